"""Runs of a program on simulated ranks, and the properties that must hold afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from tests.order.programs import UNITS, Failure, Program, Step
from tests.order.rank import Rank
from tests.order.refusals import Refusals
from tests.order.world import Deadlock, Unlike, World
from zeropp.order.prefetch import Limits

__all__ = ["Choice", "check", "repeated"]

Choice = Callable[[Sequence[int]], int]


def repeated(pattern: Sequence[int]) -> Choice:
    """Return a choice that repeats a pattern of numbers among the ranks that can continue."""
    endless = itertools.cycle(pattern)
    return lambda able: able[next(endless) % len(able)]


class _Run:
    """One run of a program on simulated ranks."""

    def __init__(self, program: Program, limits: Limits, choose: Choice) -> None:
        self.program = program
        self.limits = limits
        self.world = World(program.ranks, choose)
        self.refusals = Refusals(program)

    def of_rank(self, number: int) -> Rank:
        """Run the program on one rank."""
        rank = Rank(self.world, number, [4] * UNITS, self.limits, persistent=self.program.persistent)
        for now, step in enumerate(self.program.steps):
            if step.freezes is not None:
                rank.freeze(step.freezes)
            if step.fails is not None:
                self.refusals.enter(number, (now, 0), "attempt")
                self._step(rank, now, step, step.fails[number], attempt=True)
            self._step(rank, now, step, None)
            if step.evaluation is not None:
                self.refusals.enter(number, (now, 0), "evaluation")
                rank.forward(step.evaluation[number], grad=False)
        return rank

    def _step(self, rank: Rank, now: int, step: Step, failure: Failure | None, *, attempt: bool = False) -> None:
        number = rank.number
        leaves = self.program.leaves[number] if self.program.leaves else ()
        for place, part in enumerate(step.passes):
            last = place + 1 == len(step.passes)
            fails: list[int | None] = [None, None]
            if failure is not None and failure.part == place:
                fails[failure.backward] = failure.uses
            if not attempt:
                self.refusals.enter(number, (now, place), "forward")
            if not rank.forward(part.forward[number], fails=fails[False], leaves=leaves):
                return
            if not attempt:
                self.refusals.enter(number, (now, place), "last backward" if last else "backward")
            late, again = part.late_on(number), part.again_on(number)
            no_sync = part.no_sync and not last
            if not rank.backward(
                part.back[number], last=last, no_sync=no_sync, late=late, again=again, fails=fails[True]
            ):
                return
        rank.step()


def check(program: Program, limits: Limits, choose: Choice = min) -> bool:
    """Run a program, and return True if the ranks trained, False for an allowed deadlock.

    Raises:
        AssertionError: a property is violated, or a deadlock is not allowed.
    """
    run = _Run(program, limits, choose)
    try:
        ranks = run.world.run(run.of_rank)
    except Unlike as error:
        # After failures at different places, some ranks may be at a micro-batch whose gradients are held and send
        # nothing.
        assert run.refusals.have_failed_apart(), f"{error}; ranks were in {run.refusals.there}: {program}, {limits}"
        return False
    except Deadlock as error:
        assert run.refusals.are_excused(), f"{error}; ranks were in {run.refusals.there}: {program}, {limits}"
        return False
    except AssertionError as error:
        raise AssertionError(f"{error}; ranks were in {run.refusals.there}: {program}, {limits}") from error
    alone = [step for step in program.steps if step.fails is not None and None in step.fails and any(step.fails)]
    assert not alone, f"a rank failed alone, and no other rank noticed: {program}, {limits}"
    for problem in _problems(run.world, ranks):
        raise AssertionError(f"{problem}: {program}, {limits}")
    return True


def _problems(world: World, ranks: Sequence[Rank]) -> Iterator[str]:
    """Yield violations after a program: unequal orders, gradients not reduced, units not released."""
    if any(issued != world.issued[0] for issued in world.issued):
        yield f"ranks have issued different things, {world.issued}"
    for rank in ranks:
        if rank.delivered != rank.given:
            yield f"gradients {rank.given} arrived, but {rank.delivered} were reduced"
        if left := [unit.name for unit in rank.units if unit.users or unit.state is not unit.resting]:
            yield f"{left} are still gathered or in use"
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
