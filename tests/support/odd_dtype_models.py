"""Random models of awkward parameters: any dtype and order of dimensions, tied, frozen, scalars and empty ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["OddModel"]

_SHAPES: Sequence[tuple[int, ...]] = [
    (), (0,), (3, 0), (1,), (7,), (131,), (5, 3), (1, 9), (64, 9), (4, 3, 2), (2, 3, 4, 5), (3, 1, 2, 1),
]  # fmt: skip
_FLOATING = [torch.float32, torch.float32, torch.bfloat16, torch.float64]
_WHOLE = [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]


def _values(chosen: random.Random, dtype: torch.dtype) -> Tensor:
    """A tensor of a random shape, its dimensions in a random order of memory."""
    shape = chosen.choice(_SHAPES)
    order = chosen.sample(range(len(shape)), len(shape)) if chosen.random() < 0.5 else list(range(len(shape)))
    values = torch.randn([shape[d] for d in order]) * 3
    back = [order.index(d) for d in range(len(shape))]
    return values.to(dtype).permute(back)


class _Part(nn.Module):
    def __init__(self, chosen: random.Random, made: list[nn.Parameter]) -> None:
        super().__init__()
        for number in range(chosen.randint(1, 4)):
            floating = chosen.random() < 0.8
            parameter = nn.Parameter(
                _values(chosen, chosen.choice(_FLOATING if floating else _WHOLE)),
                requires_grad=floating and chosen.random() < 0.8,
            )
            if made and chosen.random() < 0.2:
                parameter = chosen.choice(made)
            made.append(parameter)
            self.register_parameter(f"p{number}", parameter)
        self.register_buffer("counts", torch.arange(chosen.randint(0, 4)))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.parameters():
            # Of no elements the mean is not a number, and the sum 0.
            x = x + (parameter.double() * x).square().sum() / max(parameter.numel(), 1) * 1e-3
        return x


class OddModel(nn.Module):
    """The same of the same seed: parts of a few parameters each, and a loss of all of them in float64."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        chosen = random.Random(seed)
        made: list[nn.Parameter] = []
        # At least one that is trained.
        self.first = nn.Linear(3, 2)
        self.parts = nn.ModuleList(_Part(chosen, made) for _ in range(chosen.randint(2, 5)))

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x).double().square().mean()
        for part in self.parts:
            out = part(out)
        return out
