"""Ranks that are at work for as long as it takes, and tell each other now and then that they are still there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from zeropp.comm.accounts import name_ranks

__all__ = ["Rounds"]

_log = logging.getLogger("zeropp")
_LONGEST = 1.0  # seconds from one round to the next


@dataclass
class Rounds:
    """Rounds of one piece of work.

    A disk may be as slow as it likes, and a rank that is lost is noticed: its exchange fails.

    Attributes:
        rank: this rank.
        doing: for the log.
        exchange: every rank's number for this rank's; collective.
        hang_timeout: seconds for which others wait for a rank that is not heard of.
        warn_after: seconds for which some ranks wait for others before it is logged, or None.
    """

    rank: int
    doing: str
    exchange: Callable[[int], list[int]]
    hang_timeout: float
    warn_after: float | None
    _since: float | None = field(default=None, init=False)  # when the first rank was done

    def run(self, done: Callable[[], bool], wait: Callable[[float], object]) -> None:
        """Until all ranks are done.

        Args:
            done: whether this one is.
            wait: for that, so many seconds at most.
        """
        pause = _LONGEST / 64
        wait(pause)
        while not all(rows := self.exchange(int(done()))):
            self._warn([rank for rank, value in enumerate(rows) if not value], rows.index(1) if any(rows) else None)
            wait(pause)
            # Several rounds within hang_timeout, after which a silent rank counts as lost.
            pause = min(2 * pause, _LONGEST, self.hang_timeout / 4)

    def _warn(self, busy: list[int], first: int | None) -> None:
        """Name ranks that others wait for; ``first``, of those that wait, says it."""
        now = time.monotonic()
        if first is None or self.warn_after is None:
            return
        self._since = self._since or now
        if now - self._since < self.warn_after:
            return
        if first == self.rank:
            verb = "is" if len(busy) == 1 else "are"
            _log.warning(
                "rank %d has been waiting for %g s: %s %s still at %s",
                self.rank, now - self._since, name_ranks(busy), verb, self.doing,
            )  # fmt: skip
        self.warn_after += now - self._since  # again when it has taken twice as long
