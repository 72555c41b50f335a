"""Three ranks and four units: every short sequence of what may happen, and failures of some ranks at every place."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from tests.order.families import CORNERS, EVENTS, FULL, failures, sequences
from tests.order.programs import LIMITS, Choice, Failure, Program, Step, alike, check, repeated

PLACES: list[Failure | None] = [None, *(Failure(backward, uses) for backward in (False, True) for uses in (0, 2, 5))]
MORE: list[Failure | None] = [None, *(Failure(backward, uses) for backward in (False, True) for uses in range(6))]


def in_turn() -> Choice:
    """Each time the next of those who can go on does."""
    count = itertools.count()
    return lambda able: able[next(count) % len(able)]


def check_all(programs: Iterable[Program], *, thorough: bool = False) -> int:
    """Every program, with any limits; ``thorough``: with any choice of who goes on for each. How many have trained."""
    trained = 0
    for number, program in enumerate(programs):
        for turn, limits in enumerate(LIMITS):
            choices = [min, max, in_turn()]
            for choose in choices if thorough else [choices[(number + turn) % 3]]:
                trained += check(program, limits, choose)
    return trained


@pytest.mark.parametrize("name", CORNERS)
def test_ranks_that_are_heard_train(name: str) -> None:
    assert check_all([CORNERS[name]], thorough=True) == 3 * len(LIMITS)


@pytest.mark.parametrize("name", CORNERS)
def test_any_rank_may_go_on_first(name: str) -> None:
    """Ranks meet in exchanges alone, and between two of them each works on its own: who goes on changes nothing."""
    for pattern in itertools.product(range(3), repeat=3):
        assert check(CORNERS[name], LIMITS[0], repeated(pattern))


@pytest.mark.parametrize("first", EVENTS)
def test_one_event_after_another(first: str) -> None:
    assert check_all(sequences(1, first)) > 0


def test_two_events_after_a_usual_step() -> None:
    assert check_all(itertools.islice(sequences(2), 0, None, 2)) > 0


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", EVENTS)
def test_two_events_after_another(first: str) -> None:
    assert check_all(sequences(2, first), thorough=True) > 0


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_three_events_after_a_usual_step() -> None:
    assert check_all(sequences(3)) > 0


def usual(ranks: int) -> list[Step]:
    return [Step((alike(ranks, FULL),))] * 2


def in_turns(ranks: int) -> list[Step]:
    return [Step((alike(ranks, FULL),)), Step((alike(ranks, (0, 2)),))] * 2


def test_ranks_that_fail_apart_are_refused_or_train() -> None:
    """Never does what one sends meet what another one waits for, and never is one that fails alone not missed."""
    assert check_all(failures(2, PLACES, [[], usual(2), in_turns(2)])) > 0


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_ranks_that_fail_apart_at_any_place_are_refused_or_train() -> None:
    assert check_all(failures(2, MORE, [[], usual(2), in_turns(2)]), thorough=True) > 0
    assert check_all(failures(3, PLACES, [[], usual(3), in_turns(3)])) > 0
