"""Triton kernels that encode: from a flat buffer, from tensors of a table, or from the sum of other messages."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..table import locate
from ..wire import ceil_div, message_layout, state_layout
from .blocks import (
    encode_pair,
    group_peak,
    group_rows,
    load_pair,
    rotate,
    scale_of,
    scale_value,
    store_encoded,
    store_scales,
    whole,
)
from .feedback import keep_error, load_error
from .launch import Launch, launch, launched
from .places import load_blocks, triton_dtype
from .reduce import sum_pair
from .tiles import tile_of

__all__ = ["quantize_", "quantize_tensors_", "reduce_quantize_"]


@triton.jit
def _encode(
    lower, upper, first, messages, state, groups, slots, nbytes, scales_offset, state_nbytes, state_scales_offset,
    beta, rest, reset, EXACT: tl.constexpr, BITS: tl.constexpr, ROTATE: tl.constexpr, FEEDBACK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Encode one tile of values: rotate, add the stored error, store codes and scales, store the new error.

    EXACT tells that the values have 16 bits, see :func:`rotate`.
    """
    K: tl.constexpr = group_rows(BITS)
    # whole() keeps the rows aligned for the compiler, as messages are multiples of 128 bytes. The offset has 64 bits,
    # because many messages together may pass 2**31 bytes.
    message = messages + tl.program_id(1).to(tl.int64) * whole(nbytes, 128)
    live = first + tl.arange(0, TILE) < groups
    if ROTATE:
        lower, upper = rotate(lower, upper, EXACT)
    # Errors are added after the rotation, because they are errors of rotated values.
    if FEEDBACK:
        state += tl.program_id(1).to(tl.int64) * whole(state_nbytes, 128)
        old_lower, old_upper = load_error(state, state_scales_offset, first, groups, reset, TILE, K)
        lower += old_lower
        upper += old_upper
    bits, inverse, finite = scale_of(group_peak(lower, upper), BITS)
    lower_code, upper_code, lower_value, upper_value = encode_pair(lower, upper, inverse, BITS)
    # A group has K rows of 16 * BITS bytes.
    codes = message + first.to(tl.int64) * (16 * BITS * K)
    store_encoded(codes, lower_code, upper_code, live, finite, BITS, TILE, K)
    store_scales(message + scales_offset, bits, first, groups, slots, TILE)
    if FEEDBACK:
        # Products are exact, so a fused multiply-add has the rounding of a difference.
        scale = tl.broadcast_to(-scale_value(bits)[:, None, None], lower.shape)
        # The error of a group with Inf or NaN is undefined, so its state is kept, or cleared with reset.
        written = live & (tl.where(finite, 1, reset) != 0)
        keep_error(
            state, state_scales_offset, first, written, old_lower, old_upper,
            tl.fma(lower_value, scale, lower), tl.fma(upper_value, scale, upper), beta, rest, TILE, K,
        )  # fmt: skip


