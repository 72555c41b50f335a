"""The most memory that a process of its own has while a block runs."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

__all__ = ["Peak", "anonymous"]

_EVERY = 0.002  # seconds


class Peak:
    """Inside ``with``, looks at this process's anonymous memory; :attr:`nbytes` is by how much it was ever larger."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._done = threading.Event()

    def __enter__(self) -> Peak:
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
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")
