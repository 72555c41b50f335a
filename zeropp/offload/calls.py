"""System calls that move bytes of a file: every one of offload goes through here, where tests can put another in place.

Callers name this module (``calls.read_at``), so that what is put in its place is what they find.
"""

from __future__ import annotations

import os

__all__ = ["read_at", "write_at"]


def read_at(descriptor: int, memory: memoryview, offset: int) -> int:
    """Read up to ``memory.nbytes`` bytes from ``offset`` on; returns how many there were."""
    return os.preadv(descriptor, [memory], offset)


def write_at(descriptor: int, memory: memoryview, offset: int) -> int:
    """Write up to ``memory.nbytes`` bytes from ``offset`` on; returns how many it took."""
    return os.pwritev(descriptor, [memory], offset)
