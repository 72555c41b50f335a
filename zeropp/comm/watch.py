"""Who waits where: the status of each rank in the job's store, and a thread that watches the work of a card.

A `RankStatus` is one rank's status in words; `explain` tells the likely cause from the status of all ranks. A
`StatusBoard` writes this rank's status into the store and reads those of others: whether an exception has stopped it,
and what it waits for.

`Monitor` ends waits on a card, where the host only queues work and goes on. If another rank is missing, a collective on
the card never ends, and neither does the work behind it. The host notices where it reads a number, or when the queue is
full and a launch does not return. So a thread watches the queued work. When none of it has finished for
``hang_timeout``, or when another rank says that it has failed, the thread declares the ranks lost and aborts the
communicators, and the launch returns.

[Note: one rank's exception] An exception may end a pass or a step on one rank alone. Then the other ranks wait for it
in vain. Or it ends the pass on all ranks, because a batch does not fit, say, and all go on with the next batch. A rank
cannot tell which. So it writes into the store that it has stopped, and where. It takes that back

- when an exchange of messages has shown that the other ranks are where it is. A pass begins with such an exchange if
  the pass before it has failed; or
- if the failed pass has sent nothing, when it begins a step, or a pass that sends something.

A rank that has waited for 5 seconds reads the store. If another rank has stopped at a place where this rank has not,
and is still stopped 3 seconds later, it will not come: the ranks have lost each other. An evaluation that sends nothing
does not count, since one rank alone may run it.

Engines over the same ranks share their statuses: a rank may stop in the actor's forward while the others wait in the
critic's. Once it goes on in the critic, its stop in the actor concerns only ranks that wait in the actor.

[Note: accounts in the store] One process answers for the store, and all ranks may ask it within the same two seconds.
So a status is a line of some 30 bytes in a list. It holds codes in place of texts, and a text that many ranks give is
stored once, under its code. The length of the list tells in one small request whether there is anything new to read.
After a loss each of 1024 ranks reads some 60 kB, once; the process gives out less than 100 MB.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from zeropp._compat import default_store
from zeropp.comm.process_groups import name_ranks
from zeropp.comm.streams import Event
from zeropp.comm.timers import Patrol, within

__all__ = [
    "ASKING",
    "BLIND",
    "PERIOD",
    "Monitor",
    "RankStatus",
    "StatusBoard",
    "board_of",
    "by_text",
    "code_of",
    "explain",
    "likely_cause",
    "make_monitor",
]

_log = logging.getLogger("zeropp")
# Seconds for one answer of the store. It has no limit of its own where the process that keeps it stands still, and that
# may be the rank that all others wait for.
_ANSWER = 2.0
_OFTEN = 10.0  # seconds between stops that are told at once
_TELLING = 1.0  # seconds until others are told
_GOING_ON = 3.0  # seconds in which a rank that has stopped may go on
_REMEMBERED = 64  # places at which this rank has stopped
_PAGE = 2  # lines for each rank in one list
_LONGEST = 300  # characters of what went wrong on a rank
PERIOD = 1.0  # seconds between looks, at most; the events of finished work are kept until then
ASKING = 5.0  # seconds of waiting after which a rank asks whether another one has failed, and between two questions
_LOOKS_BEFORE_LOSS = 8  # in ``hang_timeout``, at least
BLIND = frozenset({"cuda"})
"""Types of devices whose work the host does not wait for."""


# Accounts: words only, no process.


@dataclass(frozen=True)
class RankStatus:
    """One rank's account of itself.

    Attributes:
        doing: in the words of an error, after "rank 0 was".
        call: the collective call of the user that it has come to, "state_dict() of a GPT", or "".
        where: the pass or step that it is in, "a backward", or "".
        until: what ended it, ", until ...", or "".
        failure: what went wrong on this rank itself, or "".
        unsure: the failure may have kept weights from being stepped here.
        beyond: what it does that no rank has done before, so that nobody waits for it, or "".
        other_model: it is in a pass or call of another model than the rank that reads this.
    """

    doing: str
    call: str = ""
    where: str = ""
    until: str = ""
    failure: str = ""
    unsure: bool = False
    beyond: str = ""
    other_model: bool = False

    def __str__(self) -> str:
        # What a rank does often names it already ("starting a forward").
        inside = f" in {self.where}" if self.where and self.where not in self.doing else ""
        return f"{'using another model, ' if self.other_model else ''}{self.doing}{inside}{self.until}"

    def packed(self) -> str:
        """Its text for the job's store."""
        return json.dumps(asdict(self))

    @staticmethod
    def unpacked(text: str | bytes) -> RankStatus:
        """The inverse of :meth:`packed`."""
        return RankStatus(**json.loads(text))


