"""Progress of a save, a load or an export: a bar of tqdm, where that is installed, for what takes its time.

All that moves bytes tells of them here; so this is also where it can be stopped.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from typing import Any

from zeropp.checkpoint.errors import CheckpointError

__all__ = ["AFTER", "Progress"]

AFTER = 2.0
"""Seconds that something may take without a bar."""


class Progress:
    """Bytes that are done, of those that are to be done; any thread may tell of them.

    Args:
        doing: what is shown in front of the bar.
        shown: whether there may be one, which is so on the first rank unless the user does without.
    """

    def __init__(self, doing: str = "", shown: bool = False) -> None:
        self._doing = doing
        self._shown = shown
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._done = self._total = 0
        self._bar: Any = None
        self._stopped = False

    def stop(self) -> None:
        """There is no use in the rest: whoever tells of more, on any thread, gets an error and leaves it."""
        self._stopped = True

    def expect(self, nbytes: int) -> None:
        """So many more are to be done."""
        with self._lock:
            self._total += nbytes

    def add(self, nbytes: int) -> None:
        """So many more are done.

        Raises:
            CheckpointError: it was stopped.
        """
        if self._stopped:
            raise CheckpointError("it was stopped, since a rank is lost")
        with self._lock:
            self._done += nbytes
            if not self._shown or time.monotonic() - self._begin < AFTER:
                return
            if self._bar is None:
                self._bar = _new_bar(self._doing, self._done)
                self._shown = self._bar is not None
            self._show()

    def close(self) -> None:
        """Leave the bar as it is, and begin no other."""
        with self._lock:
            self._show()
            self._shown, bar, self._bar = False, self._bar, None
            if bar is not None:
                with contextlib.suppress(Exception):
                    bar.close()

    def _show(self) -> None:
        if self._bar is None:
            return
        try:
            self._bar.total = self._total
            # Reads are rounded to whole stretches, of which nobody was told.
            self._bar.update(min(self._done, self._total) - self._bar.n)
        except Exception:
            # Where it would be shown may be closed, and that is no reason to lose a checkpoint.
            self._shown, self._bar = False, None


def _new_bar(doing: str, done: int) -> Any:
    """A bar, or None without tqdm."""
    try:
        kind: Any = importlib.import_module("tqdm").tqdm
    except ImportError:
        return None
    # Without tqdm's thread, which would stay, and a lock of its own, which may start a process.
    own = type("Bar", (kind,), {"monitor_interval": 0})
    own.set_lock(threading.RLock())  # type: ignore[attr-defined]  # as tqdm has it
    return own(desc=doing, initial=done, total=done, unit="B", unit_scale=True, mininterval=1.0)
