"""Programs drawn at random: what ranks may do alike or apart, with any limits and any choice of who goes on."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, seed, settings
from hypothesis import strategies as st

from tests.order.rank import ENDLESS, Rank
from tests.order.world import Deadlock, World
from zeropp.order.prefetch import Limits

UNITS = 4
LIMITS = [ENDLESS, Limits(0, 0, 0), Limits(4, 8, 100), Limits(100, 8, 8)]
Uses = tuple[int, ...]


@dataclass(frozen=True)
class Pass:
    """One micro-batch: of each rank its way forward, and which of that its backward comes back to."""

    forward: tuple[Uses, ...]
    back: tuple[Uses, ...]
    no_sync: bool = False


@dataclass(frozen=True)
class Step:
    """Micro-batches, evaluation in between, and whether a forward fails before them."""

    passes: tuple[Pass, ...]
    evaluation: tuple[Uses, ...] | None = None
    fails: Uses | None = None


@dataclass
class History:
    """What was used: kind of pass -> (step, units) of each."""

    taken: defaultdict[str, set[tuple[int, frozenset[int]]]] = field(default_factory=lambda: defaultdict(set))

    def may_be_silent(self, step: int, kind: str) -> bool:
        """Whether every rank had used the same units before ``step``, whenever it was in such a pass."""
        return len({units for when, units in self.taken[kind] if when < step}) <= 1


ways = st.lists(st.integers(0, UNITS - 1), max_size=5).map(tuple)


@st.composite
def passes(draw: Any, ranks: int, usual: Sequence[Uses]) -> Pass:
    alike = draw(st.booleans())
    common = draw(st.sampled_from(usual))
    forward = tuple(common if alike else draw(st.sampled_from(usual) | ways) for _ in range(ranks))
    back = tuple(_back(draw, way) for way in forward)
    return Pass(forward, back, no_sync=draw(st.integers(0, 9)) == 0)


def _back(draw: Any, way: Uses) -> Uses:
    """Usually the whole way; or from one of its places on, as where a loss is taken of a part."""
    start = draw(st.integers(0, len(way))) if draw(st.integers(0, 7)) == 0 else 0
    return tuple(reversed(way))[start:]


@st.composite
def programs(draw: Any) -> tuple[int, list[Step]]:
    ranks = draw(st.sampled_from([2, 2, 3]))
    usual = [(0, 1, 2, 3), *draw(st.lists(ways, max_size=2))]
    steps = []
    for _ in range(draw(st.integers(2, 6))):
        count = draw(st.sampled_from([1, 1, 2]))
        micro = tuple(draw(passes(ranks, usual)) for _ in range(count))
        evaluation = tuple(draw(st.sampled_from(usual)) for _ in range(ranks)) if draw(st.integers(0, 5)) == 0 else None
        fails = draw(st.sampled_from(usual)) if draw(st.integers(0, 9)) == 0 else None
        steps.append(Step(micro, evaluation, fails))
    return ranks, steps


def run(ranks: int, steps: Sequence[Step], limits: Limits, choices: random.Random) -> tuple[World, list[Rank]]:
    """Run a program; the ranks, or what stood in the way."""
    world = World(ranks, lambda able: able[choices.randrange(len(able))])
    history = History()
    there = [(0, "")] * ranks

    def program(number: int) -> Rank:
        rank = Rank(world, number, [4] * UNITS, limits)

        def enter(now: int, kind: str, uses: Uses) -> None:
            there[number] = (now, kind)
            history.taken[kind].add((now, frozenset(uses)))

        for now, step in enumerate(steps):
            if step.fails is not None:
                there[number] = (now, "forward")  # nothing is remembered of it
                rank.failing_forward(step.fails)
            for place, part in enumerate(step.passes):
                last = place + 1 == len(step.passes)
                enter(now, "forward", part.forward[number])
                rank.forward(part.forward[number])
                enter(now, "last backward" if last else "backward", part.back[number])
                rank.backward(part.back[number], last=last, no_sync=part.no_sync and not last)
            rank.step()
            if step.evaluation is not None:
                enter(now, "evaluation", step.evaluation[number])
                rank.forward(step.evaluation[number], grad=False)
        return rank

    try:
        return world, world.run(program)
    except Deadlock as error:
        silent = [kind for kind in there if history.may_be_silent(*kind)]
        failing = [now for now, _ in there if steps[now].fails is not None]  # ranks may differ in how far they got
        raise Refused(f"{error}; ranks were in {there}", legal=bool(silent or failing)) from error


class Refused(Exception):
    """Ranks stood at different places; ``legal`` if one of them was where none had ever gone another way."""

    def __init__(self, text: str, *, legal: bool) -> None:
        super().__init__(text)
        self.legal = legal


def check_many(count: int, number: int) -> None:
    outcomes: Counter[str] = Counter()

    @seed(number)
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(program=programs(), limits=st.sampled_from(LIMITS), choices=st.integers(0, 2**16))
    def one(program: tuple[int, list[Step]], limits: Limits, choices: int) -> None:
        ranks, steps = program
        try:
            world, done = run(ranks, steps, limits, random.Random(choices))
        except Refused as refused:
            event("refused")
            outcomes["refused"] += 1
            assert refused.legal, f"{refused}: {steps}"
            return
        outcomes["trained"] += 1
        assert all(issued == world.issued[0] for issued in world.issued), f"{world.issued}: {steps}"
        for rank in done:
            assert rank.delivered == rank.given, f"{rank.given} given, {rank.delivered} delivered: {steps}"

    one()
    assert outcomes["trained"] > 0.8 * count, outcomes


def test_programs() -> None:
    check_many(1500, 1)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_many_programs() -> None:
    check_many(20_000, random.SystemRandom().getrandbits(32))
