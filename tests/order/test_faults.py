"""The tests of the order detect each of the one-line faults in :mod:`tests.order.faults`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.order.branching import DEADLOCKS, SCENARIOS, check_alike, check_seeds
from tests.order.economy import ECONOMIES
from tests.order.families import CORNERS, EVENTS, FULL, failures, sequences
from tests.order.faults import FAULTS, Fault
from tests.order.programs import LIMITS, Failure, Program, Step, alike
from tests.order.trial import check


def _must_train(program: Program) -> None:
    for limits in LIMITS:
        assert check(program, limits), f"{program} is refused with {limits}"


def _check(programs: Iterator[Program]) -> None:
    for program, limits in itertools.product(programs, LIMITS):
        check(program, limits)


def _nets() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the checks of the other tests with their names, the fastest first."""
    yield from ((name, partial(_must_train, program)) for name, program in CORNERS.items())
    yield from ((economy.__name__, economy) for economy in ECONOMIES)
    places = [None, *(Failure(backward, uses) for backward in (False, True) for uses in (0, 2, 5))]
    yield "failures", lambda: _check(failures(2, places, [[Step((alike(2, FULL),))] * 2]))
    yield from SCENARIOS.items()
    yield "running alike", lambda: check_alike(range(150))
    yield "branching", lambda: check_seeds(range(400))
    yield "deadlocks", lambda: [check_seeds(range(number, number + 1)) for number in DEADLOCKS]
    yield from ((f"after {first}", partial(_check, sequences(1, first))) for first in EVENTS)
    yield "two events", lambda: _check(sequences(2))


def catching(fault: Fault) -> str | None:
    """Return the name of the first check that fails with a fault; None if all checks pass."""
    with pytest.MonkeyPatch.context() as patch:
        fault.put_in(patch)
        for name, holds in _nets():
            try:
                holds()
            except Exception:  # a faulty module may raise anything
                return name
    return None


SEEN_AT_ONCE = [
    "no word after a failure",
    "work in flight begins again",
    "strays are left to the boundary",
    "only one rank tells where backward may come",
    "reductions sent in vain are expected again",
    "the first of two places is remembered",
    "phases are not told apart",
    "backwards are refused in which nobody asks",
    "calls are not counted",
    "calls to come are not counted",
    "a forward that was left out is no reason",
    "units that nobody has used are no reason",
    "calls that may run again are no reason",
]


@pytest.mark.every(8)
@pytest.mark.parametrize("name", SEEN_AT_ONCE)
def test_these_faults_are_found(name: str) -> None:
    assert catching(FAULTS[name]) is not None


@pytest.mark.campaign
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found(name: str) -> None:
    assert catching(FAULTS[name]) is not None
