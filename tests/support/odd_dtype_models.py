"""Random models of unusual parameters: any dtype and memory order, tied, frozen, scalar and empty ones."""

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
    """Return a tensor of a random shape, with its dimensions in a random order in memory."""
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
            # The mean of an empty parameter would be NaN; its sum is 0.
            x = x + (parameter.double() * x).square().sum() / max(parameter.numel(), 1) * 1e-3
        return x


class OddModel(nn.Module):
    """A model of random parts, determined by the seed; its loss in float64 uses every parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        chosen = random.Random(seed)
        made: list[nn.Parameter] = []
        # Ensures that the model has at least one trainable parameter.
        self.first = nn.Linear(3, 2)
        self.parts = nn.ModuleList(_Part(chosen, made) for _ in range(chosen.randint(2, 5)))

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x).double().square().mean()
        for part in self.parts:
            out = part(out)
        return out