def explain(accounts: Mapping[int, RankStatus], world: int) -> str:
    """The likely cause, then each account: "rank 0 called ... alone; .... rank 0 was ...; rank 1 was ..."."""
    groups = by_text({rank: str(account) for rank, account in accounts.items()})
    said = "; ".join(f"{name_ranks(of)} {'was' if len(of) == 1 else 'were'} {text}" for text, of in groups.items())
    silent = _silent(accounts, world)
    if silent:
        said += f"; {name_ranks(silent)} said nothing"
    return f"{likely_cause(accounts, world)}. The ranks are no longer in step: {said}"


def likely_cause(accounts: Mapping[int, RankStatus], world: int) -> str:
    """The thing that the user most probably has to look at, in a sentence without its full stop."""
    # Most telling first: what one rank knows to be wrong explains the rest, and calls of the user that differ explain
    # silence and different phases, and not the other way round.
    failures = by_text({rank: account.failure for rank, account in accounts.items() if account.failure})
    if failures:
        return " and ".join(f"{name_ranks(ranks)} failed: {failure}" for failure, ranks in failures.items())
    beyond = by_text({rank: account.beyond for rank, account in accounts.items() if account.beyond})
    if beyond:
        parts = " and ".join(f"{name_ranks(ranks)} alone {text}" for text, ranks in beyond.items())
        once = "If all ranks have done so in one pass, as in a first step, each of them may do so alone"
        return f"{parts}; the other ranks cannot know of it, and do not wait there. {once}"
    silent = _silent(accounts, world)
    calls = by_text({rank: account.call for rank, account in accounts.items() if account.call})
    if len(calls) > 1:
        parts = " and ".join(f"{name_ranks(ranks)} called {call}" for call, ranks in calls.items())
        return f"{parts}; they are collective: every rank makes the same calls in the same order"
    for call, ranks in calls.items():
        others = set(range(world)).difference(ranks)
        # The fewer ranks are the more likely culprits; in a draw, those that made the call.
        if others and len(ranks) <= len(others):
            return f"{name_ranks(ranks)} called {call} alone; it is collective: every rank calls it"
        if others:
            return f"{name_ranks(others)} did not call {call}, which is collective: every rank calls it"
    if silent:
        does = "does" if len(silent) == 1 else "do"
        return (
            f"{name_ranks(silent)} {does} not wait for others: failed or ended, out of data, slow, or in code that "
            "only some ranks run"
        )
    elsewhere = [rank for rank, account in accounts.items() if account.other_model]
    if elsewhere:
        verb = "uses" if len(elsewhere) == 1 else "use"
        return f"{name_ranks(elsewhere)} {verb} another model; every rank uses its models in the same order"
    places = by_text({rank: account.where for rank, account in accounts.items()})
    if len(places) > 1:
        parts = ", ".join(f"{name_ranks(ranks)} in {where or 'no pass'}" for where, ranks in places.items())
        return f"the ranks made different forwards, backwards or steps, or numbers of them: {parts}"
    if len(by_text({rank: account.doing for rank, account in accounts.items()})) > 1:
        return "the ranks ran different modules, or in another order; look for code that depends on the rank"
    return "all ranks wait for each other at the same place: a connection or a device may be stuck"


def _silent(accounts: Mapping[int, RankStatus], world: int) -> list[int]:
    return [rank for rank in range(world) if rank not in accounts]


