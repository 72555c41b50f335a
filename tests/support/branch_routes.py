"""Training along routes through a model's blocks, and the number of agreements between ranks that it needs.

All ranks take the same route, or each rank takes its own.
"""

from __future__ import annotations

import zeropp
from tests.support.branching_models import Route, Routed, chain, make_config
from tests.support.sharded_and_plain import Pair

__all__ = ["ALL", "BARE", "BRANCHES", "agreements", "follow"]

ALL = chain(4)
BARE = {"reuse": 0, "prefetch": 0}
BRANCHES = [((0, 1), (2, 3)), ((1, 0), (3, 2))]


def follow(steps: list[list[Route]], settings: dict[str, object], zero_grad: bool = True, device: str = "cpu") -> int:
    """Train beside a plain model, and return the number of agreements in the last step.

    The weights are compared with those of the plain model after every step.

    Args:
        steps: the routes of each step: one route for all ranks, or one route per rank.
        settings: keys for ``make_config``.
        zero_grad: False to accumulate gradients over the steps.
    """
    pair = Pair(Routed(), make_config(**settings), device=device)
    rounds = 0
    for routes in steps:
        rounds = -agreements(pair.optimizer)
        if zero_grad:
            pair.zero_grad()
        pair.backward(*routes)
        pair.step()
        rounds += agreements(pair.optimizer)
        pair.check()
    return rounds


def agreements(optimizer: zeropp.ZeroOptimizer) -> int:
    return sum(row.calls for row in optimizer.engine.comm.ledger.rows if row.unit == "<agreement>")
