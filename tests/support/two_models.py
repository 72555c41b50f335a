"""Two models that are trained with one common loss, their batches, and two such losses."""

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
    """Return the loss of a chain: the outputs of the first model are the inputs of the second (encoder and decoder)."""
    return second(first(x)).float().square().mean()


def joint(first: Any, second: Any, x: Tensor) -> Tensor:
    """Return a weighted sum of two independent losses on the same inputs, as for an actor and a critic."""
    return first(x).float().square().mean() + 0.5 * second(x).float().square().mean()


LOSSES = {"chain": chain, "joint": joint}
