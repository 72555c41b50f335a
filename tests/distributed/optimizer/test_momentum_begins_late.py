"""SGD with momentum whose parameters get their first gradient at different steps, against torch without ``fused``.

torch's own fused SGD is wrong there: it treats a step as the first one for all parameters of a group or for none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.branching_models import Routed, chain, make_config
from tests.support.rank_pool import run_ranks, some
from tests.support.sharded_and_plain import Pair

SETTINGS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, "dampening": 0.3}
LATE = [
    [chain(0, 2), chain(0, 2)],
    [chain(0, 1), chain(0, 3)],  # blocks 1 and 3 get their first gradient, each from one rank
    [chain(4), chain(4)],
    [chain(2), chain(2)],
]


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), fused=True, **SETTINGS)


def beside(config: dict[str, Any]) -> Pair:
    pair = Pair(Routed(), config, optimizer=fused)
    pair.plain_optimizer = torch.optim.SGD(pair.plain.parameters(), **SETTINGS)
    pair.whole.optimizer = pair.plain_optimizer
    return pair


def late_branches(config: dict[str, Any]) -> None:
    pair = beside(config)
    bound = config.get("gradient_clipping")
    for routes in LATE:
        pair.zero_grad()
        pair.backward(*routes)
        if bound:
            nn.utils.clip_grad_norm_(pair.plain.parameters(), bound)
        pair.step()
        pair.check()


@pytest.mark.every(6)
@pytest.mark.parametrize(
    "settings",
    [
        {"stage": 0},
        {"stage": 1},
        {},
        {"unit_min_blocks": 128},
        {"gradient_clipping": 0.05},
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    ],
    ids=str,
)
def test_a_branch_that_is_taken_late(settings: dict[str, Any]) -> None:
    run_ranks(2, late_branches, make_config(**settings))


def unfrozen_step_by_step(config: dict[str, Any]) -> None:
    """Unfreeze the blocks one by one, the last one first, and compare each step with plain torch.

    The first block is unused at first, and states are read before a step has made them.
    """
    pair = beside(config)
    for model in (pair.model, pair.plain):
        for number in range(3):
            model.blocks[number].requires_grad_(False)  # type: ignore[operator, index, union-attr]
    for number in range(5):
        for model in (pair.model, pair.plain):
            if number < 3:
                model.blocks[2 - number].requires_grad_(True)  # type: ignore[operator, index, union-attr]
        pair.train(chain(1, 2, 3) if number < 3 else chain(4))
        pair.check()
        for group in pair.optimizer.param_groups:
            for parameter in group["params"]:
                assert pair.optimizer.state[parameter].get("momentum_buffer", parameter).shape == parameter.shape


@pytest.mark.parametrize("settings", some([{}, {"stage": 1}, {"offload_optimizer": {"device": "cpu"}}], 3), ids=str)
def test_blocks_that_are_unfrozen_step_by_step(settings: dict[str, Any]) -> None:
    run_ranks(2, unfrozen_step_by_step, make_config(**settings))
