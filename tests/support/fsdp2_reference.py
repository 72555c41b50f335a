"""What zeropp.fsdp2 should compute, said again without process groups, and the model that its tests train.

A unit's gradients are a table [ranks, n]: row r is what rank r is to have of each parameter, dimension 0 padded with
zeros until the ranks divide it, one parameter after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import zeropp_kernels as kernels

STEPS = {8: 127, 4: 7}
GROUPS = {8: 256, 4: 128}


class Net(nn.Module):
    """Blocks and a rest; sizes that no number of ranks divides, vectors, a frozen matrix, a table with unused rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(11, 37)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(37, 61), nn.Tanh(), nn.Linear(61, 37)) for _ in range(2))
        self.norm = nn.LayerNorm(37)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 3))
        self.fixed = nn.Linear(37, 37, bias=False)
        self.fixed.requires_grad_(False)
        self.head = nn.Linear(37, 301)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = self.fixed(self.norm(x)) + x
        return self.head(x).float().square().mean() + (x.float().mean() * self.scale.float()).sum()


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, 9, (6,), generator=torch.Generator().manual_seed(100 * step + rank))


# Layout.


def table_of(tensors: Sequence[Tensor], world: int) -> Tensor:
    """FSDP2's buffer of some parameters' gradients or weights, [ranks, n]."""
    rows = []
    for tensor in tensors:
        length = -(-tensor.size(0) // world) * world
        padded = tensor.new_zeros(length, *tensor.shape[1:])
        padded[: tensor.size(0)] = tensor
        rows.append(padded.reshape(world, -1))
    return torch.cat(rows, dim=1)


def tensors_of(table: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The other way round."""
    world, found, start = table.size(0), [], 0
    for shape in shapes:
        rows = -(-shape[0] // world)
        size = rows * shape[1:].numel()
        found.append(table[:, start : start + size].reshape(world * rows, *shape[1:])[: shape[0]])
        start += size
    return found


# Rounding.


def rounded(values: Tensor, bits: int) -> Tensor:
    """Values [n] after a message of ``bits``."""
    if bits == 32:
        return values.float()
    if bits == 16:
        return values.bfloat16().float()
    message = torch.empty(kernels.message_layout(values.numel(), bits).nbytes, dtype=torch.uint8)
    kernels.quantize_(values.contiguous(), message, bits=bits)
    out = torch.empty(values.shape, dtype=torch.float32)
    kernels.dequantize_(message, out, bits=bits)
    return out


def total(tables: Sequence[Tensor], local: int, bits: tuple[int, int]) -> Tensor:
    """Sum of every rank's table over the hops, to the bit; float32 [ranks, n]."""
    world = len(tables)
    rows = []
    for piece in range(world):
        if local in (1, world):
            rows.append(_sum([rounded(table[piece], bits[1]) for table in tables]))
            continue
        nodes = [tables[start : start + local] for start in range(0, world, local)]
        partial = [_sum([rounded(table[piece], bits[0]) for table in node]) for node in nodes]
        rows.append(_sum([rounded(each, bits[1]) for each in partial]))
    return torch.stack(rows)


def _sum(values: Sequence[Tensor]) -> Tensor:
    whole = values[0].clone()
    for value in values[1:]:
        whole += value
    return whole


def half_scales(table: Tensor, bits: int) -> Tensor:
    """Largest error of each element of a table [ranks, n] that is encoded row by row."""
    size = table.abs().double()
    if bits not in GROUPS:
        return size * {32: 0.0, 16: 2.0**-8}[bits]
    group, count = GROUPS[bits], table.size(1)
    padded = torch.nn.functional.pad(size, (0, -count % group))
    peaks = padded.view(table.size(0), -1, group).amax(2, keepdim=True).expand(-1, -1, group).reshape(padded.shape)
    # Scales are rounded up to bfloat16; a product with a rounded inverse can fall to the wrong side of a tie.
    return (peaks * 0.5 * (1 + 2**-7) / STEPS[bits] + padded * 2**-22)[:, :count]


def bound(tables: Sequence[Tensor], local: int, bits: tuple[int, int]) -> Tensor:
    """Largest error of each element of the mean: half a scale of each code that meets in it."""
    world = len(tables)
    if local in (1, world):
        return sum(half_scales(table, bits[1]) for table in tables) / world  # type: ignore[return-value]
    whole = torch.zeros(tables[0].shape, dtype=torch.float64)
    for start in range(0, world, local):
        node = tables[start : start + local]
        error = sum(half_scales(table, bits[0]) for table in node)
        partial = torch.stack([table.double() for table in node]).sum(0)
        whole += error + half_scales(partial.abs() + error, bits[1])
    return whole / world
