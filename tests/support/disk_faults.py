"""Helpers for tests of NVMe offload: reads and writes that are counted, delayed, cut short or refused."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from zeropp.offload import swap

__all__ = ["Calls", "offload_threads", "open_descriptors", "wait_until"]


@dataclass
class Calls:
    """Replacements of the read and write calls of ``zeropp.offload.swap``.

    Attributes:
        seen: ("read" or "write", descriptor, bytes requested, offset) of every call.
        limit: returns the largest number of bytes that a call moves, given the number requested.
        error: takes an entry of ``seen`` and returns the errno to fail with, or 0.
        delay: seconds before each call.
        most: largest number of calls in progress at once.
        gate: an event that each call waits for, at most 20 seconds; None for no wait.
    """

    seen: list[tuple[str, int, int, int]] = field(default_factory=list)
    limit: Callable[[int], int] = lambda nbytes: nbytes
    error: Callable[[tuple[str, int, int, int]], int] = lambda call: 0
    delay: float = 0.0
    most: int = 0
    gate: threading.Event | None = None

    def put(self, patch: pytest.MonkeyPatch) -> Calls:
        lock, now = threading.Lock(), 0

        def around(word: str, real: Callable[[int, memoryview, int], int]) -> Callable[[int, memoryview, int], int]:
            def call(descriptor: int, memory: memoryview, offset: int) -> int:
                nonlocal now
                own = (word, descriptor, len(memory), offset)
                with lock:
                    self.seen.append(own)
                    now += 1
                    self.most = max(self.most, now)
                try:
                    if self.gate is not None:
                        self.gate.wait(20)
                    time.sleep(self.delay)
                    if number := self.error(own):
                        raise OSError(number, os.strerror(number))
                    count = min(self.limit(len(memory)), len(memory))
                    return real(descriptor, memory[:count], offset) if count else 0
                finally:
                    with lock:
                        now -= 1

            return call

        patch.setattr(swap, "read_at", around("read", swap.read_at))
        patch.setattr(swap, "write_at", around("write", swap.write_at))
        return self


def offload_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("zeropp offload")]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def open_files(folder: Path) -> int:
    """Return the number of open files of this process that lie in a folder, unlinked files included."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            found += os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder.resolve()}/")
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return condition()
