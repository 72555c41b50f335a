"""Triton: messages -> values, n messages -> their sum, of codes and of plain values."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..wire import BLOCK, blocks_of, ceil_div, message_layout
from .blocks import (
    TILE_ROWS,
    aligned,
    cast,
    code_values,
    half_rows,
    load_packed,
    load_pair,
    loop_end,
    rotate,
    saturate,
    scale_value,
    store_pair,
    unpack,
    whole,
    wide,
    widen,
    within,
)
from .launch import ROWS, launched
from .stats import report

__all__ = ["SUM_TILE", "dequantize_", "reduce_", "sum_", "sum_pair"]

# Blocks. Half of the other kernels' tiles, since a thread has the next message in registers, too.
SUM_TILE = ROWS * 128 // BLOCK // 2


@triton.jit
def _load_message(message, scales_offset, row, group, groups, BITS: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """Bytes of TILE * K rows of one message from row ``row`` on, see :func:`load_packed`, and scale bits [TILE, K].

    ``group`` [TILE, K] is that of each row; zeros from ``groups`` on.
    """
    live = group < groups
    scales = (message + scales_offset).to(tl.pointer_type(tl.int16))
    bits = tl.load(scales + group, mask=live, other=0)
    # A row of 128 codes takes 16 * BITS bytes.
    lower, upper = load_packed(message + row * (16 * BITS), live[:, :, None], BITS, TILE, K)
    return lower, upper, bits


@triton.jit
def _message_values(lower, upper, bits, BITS: tl.constexpr):
    """As :func:`code_values`, of what :func:`_load_message` gives; scales are [TILE, K, 1]."""
    lower, upper = unpack(lower, upper, BITS)
    return code_values(lower, upper, scale_value(bits)[:, :, None], BITS)


@triton.jit
def sum_pair(
    messages, count, row, groups, nbytes, scales_offset, BITS: tl.constexpr, GROUP_ROWS: tl.constexpr,
    TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Float32 sum of ``count`` messages in their order, for TILE * K rows from row ``row`` (int64) on.

    Groups have GROUP_ROWS rows each, which need not be K.
    Products are exact (8 significant bits times at most 7), so a fused multiply-add rounds as a sum does.
    """
    rows = row + tl.arange(0, TILE)[:, None] * K + tl.arange(0, K)[None, :]
    # By row, since these groups can be twice or half as long as those of the tile.
    group = rows // GROUP_ROWS
    next_lower, next_upper, next_bits = _load_message(messages, scales_offset, row, group, groups, BITS, TILE, K)
    # -0 plus the first product is that product, whatever its sign; from +0 a first -0 would be lost.
    lower = tl.full([TILE, K, 64], -0.0, tl.float32)
    upper = tl.full([TILE, K, 64], -0.0, tl.float32)
    # In this order on every machine, since float32 sums depend on it.
    for index in range(1, loop_end(count) + 1):
        messages += whole(nbytes, 128)
        # One message ahead, in the bytes that it has in memory: a load need not wait for the additions before it.
        ahead_lower, ahead_upper, ahead_bits = _load_message(
            messages, scales_offset, row, group, tl.where(index < count, groups, 0), BITS, TILE, K
        )
        lower_code, upper_code, lower_scale, upper_scale = _message_values(next_lower, next_upper, next_bits, BITS)
        # Written out, since launches forbid the compiler to fuse. Products are exact, so bits do not depend on it.
        lower = tl.fma(lower_code, tl.broadcast_to(lower_scale, lower.shape), lower)
        upper = tl.fma(upper_code, tl.broadcast_to(upper_scale, upper.shape), upper)
        next_lower, next_upper, next_bits = ahead_lower, ahead_upper, ahead_bits
    return lower, upper


@triton.jit
def _spoil_infinite(x):
    """NaN for what has passed the largest float32: rotated back it would be a sum that is clamped, and look finite."""
    # NaN compares unequal and stays.
    return tl.where(tl.abs(x) == float("inf"), float("nan"), x)


@triton.jit
def _rotate_back(lower, upper):
    lower, upper = rotate(_spoil_infinite(lower), _spoil_infinite(upper))
    # Rotating twice is 2**-5 times the input.
    return lower * 32.0, upper * 32.0


