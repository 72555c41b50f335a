"""Programs of simulated ranks, what may become of them, and what must hold when they have run."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.order.rank import ENDLESS, Rank
from tests.order.world import Deadlock, Unlike, World
from zeropp.order.prefetch import Limits
from zeropp.params.unit import UnitState

__all__ = ["LIMITS", "UNITS", "Choice", "Failure", "Pass", "Program", "Step", "Uses", "alike", "check", "repeated"]

UNITS = 4
LIMITS = [ENDLESS, Limits(0, 0, 0), Limits(4, 8, 100), Limits(100, 8, 8)]
Uses = tuple[int, ...]
Choice = Callable[[Sequence[int]], int]


def repeated(pattern: Sequence[int]) -> Choice:
    """The same choices over and over, by number among those who can go on."""
    endless = itertools.cycle(pattern)
    return lambda able: able[next(endless) % len(able)]


@dataclass(frozen=True)
class Pass:
    """One micro-batch.

    Attributes:
        forward: of each rank its way.
        back: of each rank what of that its backward comes back to.
        late: of each rank those of them whose gradients come only at its end.
        no_sync: whether the backward runs inside ``no_sync``, if it is not the last before the step.
    """

    forward: tuple[Uses, ...]
    back: tuple[Uses, ...]
    late: tuple[Uses, ...] = ()
    no_sync: bool = False


@dataclass(frozen=True)
class Failure:
    """Where an error of its own ends what a rank does in a step: in which micro-batch, after how many uses."""

    backward: bool
    uses: int
    part: int = 0


@dataclass(frozen=True)
class Step:
    """Micro-batches, and what comes before and after them.

    Attributes:
        passes: micro-batches.
        evaluation: of each rank a forward without gradients after the step.
        fails: of each rank where a first attempt at the step ends, if it does not come to the end of it.
    """

    passes: tuple[Pass, ...]
    evaluation: tuple[Uses, ...] | None = None
    fails: tuple[Failure | None, ...] | None = None

    @property
    def fails_apart(self) -> bool:
        """Whether ranks fail at places that may differ in what has been issued."""
        ways = [each for part in self.passes for each in (part.forward, part.back, part.late)]
        return self.fails is not None and any(len(set(each)) > 1 for each in (self.fails, *ways))


@dataclass(frozen=True)
class Program:
    """What each of so many ranks does; units in ``leaves`` have no graph on that rank."""

    ranks: int
    steps: tuple[Step, ...]
    leaves: tuple[Uses, ...] = ()


def alike(ranks: int, forward: Uses, back: Uses | None = None, *, no_sync: bool = False) -> Pass:
    """A micro-batch that every rank has alike."""
    return Pass((forward,) * ranks, (forward[::-1] if back is None else back,) * ranks, no_sync=no_sync)


_When = tuple[int, int]  # step, and which of its passes


@dataclass
class _History:
    """Which units ranks have used: kind of pass -> when, units, of each; and which a backward may come back to."""

    taken: defaultdict[str, list[tuple[_When, frozenset[int]]]] = field(default_factory=lambda: defaultdict(list))
    foreseen: set[int] = field(default_factory=set)

    def may_be_silent(self, when: _When, kind: str) -> bool:
        """Whether nobody listens at the end of such a pass: of what it may come to, all ranks have always used all."""
        backward = kind != "forward" and kind != "evaluation"
        used = self._known(when, kind)
        alike = len(used) == 1 and (not backward or len(self._known((when[0], when[1] + 1), "forward")) == 1)
        return alike and (self.foreseen if backward else set(range(UNITS))).issubset(*used)

    def _known(self, before: _When, kind: str) -> set[frozenset[int]]:
        """The sets of units that were used, as far as ranks have heard of it: as they learn, and at boundaries."""
        taken = self.taken[kind]
        first = min((when for when, _ in taken), default=before)
        return {units for when, units in taken if when < before and (when[0] < before[0] or when == first)}


class _Run:
    """One run of a program."""

    def __init__(self, program: Program, limits: Limits, choose: Choice) -> None:
        self.program = program
        self.limits = limits
        self.world = World(program.ranks, choose)
        self.history = _History()
        self.there = [((0, 0), "")] * program.ranks  # of each rank the pass that it is in, and its kind

    def of_rank(self, number: int) -> Rank:
        """What a rank does."""
        rank = Rank(self.world, number, [4] * UNITS, self.limits)
        for now, step in enumerate(self.program.steps):
            if step.fails is not None:
                self.there[number] = ((now, 0), "attempt")
                self._step(rank, now, step, step.fails[number], attempt=True)
            self._step(rank, now, step, None)
            if step.evaluation is not None:
                self._enter(number, (now, 0), "evaluation", step.evaluation[number])
                rank.forward(step.evaluation[number], grad=False)
        return rank

    def _step(self, rank: Rank, now: int, step: Step, failure: Failure | None, *, attempt: bool = False) -> None:
        number = rank.number
        leaves = self.program.leaves[number] if self.program.leaves else ()
        for place, part in enumerate(step.passes):
            last, forward, back = place + 1 == len(step.passes), part.forward[number], part.back[number]
            fails: list[int | None] = [None, None]
            if failure is not None and failure.part == place:
                fails[failure.backward] = failure.uses
            if not attempt:
                self._enter(number, (now, place), "forward", forward)
            if (now, place) == (0, 0):  # ranks tell of what they learn
                self.history.foreseen.update(set(forward).difference(leaves))
            if not rank.forward(forward, fails=fails[False], leaves=leaves):
                return
            if not attempt:
                self._enter(number, (now, place), "last backward" if last else "backward", back)
            late, no_sync = part.late[number] if part.late else (), part.no_sync and not last
            if not rank.backward(back, last=last, no_sync=no_sync, late=late, fails=fails[True]):
                return
        rank.step()

    def _enter(self, number: int, now: _When, kind: str, uses: Uses) -> None:
        self.there[number] = (now, kind)
        self.history.taken[kind].append((now, frozenset(uses)))

    def may_be_refused(self) -> bool:
        """Whether a deadlock, of which a real job makes an error, is within what is promised."""
        # A rank that failed where others did not waits for their word, and they for what it has not issued.
        apart = [self.program.steps[step].fails_apart and kind == "attempt" for (step, _), kind in self.there]
        silent = [self.history.may_be_silent(*place) for place in self.there if place[1] not in ("", "attempt")]
        return any(apart) or any(silent)


def check(program: Program, limits: Limits, choose: Choice = min) -> bool:
    """Run a program; whether the ranks trained, and were not refused what they may be refused.

    Raises:
        AssertionError: something does not hold that must.
    """
    run = _Run(program, limits, choose)
    try:
        ranks = run.world.run(run.of_rank)
    except Unlike as error:
        # Where ranks have failed apart, some may have come to where a gradient is held, which sends nothing.
        steps = program.steps[: 1 + max(step for (step, _), _ in run.there)]
        assert any(step.fails_apart for step in steps), f"{error}; ranks were in {run.there}: {program}, {limits}"
        return False
    except Deadlock as error:
        assert run.may_be_refused(), f"{error}; ranks were in {run.there}: {program}, {limits}"
        return False
    except AssertionError as error:
        raise AssertionError(f"{error}; ranks were in {run.there}: {program}, {limits}") from error
    alone = [step for step in program.steps if step.fails is not None and None in step.fails and any(step.fails)]
    assert not alone, f"a rank failed alone, and nobody heard of it: {program}, {limits}"
    for problem in _problems(run.world, ranks):
        raise AssertionError(f"{problem}: {program}, {limits}")
    return True


def _problems(world: World, ranks: Sequence[Rank]) -> Iterator[str]:
    """What does not hold after a program: equal orders and knowledge, each gradient delivered, all let go."""
    if any(issued != world.issued[0] for issued in world.issued):
        yield f"ranks have issued different things, {world.issued}"
    for rank in ranks:
        if rank.delivered != rank.given:
            yield f"of {rank.given} gradients {rank.delivered} were delivered"
        if left := [unit.name for unit in rank.units if unit.users or unit.state is not UnitState.SHARDED]:
            yield f"{left} are still there"
        yield from _problems_of_knowledge(rank, ranks[0])


def _problems_of_knowledge(rank: Rank, first: Rank) -> Iterator[str]:
    known, other = rank.schedule.known, first.schedule.known
    if (known._known, known._units) != (other._known, other._units):
        yield f"ranks {rank.number} and {first.number} know different orders, {known._known} and {other._known}"
    if rank.reductions.reused != first.reductions.reused:
        yield f"ranks {rank.number} and {first.number} have seen different units used twice"
    for order in [order for variants in known._known.values() for order in variants.known]:
        places = [place for _, place in order.reductions]
        units = [unit for unit, _ in order.reductions]
        if places != sorted(places) or max(places, default=0) > len(order.uses) or len(set(units)) < len(units):
            yield f"reductions are out of order in {order}"
