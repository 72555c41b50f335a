"""Random training sessions beside plain torch; :mod:`tests.distributed.sessions` has the calls."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.sessions import Session, run_session

LENGTH = 30  # calls in a session


def check(seeds: range, world: int) -> None:
    """Sessions on ``world`` ranks, two to a node; every call has to come up."""
    made: Counter[str] = Counter()
    for seed in seeds:
        made.update(run_ranks(world, run_session, seed, LENGTH, local_world_size=2)[0])
    missing = {name.removeprefix("do_") for name in dir(Session) if name.startswith("do_")} - made.keys()
    assert not missing, f"no session made {missing}"


@pytest.mark.parametrize("first", [pytest.param(n, marks=pytest.mark.campaign) for n in (0, 12, 24)])
def test_sessions(first: int) -> None:
    check(range(first, first + 12), 2)


@pytest.mark.campaign
@pytest.mark.parametrize("first", [100, pytest.param(105, marks=pytest.mark.campaign)])
def test_sessions_on_two_nodes(first: int) -> None:
    check(range(first, first + 5), 4)


def test_a_forward_fails_while_a_gradient_waits_for_the_boundary() -> None:
    run_ranks(2, run_session, 4149808467, LENGTH, local_world_size=2)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [2, 4])
def test_many_sessions(world: int) -> None:
    first = random.SystemRandom().getrandbits(32)
    check(range(first, first + 1000 // world), world)
