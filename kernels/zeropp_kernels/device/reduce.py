"""Triton kernels that decode and sum: messages to values, and n messages to their sum, quantized or plain."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..wire import BLOCK, blocks_of, ceil_div, message_layout
from .blocks import (
    aligned,
    cast,
    code_pair,
    group_rows,
    half_rows,
    load_pair,
    load_words,
    loop_end,
    rotate,
    saturate,
    scale_value,
    store_pair,
    value_pair,
    whole,
    wide,
    widen,
    within,
)
from .launch import Launch, launch, launched
from .stats import report
from .tiles import tile_of

__all__ = ["dequantize_", "reduce_", "sum_", "sum_pair"]


@triton.constexpr_function
def _stored_words(dtype: tl.dtype) -> int:
    """Return the number of words of four codes whose values take 16 bytes in ``dtype``."""
    return 1 if dtype.primitive_bitwidth == 32 else 2


@triton.jit
def _load_message(
    message, scales_offset, row, group, end, groups, BITS: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Load TILE * K rows of one message from row ``row`` on: (lower words, upper words, scale bits [TILE, K]).

    ``group`` [TILE, K] is the group of each row. Rows of groups from ``end`` on are zeros.
    """
    live = group < end
    scales = (message + scales_offset).to(tl.pointer_type(tl.int16))
    bits = tl.load(scales + group, mask=live, other=0)
    # A row of 128 codes takes 16 * BITS bytes.
    lower, upper = load_words(message + row * (16 * BITS), live[:, :, None], groups, BITS, TILE, K, WIDTH)
    return lower, upper, bits


