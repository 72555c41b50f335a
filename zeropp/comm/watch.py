"""The status of each rank in the job's store, and a monitor thread that watches the collectives of a GPU.

A `RankStatus` describes in words where a rank is and what it waits for. `explain` finds the likely cause of a hang from
the statuses of all ranks. A `StatusBoard` writes this rank's status into the store and reads the statuses of other
ranks: if an exception has stopped the rank, and what the rank waits for.

`Monitor` ends waits on a GPU, where the host only queues work and goes on. If one rank is missing, a collective on the
GPU never ends, and the work behind it never starts. The host is blocked only later, when it reads a result, or when the
queue is full and a launch does not return. Therefore a thread watches the queued work. If none of the work finishes for
``hang_timeout`` seconds, or if another rank reports a failure, the thread declares the ranks lost and aborts the
communicators, so that the blocked launch returns.

[Note: one rank's exception] An exception may end a pass or a step on one rank only. Then the other ranks wait for that
rank in vain. Or the exception ends the pass on all ranks, for example because a batch does not fit, and all ranks go on
with the next batch. A rank cannot see which of the two happened. Therefore the rank writes into the store that it has
stopped, and in which pass. The rank withdraws this entry

- when an exchange of messages has shown that the other ranks are at the same place. A pass begins with such an exchange
  if the pass before it has failed; or
- when it begins a step, or a pass that sends something, if the failed pass has sent nothing.

A rank that waits reads the store: after 5 seconds, or after 1 second if its host polls an event. If another rank has
stopped in a pass in which the reading rank has not stopped, and is still stopped 3 seconds later, the other rank will
not come: the ranks have lost each other. An evaluation pass that sends nothing is not counted, because one rank may run
it without the others.

Engines over the same ranks share one status board: a rank may stop in the forward of one model (an actor) while the
other ranks wait in another model (a critic). When the rank goes on in the critic, its stop in the actor only matters to
ranks that wait in the actor.

[Note: accounts in the store] One process serves the store, and all ranks may send requests to it within the same two
seconds. Therefore a status is a line of about 30 bytes in a list. The line holds short codes in place of texts, and a
text that many ranks share is stored once, under its code. The length of the list shows in one small request if there is
anything new to read. After a loss each of 1024 ranks reads about 60 kB once, so the process sends less than 100 MB.
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
from zeropp.comm.timers import PeriodicThread, within

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
# Time limit in seconds of one request to the store. torch's requests have no limit if the process that serves the store
# hangs, and that process may be the rank for which all others wait.
_ANSWER = 2.0
_OFTEN = 10.0  # seconds, at least, between two stops that are written to the store at once
_TELLING = 1.0  # seconds after a stop until the watching thread writes it to the store
_GOING_ON = 3.0  # seconds for which another rank's stop may be seen before it counts as a failure
_REMEMBERED = 64  # number of places of stops that a rank remembers
_PAGE = 2  # a list in the store is full at ``_PAGE * world`` lines
_LONGEST = 300  # characters, at most, of a failure's text in the store
# Seconds, at most, between two checks by a watching thread. Events of finished work stay in memory until the next
# check.
PERIOD = 1.0
# Seconds of waiting after which a watching thread checks the store for failures of other ranks, and seconds between two
# checks.
ASKING = 5.0
_LOOKS_BEFORE_LOSS = 8  # number of checks by the monitor within ``hang_timeout``, at least
BLIND = frozenset({"cuda"})
"""Types of devices on which the host does not wait for queued work."""


# Statuses and their explanation; no communication.


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank in words: where the rank is, and what went wrong.

    Attributes:
        doing: activity, in words that follow "rank 0 was", such as "waiting for the gather of unit 'head'".
        call: collective call of the user that the rank has reached, such as "state_dict() of a GPT"; or "".
        where: pass or step in which the rank is, such as "a backward"; or "".
        until: reason why the activity ended, as ", until ..." or " (...)"; or "".
        failure: error on this rank itself; or "".
        unsure: True if the failure may have kept weights from being stepped on this rank.
        beyond: action of this rank that no rank's known order contains, so that no other rank waits there; or "".
        other_model: True if the rank is in a pass or call of another model than the rank that reads this status.
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
        # ``doing`` may already contain ``where``, as in "starting a forward".
        inside = f" in {self.where}" if self.where and self.where not in self.doing else ""
        return f"{'using another model, ' if self.other_model else ''}{self.doing}{inside}{self.until}"

    def packed(self) -> str:
        """Return this status as JSON text for the job's store."""
        return json.dumps(asdict(self))

    @staticmethod
    def unpacked(text: str | bytes) -> RankStatus:
        """Return the status from the JSON text made by :meth:`packed`."""
        return RankStatus(**json.loads(text))


