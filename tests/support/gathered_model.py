"""A model for tests of GatheredParameters, its inputs, and six ways to place its weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.branching_models import Block, make_config
from tests.support.sharded_and_plain import Pair

__all__ = ["PLACED", "Stack", "data", "lent"]

PLACED: dict[str, dict[str, object]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 3": {},
    "small kept": {"persist": 100},
    "hpz": {"zero_hpz_partition_size": 2},
    "mics": {"mics_shard_size": 2},
}


class Stack(nn.Module):
    """Three blocks, one of them frozen, a channels_last weight, and an integer parameter that is not partitioned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.codes = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.conv(x.view(-1, 4, 2, 2)).flatten(1) * (1 + self.codes.repeat(4))


def data(step: int, rank: int) -> Tensor:
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def lent(settings: dict[str, object], dtype: torch.dtype = torch.float64) -> Pair:
    config = make_config(**settings)
    return Pair(Stack(), config, optimizer=stepped, batch=lambda step, micro, rank: data(step, rank), dtype=dtype)
