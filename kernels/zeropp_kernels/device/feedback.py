"""Device functions for error feedback: load the stored error before encoding, store the new one after.

Source: LoCo (arXiv:2407.04480). The error is a moving average, ``e <- beta * e + (1 - beta) * (h - decoded(code(h)))``
with ``h = input + e``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    encode_pair,
    group_peak,
    load_words,
    scale_of,
    scale_value,
    store_encoded,
    value_pair,
)

__all__ = ["keep_error", "load_error"]


@triton.jit
def load_error(state, scales_offset, first, groups, reset, TILE: tl.constexpr, K: tl.constexpr):
    """Load the stored error of a tile as float32 (lower, upper); zeros of either sign if ``reset`` is nonzero."""
    # A state has 8-bit codes in the groups of the message: 128 * K bytes per group.
    live = first + tl.arange(0, TILE) < groups
    codes = state + first.to(tl.int64) * (128 * K)
    lower, upper = load_words(codes, live[:, None, None], groups, 8, TILE, K)
    scales = (state + scales_offset).to(tl.pointer_type(tl.int16)) + first
    scale = scale_value(tl.load(scales + tl.arange(0, TILE), mask=live, other=0))
    # Codes are always finite, so a zero scale is enough. Selected, not multiplied, because 0 * NaN is NaN.
    scale = tl.where(reset != 0, 0.0, scale)
    return value_pair(lower, upper, scale[:, None, None], groups, 8)


@triton.jit
def keep_error(
    state, scales_offset, first, live, old_lower, old_upper, lost_lower, lost_upper, beta, rest,
    TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Store the new error of a tile; groups where ``live`` is False keep their state to the bit.

    A group whose new error has Inf or NaN gets zeros, as in a new state.
    """
    # Two products and a sum, each rounded, as in the reference. rest is 1 - beta, rounded on the host.
    lower = old_lower * beta + lost_lower * rest
    upper = old_upper * beta + lost_upper * rest
    bits, inverse, finite = scale_of(group_peak(lower, upper), 8)
    # A NaN in a state would make the group NaN in every later message.
    bits = tl.where(finite, bits, 0)
    lower, upper, _, _ = encode_pair(lower, upper, inverse, 8)
    store_encoded(state + first.to(tl.int64) * (128 * K), lower, upper, live, finite, 8, TILE, K)
    # Only scales of groups are stored. Slots after the last group are zeros since the state was allocated.
    scales = (state + scales_offset).to(tl.pointer_type(tl.int16)) + first
    tl.store(scales + tl.arange(0, TILE), bits.to(tl.int16), mask=live)
