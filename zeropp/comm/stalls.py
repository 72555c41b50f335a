"""How long the model stands still for something: by the host's clock, or on a GPU by that of the stream that waits."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

__all__ = ["HostStalls", "Stalls", "StreamStalls", "make_stalls"]

Tell = Callable[[str, str, float], None]
"""Takes a unit, what of it was waited for, and seconds."""


class Stalls(Protocol):
    """Times what happens inside a ``with`` block, and tells it."""

    def timing(self, unit: str, kind: str) -> contextlib.AbstractContextManager[None]:
        """Time a wait, if it ends well."""
        ...

    def collect(self) -> None:
        """Tell what is known by now and was not when its wait was queued."""
        ...


class HostStalls:
    """Where the host itself waits."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    @contextlib.contextmanager
    def timing(self, unit: str, kind: str) -> Iterator[None]:
        """See :class:`Stalls`."""
        start = time.perf_counter()
        # No ``finally``: a wait that ends in an error says nothing of how long the model waits.
        yield
        self._tell(unit, kind, time.perf_counter() - start)

    def collect(self) -> None:
        """Nothing is told later."""


class StreamStalls:
    """Where the host queues the wait and goes on: two events around it, read once the device has passed them.

    Nothing here waits for the device. What it has not passed yet is told at a later call.

    Args:
        device: whose current stream waits.
        tell: gets the times.
    """

    def __init__(self, device: torch.device, tell: Tell) -> None:
        self._device = device
        self._tell = tell
        self._open: deque[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def timing(self, unit: str, kind: str) -> Iterator[None]:
        """See :class:`Stalls`."""
        stream = torch.cuda.current_stream(self._device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The host only queues the wait. What stands still is the stream, so its own clock is read.
        start.record(stream)
        yield
        end.record(stream)
        self._open.append((unit, kind, start, end))
        self.collect()

    def collect(self) -> None:
        """See :class:`Stalls`."""
        # Events of one stream are passed in order: behind one that is still ahead, none can have been passed.
        while self._open and self._open[0][3].query():
            unit, kind, start, end = self._open.popleft()
            self._tell(unit, kind, start.elapsed_time(end) / 1000)


def make_stalls(device: torch.device, tell: Tell) -> Stalls:
    """What times the waits of a model on ``device``."""
    return StreamStalls(device, tell) if device.type == "cuda" else HostStalls(tell)
