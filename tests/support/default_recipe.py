"""The model of the default recipe on batches of one rank or of all ranks, and six ways to place its weights.

For tests of features around training, such as gradient norms and averages of weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tests.support.parity import Recipe, micro_batch
from tests.support.small_models import MODELS

__all__ = ["PLACED", "RECIPE", "backward", "loss_of"]

PLACED: dict[str, dict[str, object]] = {
    "stage 3": {}, "stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "hpz": {"zero_hpz_partition_size": 2},
    "mics": {"mics_shard_size": 2}, "persistent": {"persist": 10**6},
}  # fmt: skip
RECIPE = Recipe()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return MODELS[RECIPE.model].loss(model, micro_batch(RECIPE, step, 0, rank))


def backward(model: nn.Module, step: int, world: int | None) -> None:
    """Run backward on this rank's batch, or on the batches of all ranks.

    Args:
        world: None for this rank's batch; else the number of ranks whose batches are used, each loss divided by it.
    """
    for rank in [dist.get_rank()] if world is None else range(world):
        (loss_of(model, step, rank) / (world or 1)).backward()
