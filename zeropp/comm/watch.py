"""Two threads of a rank that look at its waiting: one warns early, the other ends waits that Python cannot.

`Watch` warns long before waiting becomes an error. The thread that waits may be inside a call of torch and cannot
speak. So another one looks at it now and then, puts the rank's account into the job's store once it has waited for
long, reads the others' and logs them. See :mod:`zeropp.comm.status`.

`Monitor` ends waits on a card, where the host only queues work and goes on. If another rank is missing, a collective on
the card never ends, and neither does the work behind it. The host notices where it reads a number, or when the queue is
full and a launch does not return. So a thread watches the queued work. When none of it has finished for
``hang_timeout``, or when another rank says that it has failed, the thread declares the ranks lost and aborts the
communicators, and the launch returns.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from zeropp.comm.process_groups import name_ranks
from zeropp.comm.status import Account, StatusBoard, by_text, likely_cause
from zeropp.comm.streams import Event
from zeropp.comm.threads import Patrol

__all__ = ["BLIND", "Monitor", "Watch", "make_monitor"]

_log = logging.getLogger("zeropp")
_PERIOD = 1.0  # seconds between looks, at most; the events of finished work are kept until then
_ASKING = 5.0  # seconds of waiting after which a rank asks whether another one has failed, and between two questions
_LOOKS_WHILE_WAITING = 4  # before waiting is long
_GRACE = 1.0  # seconds, or the time to the next look: for accounts of ranks that began to wait a little later
_LOOKS_BEFORE_LOSS = 8  # in ``hang_timeout``, at least

BLIND = frozenset({"cuda"})
"""Types of devices whose work the host does not wait for."""


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
        self._board = board
        self._engine = engine
        self._rank = rank
        self._world = world
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
            self._patrol.start(min(self._after / _LOOKS_WHILE_WAITING, _PERIOD))
        # Waits nest, as an exchange does inside a call of the user. The other thread reads ``_current`` without a
        # lock: one reference replaces another.
        before = self._current
        wait = _Wait(account, time.monotonic())
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
        wait = self._current
        now = time.monotonic()
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
            self._patrol.stopped.wait(min(_GRACE, self._after / _LOOKS_WHILE_WAITING))
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


@dataclass(eq=False)
class _Wait:
    """One wait of the rank's main thread."""

    account: Callable[[], Account]
    start: float
    told: bool = False


def make_monitor(
    device: torch.device, hang_timeout: float, give_up: GiveUp, failed: Callable[[], bool] = lambda: False
) -> Monitor | None:
    """A monitor where the device needs one; arguments as for :class:`Monitor`."""
    return Monitor(hang_timeout, give_up, device, failed) if device.type in BLIND else None


class Monitor:
    """Knows what one rank has queued for the links between ranks.

    Args:
        hang_timeout: seconds without progress that are too many.
        give_up: called once, on the monitor's thread, with the name of what is waited for, and whether ``hang_timeout``
            was reached.
        device: whose work that is.
        failed: tells whether another rank has failed; asked now and then while this one waits.
    """

    def __init__(
        self,
        hang_timeout: float,
        give_up: GiveUp,
        device: torch.device,
        failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._device = device
        self._hang_timeout = hang_timeout
        self._give_up = weakref.WeakMethod(give_up)  # it is a method of what owns this
        self._queued: deque[tuple[Event, str, float]] = deque()  # its own thread takes them out
        self._failed = failed
        self._asked = 0.0  # when the others were last asked
        self._progress = 0.0  # when work was last seen to be finished
        self._patrol = Patrol("monitor", self._look)

    def note(self, event: Event, doing: str) -> None:
        """Work was queued that ends with ``event``; ``doing`` says what it is, after "waiting for"."""
        if not self._patrol.started:  # at the first: a rank that sends nothing needs no thread
            self._patrol.start(min(self._hang_timeout / _LOOKS_BEFORE_LOSS, _PERIOD))
        self._queued.append((event, doing, time.monotonic()))

    def _look(self) -> None:
        if self._device.type == "cuda":
            # A thread begins on the first card, and asking an event would make a context there, of half a gigabyte.
            torch.cuda.set_device(self._device)
        self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Forget what is finished; give up if the oldest of the rest has been at the head for too long."""
        while self._queued and self._queued[0][0].done():
            self._queued.popleft()
            self._progress = now
        if not self._queued or self._patrol.stopped.is_set():
            return
        _, doing, since = self._queued[0]
        # A long queue is no hang: each piece of work has the time from the end of the one before it.
        waited = now - max(since, self._progress)
        late = waited >= self._hang_timeout
        if late or self._is_in_vain(waited, now):
            self._patrol.stopped.set()
            give_up = self._give_up()
            if give_up is not None:
                give_up(doing, waited=late)

    def _is_in_vain(self, waited: float, now: float) -> bool:
        """Tell, every few seconds of a wait, whether another rank has failed."""
        if waited < _ASKING or now - self._asked < _ASKING:
            return False
        self._asked = now
        # A store that does not answer is the business of whoever waits for it.
        with contextlib.suppress(RuntimeError, TimeoutError):
            return self._failed()
        return False

    def close(self) -> None:
        """Stop looking."""
        self._patrol.stopped.set()


class GiveUp(Protocol):
    """A method that ends the waiting."""

    def __call__(self, doing: str, /, *, waited: bool) -> object:
        """See :class:`Monitor`."""
        ...