def by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Ranks by what they say, in ascending order."""
    found: dict[str, list[int]] = {}
    # Ranks in ascending order, so that the same accounts give the same words on every rank.
    for rank in sorted(texts):
        found.setdefault(texts[rank], []).append(rank)
    return found


# Statuses in the store.

_boards: weakref.WeakValueDictionary[tuple[tuple[int, ...], int], StatusBoard] = weakref.WeakValueDictionary()


def board_of(ranks: tuple[int, ...], rank: int) -> StatusBoard:
    """This process's board of a group; arguments as for :class:`StatusBoard`."""
    board = _boards.get((ranks, rank))
    if board is None:
        board = _boards[ranks, rank] = StatusBoard(ranks, rank)
    return board


class StatusBoard:
    """The statuses of a group's ranks, for the engines over these ranks in this process.

    Attributes:
        stopped_by: this rank's account of an exception that has ended its last pass or step, until it goes on.
        ends: stops and losses of this rank, by engine. Other threads read it, so each change replaces the whole.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        """``ranks``: global ranks of the group; ``rank``: this one's place among them."""
        self._name = f"zeropp-{code_of(repr(ranks))}"
        self._rank = rank
        self.stopped_by: RankStatus | None = None
        self.ends: dict[str, _End] = {}
        self._waits: dict[str, str] = {}  # texts of accounts, by engine; replaced as a whole, too
        self._places: dict[str, int] = {}  # where this rank has stopped, the latest last: how often
        self._stopped = self._told = -_OFTEN  # when it last stopped, and when that was told at once
        self._said_ends = _Lines(f"{self._name}/ends", rank, len(ranks))
        self._said_waits = _Lines(f"{self._name}/waits", rank, len(ranks))
        self._stored: dict[str, str] = {}  # texts in the store, by key
        self._writing = threading.Lock()
        # Those of other ranks.
        self._heard: tuple[int, dict[int, dict[str, _End]]] = (0, {})  # number of lines read; ends by rank and engine
        # By the engine that asks: {(rank, engine, place): when this was first read}.
        self._suspected: dict[str, dict[tuple[int, str, str], float]] = {}
        self._texts: dict[str, tuple[str, RankStatus]] = {}  # by code: (engine, account), as they were read

    def join(self) -> None:
        """Withdraw what this rank has said, since it makes another engine."""
        self.stopped_by = None
        self.ends = {}
        self._waits = {}
        self._heard = (0, {})
        # An error here would end the wrap; one that matters comes up again where the store is needed.
        with contextlib.suppress(RuntimeError, TimeoutError):
            within(_ANSWER, self._begin_lines, "saying that this rank begins")

    def stop(self, engine: str, place: int, account: RankStatus, *, at_once: bool) -> None:
        """Note that an exception has ended this rank's pass or step; see [Note: one rank's exception].

        Args:
            engine: whose.
            place: of the pass or step, the same on all ranks.
            account: with the exception as its ``failure``.
            at_once: write to the store now, and wait for it. Otherwise :meth:`tell_stop` writes, on another thread.
        """
        before = self.ends.get(engine)
        now = time.monotonic()
        code = code_of(f"{engine} {place}")
        # The same stop may be noted twice: the second account says more.
        again = before is not None and before.idle and before.place.startswith(code)
        # A pass that has failed may be tried again, and fail again at the same place.
        times = self._places.get(code, 0) + (not again)
        others = [each for each in self._places.items() if each[0] != code]
        self._places = dict([*others[1 - _REMEMBERED :], (code, times)])
        self._end(engine, _End(f"{code}.{times}", _text(engine, account), idle=True))
        self.stopped_by = account
        self._stopped = self._stopped if again else now
        # A program may leave every forward by an exception on purpose, and must not wait for the store each time.
        if at_once and now - self._told >= _OFTEN:
            self._told = now
            self.write_status()

    def is_stopped(self, engine: str) -> bool:
        """Tell whether this rank has stopped in an engine, and has begun nothing since then."""
        return engine in self.ends and self.ends[engine].idle

    def go_on(self, engine: str) -> None:
        """Note that this rank begins something with other ranks in an engine, after an exception perhaps."""
        self.stopped_by = None
        self.ends = {other: replace(end, idle=False) for other, end in self.ends.items() if other != engine or end.lost}
        self.write_status()

    def lose(self, engine: str, account: RankStatus, *, closed: bool = False) -> None:
        """Tell the others that this rank cannot go on in an engine, whoever has failed.

        Args:
            engine: which one.
            account: why. The exception that has stopped the rank before is told with it, unless it has one of its own.
            closed: the rank has closed the engine, and may go on in others.
        """
        self._waits = {other: text for other, text in self._waits.items() if other != engine}
        # An exception that has stopped this rank before is the cause, unless it has stopped others there, too.
        before = next((end for end in self.ends.values() if end.idle), None)
        place = ""
        text = _text(engine, account)
        if before is not None and before.place and self.stopped_by is not None and (closed or not account.failure):
            place = before.place
            text = _text(engine, replace(account, failure=self.stopped_by.failure))
        if closed:
            idle = before is not None and before is self.ends.get(engine)
            self.ends = {**self.ends, engine: _End(place, text, idle=idle, lost=True)}
        else:
            self._end(engine, _End(place, text, idle=True, lost=True))
            self.stopped_by = account
        within(_ANSWER, self._write_lines, "telling why this rank fails")

    def post_waiting(self, engine: str, account: RankStatus | None) -> None:
        """Tell the others that this rank has waited for long in an engine; None: that it waits no more."""
        others = {other: text for other, text in self._waits.items() if other != engine}
        if account is None:
            self._waits = others
            self.write_status()
        else:
            self._waits = {**others, engine: _text(engine, account)}
            within(_ANSWER, self._write_lines, "telling where this rank waits")

    def tell_stop(self) -> None:
        """Tell the others that this rank has stopped, if that is a second ago. Called every second, by a thread."""
        if self.stopped_by is not None and time.monotonic() - self._stopped >= _TELLING:
            self.write_status()

    def write_status(self, *, limit: bool = True) -> None:
        """Write this rank's status to the store, if it has changed.

        Args:
            limit: give up after two seconds, on a thread that is left behind.
        """
        # While another thread writes, it may be writing what was true before.
        if self._writing.locked() or self._words() != (self._said_ends.said, self._said_waits.said):
            # The store may be gone. This must not hide the exception that led here.
            with contextlib.suppress(RuntimeError, TimeoutError):
                if limit:
                    within(_ANSWER, self._write_lines, "telling how this rank is")
                else:
                    self._write_lines()

    def some_rank_failed(self, engine: str) -> bool:
        """Tell whether another rank has lost this engine, or has stopped where this one has not."""
        return within(_ANSWER, partial(self._find_failure, engine), "asking whether a rank has failed")

    def accounts(self, engine: str) -> dict[int, RankStatus]:
        """Accounts of ranks that have failed or wait for long, for a rank that waits in an engine."""
        return within(_ANSWER, partial(self._find_accounts, engine), "reading the accounts of ranks")

    def _end(self, engine: str, end: _End) -> None:
        others = {other: replace(each, idle=False) for other, each in self.ends.items()}
        self.ends = {**others, engine: end}

    def _begin_lines(self) -> None:
        with self._writing:
            store = default_store()
            self._stored.clear()
            self._said_ends.withdraw_lines(store)
            self._said_waits.withdraw_lines(store)

    def _write_lines(self) -> None:
        # The status is read under the lock: a call that was held up in the store does not overwrite a newer status.
        with self._writing:
            store = default_store()
            ends = self.ends
            waits = self._waits
            for key, text in (*map(self._account, ends.items()), *((code_of(text), text) for text in waits.values())):
                if self._stored.get(key) != text:
                    store.set(self._key(key), text)
                    self._stored[key] = text
            of_ends, of_waits = self._words(ends, waits)
            self._said_ends.say(store, of_ends)
            self._said_waits.say(store, of_waits)

    def _words(self, ends: dict[str, _End] | None = None, waits: dict[str, str] | None = None) -> tuple[str, str]:
        """This rank's two lines: "engine:place:key" for each end, marked "!" if idle and "x" if lost; "engine:key"."""
        ends = self.ends if ends is None else ends
        waits = self._waits if waits is None else waits
        return (
            " ".join(
                f"{'!' * end.idle}{'x' * end.lost}:{engine}:{end.place}:{self._account((engine, end))[0]}"
                for engine, end in ends.items()
            ),
            " ".join(f"{engine}:{code_of(text)}" for engine, text in waits.items()),
        )

    def _find_failure(self, engine: str) -> bool:
        store = default_store()
        count = self._said_ends.count_lines(store)
        if count != self._heard[0]:
            # The count was read before the lines: a line that comes in between is read twice, and not missed.
            self._heard = count, self._read_ends(store)
            with self._writing:
                self._said_ends.repeat(store, count)
        now = time.monotonic()
        before = self._suspected.get(engine, {})
        suspected: dict[tuple[int, str, str], float] = {}
        for rank, ends in self._heard[1].items():
            for other, end in ends.items():
                if rank == self._rank or (other != engine and not end.idle):
                    continue
                if other == engine and end.lost:
                    return True
                if not self._has_ended(other, end):
                    suspected[rank, other, end.place] = before.get((rank, other, end.place), now)
        self._suspected[engine] = suspected
        # A rank that handles its exception may yet go on.
        return any(now - since >= _GOING_ON for since in suspected.values())

    def _has_ended(self, engine: str, end: _End) -> bool:
        """Tell whether this rank, too, has stopped there, or has lost the engine."""
        own = self.ends.get(engine)
        return own is not None and own.lost if end.lost else self._has_stopped(end.place)

    def _has_stopped(self, place: str) -> bool:
        code, _, times = place.partition(".")
        return bool(code) and self._places.get(code, 0) >= int(times)

    def _account(self, end: tuple[str, _End]) -> tuple[str, str]:
        """Key and text of the account of an engine's end. Exceptions may come for ever, so a new text replaces one."""
        engine, text = end[0], end[1].account
        return (code_of(text) if end[1].lost else f"{self._rank}-{engine}"), text

    def _find_accounts(self, engine: str) -> dict[int, RankStatus]:
        store = default_store()
        found = dict[int, str]()
        common = set[int]()
        for rank, words in self._said_waits.read_lines(store).items():
            waits = dict(word.split(":") for word in words)
            found[rank] = waits.get(engine) or next(iter(waits.values()))
        for rank, ends in self._read_ends(store).items():
            other = engine if engine in ends else next((each for each, end in ends.items() if end.idle), None)
            # What has ended on this rank, too, explains nothing.
            if other is not None and (
                (other == engine and ends[other].lost) or not self._has_ended(other, ends[other])
            ):
                found[rank] = ends[other].account
                if self._has_stopped(ends[other].place):
                    common.add(rank)
        texts = self._read_texts(store, set(found.values()))
        accounts = {}
        for rank, key in found.items():
            owner, account = texts[key]
            failure = "" if rank in common else account.failure
            accounts[rank] = replace(account, failure=failure, other_model=owner != engine)
        return accounts

    def _read_texts(self, store: dist.Store, keys: set[str]) -> dict[str, tuple[str, RankStatus]]:
        missing = list(keys.difference(self._texts))
        found = {key: self._texts[key] for key in keys.difference(missing)}
        if missing:
            for key, text in zip(missing, store.multi_get([self._key(key) for key in missing]), strict=True):
                owner, packed = json.loads(text)
                found[key] = owner, RankStatus.unpacked(packed)
                if "-" not in key:  # others are replaced
                    self._texts[key] = found[key]
        return found

    def _read_ends(self, store: dist.Store) -> dict[int, dict[str, _End]]:
        ends: dict[int, dict[str, _End]] = {}
        for rank, words in self._said_ends.read_lines(store).items():
            for marks, engine, place, key in (word.split(":") for word in words):
                ends.setdefault(rank, {})[engine] = _End(place, key, idle="!" in marks, lost="x" in marks)
        return ends

    def _key(self, code: str) -> str:
        return f"{self._name}/{code}"


