"""PEFT merges adapters into frozen weights inside GatheredParameters; outside, the merge is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.branching_models import worst
from tests.support.lora_models import TOKENS, adapted, plain_merge
from tests.support.rank_pool import run_ranks


def bare(stage: int) -> list[float]:
    """Train LoRA adapters for two steps with a plain ZeroOptimizer, and merge them inside GatheredParameters.

    Args:
        stage: ZeRO stage.

    Returns:
        Largest differences from weights that plain torch and PEFT compute: inside GatheredParameters, and after it.
    """
    model = adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    config = {"zero_optimization": {"stage": stage}}
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(trained, lr=1e-2), model, config)
    for _ in range(2):
        optimizer.backward(model(input_ids=TOKENS + dist.get_rank(), labels=TOKENS).loss)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"zeropp\.zero\.GatheredParameters"):
        model.merge_adapter()
    wanted = plain_merge()
    with zeropp.zero.GatheredParameters(list(model.parameters())):
        found = model.merge_and_unload()
        inside = worst({key: value.clone() for key, value in found.state_dict().items()}, wanted)
    return [inside, worst(zeropp.full_state(found), wanted)]


@pytest.mark.every(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_bare_optimizer_s_model_is_merged_while_it_is_gathered(stage: int) -> None:
    for distances in run_ranks(2, bare, stage):
        assert max(distances) < 1e-5
