"""``zero_grad(set_to_none=False)`` as in plain torch: zero gradients are stepped, with weight decay and momentum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.branching_models import Routed, chain, make_config
from tests.support.model_and_twin import PLACES, placed
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Pair

EACH_ITS_OWN = [
    [chain(4), chain(4)],
    [chain(0, 1), chain(0, 2)],  # block 3 has zero gradients; blocks 1 and 2 get a gradient from one rank each
    [chain(0, 1), chain(0, 1)],
    [chain(0, 3), chain(1)],
    [chain(2), chain(2)],
]
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: PLACES[name] for name in ("stage 0", "stage 1", "stage 2", "stage 3", "hpz", "offloaded", "in files")},
    "persistent biases": {"persist": 9},
    "one unit": {"unit_min_blocks": 128},
    "clipped": {"gradient_clipping": 0.05},
}


def zeroed(settings: dict[str, Any], folder: str) -> None:
    pair = Pair(Routed(), placed(settings, folder))
    bound = settings.get("gradient_clipping")
    for number, routes in enumerate(EACH_ITS_OWN):
        pair.backward(*routes)
        if bound:
            nn.utils.clip_grad_norm_(pair.plain.parameters(), bound)
        pair.step()
        pair.check()
        # After the third step gradients are set to None, so only blocks that are used later have a gradient.
        for each in (pair.optimizer, pair.plain_optimizer):
            each.zero_grad(set_to_none=number == 2)


@pytest.mark.every(6)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_zeros_are_stepped(settings: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(2, zeroed, settings, str(tmp_path))


def by_the_model() -> None:
    """Set gradients to zero by ``model.zero_grad``. A block that was never used has no gradient and is not stepped."""
    pair = Pair(Routed(), make_config())
    for routes in ([chain(0, 1)], [chain(0, 2)], [chain(1)]):
        pair.backward(*routes)
        pair.step()
        pair.check()
        pair.model.zero_grad(set_to_none=False)
        pair.plain.zero_grad(set_to_none=False)


def without_backward() -> None:
    """Step zero gradients alone, and after gradients that were held and set to zero before any reduction."""
    pair = Pair(Routed(), make_config())
    with pair.optimizer.no_sync():
        pair.backward(chain(4))
    for number in range(3):
        for each in (pair.optimizer, pair.plain_optimizer):
            each.zero_grad(set_to_none=False)
        if number == 1:
            pair.backward(chain(0, 1))
        pair.step()
        pair.check()


def accumulated() -> None:
    """Train windows of two micro-batches, with ``step`` and ``zero_grad`` after each, as trainers call them."""
    pair = Pair(Routed(), make_config(gradient_accumulation_steps=2), micros=2)
    for routes in ([chain(4), chain(4)], [chain(0, 1), chain(0, 2)], [chain(1), chain(1)]):
        for micro in range(2):
            pair.backward(*routes)
            if micro == 0:
                pair.optimizer.step()
                pair.optimizer.zero_grad(set_to_none=False)
        pair.step()
        pair.check()
        for each in (pair.optimizer, pair.plain_optimizer):
            each.zero_grad(set_to_none=False)


def frozen() -> None:
    """Freeze a block for two steps. As in torch, its zero gradient stays, and the optimizer still steps the block."""
    pair = Pair(Routed(), make_config())
    for number in range(4):
        if number in (1, 3):
            for model in (pair.model, pair.plain):
                model.blocks[1].requires_grad_(number == 3)  # type: ignore[operator]
        pair.backward(chain(4))
        pair.step()
        pair.check()
        for each in (pair.optimizer, pair.plain_optimizer):
            each.zero_grad(set_to_none=False)


def edited() -> None:
    """Add to every gradient in the groups that is not None, zeros included. A gradient set to None is not stepped."""
    pair = Pair(Routed(), make_config(gradient_clipping=0.1))
    for number, route in enumerate([chain(4), chain(0, 1), chain(0, 1)]):
        pair.backward(route)
        for each in (pair.optimizer, pair.plain_optimizer):
            for parameter in (p for group in each.param_groups for p in group["params"] if p.grad is not None):
                parameter.grad.add_(0.01)
        if number == 2:
            pair.model.blocks[2].lin.weight.grad = None  # type: ignore[union-attr]
            pair.plain.blocks[2].lin.weight.grad = None  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)
        pair.step()
        pair.check()
        for each in (pair.optimizer, pair.plain_optimizer):
            each.zero_grad(set_to_none=False)


@pytest.mark.parametrize("program", [by_the_model, without_backward, accumulated, frozen, edited])
def test_zeros_in_other_programs(program: Any) -> None:
    run_ranks(2, program)


def on_one_rank_alone() -> float:
    """Set gradients to zero on rank 0 and to None on rank 1: they count as zeros on all ranks."""
    pair = Pair(Routed(), make_config())
    for route in (chain(4), chain(0, 1), chain(0, 1)):
        pair.backward(route)
        pair.step()
        pair.check()
        pair.optimizer.zero_grad(set_to_none=pair.rank == 1)
        pair.plain_optimizer.zero_grad(set_to_none=False)
    return 0.0


def test_zeros_on_one_rank_alone() -> None:
    run_ranks(2, on_one_rank_alone)