def explain(accounts: Mapping[int, RankStatus], world: int) -> str:
    """Return the text of an error: the likely cause of a hang, followed by the status of each rank.

    Args:
        accounts: status by rank; ranks that reported no status are missing.
        world: number of ranks.

    Returns:
        Text such as "rank 0 called ... alone; .... rank 0 was ...; rank 1 was ...".
    """
    groups = by_text({rank: str(account) for rank, account in accounts.items()})
    said = "; ".join(f"{name_ranks(of)} {'was' if len(of) == 1 else 'were'} {text}" for text, of in groups.items())
    silent = _silent(accounts, world)
    if silent:
        said += f"; {name_ranks(silent)} reported nothing"
    return f"{likely_cause(accounts, world)}. The ranks are no longer in step: {said}"


def likely_cause(accounts: Mapping[int, RankStatus], world: int) -> str:
    """Return the most likely cause of a hang as a sentence without its full stop.

    Args:
        accounts: status by rank; ranks that reported no status are missing.
        world: number of ranks.
    """
    # The causes are checked from the most to the least specific. A failure on one rank explains all other statuses.
    # User calls that differ explain missing statuses and different passes; the reverse does not hold.
    failures = by_text({rank: account.failure for rank, account in accounts.items() if account.failure})
    if failures:
        return " and ".join(f"{name_ranks(ranks)} failed: {failure}" for failure, ranks in failures.items())
    beyond = by_text({rank: account.beyond for rank, account in accounts.items() if account.beyond})
    if beyond:
        parts = " and ".join(f"{name_ranks(ranks)} alone {text}" for text, ranks in beyond.items())
        once = "After a pass in which all ranks did so, such as the first step, one rank alone may do so"
        return f"{parts}; the other ranks do not expect it and do not wait there. {once}"
    silent = _silent(accounts, world)
    calls = by_text({rank: account.call for rank, account in accounts.items() if account.call})
    if len(calls) > 1:
        parts = " and ".join(f"{name_ranks(ranks)} called {call}" for call, ranks in calls.items())
        return f"{parts}; they are collective: every rank makes the same calls in the same order"
    for call, ranks in calls.items():
        others = set(range(world)).difference(ranks)
        # The smaller set of ranks is the more likely culprit; if both are equally large, the ranks that made the call.
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
    """Return the ranks that reported no status, in ascending order."""
    return [rank for rank in range(world) if rank not in accounts]