@triton.jit
def _decoded(
    message, scales_offset, row, groups, dtype: tl.constexpr, BITS: tl.constexpr, ROTATE: tl.constexpr,
    TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile of one message in ``dtype``."""
    group = tl.broadcast_to(row // K + tl.arange(0, TILE)[:, None], [TILE, K])
    lower, upper, bits = _load_message(message, scales_offset, row, group, groups, BITS, TILE, K)
    lower, upper, lower_scale, upper_scale = _message_values(lower, upper, bits, BITS)
    lower *= lower_scale
    upper *= upper_scale
    if ROTATE:
        lower, upper = _rotate_back(lower, upper)
    # A value that is not rotated is finite in float32.
    if ROTATE or dtype != tl.float32:
        lower = saturate(lower, dtype)
        upper = saturate(upper, dtype)
    return cast(lower, dtype), cast(upper, dtype)


@launched("out", registers=128)
def dequantize_kernel(
    messages, out, numel: tl.int64, groups: tl.int32, nbytes: tl.int64, scales_offset: tl.int64,
    BITS: tl.constexpr, ROTATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of one message. Grid: (tiles of a message, messages)."""
    K: tl.constexpr = TILE_ROWS // TILE
    SIZE: tl.constexpr = TILE_ROWS * 128
    dtype: tl.constexpr = out.dtype.element_ty
    row = (tl.program_id(0) * TILE).to(tl.int64) * K
    message = messages + tl.program_id(1).to(tl.int64) * whole(nbytes, 128)
    target = out + (tl.program_id(1).to(tl.int64) * numel + row * 128)
    left = numel - row * 128
    at = half_rows(128, TILE, K)
    # Decoded in each branch: before them, Triton 3.6 would do it a second time, in the order of narrow stores, in every
    # program.
    if wide(target, left, SIZE):
        lower, upper = _decoded(message, scales_offset, row, groups, dtype, BITS, ROTATE, TILE, K)
        tl.store(aligned(target, at), lower)
        tl.store(aligned(target, at + 64), upper)
    else:
        there = within(left, SIZE)
        lower, upper = _decoded(message, scales_offset, row, groups, dtype, BITS, ROTATE, TILE, K)
        tl.store(target + at, lower, mask=at < there)
        tl.store(target + at + 64, upper, mask=at + 64 < there)


@launched("out", "device_scale", "norms", "flag", registers=128)
def reduce_kernel(
    messages, count: tl.int32, out, numel: tl.int64, groups: tl.int32, nbytes: tl.int64, scales_offset: tl.int64,
    scale: tl.float32, device_scale, norms, flag,
    BITS: tl.constexpr, ROTATE: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of out[i] = scale * sum of ``count`` messages. Grid: (tiles,)."""
    K: tl.constexpr = TILE_ROWS // TILE
    first = tl.program_id(0) * TILE
    row = first.to(tl.int64) * K
    left = numel - row * 128
    lower, upper = sum_pair(messages, count, row, groups, nbytes, scales_offset, BITS, K, TILE, K)
    if device_scale is not None:
        scale = tl.load(device_scale)
    # Before the way back, and once: the reference does it in this order.
    lower *= scale
    upper *= scale
    if ROTATE:
        lower, upper = _rotate_back(lower, upper)
    target = out + row * 128
    # A sum that is not finite in float32 must show as Inf.
    if ROTATE or out.dtype.element_ty != tl.float32:
        lower = saturate(lower, out.dtype.element_ty)
        upper = saturate(upper, out.dtype.element_ty)
    if ACCUMULATE:
        old_lower, old_upper = load_pair(target, left, TILE, K)
        lower += old_lower
        upper += old_upper
    if norms is not None or flag is not None:
        if left < TILE_ROWS * 128:
            # Behind the end lies what the rotation has spread there.
            there = within(left, TILE_ROWS * 128)
            at = half_rows(128, TILE, K)
            lower = tl.where(at < there, lower, 0.0)
            upper = tl.where(at + 64 < there, upper, 0.0)
        # A block is two rows, whatever a group is.
        BLOCKS: tl.constexpr = TILE_ROWS // 2
        block = row // 2
        report(
            tl.reshape(lower, [BLOCKS, 2, 64]), tl.reshape(upper, [BLOCKS, 2, 64]), norms, flag, block,
            block + tl.arange(0, BLOCKS) < tl.cdiv(numel, 256), tl.float32, BLOCKS,
        )  # fmt: skip
    store_pair(target, lower, upper, left, TILE, K)


@triton.jit
def _sum_wide(source, stride, count, TILE: tl.constexpr):
    """Float32 sum of ``count`` tiles of blocks, ``stride`` elements apart, all of them :func:`wide`."""
    at = half_rows(128, TILE, 2)
    lower = widen(tl.load(aligned(source, at)))
    upper = widen(tl.load(aligned(source, at + 64)))
    source += stride
    # One message ahead: loads of a message need not wait for the additions of the one before.
    more = tl.full([TILE, 2, 64], 1, tl.int1) & (count > 1)
    next_lower = tl.load(aligned(source, at), mask=more, other=0.0)
    next_upper = tl.load(aligned(source, at + 64), mask=more, other=0.0)
    for index in range(1, loop_end(count)):
        source += stride
        more = tl.full([TILE, 2, 64], 1, tl.int1) & (index + 1 < count)
        ahead_lower = tl.load(aligned(source, at), mask=more, other=0.0)
        ahead_upper = tl.load(aligned(source, at + 64), mask=more, other=0.0)
        lower += widen(next_lower)
        upper += widen(next_upper)
        next_lower, next_upper = ahead_lower, ahead_upper
    return lower, upper


@triton.jit
def _sum_narrow(source, stride, count, left, TILE: tl.constexpr):
    """The same wherever they lie, of the elements before ``left``."""
    at = half_rows(128, TILE, 2)
    there = within(left, TILE * 256)
    # None ahead: at an end speed is worth less than the registers, which all programs would have to have.
    lower = widen(tl.load(source + at, mask=at < there, other=0.0))
    upper = widen(tl.load(source + at + 64, mask=at + 64 < there, other=0.0))
    for _ in range(1, loop_end(count)):
        source += stride
        lower += widen(tl.load(source + at, mask=at < there, other=0.0))
        upper += widen(tl.load(source + at + 64, mask=at + 64 < there, other=0.0))
    return lower, upper


@launched("messages", "out", "device_scale", "norms", "flag", registers=72)
def sum_kernel(
    messages, count: tl.int32, out, numel: tl.int64, blocks: tl.int32, scale: tl.float32, device_scale, norms, flag,
    ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of blocks: out[i] = scale * sum of ``count`` messages [numel]. Grid: (tiles,)."""
    first = tl.program_id(0) * TILE
    start = first.to(tl.int64) * 256
    left = numel - start
    source = messages + start
    # The second message tells of all: strides are the same.
    if wide(source, left, TILE * 256) & ((count == 1) | wide(source + numel, left, TILE * 256)):
        lower, upper = _sum_wide(source, numel, count, TILE)
    else:
        lower, upper = _sum_narrow(source, numel, count, left, TILE)
    if device_scale is not None:
        scale = tl.load(device_scale)
    lower *= scale
    upper *= scale
    target = out + start
    if ACCUMULATE:
        old_lower, old_upper = load_pair(target, left, TILE, 2)
        lower += old_lower
        upper += old_upper
    report(lower, upper, norms, flag, first, first + tl.arange(0, TILE) < blocks, tl.float32, TILE)
    store_pair(target, lower, upper, left, TILE, 2)


def dequantize_(messages: Tensor, out: Tensor, count: int, bits: int, rotate: bool) -> None:
    """See :func:`zeropp_kernels.dequantize_`."""
    layout = message_layout(out.numel() // count, bits)
    # Decoding reads no slots behind the last group, so groups make the grid, here and below.
    if layout.groups == 0:
        return
    tile = ROWS * 128 // layout.group
    dequantize_kernel[ceil_div(layout.groups, tile), count](
        messages, out, layout.numel, layout.groups, layout.nbytes, layout.scales_offset,
        BITS=bits, ROTATE=rotate, TILE=tile, **dequantize_kernel.options,
    )  # fmt: skip


def reduce_(
    messages: Tensor, out: Tensor, count: int, bits: int, rotate: bool, scale: float, accumulate: bool,
    norms: Tensor | None, flag: Tensor | None, device_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.reduce_`."""
    layout = message_layout(out.numel(), bits)
    if layout.groups == 0:
        return
    tile = ROWS * 128 // layout.group
    reduce_kernel[(ceil_div(layout.groups, tile),)](
        messages, count, out, layout.numel, layout.groups, layout.nbytes, layout.scales_offset, scale,
        device_scale, norms, flag, BITS=bits, ROTATE=rotate, ACCUMULATE=accumulate, TILE=tile, **reduce_kernel.options,
    )  # fmt: skip


def sum_(
    messages: Tensor, out: Tensor, count: int, scale: float, accumulate: bool, norms: Tensor | None,
    flag: Tensor | None, device_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.sum_`."""
    numel = out.numel()
    blocks = blocks_of(numel)
    if blocks == 0:
        return
    sum_kernel[(ceil_div(blocks, SUM_TILE),)](
        messages, count, out, numel, blocks, scale, device_scale, norms, flag,
        ACCUMULATE=accumulate, TILE=SUM_TILE, **sum_kernel.options,
    )  # fmt: skip