@triton.jit
def sum_pair(
    messages, count, row, groups, nbytes, scales_offset, BITS: tl.constexpr, GROUP_ROWS: tl.constexpr,
    TILE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the float32 sum (lower, upper) of ``count`` messages, in their order, for TILE * K rows from ``row`` on.

    Source groups have GROUP_ROWS rows, which may differ from K. Products of codes (at most 7 significant bits) and
    scales (8) are exact, so a fused multiply-add has the same rounding as a sum.
    """
    rows = row + tl.arange(0, TILE)[:, None] * K + tl.arange(0, K)[None, :]
    # The group is computed per row, because source groups can be twice or half as long as groups of the tile. A shift,
    # because a division of a signed number takes five instructions.
    group = (rows >> (GROUP_ROWS.bit_length() - 1)).to(tl.int32)
    lower, upper, bits = _load_message(messages, scales_offset, row, group, groups, groups, BITS, TILE, K, WIDTH)
    # Load the words of the next message before adding this one, so that the loads overlap with the additions.
    messages += whole(nbytes, 128)
    next_lower, next_upper, next_bits = _load_message(
        messages, scales_offset, row, group, tl.where(count > 1, groups, 0), groups, BITS, TILE, K, WIDTH
    )
    # The sum starts with the first product, because 0 plus a product of -0 would be +0.
    lower, upper = value_pair(lower, upper, scale_value(bits)[:, :, None], groups, BITS)
    # Add in this order on every machine, because float32 sums depend on the order.
    for index in range(1, loop_end(count)):
        messages += whole(nbytes, 128)
        ahead_lower, ahead_upper, ahead_bits = _load_message(
            messages, scales_offset, row, group, tl.where(index + 1 < count, groups, 0), groups, BITS, TILE, K, WIDTH
        )
        lower_code, upper_code = code_pair(next_lower, next_upper, groups, BITS)
        scale = tl.broadcast_to(scale_value(next_bits)[:, :, None], lower.shape)
        # Explicit fma, because kernels are compiled with fusion off. The products are exact, so the bits are the same.
        lower = tl.fma(lower_code, scale, lower)
        upper = tl.fma(upper_code, scale, upper)
        next_lower, next_upper, next_bits = ahead_lower, ahead_upper, ahead_bits
    return lower, upper


@triton.jit
def _spoil_infinite(x):
    """Replace Inf by NaN, so that an overflow stays visible: after the inverse rotation Inf would be clamped."""
    # NaN compares unequal to Inf and stays.
    return tl.where(tl.abs(x) == float("inf"), float("nan"), x)


@triton.jit
def _rotate_back(lower, upper):
    lower, upper = rotate(_spoil_infinite(lower), _spoil_infinite(upper), False)
    # Applying the transform twice multiplies by 2**-5.
    return lower * 32.0, upper * 32.0


@triton.jit
def _decoded(
    message, scales_offset, row, groups, dtype: tl.constexpr, BITS: tl.constexpr, ROTATE: tl.constexpr,
    TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Return one decoded tile of one message in ``dtype``."""
    group = tl.broadcast_to((row // K).to(tl.int32) + tl.arange(0, TILE)[:, None], [TILE, K])
    width: tl.constexpr = 4 if ROTATE else _stored_words(dtype)
    lower, upper, bits = _load_message(message, scales_offset, row, group, groups, groups, BITS, TILE, K, width)
    lower, upper = value_pair(lower, upper, scale_value(bits)[:, :, None], groups, BITS)
    if ROTATE:
        lower, upper = _rotate_back(lower, upper)
    # Unrotated float32 values are always finite.
    if ROTATE or dtype != tl.float32:
        lower = saturate(lower, dtype)
        upper = saturate(upper, dtype)
    return cast(lower, dtype), cast(upper, dtype)


@launched("out")
def dequantize_kernel(
    messages, out, numel: tl.int64, groups: tl.int32, nbytes: tl.int64, scales_offset: tl.int64,
    BITS: tl.constexpr, ROTATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Decode one tile of a message. Grid: (tiles of a message, messages)."""
    K: tl.constexpr = group_rows(BITS)
    SIZE: tl.constexpr = TILE * K * 128
    dtype: tl.constexpr = out.dtype.element_ty
    row = (tl.program_id(0) * TILE).to(tl.int64) * K
    message = messages + tl.program_id(1).to(tl.int64) * whole(nbytes, 128)
    target = out + (tl.program_id(1).to(tl.int64) * numel + row * 128)
    left = numel - row * 128
    at = half_rows(128, TILE, K)
    # The tile is decoded separately in each branch. If it were decoded before the branch, Triton 3.6 would run the code
    # twice in every program, the second time in the layout of the narrow stores.
    if wide(target, left, SIZE):
        lower, upper = _decoded(message, scales_offset, row, groups, dtype, BITS, ROTATE, TILE, K)
        tl.store(aligned(target, at), lower)
        tl.store(aligned(target, at + 64), upper)
    else:
        there = within(left, SIZE)
        lower, upper = _decoded(message, scales_offset, row, groups, dtype, BITS, ROTATE, TILE, K)
        tl.store(target + at, lower, mask=at < there)
        tl.store(target + at + 64, upper, mask=at + 64 < there)


@launched("out", "device_scale", "norms", "flag")
def reduce_kernel(
    messages, count: tl.int32, out, numel: tl.int64, groups: tl.int32, nbytes: tl.int64, scales_offset: tl.int64,
    scale: tl.float32, device_scale, norms, flag,
    BITS: tl.constexpr, ROTATE: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``out = scale * sum of count messages``, or add it to ``out``. Grid: (tiles,)."""
    K: tl.constexpr = group_rows(BITS)
    first = tl.program_id(0) * TILE
    row = first.to(tl.int64) * K
    left = numel - row * 128
    width: tl.constexpr = 4 if ROTATE else _stored_words(out.dtype.element_ty)
    lower, upper = sum_pair(messages, count, row, groups, nbytes, scales_offset, BITS, K, TILE, K, width)
    if device_scale is not None:
        scale = tl.load(device_scale)
    # Scale once and before the inverse rotation, as in the reference.
    lower *= scale
    upper *= scale
    if ROTATE:
        lower, upper = _rotate_back(lower, upper)
    target = out + row * 128
    # Unrotated float32 sums are not clamped, because an overflow must stay Inf.
    if ROTATE or out.dtype.element_ty != tl.float32:
        lower = saturate(lower, out.dtype.element_ty)
        upper = saturate(upper, out.dtype.element_ty)
    if ACCUMULATE:
        old_lower, old_upper = load_pair(target, left, TILE, K)
        lower += old_lower
        upper += old_upper
    if norms is not None or flag is not None:
        if left < TILE * K * 128:
            # After a rotation, elements past the end may be nonzero. They must not count in norms and flag.
            there = within(left, TILE * K * 128)
            at = half_rows(128, TILE, K)
            lower = tl.where(at < there, lower, 0.0)
            upper = tl.where(at + 64 < there, upper, 0.0)
        # A block is two rows, for groups of either size.
        BLOCKS: tl.constexpr = TILE * K // 2
        block = row // 2
        report(
            tl.reshape(lower, [BLOCKS, 2, 64]), tl.reshape(upper, [BLOCKS, 2, 64]), norms, flag, block,
            block + tl.arange(0, BLOCKS) < tl.cdiv(numel, 256), tl.float32, BLOCKS,
        )  # fmt: skip
    store_pair(target, lower, upper, left, TILE, K)


@triton.jit
def _sum_wide(source, stride, count, TILE: tl.constexpr):
    """Return the float32 sum of ``count`` tiles of blocks, ``stride`` elements apart; all must be :func:`wide`."""
    at = half_rows(128, TILE, 2)
    lower = widen(tl.load(aligned(source, at)))
    upper = widen(tl.load(aligned(source, at + 64)))
    source += stride
    # Load the next message before adding this one, so that the loads overlap with the additions.
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
    """Return the float32 sum of ``count`` tiles of blocks at any address, for elements before ``left``."""
    at = half_rows(128, TILE, 2)
    there = within(left, TILE * 256)
    # No message is loaded ahead: tiles at an end are rare, and the extra registers would count for all programs.
    lower = widen(tl.load(source + at, mask=at < there, other=0.0))
    upper = widen(tl.load(source + at + 64, mask=at + 64 < there, other=0.0))
    for _ in range(1, loop_end(count)):
        source += stride
        lower += widen(tl.load(source + at, mask=at < there, other=0.0))
        upper += widen(tl.load(source + at + 64, mask=at + 64 < there, other=0.0))
    return lower, upper


@launched("messages", "out", "device_scale", "norms", "flag")
def sum_kernel(
    messages, count: tl.int32, out, numel: tl.int64, blocks: tl.int32, scale: tl.float32, device_scale, norms, flag,
    ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``out = scale * sum of count plain messages``, or add it to ``out``. Grid: (tiles,)."""
    first = tl.program_id(0) * TILE
    start = first.to(tl.int64) * 256
    left = numel - start
    source = messages + start
    # If the second message is aligned, all are, because the stride is the same.
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


def dequantize_(messages: Tensor, out: Tensor, count: int, bits: int, rotate: bool) -> Launch | None:
    """Decode messages with a Triton kernel, with the arguments of :func:`zeropp_kernels.dequantize_`."""
    layout = message_layout(out.numel() // count, bits)
    # The grid covers groups, because decoding reads no slots after the last group.
    if layout.groups == 0:
        return None
    tile = tile_of(dequantize_kernel).holds(layout.group)
    return launch(
        dequantize_kernel, (ceil_div(layout.groups, tile), count),
        messages, out, layout.numel, layout.groups, layout.nbytes, layout.scales_offset,
        BITS=bits, ROTATE=rotate, TILE=tile,
    )  # fmt: skip


def reduce_(
    messages: Tensor, out: Tensor, count: int, bits: int, rotate: bool, scale: float, accumulate: bool,
    norms: Tensor | None, flag: Tensor | None, device_scale: Tensor | None = None,
) -> Launch | None:  # fmt: skip
    """Decode and sum messages with a Triton kernel, with the arguments of :func:`zeropp_kernels.reduce_`."""
    layout = message_layout(out.numel(), bits)
    if layout.groups == 0:
        return None
    tile = tile_of(reduce_kernel, {"ROTATE": rotate, "ACCUMULATE": accumulate}).holds(layout.group)
    return launch(
        reduce_kernel, (ceil_div(layout.groups, tile),),
        messages, count, out, layout.numel, layout.groups, layout.nbytes, layout.scales_offset, scale,
        device_scale, norms, flag, BITS=bits, ROTATE=rotate, ACCUMULATE=accumulate, TILE=tile,
    )  # fmt: skip


def sum_(
    messages: Tensor, out: Tensor, count: int, scale: float, accumulate: bool, norms: Tensor | None,
    flag: Tensor | None, device_scale: Tensor | None = None,
) -> Launch | None:  # fmt: skip
    """Sum plain messages with a Triton kernel, with the arguments of :func:`zeropp_kernels.sum_`."""
    numel = out.numel()
    blocks = blocks_of(numel)
    if blocks == 0:
        return None
    tile = tile_of(sum_kernel).holds(BLOCK)
    return launch(
        sum_kernel, (ceil_div(blocks, tile),),
        messages, count, out, numel, blocks, scale, device_scale, norms, flag,
        ACCUMULATE=accumulate, TILE=tile,
    )  # fmt: skip
