"""Several ranks in one process: threads of which one runs at a time. The choice of the next thread can be enumerated.

Everything between real ranks is replaced. An exchange returns when every rank has reached it. A wait for a collective
returns when every rank has issued the collective. If no rank can continue and some have not finished, a Deadlock is
raised at once. If ranks issue different collectives at the same position of their orders, a Clash is raised.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["Agreement", "Clash", "CommStreams", "Deadlock", "Event", "Unlike", "World"]

_T = TypeVar("_T")


class Deadlock(RuntimeError):
    """An error for ranks that wait for each other forever. A real job raises an error after ``hang_timeout``."""


class Unlike(Deadlock):
    """An error at the step sync: ranks have not sent and held the same. A real job refuses the step with an error."""


class Clash(AssertionError):
    """An error for ranks that issue different collectives at one position. gloo would end the process instead."""


class _Over(BaseException):
    """The exception that ends this rank after another rank has failed."""


@dataclass
class _Rank:
    number: int
    turn: threading.Lock = field(default_factory=threading.Lock)  # free when it is this rank's turn
    doing: str = "starting"
    ready: Callable[[], bool] | None = None  # the condition that the rank waits for
    done: bool = False
    error: BaseException | None = None
    result: Any = None


@dataclass
class World:
    """The ranks, and their collectives and exchanges so far.

    Attributes:
        size: number of ranks.
        choose: selects the next rank from the numbers of the ranks that can continue.
        issued: the collectives that each rank has issued, in order.
        exchanges: kinds of the exchanges so far, in order.
    """

    size: int
    choose: Callable[[Sequence[int]], int] = min
    issued: list[list[tuple[object, ...]]] = field(default_factory=list)
    exchanges: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.issued = [[] for _ in range(self.size)]
        self._ranks = [_Rank(number) for number in range(self.size)]
        self._said: list[list[tuple[object, object]]] = [[] for _ in range(self.size)]

    def run(self, program: Callable[[int], _T]) -> list[_T]:
        """Run a program on every rank, and return the results.

        Raises:
            Deadlock: no rank can continue.
            Exception: the first error of a rank.
        """
        threads = [threading.Thread(target=self._run, args=(rank, program), daemon=True) for rank in self._ranks]
        for rank, thread in zip(self._ranks, threads, strict=True):
            rank.turn.acquire()
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        errors = [rank.error for rank in self._ranks if rank.error is not None and not isinstance(rank.error, _Over)]
        if errors:
            raise errors[0]
        return [rank.result for rank in self._ranks]

    def _run(self, rank: _Rank, program: Callable[[int], Any]) -> None:
        try:
            self._wait_for_turn(rank)
            rank.result = program(rank.number)
        except BaseException as error:
            rank.error = rank.error or error  # keep a deadlock, which was assigned while this rank only waited
        rank.done = True
        self._pass_on()

    def wait(self, number: int, ready: Callable[[], bool], doing: str) -> None:
        """Let other ranks run until ``ready`` returns True."""
        rank = self._ranks[number]
        if ready():
            return
        rank.ready, rank.doing = ready, doing
        self._pass_on()
        self._wait_for_turn(rank)
        rank.ready = None

    def _wait_for_turn(self, rank: _Rank) -> None:
        rank.turn.acquire()
        if any(other.error is not None for other in self._ranks):
            raise _Over

    def _pass_on(self) -> None:
        left = [rank for rank in self._ranks if not rank.done]
        if not left:
            return
        failed = any(rank.error is not None for rank in self._ranks)
        able = [rank.number for rank in left if failed or rank.ready is None or rank.ready()]
        if not able:
            places = "; ".join(f"rank {r.number} {'has ended' if r.done else f'is {r.doing}'}" for r in self._ranks)
            self._ranks[left[0].number].error = Deadlock(places)
            able = [left[0].number]
        turn = able[0] if failed or len(able) == 1 else self.choose(able)
        self._ranks[turn].turn.release()

    def said(self, number: int) -> int:
        """Return the number of exchanges that a rank has reached."""
        return len(self._said[number])

    def exchange(self, number: int, kind: object, value: _T) -> list[_T]:
        """Return every rank's value, after every rank has reached this exchange.

        Raises:
            Deadlock: ranks are at exchanges of different kinds.
        """
        place = len(self._said[number])
        self._said[number].append((kind, value))
        self.wait(number, lambda: all(len(said) > place for said in self._said), f"at {kind}")
        rows = [said[place] for said in self._said]
        if any(other != kind for other, _ in rows):
            raise Deadlock("ranks exchange different things: " + ", ".join(str(other) for other, _ in rows))
        if number == 0:
            self.exchanges.append(kind)
        return [said for _, said in rows]  # type: ignore[misc]

    def issue(self, number: int, what: tuple[object, ...]) -> Event:
        """Issue a collective, which completes when every rank has issued it at the same position of its order.

        Raises:
            Clash: another rank has issued a different collective there.
        """
        place = len(self.issued[number])
        self.issued[number].append(what)
        there = [each[place] if len(each) > place else what for each in self.issued]
        if any(other != what for other in there):
            raise Clash(f"rank {number} issues {what}, and ranks have issued {there}")
        return Event(self, number, place)


@dataclass
class Event:
    """The completion of a collective."""

    world: World
    rank: int
    place: int

    def wait(self, timeout: float) -> bool:
        """Wait until every rank has issued the collective."""
        issued = self.world.issued
        what = issued[self.rank][self.place]
        self.world.wait(self.rank, lambda: all(len(each) > self.place for each in issued), f"waiting for {what}")
        return True


@dataclass
class CommStreams:
    """The comm streams of one rank, which issue queued work at once."""

    world: World
    rank: int

    def run_work(self, work: Any, after: None = None) -> Event:
        """Issue the collective that ``work`` describes."""
        event = work.read = self.world.issue(self.rank, work.collective)
        return event


@dataclass
class Agreement:
    """The interface of :class:`zeropp.comm.agreement.Agreement` that a schedule uses, without processes and clocks."""

    world: World
    rank: int
    where: str = ""
    place: int = 0
    beyond: str = ""

    def enter(self, where: str, place: int) -> None:
        """Begin a pass."""
        self.where, self.place = where, place

    def go_on(self, *, met: bool = False) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """End the pass."""
        self.where, self.place = "", 0

    def exchange(self, kind: int, values: list[int], doing: str, call: str = "") -> list[list[int]]:
        """Return every rank's integers."""
        rows = self.world.exchange(self.rank, kind, (self.place, values))
        if any(place != self.place for place, _ in rows):
            raise Deadlock(f"ranks are in different passes, rank {self.rank} in {self.where}")
        return [values for _, values in rows]

    def exchange_objects(self, value: _T, doing: str) -> list[_T]:
        """Return copies of every rank's object, because a rank may change its object later."""
        return [pickle.loads(each) for each in self.world.exchange(self.rank, doing, pickle.dumps(value))]

    def wait_for_event(self, wait: Callable[[float], bool], watched: object) -> None:
        """Wait without a time limit."""
        wait(0.0)

    def watching(self, *doing: str, **described: object) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def issuing(self, what: str, unit: str, kind: str) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def queued(self, event: Event, unit: str, kind: str) -> None:
        """Do nothing."""

    def failure(self, doing: str, call: str = "") -> RuntimeError:
        """Return the error of ranks that are at different places."""
        return Deadlock(f"rank {self.rank}: {doing}")