@launched("x")
def quantize_kernel(
    x, numel: tl.int64, messages, state, groups: tl.int32, slots: tl.int32, nbytes: tl.int64, scales_offset: tl.int64,
    state_nbytes: tl.int64, state_scales_offset: tl.int64, beta: tl.float32, rest: tl.float32, reset: tl.int32,
    BITS: tl.constexpr, ROTATE: tl.constexpr, FEEDBACK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Encode one tile of a flat buffer. Grid: (tiles of a message, messages)."""
    K: tl.constexpr = group_rows(BITS)
    first = tl.program_id(0) * TILE
    start = first.to(tl.int64) * (128 * K)
    source = x + (tl.program_id(1).to(tl.int64) * numel + start)
    lower, upper = load_pair(source, numel - start, TILE, K)
    _encode(
        lower, upper, first, messages, state, groups, slots, nbytes, scales_offset, state_nbytes, state_scales_offset,
        beta, rest, reset, x.dtype.element_ty.primitive_bitwidth == 16, BITS, ROTATE, FEEDBACK, TILE,
    )  # fmt: skip


@launched("entries", "owners")
def quantize_tensors_kernel(
    entries, size: tl.int32, owners, numel: tl.int64, messages, state, groups: tl.int32, slots: tl.int32,
    nbytes: tl.int64, scales_offset: tl.int64, state_nbytes: tl.int64, state_scales_offset: tl.int64,
    beta: tl.float32, rest: tl.float32, reset: tl.int32, DTYPE: tl.constexpr,
    BITS: tl.constexpr, ROTATE: tl.constexpr, FEEDBACK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Encode one tile of tensors in a table. Grid: (tiles of a message, messages)."""
    K: tl.constexpr = group_rows(BITS)
    first = tl.program_id(0) * TILE
    # Element numbers in the flat buffer that the table describes. check_blocks makes sure that messages start on
    # blocks.
    begin = first.to(tl.int64) * (128 * K)
    start = tl.program_id(1).to(tl.int64) * numel + begin
    # load_blocks returns the tile that the flat buffer would have, so encoding is the same as for a flat buffer.
    lower, upper = load_blocks(entries, size, owners, start, tl.cdiv(numel - begin, 256), 1.0, DTYPE, TILE, K)
    _encode(
        lower, upper, first, messages, state, groups, slots, nbytes, scales_offset, state_nbytes, state_scales_offset,
        beta, rest, reset, DTYPE.primitive_bitwidth == 16, BITS, ROTATE, FEEDBACK, TILE,
    )  # fmt: skip


@launched("device_scale")
def reduce_quantize_kernel(
    sources, count: tl.int32, source_groups: tl.int32, source_nbytes: tl.int64, source_scales_offset: tl.int64,
    scale: tl.float32, device_scale, numel: tl.int64, messages, state, groups: tl.int32, slots: tl.int32,
    nbytes: tl.int64, scales_offset: tl.int64, state_nbytes: tl.int64, state_scales_offset: tl.int64,
    beta: tl.float32, rest: tl.float32, reset: tl.int32,
    SOURCE_BITS: tl.constexpr, SOURCE_K: tl.constexpr,
    BITS: tl.constexpr, ROTATE: tl.constexpr, FEEDBACK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Encode one tile of the scaled sum of messages. Grid: (tiles of an outgoing message, outgoing messages)."""
    K: tl.constexpr = group_rows(BITS)
    first = tl.program_id(0) * TILE
    # The position is counted in rows of 128, because incoming and outgoing groups may have different sizes. Outgoing
    # messages start on blocks.
    row = (tl.program_id(1).to(tl.int64) * numel >> 7) + first.to(tl.int64) * K
    lower, upper = sum_pair(
        sources, count, row, source_groups, source_nbytes, source_scales_offset, SOURCE_BITS, SOURCE_K, TILE, K, 4
    )
    if device_scale is not None:
        scale = tl.load(device_scale)
    _encode(
        lower * scale, upper * scale, first, messages, state, groups, slots, nbytes, scales_offset, state_nbytes,
        state_scales_offset, beta, rest, reset, False, BITS, ROTATE, FEEDBACK, TILE,
    )  # fmt: skip


def _launch(
    kernel: triton.runtime.KernelInterface,
    source: Sequence[object],
    messages: Tensor,
    numel: int,
    count: int,
    bits: int,
    rotate: bool,
    state: Tensor | None,
    beta: float,
    reset: bool,
    **constants: object,
) -> Launch | None:
    """Launch an encoding kernel; ``source`` are its first arguments, the others are the same for all kernels."""
    layout = message_layout(numel, bits)
    kept = state_layout(numel, bits)
    if layout.slots == 0 or count == 0:
        return None
    constants |= {"BITS": bits, "ROTATE": rotate, "FEEDBACK": state is not None}
    tile = tile_of(kernel, constants).holds(layout.group)
    # The grid covers slots, not groups, because the zeros after the last scale are part of the message.
    return launch(
        kernel, (ceil_div(layout.slots, tile), count),
        # Without a state, the kernel still needs a pointer that it never reads. messages is uint8 and aligned like a
        # state, so Triton does not compile another variant for it.
        *source, messages, state if state is not None else messages,
        layout.groups, layout.slots, layout.nbytes, layout.scales_offset, kept.nbytes, kept.scales_offset,
        # 1 - beta is computed in float64 and rounded once, as torch does with a Python number.
        beta, 1.0 - beta, int(reset),
        TILE=tile, **constants,
    )  # fmt: skip


def quantize_(
    x: Tensor, messages: Tensor, count: int, bits: int, rotate: bool, state: Tensor | None, beta: float, reset: bool
) -> Launch | None:
    """Encode a flat buffer with a Triton kernel, with the arguments of :func:`zeropp_kernels.quantize_`."""
    numel = x.numel() // count
    return _launch(quantize_kernel, (x, numel), messages, numel, count, bits, rotate, state, beta, reset)


def quantize_tensors_(
    tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, numel: int, messages: Tensor, count: int,
    bits: int, rotate: bool, state: Tensor | None, beta: float, reset: bool,
) -> Launch | None:  # fmt: skip
    """Encode tensors with a Triton kernel, with the arguments of :func:`zeropp_kernels.quantize_tensors_`."""
    # Addresses are sent on the current stream, before the kernel that reads them.
    locate(tensors, host, entries)
    source = (entries, len(tensors), owners, numel // count)
    return _launch(
        quantize_tensors_kernel, source, messages, numel // count, count, bits, rotate, state, beta, reset,
        DTYPE=triton_dtype(tensors),
    )  # fmt: skip


def reduce_quantize_(
    sources: Tensor, numel: int, count: int, source_bits: int, scale: float, messages: Tensor, out_count: int,
    bits: int, rotate: bool, state: Tensor | None, beta: float, reset: bool, device_scale: Tensor | None = None,
) -> Launch | None:  # fmt: skip
    """Sum and encode messages with a Triton kernel, with the arguments of :func:`zeropp_kernels.reduce_quantize_`."""
    source = message_layout(numel, source_bits)
    # Elements of one outgoing message. Each source has out_count times as many.
    part = numel // out_count
    arguments = (sources, count, source.groups, source.nbytes, source.scales_offset, scale, device_scale, part)
    return _launch(
        reduce_quantize_kernel, arguments, messages, part, out_count, bits, rotate, state, beta, reset,
        SOURCE_BITS=source_bits, SOURCE_K=source.group // 128,
    )  # fmt: skip
