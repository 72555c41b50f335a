"""Early warnings from a rank that waits for others: who waits where, long before waiting becomes an error.

The thread that waits may be inside a call of torch and cannot speak. So every rank has another one that looks at it now
and then, puts the rank's account into the job's store once it has waited for long, reads the others' and logs them. See
:mod:`zeropp.comm.status`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zeropp.comm.process_groups import name_ranks
from zeropp.comm.status import Account, StatusBoard, by_text, likely_cause
from zeropp.comm.threads import Patrol

__all__ = ["Watch"]

_log = logging.getLogger("zeropp")

_LOOKS = 4  # before waiting is long
_PERIOD = 1.0  # seconds between looks, at most
_ASKING = 5.0  # seconds of waiting after which a rank asks whether another one has failed, and between two questions
_GRACE = 1.0  # seconds, or the time to the next look: for accounts of ranks that began to wait a little later


@dataclass(eq=False)
class _Wait:
    """One wait of the rank's main thread."""

    account: Callable[[], Account]
    start: float
    told: bool = False


class Watch:
    """Watches one rank's waiting in one engine.

    Args:
        board: with the statuses of the engine's ranks.
        engine: its code there.
        rank: this rank in the engine's group.
        world: how many there are.
        after: seconds, or None never to say anything.
        when_failed: called on the watching thread while this rank waits for others, one of which has failed.
        alone: there is nobody to wait for.
    """

    def __init__(
        self,
        board: StatusBoard,
        engine: str,
        rank: int,
        world: int,
        after: float | None,
        when_failed: Callable[[], None] = lambda: None,
        *,
        alone: bool = False,
    ) -> None:
        self._board, self._engine = board, engine
        self._rank, self._world = rank, world
        self._when_failed = when_failed
        self._after = None if alone else math.inf if after is None else after
        self._current: _Wait | None = None
        self._asked = 0.0  # when it was last asked whether a rank has failed
        self._on_look: weakref.WeakMethod[Callable[[], None]] | None = None
        self._patrol = Patrol("watch", self.look, self.end)

    @contextlib.contextmanager
    def waiting(self, account: Callable[[], Account]) -> Iterator[None]:
        """Inside, this rank may wait for others; ``account`` says where."""
        if self._after is None:
            yield
            return
        # At the first wait: a rank that never waits for others needs no thread.
        if not self._patrol.started:
            self._patrol.start(min(self._after / _LOOKS, _PERIOD))
        # Waits nest, as an exchange does inside a call of the user. The other thread reads ``_current`` without a
        # lock: one reference replaces another.
        before, wait = self._current, _Wait(account, time.monotonic())
        self._current = wait
        try:
            yield
        finally:
            self._current = before
            if wait.told:
                self._board.wait(self._engine, None)

    def on_look(self, action: Callable[[], None]) -> None:
        """Call a method, which is not kept alive, every second on the watching thread."""
        self._on_look = weakref.WeakMethod(action)

    def end(self) -> None:
        """Write a status that has not been written yet, as the program ends; on the watching thread."""
        # Without a limit: Python does not start threads any more by then.
        self._board.tell(limit=False)

    def close(self) -> None:
        """Stop watching."""
        self._after = None
        self._patrol.stopped.set()

    def look(self) -> None:
        """Speak if the wait of this moment has become long; on the watching thread."""
        # Read once: the main thread may begin or end a wait at any moment.
        wait, now = self._current, time.monotonic()
        self._call_on_look()
        self._board.tell_stop()
        if wait is None or self._after is None:
            return
        waited = now - wait.start
        if waited >= _ASKING and now - self._asked >= _ASKING:
            self._asked = now
            with contextlib.suppress(RuntimeError, TimeoutError):
                if self._board.some_rank_failed(self._engine) and self._current is wait:
                    self._when_failed()
        if wait.told or waited < self._after:
            return
        # Before the account goes out, so that a wait that ends meanwhile withdraws it.
        wait.told = True
        account = wait.account()
        try:
            self._board.wait(self._engine, account)
            # On the event and not in sleep, so that the end of the program need not wait for this.
            self._patrol.stopped.wait(min(_GRACE, self._after / _LOOKS))
            words = self._words({**self._board.accounts(self._engine), self._rank: account})
        except (RuntimeError, TimeoutError) as error:
            words = (
                f"rank {self._rank} has been waiting for {self._after:g} s, {account}; the others cannot be asked, "
                f"since the job's store, which rank 0 keeps, or the launcher, does not answer ({error})"
            )
        if self._current is wait:
            _log.warning("%s", words)
        else:
            # The wait ended meanwhile, perhaps before its account was there to be withdrawn.
            self._board.wait(self._engine, None)

    def _call_on_look(self) -> None:
        action = None if self._on_look is None else self._on_look()
        # The model's thread goes on meanwhile, and may take away what is looked at.
        with contextlib.suppress(Exception):
            if action is not None:
                action()

    def _words(self, accounts: dict[int, Account]) -> str:
        said = by_text({rank: str(account) for rank, account in accounts.items() if rank != self._rank})
        others = [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {text}" for text, ranks in said.items()]
        silent = [rank for rank in range(self._world) if rank not in accounts]
        if silent:
            others.append(f"{name_ranks(silent)} {'waits' if len(silent) == 1 else 'wait'} for nobody")
        return (
            f"rank {self._rank} has been waiting for {self._after:g} s, {accounts[self._rank]}; {'; '.join(others)}. "
            f"Perhaps {likely_cause(accounts, self._world)}"
        )
