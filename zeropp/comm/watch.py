"""Early warnings from a rank that waits for others: who waits where, long before waiting becomes an error.

The thread that waits may be inside a call of torch and cannot speak. So every rank has another one that looks at it now
and then, puts the rank's account into the job's store once it has waited for long, reads the others' and logs them.

[Note: one rank's exception] An exception may end a pass or a step on one rank alone, or on all ranks, which then go on:
after a batch that does not fit, say. No rank can tell which. So a rank says in the store that it has stopped, and
where; it takes that back when its next pass, step or exchange begins. A rank that has waited for some seconds asks the
store. If another one has stopped where this one has not, and still has some seconds later, it will not come, and the
ranks have lost each other. An evaluation that sends nothing is no pass in this sense.

[Note: accounts in the store] One process answers for the store, and all ranks may ask it within the same two seconds.
So an account that many ranks give is stored once, under a code, and a rank adds one line to a list: its number and the
code. There is a list of ranks that have stopped or lost the others, and lists of those that wait. A reading takes at
most 4 lines of some 14 bytes for each rank, and the texts that this rank has not read: with 1024 ranks 58 kB. After a
loss each of them reads twice, so that the process gives out less than 100 MB.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import math
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from zeropp._compat import default_store
from zeropp.comm.accounts import Account, by_text, likely_cause, name_ranks
from zeropp.comm.within import within

__all__ = ["Watch", "warn_of_waiting"]

_log = logging.getLogger("zeropp")

_LOOKS = 4  # before waiting is long
_ASKING = 5.0  # seconds of waiting after which a rank asks now and then whether another one has failed
_GRACE = 1.0  # seconds, or the time to the next look: for accounts of ranks that began to wait a little later
_JOINING = 2.0  # seconds at the end of the program
# Seconds for one answer of the store. It has no limit of its own where the process that keeps it stands still, and that
# may be the rank that all others wait for.
_ANSWER = 2.0
_GOING_ON = 3.0  # seconds in which a rank that has stopped may go on
_REMEMBERED = 16  # places at which this rank has stopped
_FOR_GOOD = 1 << 40  # no place: a rank that goes on nowhere
_PAGE = 1  # lines for each rank in one list of those that wait


@contextlib.contextmanager
def warn_of_waiting(after: float, words: str) -> Iterator[None]:
    """Log ``words`` if what is inside takes longer than ``after`` seconds; where ranks have no common store yet."""
    timer = threading.Timer(after, _log.warning, args=("%s", words))
    # What is inside may fail, and the program must then be able to end before the timer does.
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(eq=False)
class _Wait:
    """One wait of the rank's main thread."""

    account: Callable[[], Account]
    start: float
    told: bool = False


