"""A small model whose parts are frozen, unfrozen or added to the optimizer after wrapping, and its training loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeropp
from tests.support.branching_models import WIDTH, Block, make_config
from tests.support.parity import assert_close

__all__ = ["Gain", "Tower", "attempt", "batch", "check", "train", "trained", "wrap"]


class Gain(nn.Module):
    """A module whose forward returns a view of its weight. The model reads the view after forward has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self) -> Tensor:
        return self.weight.view(1, -1)


class Tower(nn.Module):
    """Blocks, one checkpointed and one used twice, a norm and a gain after them, and a head of two tied layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = Gain()
        self.head, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        x = checkpoint(self.blocks[2], x, use_reentrant=False)
        gain = self.gain()
        x = self.norm(self.blocks[3](self.blocks[0](x))) * gain
        return self.out(torch.tanh(self.head(x)))


def trained(model: Tower) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def batch(step: int, micro: int, rank: int) -> Tensor:
    seed = 1000 * step + 10 * micro + rank
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wrap(model: Tower, **settings: object) -> zeropp.ZeroOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return zeropp.ZeroOptimizer(inner, model, make_config(**settings))


def train(model: Tower, optimizer: zeropp.ZeroOptimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, 0, dist.get_rank())).square().mean().backward()
        optimizer.step()


def attempt(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def check(results: list[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> None:
    for state, plain in results:
        for name, value in plain.items():
            assert_close(state[name], value, 1e-12, name)
