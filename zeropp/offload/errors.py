"""The error of swap files."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["SwapError"]


class SwapError(OSError):
    """A directory cannot be used, a disk is full, or a read or write failed.

    It has the system's ``errno``; ``filename`` is the directory of the swap file, which has no name of its own.
    """

    @classmethod
    def of(cls, number: int, path: Path | str, what: str, remedy: str = "") -> SwapError:
        """Make one.

        Args:
            number: of the system's error, such as ``errno.ENOSPC``.
            path: of what it is about.
            what: what could not be done, with numbers.
            remedy: what to do about it, if anything can be done.
        """
        text = f"{what}: {os.strerror(number)}"
        return cls(number, f"{text}; {remedy}" if remedy else text, str(path))
