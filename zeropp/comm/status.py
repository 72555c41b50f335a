"""The status of each rank in the job's store: whether an exception has stopped it, and what it waits for.

[Note: one rank's exception] An exception may end a pass or a step on one rank alone, or on all ranks, which then go on:
after a batch that does not fit, say. No rank can tell which. So a rank that has stopped for a second says so in the
store, and where; it takes that back when its next pass or step begins, or when others have come to an exchange with it.
A rank that has waited for some seconds asks the store. If another one has stopped where this one has not, and still has
some seconds later, it will not come, and the ranks have lost each other. An evaluation that sends nothing is no pass in
this sense.

A rank has one status for all engines over the same ranks: it may stop in the actor's forward while the others wait in
the critic's.

[Note: accounts in the store] One process answers for the store, and all ranks may ask it within the same two seconds.
So a rank's status is a few codes, and an account that many ranks give is stored once, under its code. A count of the
changes tells in one small request whether there is anything to read. A reading takes some 35 bytes for each rank, and
the accounts that this rank has not read: with 1024 ranks 40 kB. After a loss each of them reads two or three times, so
that the process gives out less than 100 MB.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial

import torch.distributed as dist

from zeropp._compat import default_store
from zeropp.comm.accounts import Account
from zeropp.comm.within import within

__all__ = ["StatusBoard", "board_of", "code_of"]

# Seconds for one answer of the store. It has no limit of its own where the process that keeps it stands still, and that
# may be the rank that all others wait for.
_ANSWER = 2.0
_TELLING = 1.0  # seconds before a rank that has stopped says so
_GOING_ON = 3.0  # seconds in which a rank that has stopped may go on
_REMEMBERED = 16  # places at which this rank has stopped
_STOP, _LOST, _WAITS = "!", "x", "~"  # marks in a status


@dataclass
class _Status:
    """One rank's status; accounts are given by their codes.

    Attributes:
        stop: (code of the place where an exception has stopped it, or of the engine it has lost; account), or None.
        lost: accounts by engine whose ranks it has lost, or that it has closed before the others.
        waits: accounts by engine in which it has waited for long.
    """

    stop: tuple[str, str] | None = None
    lost: dict[str, str] = field(default_factory=dict)
    waits: dict[str, str] = field(default_factory=dict)

    def packed(self) -> tuple[str, str]:
        """Texts for the store: of what has stopped or is lost, and of waits."""
        # Copies: a thread writes this while another one changes it.
        stop, lost = self.stop, dict(self.lost)
        words = [] if stop is None else [f"{_STOP}{stop[0]}:{stop[1]}"]
        words += [f"{_LOST}{engine}:{code}" for engine, code in lost.items() if (engine, code) != stop]
        return " ".join(words), " ".join(f"{_WAITS}{engine}:{code}" for engine, code in dict(self.waits).items())

    @staticmethod
    def unpacked(text: str) -> _Status:
        """The inverse of :meth:`packed`, but for a stop that is the loss of an engine."""
        status = _Status()
        for word in text.split():
            which, _, code = word[1:].partition(":")
            if word[0] == _STOP:
                status.stop = which, code
            else:
                (status.lost if word[0] == _LOST else status.waits)[which] = code
        return status

    def account(self, engine: str) -> str | None:
        """The account that says most to a rank that waits in an engine."""
        stopped = None if self.stop is None else self.stop[1]
        return self.lost.get(engine) or stopped or self.waits.get(engine) or next(iter(self.waits.values()), None)

    def has_lost(self, engine: str) -> bool:
        """Tell whether the rank does not come any more to what it did in an engine."""
        return engine in self.lost or (self.stop is not None and self.stop[0] == engine)


class StatusBoard:
    """The statuses of a group's ranks, for the engines over these ranks in this process.

    Attributes:
        stopped_by: this rank's account of an exception that has ended its last pass or step, until it goes on.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        """``ranks``: global ranks of the group; ``rank``: this one's place among them."""
        self._name, self._rank, self._world = f"zeropp-{code_of(repr(ranks))}", rank, len(ranks)
        self.stopped_by: Account | None = None
        self._own = _Status()
        # Where this rank has stopped, and how often there: a pass that has failed may be tried again.
        self._stops: deque[tuple[str, int, int]] = deque(maxlen=_REMEMBERED)
        self._stopped_at = 0.0
        self._unwritten: dict[str, str] = {}  # texts of accounts, by code
        self._writing = threading.Lock()
        self._written: tuple[str, str] | None = None
        self._texts: dict[str, tuple[str, Account]] = {}  # those that were read, with their engines, by code
        self._statuses: list[_Status] = []
        self._changes = 0  # when those were read
        self._suspected: dict[tuple[int, str], float] = {}  # (rank, place) -> when this was first read

    def join(self) -> None:
        """Begin anew for a further engine. All ranks do so before any of them asks."""
        # The store may be another one than that of the engines before.
        self.stopped_by, self._own.stop, self._written, self._changes = None, None, None, -1
        within(_ANSWER, self._write, "saying that this rank begins")

    def stop(self, engine: str, place: int, account: Account) -> None:
        """An exception has ended this rank's pass or step; the others are told soon. See [Note: one rank's exception].

        Args:
            engine: whose.
            place: of the pass or step, the same on all ranks.
            account: with the exception as its ``failure``.
        """
        before = max((stop[2] for stop in self._stops if stop[:2] == (engine, place)), default=0)
        # The same stop may be told twice, and then says more.
        if self.stopped_by is None or not before or self._stops[-1] != (engine, place, before):
            self._stops.append((engine, place, before + 1))
        self._drop_text()
        self.stopped_by, self._own.stop = account, (self._codes()[-1], self._put(engine, account))
        self._stopped_at = time.monotonic()

    def go_on(self) -> None:
        """Take back that this rank has stopped, if it has."""
        if self.stopped_by is not None:
            self._drop_text()
            self.stopped_by = self._own.stop = None
            self.tell()

    def lose(self, engine: str, account: Account, *, closed: bool = False) -> None:
        """Say that this rank does not come any more to what it did in an engine, whoever has failed.

        Args:
            engine: which one.
            account: why. Of an exception that has stopped the rank before, it says more.
            closed: the rank has closed the engine, and may go on in others.
        """
        self._own.waits.pop(engine, None)
        if closed and self._own.stop is not None:
            self._own.lost[engine] = self._own.stop[1]
        else:
            self._own.lost[engine] = code = self._put(engine, account)
            if not closed:
                self.stopped_by, self._own.stop = account, (engine, code)
        within(_ANSWER, self._write, "telling why this rank fails")

    def wait(self, engine: str, account: Account | None) -> None:
        """Say that this rank waits for long in an engine, or does no more."""
        if account is None:
            if self._own.waits.pop(engine, None) is not None:
                self.tell()
        else:
            self._own.waits[engine] = self._put(engine, account)
            within(_ANSWER, self._write, "telling where this rank waits")

    def tell_stop(self) -> None:
        """Bring to the store that this rank has stopped, if it has for a while; now and then, on another thread."""
        # A program may leave each forward by an exception, and go on. Nor shall its thread wait for the store.
        if self.stopped_by is not None and time.monotonic() - self._stopped_at >= _TELLING:
            self.tell()

    def tell(self) -> None:
        """Bring this rank's status to the store, if it has changed and the store answers."""
        if self._own.packed() != self._written:
            # The store may be gone, and an exception be on its way.
            with contextlib.suppress(RuntimeError, TimeoutError):
                within(_ANSWER, self._write, "telling how this rank is")

    def _write(self) -> None:
        # Under the lock, and as it is now: a call that the store has kept for long writes nothing old.
        with self._writing:
            status = self._own.packed()
            if status == self._written:
                return
            store = default_store()
            for code, text in list(self._unwritten.items()):
                store.set(self._key(code), text)
                self._unwritten.pop(code, None)
            store.set(self._key(self._rank), " ".join(status))
            if self._written is None or status[0] != self._written[0]:
                store.add(self._key("changes"), 1)
            self._written = status

    def some_rank_failed(self, engine: str) -> bool:
        """Tell whether another rank has lost this engine, or has stopped where this one has not."""
        return within(_ANSWER, partial(self._find_failure, engine), "asking whether a rank has failed")

    def accounts(self, engine: str) -> dict[int, Account]:
        """Accounts of ranks that have failed or wait for long, for a rank that waits in an engine."""
        return within(_ANSWER, partial(self._find_accounts, engine), "reading the accounts of ranks")

    def _find_failure(self, engine: str) -> bool:
        store = default_store()
        changes = store.add(self._key("changes"), 0)
        if changes != self._changes:
            # In this order: a status may be newer than the count, and is read once more then.
            self._statuses, self._changes = self._read(store), changes
        others = [(rank, status) for rank, status in enumerate(self._statuses) if rank != self._rank]
        if any(status.has_lost(engine) for _, status in others):
            return True
        now, before, own = time.monotonic(), self._suspected, {*self._codes(), *self._own.lost}
        stops = [(rank, status.stop[0]) for rank, status in others if status.stop is not None]
        # A rank that handles its error may yet go on.
        self._suspected = {(rank, which): before.get((rank, which), now) for rank, which in stops if which not in own}
        return any(now - since >= _GOING_ON for since in self._suspected.values())

    def _find_accounts(self, engine: str) -> dict[int, Account]:
        store = default_store()
        codes = {rank: status.account(engine) for rank, status in enumerate(self._read(store))}
        found = {rank: code for rank, code in codes.items() if code is not None}
        missing = list(set(found.values()).difference(self._texts))
        if missing:
            for code, text in zip(missing, store.multi_get([self._key(code) for code in missing]), strict=True):
                owner, packed = json.loads(text)
                self._texts[code] = owner, Account.unpacked(packed)
        accounts = {}
        for rank, code in found.items():
            owner, account = self._texts[code]
            accounts[rank] = replace(account, other_model=owner != engine)
        return accounts

    def _read(self, store: dist.Store) -> list[_Status]:
        texts = store.multi_get([self._key(rank) for rank in range(self._world)])
        return [_Status.unpacked(text.decode()) for text in texts]

    def _drop_text(self) -> None:
        """Write no account of a stop that is told no more; a loss has written it."""
        if self._own.stop is not None:
            self._unwritten.pop(self._own.stop[1], None)

    def _codes(self) -> list[str]:
        """Of the places where this rank has stopped."""
        return [code_of(repr(stop)) for stop in list(self._stops)]

    def _put(self, engine: str, account: Account) -> str:
        text = json.dumps([engine, account.packed()])
        code = code_of(text)
        self._unwritten[code] = text
        return code

    def _key(self, of: object) -> str:
        return f"{self._name}/{of}"


_boards: weakref.WeakValueDictionary[tuple[tuple[int, ...], int], StatusBoard] = weakref.WeakValueDictionary()


def board_of(ranks: tuple[int, ...], rank: int) -> StatusBoard:
    """This process's board of a group; arguments as for :class:`StatusBoard`."""
    board = _boards.get((ranks, rank))
    if board is None:
        board = _boards[ranks, rank] = StatusBoard(ranks, rank)
    return board


def _tell_all() -> None:
    """Tell what was not told yet, before the program ends."""
    for board in list(_boards.values()):
        if board.stopped_by is not None:
            board.tell()


atexit.register(_tell_all)


def code_of(text: str) -> str:
    """A short code of a text, such as an engine's unique name."""
    return hashlib.blake2s(text.encode(), digest_size=4).hexdigest()
