"""Triton kernels for weights sent as int4 differences from a reference that sender and receivers have (SDP4Bit)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..wire import ceil_div, message_layout
from .blocks import (
    encode_pair,
    group_peak,
    load_pair,
    load_words,
    saturate,
    scale_of,
    scale_value,
    store_encoded,
    store_pair,
    store_scales,
    value_pair,
    whole,
)
from .launch import Launch, launch, launched
from .tiles import tile_of

__all__ = ["delta_apply_", "delta_encode_"]


@triton.jit
def _advance(reference, lower, upper, lower_value, upper_value, left, TILE: tl.constexpr):
    """Add a tile of decoded differences to the reference and store it; sender and receivers both call this."""
    dtype: tl.constexpr = reference.dtype.element_ty
    # One rounded sum, then the cast. The decoded values are exact products, so sender and receivers have the same ones.
    lower = saturate(lower + lower_value, dtype)
    upper = saturate(upper + upper_value, dtype)
    store_pair(reference, lower, upper, left, TILE, 1)


@launched("shard", "reference")
def delta_encode_kernel(
    shard, reference, message, numel: tl.int64, groups: tl.int32, slots: tl.int32, scales_offset: tl.int64,
    UPDATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Encode one tile of ``shard - reference``. Grid: (tiles,)."""
    first = tl.program_id(0) * TILE
    # int4 groups have 128 elements, so K is 1 in this file.
    start = first.to(tl.int64) * 128
    left = numel - start
    live = first + tl.arange(0, TILE) < groups
    # Elements past the end are zeros in both, and so is their difference.
    lower, upper = load_pair(shard + start, left, TILE, 1)
    old_lower, old_upper = load_pair(reference + start, left, TILE, 1)
    lower -= old_lower
    upper -= old_upper
    bits, inverse, finite = scale_of(group_peak(lower, upper), 4)
    lower_code, upper_code, lower_value, upper_value = encode_pair(lower, upper, inverse, 4)
    store_encoded(message + first.to(tl.int64) * 64, lower_code, upper_code, live, finite, 4, TILE, 1)
    store_scales(message + scales_offset, bits, first, groups, slots, TILE)
    # Compute the values that receivers decode without loading the message. In a group with Inf or NaN the scale is NaN,
    # so the values are NaN here as on the receivers.
    if UPDATE:
        scale = scale_value(bits)[:, None, None]
        _advance(reference + start, old_lower, old_upper, lower_value * scale, upper_value * scale, left, TILE)


@launched("reference")
def delta_apply_kernel(
    messages, reference, numel: tl.int64, groups: tl.int32, nbytes: tl.int64, scales_offset: tl.int64,
    TILE: tl.constexpr,
):  # fmt: skip
    """Add one tile of a decoded message to the reference. Grid: (tiles of a message, messages)."""
    first = tl.program_id(0) * TILE
    start = first.to(tl.int64) * 128
    left = numel - start
    live = first + tl.arange(0, TILE) < groups
    # 64-bit offset, because the product of message number and message size may exceed 32 bits.
    message = messages + tl.program_id(1).to(tl.int64) * whole(nbytes, 128)
    target = reference + (tl.program_id(1).to(tl.int64) * numel + start)
    # Updating in place is safe, because a program loads and stores only its own tile.
    lower, upper = load_pair(target, left, TILE, 1)
    lower_code, upper_code = load_words(message + first.to(tl.int64) * 64, live[:, None, None], groups, 4, TILE, 1, 2)
    scales = (message + scales_offset).to(tl.pointer_type(tl.int16)) + first
    scale = scale_value(tl.load(scales + tl.arange(0, TILE), mask=live, other=0))
    lower_value, upper_value = value_pair(lower_code, upper_code, scale[:, None, None], groups, 4)
    _advance(target, lower, upper, lower_value, upper_value, left, TILE)


def delta_encode_(shard: Tensor, reference: Tensor, message: Tensor, update: bool) -> Launch | None:
    """Encode ``shard - reference`` with a Triton kernel, with the arguments of :func:`zeropp_kernels.delta_encode_`."""
    layout = message_layout(shard.numel(), 4)
    if layout.groups == 0:
        return None
    # The grid covers slots, not groups, because the zeros after the last scale may need a tile of their own.
    tile = tile_of(delta_encode_kernel).holds(layout.group)
    return launch(
        delta_encode_kernel, (ceil_div(layout.slots, tile),),
        shard, reference, message, layout.numel, layout.groups, layout.slots, layout.scales_offset,
        UPDATE=update, TILE=tile,
    )  # fmt: skip


def delta_apply_(messages: Tensor, reference: Tensor, count: int) -> Launch | None:
    """Add decoded differences with a Triton kernel, with the arguments of :func:`zeropp_kernels.delta_apply_`."""
    layout = message_layout(reference.numel() // count, 4)
    if layout.groups == 0:
        return None
    # The grid covers groups, because decoding reads no slots after the last group.
    tile = tile_of(delta_apply_kernel).holds(layout.group)
    return launch(
        delta_apply_kernel, (ceil_div(layout.groups, tile), count),
        messages, reference, layout.numel, layout.groups, layout.nbytes, layout.scales_offset,
        TILE=tile,
    )  # fmt: skip