def by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Group ranks by their texts. The ranks of each text are in ascending order."""
    found: dict[str, list[int]] = {}
    # Ranks are visited in ascending order, so that every rank makes the same message from the same statuses.
    for rank in sorted(texts):
        found.setdefault(texts[rank], []).append(rank)
    return found


# Statuses in the store.

_boards: weakref.WeakValueDictionary[tuple[tuple[int, ...], int], StatusBoard] = weakref.WeakValueDictionary()


def board_of(ranks: tuple[int, ...], rank: int) -> StatusBoard:
    """Return this process's status board for a group of ranks. Engines over the same ranks get the same board.

    Args:
        ranks: global ranks of the group.
        rank: this rank's position in ``ranks``.
    """
    board = _boards.get((ranks, rank))
    if board is None:
        board = _boards[ranks, rank] = StatusBoard(ranks, rank)
    return board


class StatusBoard:
    """The statuses of a group's ranks, shared by all engines of this process over these ranks.

    Engines are named by a code: see :func:`code_of`.

    Attributes:
        stopped_by: status with the exception or loss that ended this rank's last pass or step; None once the rank goes
            on.
        ends: for each engine, the exception or loss that ended this rank's work in the engine. Other threads read this
            dictionary without a lock, so a change always replaces the whole dictionary.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        """Create an empty board.

        Args:
            ranks: global ranks of the group.
            rank: this rank's position in ``ranks``.
        """
        self._name = f"zeropp-{code_of(repr(ranks))}"
        self._rank = rank
        self.stopped_by: RankStatus | None = None
        self.ends: dict[str, _End] = {}
        self._waits: dict[str, str] = {}  # status texts of long waits, by engine; replaced as a whole, too
        self._places: dict[str, int] = {}  # number of stops by place, the latest place last
        self._stopped = self._told = -_OFTEN  # times of the last stop, and of the last stop written at once
        self._said_ends = _Lines(f"{self._name}/ends", rank, len(ranks))
        self._said_waits = _Lines(f"{self._name}/waits", rank, len(ranks))
        self._stored: dict[str, str] = {}  # texts that this rank has written to the store, by key
        self._writing = threading.Lock()
        # Ends of other ranks' work: the number of lines in the list when it was last read, and the ends by rank and
        # engine.
        self._heard: tuple[int, dict[int, dict[str, _End]]] = (0, {})
        # For each engine of a waiting caller: {(rank, engine, place): time when this stop was first read}.
        self._suspected: dict[str, dict[tuple[int, str, str], float]] = {}
        self._texts: dict[str, tuple[str, RankStatus]] = {}  # texts read from the store, by code: (engine, status)

    def join(self) -> None:
        """Withdraw all statuses of this rank, because the rank creates another engine."""
        self.stopped_by = None
        self.ends = {}
        self._waits = {}
        self._heard = (0, {})
        # An error of the store is ignored, because it would end the wrap. If the store is really unusable, the error
        # comes up again where the store is needed.
        with contextlib.suppress(RuntimeError, TimeoutError):
            within(_ANSWER, self._begin_lines, "saying that this rank begins")

    def stop(self, engine: str, place: int, account: RankStatus, *, at_once: bool) -> None:
        """Record that an exception has ended this rank's pass or step; see [Note: one rank's exception].

        Args:
            engine: code of the engine of the pass or step.
            place: number of the pass or step, equal on all ranks.
            account: status with the exception as its ``failure``.
            at_once: True to write to the store now and wait for the answer. Otherwise :meth:`tell_stop` writes later,
                on another thread.
        """
        before = self.ends.get(engine)
        now = time.monotonic()
        code = code_of(f"{engine} {place}")
        # The same stop may be recorded twice. The second status is more detailed, so it replaces the first.
        again = before is not None and before.idle and before.place.startswith(code)
        # A failed pass may be repeated and fail again at the same place, so the number of stops is part of the place.
        times = self._places.get(code, 0) + (not again)
        others = [each for each in self._places.items() if each[0] != code]
        self._places = dict([*others[1 - _REMEMBERED :], (code, times)])
        self._end(engine, _End(f"{code}.{times}", _text(engine, account), idle=True))
        self.stopped_by = account
        self._stopped = self._stopped if again else now
        # A program may end every forward by an exception on purpose, and must not wait for the store each time.
        if at_once and now - self._told >= _OFTEN:
            self._told = now
            self.write_status()

    def is_stopped(self, engine: str) -> bool:
        """Return True if an exception has stopped this rank in an engine and the rank has begun nothing since then."""
        return engine in self.ends and self.ends[engine].idle

    def go_on(self, engine: str) -> None:
        """Record that this rank begins something with other ranks in an engine.

        This withdraws this rank's stop in that engine. Its stops in other engines then matter only to ranks that wait
        in those engines.

        Args:
            engine: code of the engine.
        """
        self.stopped_by = None
        self.ends = {other: replace(end, idle=False) for other, end in self.ends.items() if other != engine or end.lost}
        self.write_status()

    def lose(self, engine: str, account: RankStatus, *, closed: bool = False) -> None:
        """Write to the store that this rank cannot go on in an engine, whichever rank has failed.

        Args:
            engine: code of the engine.
            account: status with the reason. If it has no ``failure``, or if ``closed``, the exception that has stopped
                this rank before is reported as the failure.
            closed: True if the rank has closed the engine and may go on in other engines.
        """
        self._waits = {other: text for other, text in self._waits.items() if other != engine}
        # If an exception has stopped this rank before, the exception is the cause. Its place is reported, too: ranks
        # that have stopped at the same place ignore the exception.
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
        """Write to the store that this rank has waited for long in an engine.

        Args:
            engine: code of the engine.
            account: status of the wait; None if the rank does not wait any more.
        """
        others = {other: text for other, text in self._waits.items() if other != engine}
        if account is None:
            self._waits = others
            self.write_status()
        else:
            self._waits = {**others, engine: _text(engine, account)}
            within(_ANSWER, self._write_lines, "telling where this rank waits")

    def tell_stop(self) -> None:
        """Write this rank's stop to the store if the stop is at least a second old. A thread calls this method."""
        if self.stopped_by is not None and time.monotonic() - self._stopped >= _TELLING:
            self.write_status()

    def write_status(self, *, limit: bool = True) -> None:
        """Write this rank's status to the store, if the status has changed. Errors of the store are ignored.

        Args:
            limit: True to give up after two seconds; the request then goes on in a thread of its own.
        """
        # If another thread is writing, it may be writing an older status, so write in that case, too.
        if self._writing.locked() or self._words() != (self._said_ends.said, self._said_waits.said):
            # The store may be gone. Its error must not hide the exception that led to this call.
            with contextlib.suppress(RuntimeError, TimeoutError):
                if limit:
                    within(_ANSWER, self._write_lines, "telling how this rank is")
                else:
                    self._write_lines()

    def some_rank_failed(self, engine: str) -> bool:
        """Return True if another rank has lost this engine, or has stopped for long at a place where this rank has not.

        Raises:
            RuntimeError: the store reports an error.
            TimeoutError: the store does not answer within two seconds.
        """
        return within(_ANSWER, partial(self._find_failure, engine), "asking whether a rank has failed")

    def accounts(self, engine: str) -> dict[int, RankStatus]:
        """Read the statuses of ranks that have failed or that have waited for long.

        Args:
            engine: code of the engine in which this rank waits.

        Returns:
            Status by rank, without the ranks that have neither failed nor waited for long.

        Raises:
            RuntimeError: the store reports an error.
            TimeoutError: the store does not answer within two seconds.
        """
        return within(_ANSWER, partial(self._find_accounts, engine), "reading the accounts of ranks")

    def _end(self, engine: str, end: _End) -> None:
        """Record the end of this rank's work in an engine, and mark its ends in other engines as no longer idle."""
        others = {other: replace(each, idle=False) for other, each in self.ends.items()}
        self.ends = {**others, engine: end}

    def _begin_lines(self) -> None:
        """Withdraw this rank's lines in the store."""
        with self._writing:
            store = default_store()
            self._stored.clear()
            self._said_ends.withdraw_lines(store)
            self._said_waits.withdraw_lines(store)

    def _write_lines(self) -> None:
        """Write this rank's new texts and lines to the store."""
        # The status is read while the lock is held, so that a call that the store has delayed cannot overwrite a newer
        # status.
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
        """Return this rank's line of ends and its line of waits.

        The first has "marks:engine:place:key" for each end, with the marks "!" if idle and "x" if lost. The second has
        "engine:key" for each long wait. A key names a text in the store.
        """
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
        """Return True if another rank has failed; see :meth:`some_rank_failed`."""
        store = default_store()
        count = self._said_ends.count_added(store)
        if count != self._heard[0]:
            # The count was read before the lines. A line that is added in between is read twice, and is not missed.
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
        # A rank that handles its exception may still go on, so a stop counts only after some seconds.
        return any(now - since >= _GOING_ON for since in suspected.values())

    def _has_ended(self, engine: str, end: _End) -> bool:
        """Return True if this rank, too, has lost the engine (if ``end.lost``), or has stopped at the same place."""
        own = self.ends.get(engine)
        return own is not None and own.lost if end.lost else self._has_stopped(end.place)

    def _has_stopped(self, place: str) -> bool:
        """Return True if this rank has stopped at a place at least as often as the place ("code.number") says."""
        code, _, times = place.partition(".")
        return bool(code) and self._places.get(code, 0) >= int(times)

    def _account(self, end: tuple[str, _End]) -> tuple[str, str]:
        """Return the key in the store and the text of an engine's end.

        A stop's key depends only on the rank and engine, so a new text replaces the old one. Otherwise a program with
        endless exceptions would fill the store.
        """
        engine, text = end[0], end[1].account
        return (code_of(text) if end[1].lost else f"{self._rank}-{engine}"), text

    def _find_accounts(self, engine: str) -> dict[int, RankStatus]:
        """Read the statuses of ranks that have failed or waited for long; see :meth:`accounts`."""
        store = default_store()
        found = dict[int, str]()
        common = set[int]()
        for rank, words in self._said_waits.read_lines(store).items():
            waits = dict(word.split(":") for word in words)
            found[rank] = waits.get(engine) or next(iter(waits.values()))
        for rank, ends in self._read_ends(store).items():
            other = engine if engine in ends else next((each for each, end in ends.items() if end.idle), None)
            # A stop or loss that this rank shares explains nothing, unless the other rank has lost the engine in which
            # this rank waits.
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
        """Return (engine, status) for keys of texts in the store."""
        missing = list(keys.difference(self._texts))
        found = {key: self._texts[key] for key in keys.difference(missing)}
        if missing:
            for key, text in zip(missing, store.multi_get([self._key(key) for key in missing]), strict=True):
                owner, packed = json.loads(text)
                found[key] = owner, RankStatus.unpacked(packed)
                if "-" not in key:  # keys with "-" are not cached, because their texts get replaced
                    self._texts[key] = found[key]
        return found

    def _read_ends(self, store: dist.Store) -> dict[int, dict[str, _End]]:
        """Read from the store, for all ranks, the ends of their work in each engine (exceptions, losses and closes)."""
        ends: dict[int, dict[str, _End]] = {}
        for rank, words in self._said_ends.read_lines(store).items():
            for marks, engine, place, key in (word.split(":") for word in words):
                ends.setdefault(rank, {})[engine] = _End(place, key, idle="!" in marks, lost="x" in marks)
        return ends

    def _key(self, code: str) -> str:
        return f"{self._name}/{code}"


