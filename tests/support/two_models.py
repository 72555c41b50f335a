"""Two models that one loss leads through, their batches, and the losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LOSSES", "models", "rows"]

WIDTH = 6


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 1)


def rows(number: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def chain(first: Any, second: Any, x: Tensor) -> Tensor:
    """An encoder's outputs are a decoder's inputs."""
    return second(first(x)).float().square().mean()


def joint(first: Any, second: Any, x: Tensor) -> Tensor:
    """An actor's loss and a critic's, added up."""
    return first(x).float().square().mean() + 0.5 * second(x).float().square().mean()


LOSSES = {"chain": chain, "joint": joint}
