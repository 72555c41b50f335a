"""Ranks whose models branch by data train with any limits and any scheduling of the ranks."""

from __future__ import annotations

import random

import pytest

from tests.order.branching import DEADLOCKS, backward_over_more, check_alike, check_seeds, more_often_without_gradients


def test_ranks_that_branch() -> None:
    check_seeds(range(150))


def test_ranks_that_run_alike_leave_no_gradient_to_a_step() -> None:
    check_alike(range(60))


@pytest.mark.parametrize("number", DEADLOCKS)
def test_cases_that_were_deadlocks(number: int) -> None:
    check_seeds(range(number, number + 1))


def test_a_backward_over_more_than_was_learned() -> None:
    backward_over_more()


def test_a_module_that_a_rank_ran_more_often_in_an_evaluation() -> None:
    more_often_without_gradients()


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(16))
def test_a_million_passes_of_ranks_that_branch(part: int) -> None:
    start = random.SystemRandom().getrandbits(40)
    check_seeds(range(start + part * 5000, start + (part + 1) * 5000))
