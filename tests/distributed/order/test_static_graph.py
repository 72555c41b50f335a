"""With ``static_graph`` ranks exchange nothing once all orders are known.

A use that the orders lack is an error on every rank.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.branch_routes import agreements
from tests.support.branching_models import Route, Routed, chain, make_config
from tests.support.rank_pool import RankFailure, run_ranks
from tests.support.sharded_and_plain import Pair

USED = chain(0, 2)  # two of the four blocks


def talk(static: bool) -> list[int]:
    """Return the number of exchanges in each of four steps with an evaluation, in which two blocks are not used.

    Args:
        static: value of ``static_graph``.
    """
    pair = Pair(Routed(), make_config(static_graph=static))
    found = []
    for _ in range(4):
        before = agreements(pair.optimizer)
        pair.train(USED)
        with torch.no_grad():
            pair.model.eval()(pair.batch(pair.rank), USED)
        pair.model.train()
        found.append(agreements(pair.optimizer) - before)
        pair.check()
    return found


def test_nothing_is_said_once_all_is_known() -> None:
    for promised, plain in zip(run_ranks(2, talk, True), run_ranks(2, talk, False), strict=True):
        assert promised[2:] == [0, 0], promised
        # Without the promise, ranks exchange at the end of each phase, because another rank may need a block that was
        # left out.
        assert min(plain) > 0, plain


def broken(routes: list[Route], evaluating: bool) -> None:
    """Train two equal steps, and then use one block more.

    Args:
        routes: one route for all ranks, or one route per rank.
        evaluating: True to use the additional block in an evaluation; False to use it in training.
    """
    pair = Pair(Routed(), make_config(static_graph=True, hang_timeout=3))
    for _ in range(2):
        pair.train(USED)
        if evaluating:
            with torch.no_grad():
                pair.model.eval()(pair.batch(pair.rank), USED)
            pair.model.train()
    if not evaluating:
        pair.train(*routes)
        return
    with torch.no_grad():
        pair.model.eval()(pair.batch(pair.rank), routes[pair.rank % len(routes)])
    pair.train(USED)


@pytest.mark.every(4)
@pytest.mark.parametrize("evaluating", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("routes", [[chain(0, 1, 2)], [USED, chain(0, 1, 2)]], ids=["all ranks", "one rank"])
def test_a_broken_promise_is_an_error_on_every_rank(routes: list[Route], evaluating: bool) -> None:
    found = run_ranks(2, broken, routes, evaluating, catch=True)
    for rank, failure in enumerate(found):
        assert isinstance(failure, RankFailure), f"rank {rank} went on"
        assert "asking for unit 'blocks.1'" in failure.message and "static_graph" in failure.message, failure.message


def passed_over() -> float:
    """Train steps of which one skips blocks, and return the difference from plain torch."""
    pair = Pair(Routed(), make_config(static_graph=True))
    for route in (chain(4), chain(4), chain(0, 3), chain(4)):
        pair.train(route)
        pair.check()
    return pair.difference()


def test_fewer_uses_are_served() -> None:
    """Skipping a unit does not break the promise: the rank still takes part in the unit's gather."""
    run_ranks(2, passed_over)
