"""Ranks that branch by their data train, with any limits and any choice of who goes on."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.order.branching import Case, train


def check_seeds(seeds: range) -> None:
    trained = Counter[bool]()
    for number in seeds:
        draw = random.Random(number)
        try:
            trained[train(Case.draw(number), lambda able, draw=draw: able[draw.randrange(len(able))])] += 1
        except Exception as error:
            raise AssertionError(f"case {number}: {error}") from error
    # In the others a rank runs a module more often than any rank ever had, and needs one gather more.
    assert trained[False] < 0.02 * len(seeds), trained


def test_ranks_that_branch() -> None:
    check_seeds(range(400))


# Each was one once: of calls that a backward makes itself, kinds of backwards that were not told apart, modules that
# run for the first time, modules that run without what is usually around them.
DEADLOCKS = [3, 538, 3260, 6941, 8950, 12782, 17809, 18999, 19411, 19498, 19992]


@pytest.mark.parametrize("number", DEADLOCKS)
def test_cases_that_were_deadlocks(number: int) -> None:
    check_seeds(range(number, number + 1))


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(16))
def test_a_million_passes_of_ranks_that_branch(part: int) -> None:
    start = random.SystemRandom().getrandbits(40)
    check_seeds(range(start + part * 5000, start + (part + 1) * 5000))
