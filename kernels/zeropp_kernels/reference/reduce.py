"""Decoding and sums on CPU: messages to values, and n messages to their sum, quantized or plain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..wire import message_layout
from .blocks import TILE, Part, decode_, parts, require_cpu, saturate_, scratch, tiles, unrotate_
from .stats import measure_, scale_number

__all__ = ["dequantize_", "reduce_", "sum_", "sum_tile_"]


def sum_tile_(messages: Sequence[Part], first: int, last: int, bits: int, out: Tensor) -> None:
    """Write the float32 sum of groups [first, last) of messages, in message order, to ``out`` [last - first, group]."""
    for index, message in enumerate(messages):
        # The first message overwrites out, the others are added one by one. The order determines the bits.
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
                # Inf would become NaN or a clamped value in the inverse transform. NaN makes the overflow visible in
                # all 32 elements.
                total.masked_fill_(total.isinf(), torch.nan)
            unrotate_(total)
        # The last group may have more elements than out.
        start, stop = first * layout.group, min(last * layout.group, layout.numel)
        # Unrotated float32 values are not clamped: a decoded value is finite, and an overflow of a sum must stay Inf.
        if rotate or out.dtype != torch.float32:
            saturate_(total, out.dtype)
        present = total.view(-1)[: stop - start]
        if accumulate:
            out[start:stop].add_(present)
        else:
            out[start:stop].copy_(present)


def dequantize_(messages: Tensor, out: Tensor, count: int, bits: int, rotate: bool) -> None:
    """Decode messages on CPU, with the arguments of :func:`zeropp_kernels.dequantize_`."""
    numel = out.numel() // count
    for index, message in enumerate(parts(messages, message_layout(numel, bits), count)):
        # Decoding is the sum of one message.
        _sum([message], out[index * numel : (index + 1) * numel], bits, rotate, 1.0, False)


def reduce_(
    messages: Tensor, out: Tensor, count: int, bits: int, rotate: bool, scale: float, accumulate: bool,
    norms: Tensor | None, flag: Tensor | None, device_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Decode and sum messages on CPU, with the arguments of :func:`zeropp_kernels.reduce_`."""
    scale = scale_number(scale, device_scale)
    _sum(parts(messages, message_layout(out.numel(), bits), count), out, bits, rotate, scale, accumulate)
    measure_(out, norms, flag)


def sum_(
    messages: Tensor, out: Tensor, count: int, scale: float, accumulate: bool, norms: Tensor | None,
    flag: Tensor | None, device_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Sum plain messages on CPU, with the arguments of :func:`zeropp_kernels.sum_`."""
    require_cpu(messages)
    scale = scale_number(scale, device_scale)
    values = messages.view(count, -1)
    for start in range(0, out.numel(), TILE):
        target = out[start : start + TILE]
        total = scratch("sum", 1, target.numel()).view(-1)
        total.copy_(values[0, start : start + TILE])
        for index in range(1, count):
            total.add_(values[index, start : start + TILE])
        # Round the product before adding it, as the kernels do. torch's alpha could do both with one rounding.
        if scale != 1.0:
            total.mul_(scale)
        if accumulate:
            target.add_(total)
        else:
            target.copy_(total)
    measure_(out, norms, flag)
