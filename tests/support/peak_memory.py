"""The most memory that a process of its own has while a block runs."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import TracebackType

__all__ = ["Peak", "anonymous", "status"]

_EVERY = 0.002  # seconds
_MMAP_THRESHOLD = -3  # of mallopt(3)


class Peak:
    """Inside ``with``, looks at this process's anonymous memory; :attr:`nbytes` is by how much it was ever larger."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._done = threading.Event()

    def __enter__(self) -> Peak:
        # What is freed goes back at once, from blocks of a megabyte on, and so does what was freed before. Else glibc
        # keeps up to 64 MB for each thread: how much, and of what was there before, depends on who came first.
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 1 << 20)
        libc.malloc_trim(0)
        self._before = anonymous()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_EVERY):
            self.nbytes = max(self.nbytes, anonymous() - self._before)


def anonymous() -> int:
    """Bytes of this process's private memory in use."""
    return status("RssAnon")


def status(kind: str) -> int:
    """Bytes of this process of a kind: RssAnon; VmData, what it may write to, which RLIMIT_DATA limits."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {kind}")
