"""Random programs, alike or different on the ranks, train, or end in an allowed deadlock.

The limits of the prefetch plan are one of several, and the next rank to run is chosen at random.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.order.programs import LIMITS, UNITS, Failure, Pass, Program, Step, Uses
from tests.order.trial import check
from zeropp.order.prefetch import Limits

ways = st.lists(st.integers(0, UNITS - 1), max_size=5).map(tuple)
segments = st.sampled_from([(), (0, 1), (2, 3), (1, 2, 3)])


@st.composite
def passes(draw: Any, ranks: int, usual: Sequence[Uses]) -> Pass:
    alike = draw(st.booleans())
    common = draw(st.sampled_from(usual))
    forward = tuple(common if alike else draw(st.sampled_from(usual) | ways) for _ in range(ranks))
    back = tuple(_back(draw, way) for way in forward)
    late = tuple(draw(ways) for _ in range(ranks)) if draw(st.integers(0, 9)) == 0 else ()
    again = tuple(draw(segments) for _ in range(ranks)) if draw(st.integers(0, 9)) == 0 else ()
    return Pass(forward, back, late, again, no_sync=draw(st.integers(0, 9)) == 0)


def _back(draw: Any, way: Uses) -> Uses:
    """Draw the route of a backward: usually the whole reverse, sometimes a part, as for a loss of an inner output."""
    start = draw(st.integers(0, len(way))) if draw(st.integers(0, 7)) == 0 else 0
    return tuple(reversed(way))[start:]


@st.composite
def failures(draw: Any, ranks: int, count: int) -> tuple[Failure | None, ...]:
    """Draw failures: usually the same on all ranks, otherwise at different places or on some ranks only."""
    one = st.builds(Failure, st.booleans(), st.integers(0, 6), st.integers(0, count - 1))
    if draw(st.integers(0, 3)):
        return (draw(one),) * ranks
    return draw(st.tuples(*[st.none() | one] * ranks).filter(any))


@st.composite
def programs(draw: Any) -> Program:
    ranks = draw(st.sampled_from([2, 2, 3]))
    usual = [(0, 1, 2, 3), *draw(st.lists(ways, max_size=2))]
    steps = []
    for _ in range(draw(st.integers(2, 6))):
        count = draw(st.sampled_from([1, 1, 2]))
        micro = tuple(draw(passes(ranks, usual)) for _ in range(count))
        evaluation = tuple(draw(st.sampled_from(usual)) for _ in range(ranks)) if draw(st.integers(0, 5)) == 0 else None
        fails = draw(failures(ranks, count)) if draw(st.integers(0, 19)) == 0 else None
        freezes = draw(ways) if draw(st.integers(0, 9)) == 0 else None
        steps.append(Step(micro, evaluation, fails, freezes))
    leaves = tuple(draw(ways) for _ in range(ranks)) if draw(st.integers(0, 7)) == 0 else ()
    # Never all units: with nothing to gather, no rank waits in a forward, and a failure of one rank would not be
    # noticed.
    persistent = draw(st.sampled_from([(1,), (0, 2), (0, 2, 3)])) if draw(st.integers(0, 4)) == 0 else ()
    return Program(ranks, tuple(steps), leaves, persistent)


def check_many(count: int, number: int) -> None:
    outcomes: Counter[bool] = Counter()

    @seed(number)
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(program=programs(), limits=st.sampled_from(LIMITS), choices=st.integers(0, 2**16))
    def one(program: Program, limits: Limits, choices: int) -> None:
        draw = random.Random(choices)
        outcomes[check(program, limits, lambda able: able[draw.randrange(len(able))])] += 1

    one()
    # Most programs must train, or the test would check little. In the others, ranks differ in a silent pass.
    assert 0.1 * count < outcomes[False] < 0.25 * count and sum(outcomes.values()) >= count, outcomes


def test_programs() -> None:
    check_many(200, 1)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_many_programs() -> None:
    check_many(500, 1)
    check_many(20_000, random.SystemRandom().getrandbits(32))