@dataclass(frozen=True)
class _End:
    """The end of a rank's work in an engine, by an exception, a loss or a close.

    Attributes:
        place: pass or step in which an exception stopped the rank, and the number of its stops there, as in
            "1f2e3d4c.2"; empty if there was no exception.
        account: status of the rank: for this rank the packed text, for other ranks its key in the store.
        idle: True if the rank has begun nothing with other ranks since then, in any engine.
        lost: True if the rank has closed the engine or lost the other ranks, and cannot go on in the engine.
    """

    place: str
    account: str
    idle: bool
    lost: bool = False


class _Lines:
    """Lines that ranks append to a list in the store. Only the last line of each rank counts.

    A full list is followed by a new list, and is deleted some lists later. The attribute ``said`` is this rank's last
    line.
    """

    def __init__(self, name: str, rank: int, world: int) -> None:
        self._name = name
        self._rank = rank
        self._size = _PAGE * world
        self._page = 0  # number of the list that holds this rank's last line
        self.said = ""  # words of this rank's last line

    def withdraw_lines(self, store: dist.Store) -> None:
        """Withdraw this rank's earlier line. The store may be a new one, without any lines."""
        self._page = 0
        self.said = ""
        if self.count_lines(store):
            self._append(store, "")

    def say(self, store: dist.Store, words: str) -> None:
        """Append a line for this rank, unless it equals the rank's last line."""
        if words != self.said:
            self._append(store, words)

    def repeat(self, store: dist.Store, count: int) -> None:
        """Append this rank's last line again if it is in an older list, which will be deleted."""
        if self.said and count // self._size > self._page:
            self._append(store, self.said)

    def _append(self, store: dist.Store, words: str) -> None:
        """Append a line to the current list, and delete an old list when a new one begins."""
        number = self.count_lines(store, 1)
        self._page, begins = divmod(number, self._size)
        store.append(self._key(self._page), f"{number} {self._rank} {words}\n")  # type: ignore[attr-defined]  # missing in torch's own stubs
        self.count_added(store, 1)
        self.said = words
        # No rank reads or is about to read this old list: a request for a deleted list would wait for it. Lists are
        # deleted because a job that runs for months must not fill the store.
        if begins == 0:
            store.delete_key(self._key(self._page - 3))

    def read_lines(self, store: dist.Store) -> dict[int, list[str]]:
        """Return the words of each rank's last line, without ranks whose last line is empty."""
        page = self.count_lines(store) // self._size
        last = dict[int, tuple[int, list[str]]]()
        for key in (self._key(page - 1), self._key(page)):
            lines = store.get(key).decode().splitlines() if store.check([key]) else []
            for number, rank, *words in map(str.split, lines):
                # A delayed request appends its line behind newer lines. Its number is lower, so it is ignored.
                if int(number) >= last.get(int(rank), (0, []))[0]:
                    last[int(rank)] = int(number), words
        return {rank: words for rank, (_, words) in last.items() if words}

    def count_lines(self, store: dist.Store, more: int = 0) -> int:
        """Return the number of lines in all lists so far, after adding ``more`` to it."""
        return int(store.add(f"{self._name}/lines", more))

    def count_added(self, store: dist.Store, more: int = 0) -> int:
        """Return the number of lines that readers find in the lists, after adding ``more`` to it.

        :meth:`count_lines` includes lines that have a number and are not in a list yet. A reader that remembered that
        count would miss such a line for good.
        """
        return int(store.add(f"{self._name}/added", more))

    def _key(self, page: int) -> str:
        """Return the key under which the job's store keeps list number ``page`` of these lines."""
        return f"{self._name}/{page}"


