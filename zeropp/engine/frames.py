"""Python's frames of running calls of modules.

torch calls a module's hooks after an error, but not after Ctrl-C, or whatever else is no ``Exception``. Then the frame
of the call tells that it is over: nothing that runs would return to it.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

__all__ = ["is_over", "module_call"]


def module_call() -> FrameType | None:
    """The innermost running call of a module by torch; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    return frame


def is_over(frame: FrameType | None) -> bool:
    """Whether a call has ended; False where nobody knows, of None."""
    if frame is None or _reaches(sys._getframe(1), frame):
        return False
    # Gradients may be computed inside a forward, on threads of autograd's.
    return not any(_reaches(top, frame) for top in sys._current_frames().values())


def _reaches(frame: FrameType | None, other: FrameType) -> bool:
    """Whether ``other`` runs below ``frame``, or is it."""
    while frame is not None and frame is not other:
        frame = frame.f_back
    return frame is not None
