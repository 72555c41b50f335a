"""Messages -> values, n messages -> their sum, of codes and of plain values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..wire import message_layout
from .blocks import TILE, Part, decode_, parts, require_cpu, saturate_, scratch, tiles, unrotate_
from .stats import measure_, scale_number

__all__ = ["dequantize_", "reduce_", "sum_", "sum_tile_"]


def sum_tile_(messages: Sequence[Part], first: int, last: int, bits: int, out: Tensor) -> None:
    """Float32 sum of groups [first, last) of the messages, in their order, into ``out`` [last - first, group]."""
    for index, message in enumerate(messages):
        # The first overwrites, the others are added, one after the other: order decides the bits.
        decode_(message.rows(first, last), out, bits, add=index > 0)


def _sum(messages: Sequence[Part], out: Tensor, bits: int, rotate: bool, scale: float, accumulate: bool) -> None:
    layout = message_layout(out.numel(), bits)
    for first, last in tiles(layout):
        total = scratch("sum", last - first, layout.group)
        sum_tile_(messages, first, last, bits, total)
        if scale != 1.0:
            total.mul_(scale)
        if rotate:
            if not torch.isfinite(torch.stack(torch.aminmax(total))).all():
                # Rotated back it would be clamped, and look finite.
                total.masked_fill_(total.isinf(), torch.nan)
            unrotate_(total)
        # The last group may go on past the end of ``out``.
        start, stop = first * layout.group, min(last * layout.group, layout.numel)
        # A value of its own, not rotated, is finite in float32, and a sum that is not must show.
        if rotate or out.dtype != torch.float32:
            saturate_(total, out.dtype)
        present = total.view(-1)[: stop - start]
        if accumulate:
            out[start:stop].add_(present)
        else:
            out[start:stop].copy_(present)


def dequantize_(messages: Tensor, out: Tensor, count: int, bits: int, rotate: bool) -> None:
    """See :func:`zeropp_kernels.dequantize_`."""
    numel = out.numel() // count
    for index, message in enumerate(parts(messages, message_layout(numel, bits), count)):
        # Each message is a sum of one.
        _sum([message], out[index * numel : (index + 1) * numel], bits, rotate, 1.0, False)


def reduce_(
    messages: Tensor, out: Tensor, count: int, bits: int, rotate: bool, scale: float, accumulate: bool,
    norms: Tensor | None, flag: Tensor | None, device_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.reduce_`."""
    scale = scale_number(scale, device_scale)
    _sum(parts(messages, message_layout(out.numel(), bits), count), out, bits, rotate, scale, accumulate)
    measure_(out, norms, flag)


def sum_(
    messages: Tensor, out: Tensor, count: int, scale: float, accumulate: bool, norms: Tensor | None,
    flag: Tensor | None, device_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.sum_`."""
    require_cpu(messages)
    scale = scale_number(scale, device_scale)
    values = messages.view(count, -1)
    for start in range(0, out.numel(), TILE):
        target = out[start : start + TILE]
        total = scratch("sum", 1, target.numel()).view(-1)
        total.copy_(values[0, start : start + TILE])
        for index in range(1, count):
            total.add_(values[index, start : start + TILE])
        # Rounded, and added only then: torch's ``alpha`` would do both at once.
        if scale != 1.0:
            total.mul_(scale)
        if accumulate:
            target.add_(total)
        else:
            target.copy_(total)
    measure_(out, norms, flag)