def code_of(text: str) -> str:
    """Return a code of 8 hexadecimal digits for a text, such as an engine's unique name."""
    return hashlib.blake2s(text.encode(), digest_size=4).hexdigest()


def _text(engine: str, account: RankStatus) -> str:
    """Return the JSON text of an engine's code and a status, with the failure's text cut to 300 characters."""
    return json.dumps([engine, replace(account, failure=account.failure[:_LONGEST]).packed()])


# A thread that watches the work of a GPU.


def make_monitor(
    device: torch.device, hang_timeout: float, give_up: GiveUp, failed: Callable[[], bool] = lambda: False
) -> Monitor | None:
    """Return a monitor if the device needs one, otherwise None.

    Args:
        device: device of the model.
        hang_timeout: as for :class:`Monitor`.
        give_up: as for :class:`Monitor`.
        failed: as for :class:`Monitor`.
    """
    return Monitor(hang_timeout, give_up, device, failed) if device.type in BLIND else None


class Monitor:
    """A thread that watches the collectives that this rank has queued on a GPU, and gives up when they hang.

    Args:
        hang_timeout: seconds without any finished work after which the monitor gives up.
        give_up: method called once, on the monitor's thread, with the description of the oldest unfinished work and
            with ``waited=True`` if ``hang_timeout`` was reached. The monitor refers to the method's object weakly.
        device: device that runs the work.
        failed: function that returns True if another rank has failed; called every few seconds of a wait.
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
        self._give_up = weakref.WeakMethod(give_up)  # weak, because the method's object owns this monitor
        self._queued: deque[tuple[Event, str, float]] = deque()  # (event, description, time queued)
        self._failed = failed
        self._asked = 0.0  # time of the last call of ``failed``
        self._progress = 0.0  # time when finished work was last found
        self._periodic = PeriodicThread("monitor", self._look)

    def watch_event(self, event: Event, doing: str) -> None:
        """Watch one piece of queued work.

        Args:
            event: event of the work's end.
            doing: description of the work, in words that follow "waiting for".
        """
        # The thread is started at the first event: a rank that sends nothing needs no thread.
        if not self._periodic.started:
            self._periodic.start(min(self._hang_timeout / _LOOKS_BEFORE_LOSS, PERIOD))
        self._queued.append((event, doing, time.monotonic()))

    def _look(self) -> None:
        """Check the queued work with the model's device as the current device."""
        if self._device.type == "cuda":
            # A new thread has device 0 as its current device. Querying an event would create a CUDA context there,
            # which takes half a gigabyte.
            torch.cuda.set_device(self._device)
        self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Remove finished work from the queue. Give up if none has finished for ``hang_timeout``, or a rank has failed.

        Args:
            now: present time, by time.monotonic().
        """
        while self._queued and self._queued[0][0].done():
            self._queued.popleft()
            self._progress = now
        if not self._queued or self._periodic.stopped.is_set():
            return
        _, doing, since = self._queued[0]
        # A long queue is not a hang, so the time of each piece of work counts from the end of the piece before it.
        waited = now - max(since, self._progress)
        late = waited >= self._hang_timeout
        if late or self._is_in_vain(waited, now):
            self._periodic.stopped.set()
            give_up = self._give_up()
            if give_up is not None:
                give_up(doing, waited=late)

    def _is_in_vain(self, waited: float, now: float) -> bool:
        """Return True if another rank has failed; checked at most every few seconds of a wait."""
        if waited < ASKING or now - self._asked < ASKING:
            return False
        self._asked = now
        # Ignore errors of the store here: the rank's later error or warning says that the store does not answer.
        with contextlib.suppress(RuntimeError, TimeoutError):
            return self._failed()
        return False

    def close(self) -> None:
        """End the monitor's thread."""
        self._periodic.stopped.set()


class GiveUp(Protocol):
    """Type of the method that a monitor calls to give up waiting."""

    def __call__(self, doing: str, /, *, waited: bool) -> object:
        """End the waits of this rank.

        Args:
            doing: description of the oldest unfinished work.
            waited: True if ``hang_timeout`` was reached; False if another rank has failed.
        """
        ...