@dataclass(frozen=True)
class _End:
    """The end of a rank's work in an engine.

    Attributes:
        place: the pass or step in which an exception has stopped it, and how often it has stopped there:
            "1f2e3d4c.2"; empty if there was no exception.
        account: the rank's own words: of this rank the text; of others its key in the store.
        idle: the rank has begun nothing with other ranks since then, in any engine.
        lost: the rank has closed the engine or lost the other ranks, and cannot go on there.
    """

    place: str
    account: str
    idle: bool
    lost: bool = False


class _Lines:
    """Lines that ranks add to a list in the store. Only the last line of each rank counts.

    A list that is full is followed by another one, and deleted after that.
    """

    def __init__(self, name: str, rank: int, world: int) -> None:
        self._name = name
        self._rank = rank
        self._size = _PAGE * world
        self._page = 0  # of this rank's last line
        self.said = ""  # in it

    def withdraw_lines(self, store: dist.Store) -> None:
        """Withdraw what this rank has said before; the store may be another one since then."""
        self._page = 0
        self.said = ""
        if self.count_lines(store):
            self._append(store, "")

    def say(self, store: dist.Store, words: str) -> None:
        """Add a line, if it says something new."""
        if words != self.said:
            self._append(store, words)

    def repeat(self, store: dist.Store, count: int) -> None:
        """Add the last line again, if its list is about to be deleted."""
        if self.said and count // self._size > self._page:
            self._append(store, self.said)

    def _append(self, store: dist.Store, words: str) -> None:
        number = self.count_lines(store, 1)
        self._page, begins = divmod(number, self._size)
        store.append(self._key(self._page), f"{number} {self._rank} {words}\n")  # type: ignore[attr-defined]  # missing in torch's own stubs
        self.said = words
        # Nobody reads that list any more, nor is about to: a call for a list that is gone would wait for it. A job that
        # runs for months must not fill the store.
        if begins == 0:
            store.delete_key(self._key(self._page - 3))

    def read_lines(self, store: dist.Store) -> dict[int, list[str]]:
        """The words of each rank's last line, if there are any."""
        page = self.count_lines(store) // self._size
        last = dict[int, tuple[int, list[str]]]()
        for key in (self._key(page - 1), self._key(page)):
            lines = store.get(key).decode().splitlines() if store.check([key]) else []
            for number, rank, *words in map(str.split, lines):
                # A call that was held up in the store adds its line late, behind newer ones: its number is lower.
                if int(number) >= last.get(int(rank), (0, []))[0]:
                    last[int(rank)] = int(number), words
        return {rank: words for rank, (_, words) in last.items() if words}

    def count_lines(self, store: dist.Store, more: int = 0) -> int:
        """Lines so far, and ``more``."""
        return int(store.add(f"{self._name}/lines", more))

    def _key(self, page: int) -> str:
        return f"{self._name}/{page}"


def code_of(text: str) -> str:
    """A short code of a text, such as an engine's unique name."""
    return hashlib.blake2s(text.encode(), digest_size=4).hexdigest()


def _text(engine: str, account: RankStatus) -> str:
    return json.dumps([engine, replace(account, failure=account.failure[:_LONGEST]).packed()])


# A thread that watches the work of a card.


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

    def watch_event(self, event: Event, doing: str) -> None:
        """Work was queued that ends with ``event``; ``doing`` says what it is, after "waiting for"."""
        if not self._patrol.started:  # at the first: a rank that sends nothing needs no thread
            self._patrol.start(min(self._hang_timeout / _LOOKS_BEFORE_LOSS, PERIOD))
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
        if waited < ASKING or now - self._asked < ASKING:
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
