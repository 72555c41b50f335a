"""Early warnings from a rank that waits for others: who waits where, long before waiting becomes an error.

The thread that waits may be inside a call of torch and cannot speak. So every rank has another one that looks at it now
and then, puts the rank's account into the job's store once it has waited for long, reads the others' and logs them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from zeropp._compat import default_store
from zeropp.comm.accounts import Account, likely_cause, name_ranks
from zeropp.comm.within import within

__all__ = ["Watch", "warn_of_waiting"]

_log = logging.getLogger("zeropp")

_LOOKS = 4  # before waiting is long
_GRACE = 1.0  # seconds, or the time to the next look: for accounts of ranks that began to wait a little later
_JOINING = 2.0  # seconds at the end of the program
# Seconds for one answer of the store. It has no limit of its own where the process that keeps it stands still, and that
# may be the rank that all others wait for.
_ANSWER = 2.0


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
    """

    def __init__(self, job: str, rank: int, world: int, after: float | None) -> None:
        self._job = job
        self._rank = rank
        self._world = world
        self._key: str | None = None  # of this rank's account, once it has given one
        self._numbering = threading.Lock()  # both threads of a rank may give its first account
        self._after = after
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
        """Put this rank's account into the store, for good: it fails."""
        # First: ``look``, on the other thread, must not withdraw the account that follows.
        self._failed = True
        self._set(account.packed())

    def _withdraw(self) -> None:
        # The process that keeps the store may be gone.
        with contextlib.suppress(RuntimeError, TimeoutError):
            # Emptied, not deleted: others may have checked that the key is there, and ``get`` blocks where it is not.
            self._set("")

    def heard(self) -> dict[int, Account]:
        """Accounts that are in the store."""
        return within(_ANSWER, partial(_read, default_store(), self._job), "reading the accounts of ranks")

    def _set(self, text: str) -> None:
        within(_ANSWER, partial(self._write, default_store(), text), "telling where this rank waits")

    def _write(self, store: dist.Store, text: str) -> None:
        # In the order of coming: readers then ask for those that are there, and not for every rank's.
        with self._numbering:
            if self._key is None:
                self._key = _account_key(self._job, store.add(_count_key(self._job), 1))
        store.set(self._key, f"{self._rank} {text}")

    def close(self) -> None:
        """Stop watching."""
        self._after = None
        self._stop.set()

    def _start(self, after: float) -> None:
        self._thread = threading.Thread(
            target=_patrol, args=(weakref.ref(self), self._stop, after / _LOOKS), name="zeropp watch", daemon=True
        )
        _watching[self._thread] = self._stop
        self._thread.start()

    def look(self) -> None:
        """Speak if the wait of this moment has become long; on the watching thread."""
        # Read once: the main thread may begin or end a wait at any moment.
        wait = self._current
        if wait is None or wait.told or self._after is None or time.monotonic() - wait.start < self._after:
            return
        # Before the account goes out, so that a wait that ends meanwhile withdraws it.
        wait.told = True
        account = wait.account()
        self._set(account.packed())
        # On the event and not in sleep, so that the end of the program need not wait for this.
        self._stop.wait(min(_GRACE, self._after / _LOOKS))
        accounts = {**self.heard(), self._rank: account}
        if self._current is wait:
            _log.warning("%s", self._words(accounts))
        elif not self._failed:
            # The wait ended meanwhile, perhaps before its account was there to be withdrawn.
            self._withdraw()

    def _words(self, accounts: dict[int, Account]) -> str:
        others = [f"{name_ranks([rank])} is {each}" for rank, each in sorted(accounts.items()) if rank != self._rank]
        silent = [rank for rank in range(self._world) if rank not in accounts]
        if silent:
            others.append(f"{name_ranks(silent)} {'waits' if len(silent) == 1 else 'wait'} for nobody")
        return (
            f"rank {self._rank} has been waiting for {self._after:g} s, {accounts[self._rank]}; {'; '.join(others)}. "
            f"Perhaps {likely_cause(accounts, self._world)}"
        )


def _count_key(job: str) -> str:
    return f"{job}/accounts"


def _account_key(job: str, number: int) -> str:
    return f"{job}/account/{number}"


def _read(store: dist.Store, job: str) -> dict[int, Account]:
    keys = [_account_key(job, number) for number in range(1, store.add(_count_key(job), 0) + 1)]
    # Asked first, since ``get`` waits for a key that is missing: its rank has a number, and perhaps no more.
    if keys and not store.check(keys):
        keys = [key for key in keys if store.check([key])]
    # One request where the store can: a thousand ranks may be asking it for a thousand accounts.
    whole = store.has_extended_api()  # type: ignore[attr-defined]  # missing in torch's own stubs
    texts = store.multi_get(keys) if whole else [store.get(key) for key in keys]
    pairs = [text.decode().split(" ", 1) for text in texts]
    return {int(rank): Account.unpacked(text) for rank, text in pairs if text}


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
