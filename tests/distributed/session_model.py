"""The model that random sessions train: routes, tied ends, recomputation, a frozen norm, a part mostly left out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["WIDTH", "Body", "Part"]

WIDTH = 8


class Part(nn.Module):
    """A residual block; one of its parameters is no module's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, width)
        self.back = nn.Linear(width, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("told to fail")
        return x + self.gain * self.back(torch.tanh(self.lin(x)))


class Body(nn.Module):
    """Blocks taken in any order, tied ends, a frozen norm, and a part that is out of most passes."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(Part(width) for width in (8, 12, 8, 5))
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.end = nn.Linear(WIDTH, WIDTH)
        self.end.weight = self.start.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor, route: tuple[int, ...], aside: bool) -> tuple[Tensor, Tensor]:
        x = self.start(x)
        for index in route:
            part = self.parts[index]
            x = checkpoint(part, x, use_reentrant=False) if index == 2 else part(x)
        if aside:
            x = x + self.side(x.detach())
        y = self.norm(x) * self.scale + self.shift
        return self.end(y).square().mean(), torch.sin(x).mean()
