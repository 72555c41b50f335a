"""Models with uncommon parameters, hooks or control flow, and their losses.

All are small. The comparison with plain torch is exact to 1e-9 in float64 unless an entry gives another tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.support.branching_models import Block

__all__ = ["UNCOMMON", "Uncommon"]

WIDTH = 8
Loss = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Uncommon:
    """A model, its loss on [rows, 8] inputs, and the tolerance of the comparison with plain torch."""

    make: Callable[[], nn.Module]
    loss: Loss
    tolerance: float = 1e-9
    dtype: torch.dtype | None = torch.float64  # None keeps the model's own dtypes


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Parametrized(nn.Module):
    """weight_norm, an orthogonal weight and a symmetric weight: attributes that are computed from hidden parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.second = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.third = nn.utils.parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Recurrent(nn.Module):
    """An LSTM and a GRU, which keep their weights in a list of their own, and a GRU cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(2 * WIDTH, WIDTH, batch_first=True)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        sequence = x[None].expand(2, -1, -1)
        out, _ = self.gru(self.lstm(sequence)[0])
        state = torch.zeros_like(out[:, 0])
        for step in out.unbind(1):
            state = self.cell(step, state)
        return state


class Attending(nn.Module):
    """Attention modules, which read the weight of ``out_proj`` without calling its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        attended, _ = self.attention(x, x, x)
        return self.layer(attended, x)


class Scaled(nn.Module):
    """Parameters of the root, and of containers without forward, which the root's forward reads directly."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.store = nn.Module()
        self.store.table = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))
        self.list = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 0.1 * i)) for i in range(3))
        self.dict = nn.ParameterDict({"shift": nn.Parameter(torch.ones(WIDTH))})
        self.block = Block(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x * self.scale) @ self.store.table
        for entry in self.list:
            x = x + entry
        return x * self.dict["shift"] + self.block.lin.weight.sum()


class Nested(nn.Module):
    """A module that calls a part with ``functional_call`` and changed weights, and also calls the part itself."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        halved = {name: value * 0.5 for name, value in self.part.named_parameters()}
        return self.part(x) + torch.func.functional_call(self.part, halved, (x,))


class Experts(nn.Module):
    """A router that sends rows to experts by value, so that ranks use different experts and some experts are unused."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 6)
        parts = [nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(6)]
        self.experts = nn.ModuleList(parts)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        best = gates.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * gates[rows, index, None])
        return self.last(x + out)


class Codes(nn.Module):
    """A frozen base of 8-bit codes and scales, trainable low-rank factors, and complex and integer parameters."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.arange(WIDTH * WIDTH, dtype=torch.uint8).view(WIDTH, WIDTH)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.01), requires_grad=False)
        self.phase = nn.Parameter(torch.polar(torch.ones(WIDTH), torch.arange(WIDTH) * 0.3), requires_grad=False)
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base = (self.codes.to(x.dtype) - 32) * self.scale
        return x[:, self.order] @ base.T * self.phase.real + self.up(self.down(x))


class MixedDtypes(nn.Module):
    """A float32 router, a bfloat16 layer and a float64 layer in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.second = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x.float()).softmax(-1)
        return gate[:, :1] * self.first(x.bfloat16()) + gate[:, 1:] * self.second(x.double())


class Images(nn.Module):
    """A convolution on channels_last inputs, and a batch norm with statistics of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.back = nn.ConvTranspose2d(4, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.back(F.relu(self.norm(self.conv(x))))


class Hooked(nn.Module):
    """User hooks of every kind that change activations or gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.blocks[0].register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
        self.blocks[1].register_forward_hook(lambda m, args, out: out + 1)
        self.blocks[2].register_full_backward_hook(lambda m, gin, gout: tuple(g * 2 for g in gin))
        self.blocks[1].register_full_backward_pre_hook(lambda m, gout: tuple(g * 0.5 for g in gout))
        self.blocks[0].lin.weight.register_hook(lambda gradient: gradient * 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.7)
        return x


class Tiny(nn.Module):
    """A single scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.slope


class Wide(nn.Module):
    """A table that is larger than all other parameters together, and small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3000, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table((x.abs() * 700).long().clamp(max=2999)[:, 0])
        for block in self.blocks:
            x = block(x)
        return x @ self.table.weight[:50].T


def blocks() -> nn.Module:
    return nn.Sequential(*(Block(WIDTH) for _ in range(3)))


def several_forwards(model: nn.Module, x: Tensor) -> Tensor:
    first = model(x)
    with torch.no_grad():
        weight = model(x * 2).mean()
    return (first * weight + model(first)).square().mean() + model(x.flip(0)).mean()


def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x.float()).float().square().mean()


UNCOMMON: dict[str, Uncommon] = {
    "parametrizations": Uncommon(Parametrized, mean_square),
    "recurrent": Uncommon(Recurrent, mean_square),
    "attention": Uncommon(Attending, mean_square),
    "raw parameters": Uncommon(Scaled, mean_square),
    "functional_call": Uncommon(Nested, mean_square),
    "experts": Uncommon(Experts, mean_square),
    "codes": Uncommon(Codes, lambda m, x: m(x.float()).square().mean(), 1e-5, None),
    "mixed dtypes": Uncommon(MixedDtypes, lambda m, x: m(x).square().mean(), 2e-2, None),
    "images": Uncommon(Images, mean_square),
    "hooks": Uncommon(Hooked, mean_square),
    "one number": Uncommon(Tiny, mean_square),
    "wide": Uncommon(Wide, mean_square),
    "several forwards": Uncommon(blocks, several_forwards),
    "autocast": Uncommon(blocks, under_autocast, 1e-3, torch.float32),
}