class Watch:
    """Watches one rank's waiting.

    Args:
        job: prefix of keys in the store, the same on every rank.
        rank: this rank.
        world: how many there are.
        after: seconds, or None never to say anything.
        when_failed: called on the watching thread while this rank waits for others, one of which has failed.
        alone: there is nobody to wait for.

    Attributes:
        stopped_by: this rank's account of an exception that has ended its last pass or step, until it goes on.
    """

    def __init__(
        self,
        job: str,
        rank: int,
        world: int,
        after: float | None,
        when_failed: Callable[[], None] = lambda: None,
        *,
        alone: bool = False,
    ) -> None:
        self._job = job
        self._rank = rank
        self._world = world
        self._texts: dict[str, Account] = {}  # by code, those that this rank has written or read
        self._when_failed = when_failed
        # Places where this rank has stopped, each with how often: a pass that has failed may be tried again.
        self._stops: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._times = Counter[int]()  # by place
        self.stopped_by: Account | None = None
        self._telling = threading.Lock()
        self._suspected: dict[tuple[int, int, int], float] = {}  # (rank, place, times) -> when this was first read
        self._untold: tuple[Account, tuple[int, int]] | None = None
        self._after = None if alone else math.inf if after is None else after
        self._current: _Wait | None = None
        self._failed = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # The thread holds the event and not the watch, so that a dropped watch ends it.
        weakref.finalize(self, self._stop.set)

    @contextlib.contextmanager
    def waiting(self, account: Callable[[], Account]) -> Iterator[None]:
        """Inside, this rank may wait for others; ``account`` says where."""
        if self._after is None:
            yield
            return
        # At the first wait: a rank that never waits for others needs no thread.
        if self._thread is None:
            self._start(self._after)
        # Waits nest, as an exchange does inside a call of the user. The other thread reads ``_current`` without a
        # lock: one reference replaces another.
        before, wait = self._current, _Wait(account, time.monotonic())
        self._current = wait
        try:
            yield
        finally:
            self._current = before
            if wait.told and not self._failed:
                self._withdraw()

    def publish(self, account: Account) -> None:
        """Put this rank's account into the store, for good: it is lost, whoever has failed."""
        # First: the other thread must not withdraw the account that follows.
        self._failed = True
        within(
            _ANSWER,
            partial(self._write, default_store(), account, self._stopped, _FOR_GOOD, 0),
            "telling why this rank fails",
        )

    def stop(self, account: Account, place: int, *, later: bool = False) -> None:
        """Say that an exception has ended this rank's pass or step; see [Note: one rank's exception].

        Args:
            account: with the exception as its ``failure``.
            place: of the pass or step, the same on all ranks.
            later: on the watching thread, within seconds.
        """
        stop = place, self._times[place] + 1
        if self.stopped_by is not None and self._stops[-1][0] == place:
            stop = self._stops[-1]  # the same one, with more to say
        else:
            self._stops.append(stop)
            self._times[place] += 1
        self.stopped_by, self._untold = account, (account, stop)
        if not later:
            self._tell_stop()
        elif self._thread is None and self._after is not None:
            self._start(self._after)

    def _tell_stop(self) -> None:
        # The other thread may be about to take it back.
        with self._telling:
            untold, self._untold = self._untold, None
            if untold is not None and not self._failed:
                self._write_stop(untold[0], *untold[1])

    def go_on(self) -> None:
        """Take back that this rank has stopped, if it has, and is not lost."""
        if self.stopped_by is not None and not self._failed:
            self.stopped_by = None
            with self._telling:
                told, self._untold = self._untold is None, None
                if told:
                    self._write_stop(None)

    def _write_stop(self, account: Account | None, *stop: int) -> None:
        # The store may be gone, and an exception is on its way.
        with contextlib.suppress(RuntimeError, TimeoutError):
            within(_ANSWER, partial(self._write, default_store(), account, self._stopped, *stop), "telling of an error")

    @property
    def _stopped(self) -> str:
        return f"{self._job}/stopped"

    def _withdraw(self) -> None:
        # The process that keeps the store may be gone.
        with contextlib.suppress(RuntimeError, TimeoutError):
            within(_ANSWER, partial(self._note, default_store(), None), "telling that this rank waits no more")

    def heard(self) -> dict[int, Account]:
        """Accounts of ranks that have failed or wait for long."""
        return within(_ANSWER, partial(self._read, default_store()), "reading the accounts of ranks")

    def some_rank_failed(self) -> bool:
        """Tell whether a rank has published a failure, or has stopped where this one has not."""
        return within(_ANSWER, partial(self._find_failure, default_store()), "asking whether a rank has failed")

    def _find_failure(self, store: dist.Store) -> bool:
        # "rank code place times", or "rank -" when it goes on.
        last = self._last(store, self._stopped)
        stops = {(int(line[0]), int(line[2]), int(line[3])) for line in last.values() if len(line) > 2}
        now = time.monotonic()
        # A rank that handles its error may yet go on.
        self._suspected = {
            stop: self._suspected.get(stop, now)
            for stop in stops
            if stop[1:] not in self._stops or stop[1] == _FOR_GOOD
        }
        return any(stop[1] == _FOR_GOOD or now - since >= _GOING_ON for stop, since in self._suspected.items())

    def _note(self, store: dist.Store, account: Account | None) -> None:
        """Add to the lists of ranks that wait for long that this one does, or does no more."""
        page, begins = divmod(store.add(f"{self._job}/lines", 1), _PAGE * self._world)
        self._write(store, account, f"{self._job}/waiting/{page}")
        # Nobody reads those before the last one. A job that runs for months must not fill the store.
        if begins == 0:
            store.delete_key(f"{self._job}/waiting/{page - 4}")

    def _write(self, store: dist.Store, account: Account | None, key: str, *more: int) -> None:
        code = "-"
        if account is not None:
            code = hashlib.blake2s(account.packed().encode(), digest_size=4).hexdigest()
            if code not in self._texts:
                store.set(self._text_key(code), account.packed())
                self._texts[code] = account
        store.append(key, " ".join(map(str, (self._rank, code, *more))) + "\n")  # type: ignore[attr-defined]  # missing in torch's own stubs

    def _read(self, store: dist.Store) -> dict[int, Account]:
        page = store.add(f"{self._job}/lines", 0) // (_PAGE * self._world)
        # A rank's last line counts; one that has stopped says more by that than by where it waited before.
        waiting = self._last(store, f"{self._job}/waiting/{page - 1}") | self._last(
            store, f"{self._job}/waiting/{page}"
        )
        stopped = {rank: line for rank, line in self._last(store, self._stopped).items() if line[1] != "-"}
        found = {int(rank): line[1] for rank, line in (waiting | stopped).items() if line[1] != "-"}
        missing = list(set(found.values()).difference(self._texts))
        if missing:
            texts = store.multi_get([self._text_key(code) for code in missing])
            self._texts.update(zip(missing, map(Account.unpacked, texts), strict=True))
        return {rank: self._texts[code] for rank, code in found.items()}

    @staticmethod
    def _last(store: dist.Store, key: str) -> dict[str, list[str]]:
        """The last line of each rank in a list, in words."""
        lines = store.get(key).decode().splitlines() if store.check([key]) else []
        return {line[0]: line for line in map(str.split, lines)}

    def _text_key(self, code: str) -> str:
        return f"{self._job}/text/{code}"

    def close(self) -> None:
        """Stop watching."""
        self._after = None
        self._stop.set()

    def _start(self, after: float) -> None:
        self._thread = threading.Thread(
            target=_patrol,
            args=(weakref.ref(self), self._stop, min(after / _LOOKS, _ASKING)),
            name="zeropp watch",
            daemon=True,
        )
        _watching[self._thread] = self._stop
        self._thread.start()

    def look(self) -> None:
        """Speak if the wait of this moment has become long; on the watching thread."""
        # Read once: the main thread may begin or end a wait at any moment.
        wait = self._current
        self._tell_stop()
        if wait is None or self._after is None:
            return
        waited = time.monotonic() - wait.start
        if waited >= _ASKING and self.some_rank_failed() and self._current is wait:
            self._when_failed()
        if wait.told or waited < self._after:
            return
        # Before the account goes out, so that a wait that ends meanwhile withdraws it.
        wait.told = True
        account = wait.account()
        within(_ANSWER, partial(self._note, default_store(), account), "telling where this rank waits")
        # On the event and not in sleep, so that the end of the program need not wait for this.
        self._stop.wait(min(_GRACE, self._after / _LOOKS))
        accounts = {**self.heard(), self._rank: account}
        if self._current is wait:
            _log.warning("%s", self._words(accounts))
        elif not self._failed:
            # The wait ended meanwhile, perhaps before its account was there to be withdrawn.
            self._withdraw()

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


_watching: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()


def _patrol(ref: weakref.ref[Watch], stop: threading.Event, period: float) -> None:
    """Holds the watch only while it looks, so that a dropped one ends this."""
    while not stop.wait(period):
        watch = ref()
        if watch is None:
            return
        try:
            watch.look()
        except Exception as error:
            # A store that is gone must not end the job before its own error does.
            _log.debug("this rank cannot tell where it waits: %s", error)
        # The name would keep the watch alive until the next look.
        del watch


def _end_all() -> None:
    """End the threads before Python does: it stops them where they are, inside a call of the store perhaps."""
    for stop in list(_watching.values()):
        stop.set()
    # All have been told before the first is waited for, so that they end side by side.
    for thread in list(_watching):
        thread.join(timeout=_JOINING)


atexit.register(_end_all)
