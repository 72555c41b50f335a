"""Copies between the memories of the host and of a device, which the host need not wait for."""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp.comm.events import DONE, Event

__all__ = ["copy"]


def copy(into: Tensor, values: Tensor) -> Event:
    """Copy, on the current stream of whichever is a card's; ``values`` must stay as they are until the event.

    What the host does after waiting for the event finds the copy made. Page-locked memory of the host lets it go on
    meanwhile; other memory has it wait here.
    """
    card = into if into.is_cuda else values
    into.copy_(values, non_blocking=card.is_cuda)
    if not card.is_cuda:
        return DONE
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(card.device))
    return _Copied(event)


class _Copied:
    """The end of a copy, which the host waits for: it is the one that uses the memory next."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, timeout: float) -> bool:
        """See :class:`zeropp.comm.events.Event`."""
        # A copy is a matter of seconds at most; nothing else that the device does comes before it on its stream.
        self._event.synchronize()
        return True

    def done(self) -> bool:
        """See :class:`zeropp.comm.events.Event`."""
        return bool(self._event.query())
