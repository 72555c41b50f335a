"""The default recipe's model on batches of one rank or of all, for what surrounds its training, and placements."""

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
    """Run backward for the batches of all of ``world`` ranks, or for this rank's."""
    for rank in [dist.get_rank()] if world is None else range(world):
        (loss_of(model, step, rank) / (world or 1)).backward()
