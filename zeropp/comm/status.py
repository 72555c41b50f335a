"""The status of each rank in the job's store: whether an exception has stopped it, and what it waits for.

[Note: one rank's exception] An exception may end a pass or a step on one rank alone, or on all ranks, which then go on:
after a batch that does not fit, say. No rank can tell which. So a rank says in the store that it has stopped, and
where. It takes that back when others have come to an exchange with it: a pass after one that failed begins with an
exchange. Or, if nothing was sent in the one that failed, when a step begins, or a pass that sends something. A rank
that has waited for some seconds asks the store. If another one has stopped where this one has not, and still has some
seconds later, it will not come, and the ranks have lost each other. An evaluation that sends nothing is no pass in this
sense.

A rank has one status for all engines over the same ranks: it may stop in the actor's forward while the others wait in
the critic's. Once it goes on in one engine, what has stopped it in others concerns only those that wait in these.

[Note: accounts in the store] One process answers for the store, and all ranks may ask it within the same two seconds.
So what a rank says is a line of some 30 bytes in a list, with codes in place of accounts, and an account that many
ranks give is stored once, under its code. The length of the list tells in one small request whether there is anything
to read. After a loss each of 1024 ranks reads some 60 kB, once, so that the process gives out less than 100 MB.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist

from zeropp._compat import default_store
from zeropp.comm.accounts import Account
from zeropp.comm.within import within

__all__ = ["StatusBoard", "board_of", "code_of"]

# Seconds for one answer of the store. It has no limit of its own where the process that keeps it stands still, and that
# may be the rank that all others wait for.
_ANSWER = 2.0
_OFTEN = 10.0  # seconds between stops that are told at once
_TELLING = 1.0  # seconds until others are told
_GOING_ON = 3.0  # seconds in which a rank that has stopped may go on
_REMEMBERED = 16  # places at which this rank has stopped in an engine
_PAGE = 2  # lines for each rank in one list
_LONGEST = 300  # characters of what went wrong on a rank


@dataclass(frozen=True)
class _End:
    """The end of what a rank did in an engine.

    Attributes:
        place: a code of where it has stopped; empty if it has lost the engine's ranks, and does not go on there.
        account: on this rank its text, else the code under which the store has it.
        idle: the rank has done nothing with others since then, in any engine.
    """

    place: str
    account: str
    idle: bool


class _Lines:
    """The last line of each rank, in lists of the store; old ones are deleted."""

    def __init__(self, name: str, rank: int, world: int) -> None:
        self._name, self._rank, self._size = name, rank, _PAGE * world
        self._page = 0  # of this rank's last line
        self.said = ""  # in it

    def begin(self, store: dist.Store) -> None:
        """Say nothing any more; the store may be another one than before."""
        self._page, self.said = 0, ""
        if self.count(store):
            self._append(store, "")

    def say(self, store: dist.Store, words: str) -> None:
        """Add a line, if it says something new."""
        if words != self.said:
            self._append(store, words)

    def repeat(self, store: dist.Store, count: int) -> None:
        """Say it again, if the list of the last line is about to be deleted."""
        if self.said and count // self._size > self._page:
            self._append(store, self.said)

    def _append(self, store: dist.Store, words: str) -> None:
        number = self.count(store, 1)
        self._page, begins = divmod(number, self._size)
        store.append(self._key(self._page), f"{number} {self._rank} {words}\n")  # type: ignore[attr-defined]  # missing in torch's own stubs
        self.said = words
        # Nobody reads that one any more. A job that runs for months must not fill the store.
        if begins == 0:
            store.delete_key(self._key(self._page - 2))

    def read(self, store: dist.Store) -> dict[int, list[str]]:
        """Words of each rank that says something."""
        page, last = self.count(store) // self._size, dict[int, tuple[int, list[str]]]()
        for key in (self._key(page - 1), self._key(page)):
            lines = store.get(key).decode().splitlines() if store.check([key]) else []
            for number, rank, *words in map(str.split, lines):
                # By its number: a call that the store keeps for long adds its line late.
                if int(number) >= last.get(int(rank), (0, []))[0]:
                    last[int(rank)] = int(number), words
        return {rank: words for rank, (_, words) in last.items() if words}

    def count(self, store: dist.Store, more: int = 0) -> int:
        """Lines so far, and ``more``."""
        return int(store.add(f"{self._name}/lines", more))

    def _key(self, page: int) -> str:
        return f"{self._name}/{page}"


class StatusBoard:
    """The statuses of a group's ranks, for the engines over these ranks in this process.

    Attributes:
        stopped_by: this rank's account of an exception that has ended its last pass or step, until it goes on.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        """``ranks``: global ranks of the group; ``rank``: this one's place among them."""
        self._name, self._rank = f"zeropp-{code_of(repr(ranks))}", rank
        self.stopped_by: Account | None = None
        # Of this rank, by engine. Threads read them: a change replaces the whole.
        self._ends: dict[str, _End] = {}
        self._waits: dict[str, str] = {}  # texts of accounts
        self._places: dict[str, deque[tuple[int, int]]] = {}  # where it has stopped, each with how often
        self._stopped = self._told = -_OFTEN  # when it last stopped, and when that was told at once
        self._said_ends = _Lines(f"{self._name}/ends", rank, len(ranks))
        self._said_waits = _Lines(f"{self._name}/waits", rank, len(ranks))
        self._stored: set[str] = set()  # codes of accounts in the store
        self._writing = threading.Lock()
        # Of others.
        self._heard: tuple[int, dict[int, dict[str, _End]]] = (0, {})  # how many lines, and what they say
        self._suspected: dict[tuple[int, str, str], float] = {}  # (rank, engine, place) -> when this was first read
        self._texts: dict[str, tuple[str, Account]] = {}  # those that were read, with their engines, by code

    def join(self) -> None:
        """Begin anew for a further engine."""
        self.stopped_by, self._ends, self._waits, self._heard = None, {}, {}, (0, {})
        # A store that does not answer is the business of what needs it.
        with contextlib.suppress(RuntimeError, TimeoutError):
            within(_ANSWER, self._begin, "saying that this rank begins")

    def stop(self, engine: str, place: int, account: Account, *, at_once: bool) -> None:
        """An exception has ended this rank's pass or step; see [Note: one rank's exception].

        Args:
            engine: whose.
            place: of the pass or step, the same on all ranks.
            account: with the exception as its ``failure``.
            at_once: this call may ask the store, and wait for it. Else a thread does, by :meth:`tell_stop`.
        """
        before, now = self._ends.get(engine), time.monotonic()
        places = self._places.setdefault(engine, deque(maxlen=_REMEMBERED))
        # The same stop may be told twice, and then says more.
        if before is None or not before.idle or not places or places[-1][0] != place:
            # A pass that has failed may be tried again.
            places.append((place, 1 + max((times for each, times in places if each == place), default=0)))
        self._end(engine, _End(_code_of_place(*places[-1]), _text(engine, account), idle=True))
        self.stopped_by, self._stopped = account, now
        # A program may leave each forward by an exception, and go on.
        if at_once and now - self._told >= _OFTEN:
            self._told = now
            self.tell()

    def go_on(self, engine: str) -> None:
        """This rank does something with others in an engine: it has not stopped there, and is idle nowhere."""
        if self._ends:
            self.stopped_by = None
            self._ends = {
                other: replace(end, idle=False) for other, end in self._ends.items() if other != engine or not end.place
            }
            self.tell()

    def lose(self, engine: str, account: Account, *, closed: bool = False) -> None:
        """Say that this rank does not go on in an engine, whoever has failed.

        Args:
            engine: which one.
            account: why. Of an exception that has stopped the rank before, it says more.
            closed: the rank has closed the engine, and may go on in others.
        """
        self._waits = {other: text for other, text in self._waits.items() if other != engine}
        idle = next((end for end in self._ends.values() if end.idle), None)
        if not closed:
            self._end(engine, _End("", _text(engine, account), idle=True))
            self.stopped_by = account
        else:
            text = _text(engine, account) if idle is None else idle.account
            self._ends = {
                **self._ends,
                engine: _End("", text, idle=idle is not None and idle is self._ends.get(engine)),
            }
        within(_ANSWER, self._write, "telling why this rank fails")

    def wait(self, engine: str, account: Account | None) -> None:
        """Say that this rank waits for long in an engine, or does no more."""
        others = {other: text for other, text in self._waits.items() if other != engine}
        if account is None:
            self._waits = others
            self.tell()
        else:
            self._waits = {**others, engine: _text(engine, account)}
            within(_ANSWER, self._write, "telling where this rank waits")

    def tell_stop(self) -> None:
        """Bring to the store that this rank has stopped, if it has for a while; now and then, on another thread."""
        if self.stopped_by is not None and time.monotonic() - self._stopped >= _TELLING:
            self.tell()

    def tell(self, *, limit: bool = True) -> None:
        """Bring this rank's status to the store, if it has changed and the store answers; or without a ``limit``."""
        # Another thread may be writing what was true before.
        if self._writing.locked() or self._words() != (self._said_ends.said, self._said_waits.said):
            # The store may be gone, and an exception be on its way.
            with contextlib.suppress(RuntimeError, TimeoutError):
                if limit:
                    within(_ANSWER, self._write, "telling how this rank is")
                else:
                    self._write()

    def some_rank_failed(self, engine: str) -> bool:
        """Tell whether another rank has lost this engine, or has stopped where this one has not."""
        return within(_ANSWER, partial(self._find_failure, engine), "asking whether a rank has failed")

    def accounts(self, engine: str) -> dict[int, Account]:
        """Accounts of ranks that have failed or wait for long, for a rank that waits in an engine."""
        return within(_ANSWER, partial(self._find_accounts, engine), "reading the accounts of ranks")

    def _end(self, engine: str, end: _End) -> None:
        others = {other: replace(each, idle=False) for other, each in self._ends.items()}
        self._ends = {**others, engine: end}

    def _begin(self) -> None:
        with self._writing:
            store = default_store()
            self._stored.clear()
            self._said_ends.begin(store)
            self._said_waits.begin(store)

    def _write(self) -> None:
        # Under the lock, and as it is now: a call that the store has kept for long writes nothing old.
        with self._writing:
            store, ends, waits = default_store(), self._ends, self._waits
            for text in (*(end.account for end in ends.values()), *waits.values()):
                if (code := code_of(text)) not in self._stored:
                    store.set(self._key(code), text)
                    self._stored.add(code)
            of_ends, of_waits = self._words(ends, waits)
            self._said_ends.say(store, of_ends)
            self._said_waits.say(store, of_waits)

    def _words(self, ends: dict[str, _End] | None = None, waits: dict[str, str] | None = None) -> tuple[str, str]:
        """What this rank has to say: "!" before the engine since whose end it is idle."""
        ends, waits = self._ends if ends is None else ends, self._waits if waits is None else waits
        return (
            " ".join(f"{'!' * e.idle}{engine}:{e.place}:{code_of(e.account)}" for engine, e in ends.items()),
            " ".join(f"{engine}:{code_of(text)}" for engine, text in waits.items()),
        )

    def _find_failure(self, engine: str) -> bool:
        store = default_store()
        count = self._said_ends.count(store)
        if count != self._heard[0]:
            # In this order: a line may be newer than the count, and is read once more then.
            self._heard = count, self._read_ends(store)
            with self._writing:
                self._said_ends.repeat(store, count)
        now, before, suspected = time.monotonic(), self._suspected, dict[tuple[int, str, str], float]()
        for rank, ends in self._heard[1].items():
            for other, end in ends.items():
                if rank == self._rank or (other != engine and not end.idle):
                    continue
                if other == engine and not end.place:
                    return True
                if not self._has_ended(other, end.place):
                    suspected[rank, other, end.place] = before.get((rank, other, end.place), now)
        self._suspected = suspected
        # A rank that handles its error may yet go on.
        return any(now - since >= _GOING_ON for since in suspected.values())

    def _has_ended(self, engine: str, place: str) -> bool:
        """Tell whether this rank, too, has stopped there, or has lost the engine."""
        if not place:
            return engine in self._ends and not self._ends[engine].place
        return any(place == _code_of_place(*each) for each in list(self._places.get(engine, ())))

    def _find_accounts(self, engine: str) -> dict[int, Account]:
        store, found = default_store(), dict[int, str]()
        for rank, words in self._said_waits.read(store).items():
            waits = dict(word.split(":") for word in words)
            found[rank] = waits.get(engine) or next(iter(waits.values()))
        for rank, ends in self._read_ends(store).items():
            end = ends.get(engine) or next((each for each in ends.values() if each.idle), None)
            if end is not None:
                found[rank] = end.account
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

    def _read_ends(self, store: dist.Store) -> dict[int, dict[str, _End]]:
        ends: dict[int, dict[str, _End]] = {}
        for rank, words in self._said_ends.read(store).items():
            for engine, place, code in (word.split(":") for word in words):
                ends.setdefault(rank, {})[engine.removeprefix("!")] = _End(place, code, idle=engine[0] == "!")
        return ends

    def _key(self, code: str) -> str:
        return f"{self._name}/{code}"


_boards: weakref.WeakValueDictionary[tuple[tuple[int, ...], int], StatusBoard] = weakref.WeakValueDictionary()


def board_of(ranks: tuple[int, ...], rank: int) -> StatusBoard:
    """This process's board of a group; arguments as for :class:`StatusBoard`."""
    board = _boards.get((ranks, rank))
    if board is None:
        board = _boards[ranks, rank] = StatusBoard(ranks, rank)
    return board


def code_of(text: str) -> str:
    """A short code of a text, such as an engine's unique name."""
    return hashlib.blake2s(text.encode(), digest_size=4).hexdigest()


def _code_of_place(place: int, times: int) -> str:
    return code_of(f"{place} {times}")


def _text(engine: str, account: Account) -> str:
    return json.dumps([engine, replace(account, failure=account.failure[:_LONGEST]).packed()])
