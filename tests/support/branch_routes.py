"""Training along routes through the blocks, one for all ranks or one each, and how often ranks had to agree on them."""

from __future__ import annotations

import zeropp
from tests.support.branching_models import Route, Routed, chain, make_config
from tests.support.sharded_and_plain import Pair

__all__ = ["ALL", "BARE", "BRANCHES", "agreements", "follow"]

ALL = chain(4)
BARE = {"reuse": 0, "prefetch": 0}
BRANCHES = [((0, 1), (2, 3)), ((1, 0), (3, 2))]


def follow(steps: list[list[Route]], settings: dict[str, object], zero_grad: bool = True, device: str = "cpu") -> int:
    """Train along per-step, per-rank routes beside a plain model; rounds of agreement in the last step."""
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
