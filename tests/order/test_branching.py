"""Ranks whose models branch by data train with any limits and any scheduling of the ranks."""

from __future__ import annotations

import random

import pytest

from tests.order.branching import DEADLOCKS, SCENARIOS, check_alike, check_seeds


def test_ranks_that_branch() -> None:
    check_seeds(range(150))


def test_ranks_that_run_alike_leave_no_gradient_to_a_step() -> None:
    check_alike(range(60))


@pytest.mark.parametrize("number", DEADLOCKS)
def test_cases_that_were_deadlocks(number: int) -> None:
    check_seeds(range(number, number + 1))


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios(name: str) -> None:
    SCENARIOS[name]()


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(16))
def test_a_million_passes_of_ranks_that_branch(part: int) -> None:
    start = random.SystemRandom().getrandbits(40)
    check_seeds(range(start + part * 5000, start + (part + 1) * 5000))
