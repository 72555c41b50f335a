"""Ranks that branch by their data train, with any limits and any choice of who goes on."""

from __future__ import annotations

import random

import pytest

from tests.order.branching import DEADLOCKS, backward_over_more, check_seeds


def test_ranks_that_branch() -> None:
    check_seeds(range(400))


@pytest.mark.parametrize("number", DEADLOCKS)
def test_cases_that_were_deadlocks(number: int) -> None:
    check_seeds(range(number, number + 1))


def test_a_backward_over_more_than_was_learned() -> None:
    backward_over_more()


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(16))
def test_a_million_passes_of_ranks_that_branch(part: int) -> None:
    start = random.SystemRandom().getrandbits(40)
    check_seeds(range(start + part * 5000, start + (part + 1) * 5000))
