"""Rings: a fixed number of staging buffers that work takes in turn."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from zeropp.offload.memory import aligned

__all__ = ["Ring"]


class Ring:
    """Buffers of one size, allocated together and at once.

    Attributes:
        count: how many there are.
        nbytes: of one.
    """

    def __init__(self, count: int, nbytes: int, *, pinned: bool) -> None:
        """Allocate ``count`` buffers of ``nbytes``, page-locked if ``pinned``."""
        self.count = count
        self.nbytes = nbytes
        # One allocation, which is all that `pin_memory` page-locks: page-locking is slow, and torch's allocator rounds
        # each piece up to a power of two.
        if pinned:
            self._memory = torch.empty(count * nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            # torch's own memory begins between pages, from where direct I/O goes by a copy of its own.
            self._memory = aligned(count * nbytes, torch.uint8)
        self._free = [self._memory[index * nbytes : (index + 1) * nbytes] for index in range(count)]
        self._changed = threading.Condition()
        self._closed = False

    def take(self) -> Tensor:
        """A buffer, uint8 [nbytes], when there is one.

        Raises:
            RuntimeError: the ring was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            # The engine is closed while a lane waits: after an error, and nobody misses what it would have done.
            if self._closed:
                raise RuntimeError("staging buffers were given up while they were waited for")
            return self._free.pop()

    @contextlib.contextmanager
    def taken(self) -> Iterator[Tensor]:
        """A buffer that is given back at the end."""
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.give_back(buffer)

    @contextlib.contextmanager
    def all_taken(self) -> Iterator[list[Tensor]]:
        """All buffers, given back at the end; nobody else may wait for several meanwhile."""
        # Whoever holds one gives it back without waiting for another, so that this ends.
        buffers = [self.take() for _ in range(self.count)]
        try:
            yield buffers
        finally:
            for buffer in buffers:
                self.give_back(buffer)

    def give_back(self, buffer: Tensor) -> None:
        """Nothing uses a buffer any more."""
        with self._changed:
            self._free.append(buffer)
            # One is free, so one may go on.
            self._changed.notify()

    def close(self) -> None:
        """Let whoever waits for a buffer go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
