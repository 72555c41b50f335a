"""A partitioned model and its plain twin, for tests that read values and states of parameters by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.branching_models import make_config
from tests.support.gathered_model import Stack, data
from tests.support.sharded_and_plain import Pair

__all__ = ["PLACES", "TOLERANCE", "Both", "far", "placed", "trained"]

TOLERANCE = 1e-9  # float64; the sums over two ranks may round differently
OFFLOAD = {"device": "cpu"}
PLACES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {},
    "small kept": {"persist": 100},
    "hpz": {"zero_hpz_partition_size": 2},
    "mics": {"mics_shard_size": 2},
    "offloaded": {"offload_optimizer": OFFLOAD},
    "offloaded in part": {"offload_optimizer": {**OFFLOAD, "ratio": 0.4}},
    "in files": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
    "two micro-batches": {"gradient_accumulation_steps": 2},
    "deferred": {"gradient_accumulation_steps": 2, "defer_cross_reduction": True},
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.is_floating_point()], lr=0.05, fused=True)


def placed(settings: dict[str, Any], folder: str) -> dict[str, object]:
    """Return a configuration whose offloaded tensors, if they are in files, are below ``folder``."""
    blocks = {key: {**value, "nvme_path": folder} for key, value in settings.items() if isinstance(value, dict)}
    return make_config(**{**settings, **blocks})


class Both(Pair):
    """A partitioned model and its plain twin. One ``backward`` call runs a whole accumulation window."""

    def __init__(self, settings: dict[str, Any], folder: str) -> None:
        self.micros = micros = settings.get("gradient_accumulation_steps", 1)

        def batch(step: int, micro: int, rank: int) -> Tensor:
            return data(step * micros + micro, rank)

        super().__init__(Stack(), placed(settings, folder), optimizer=optimizer_of, batch=batch, micros=micros)

    def backward(self, *routes: object) -> float:
        for _ in range(self.micros):
            loss = super().backward(*routes)
            if self.optimizer.engine.accumulation.unfinished:
                self.optimizer.step()
        return loss

    def step(self) -> None:
        super().step()
        self.zero_grad()

    def pairs(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        named = zip(self.model.named_parameters(), self.plain.parameters(), strict=True)
        return [(name, mine, plain) for (name, mine), plain in named if plain.is_floating_point()]


def far(found: Tensor | None, wanted: Tensor | None) -> float:
    if found is None or wanted is None:
        return 0.0 if found is wanted else float("inf")
    assert found.shape == wanted.shape
    return (found - wanted).abs().max().item()


def trained(plain: nn.Parameter) -> Tensor | None:
    """Return the expected main weights: the twin's values, or None for a frozen parameter."""
    return plain.detach() if plain.requires_grad else None
