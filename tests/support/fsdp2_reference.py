"""A reference of the arithmetic of zeropp.fsdp2 without process groups, and the model that its tests train.

The gradients of a unit form a table [ranks, n]. Row r is the part of each parameter that rank r receives. Dimension 0
of each parameter is padded with zeros to a multiple of the number of ranks, and the parameters follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import zeropp_kernels as kernels

STEPS = {8: 127, 4: 7}
GROUPS = {8: 256, 4: 128}


class Net(nn.Module):
    """Blocks and layers of sizes that no rank count divides: vectors, a frozen matrix, a table with unused rows."""

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


# Layout of FSDP2's buffers.


def table_of(tensors: Sequence[Tensor], world: int) -> Tensor:
    """Return FSDP2's buffer [ranks, n] for the gradients or weights of some parameters."""
    rows = []
    for tensor in tensors:
        length = -(-tensor.size(0) // world) * world
        padded = tensor.new_zeros(length, *tensor.shape[1:])
        padded[: tensor.size(0)] = tensor
        rows.append(padded.reshape(world, -1))
    return torch.cat(rows, dim=1)


def tensors_of(table: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the tensors of the given shapes that a table [ranks, n] contains; the inverse of ``table_of``."""
    world, found, start = table.size(0), [], 0
    for shape in shapes:
        rows = -(-shape[0] // world)
        size = rows * shape[1:].numel()
        found.append(table[:, start : start + size].reshape(world * rows, *shape[1:])[: shape[0]])
        start += size
    return found


# Rounding of messages.


def rounded(values: Tensor, bits: int) -> Tensor:
    """Return values [n] after encoding and decoding with ``bits`` per element, as float32."""
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
    """Return the sum of all ranks' tables over the hops, float32 [ranks, n], equal to zeropp's bit for bit.

    Args:
        tables: each rank's table [ranks, n].
        local: ranks per node; with 1 or all ranks there is one hop, with ``bits[1]``.
        bits: bits per element on the intra-node hop and on the inter-node hop.
    """
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
    """Return the largest error of each element of a table [ranks, n] that is encoded row by row."""
    size = table.abs().double()
    if bits not in GROUPS:
        return size * {32: 0.0, 16: 2.0**-8}[bits]
    group, count = GROUPS[bits], table.size(1)
    padded = torch.nn.functional.pad(size, (0, -count % group))
    peaks = padded.view(table.size(0), -1, group).amax(2, keepdim=True).expand(-1, -1, group).reshape(padded.shape)
    # Scales are rounded up to bfloat16. A product with a rounded inverse may also fall on the wrong side of a tie.
    return (peaks * 0.5 * (1 + 2**-7) / STEPS[bits] + padded * 2**-22)[:, :count]


def bound(tables: Sequence[Tensor], local: int, bits: tuple[int, int]) -> Tensor:
    """Return the largest error of each element of the mean.

    The bound is half a quantization step of each message that contributes to the element. With two hops, the error of
    the first hop also widens the groups that the second hop encodes.
    """
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
