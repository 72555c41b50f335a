"""The largest growth of a process's anonymous memory while a block runs, sampled every 2 ms."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import TracebackType

__all__ = ["Peak", "anonymous", "status"]

_EVERY = 0.002  # seconds between two samples
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of mallopt(3)


class Peak:
    """A context that samples this process's anonymous memory in a thread.

    Attributes:
        nbytes: the largest growth since the block began, in bytes.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._done = threading.Event()

    def __enter__(self) -> Peak:
        # Without a fixed threshold, glibc keeps up to 64 MB of freed memory per thread, so that the peak would depend
        # on earlier allocations. With it, freed blocks of 1 MiB and more return to the system at once. malloc_trim
        # returns the memory that was freed earlier.
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
    """Return the bytes of this process's anonymous memory that is resident."""
    return status("RssAnon")


def status(kind: str) -> int:
    """Return a field of /proc/self/status in bytes.

    Args:
        kind: name of the field: RssAnon, or VmData (writable private memory, which RLIMIT_DATA limits).
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {kind}")
