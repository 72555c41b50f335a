"""Triton: error feedback (LoCo), the part of an encoding kernel that adds what the last messages lost.

Source: LoCo (arXiv 2407.04480), with the error averaged as e <- beta e + (1 - beta) (h - decode(code(h))).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    encode_pair,
    group_peak,
    load_codes,
    scale_of,
    scale_value,
    store_encoded,
    value_pair,
)

__all__ = ["keep_error", "load_error"]


@triton.jit
def load_error(state, scales_offset, first, live, reset, TILE: tl.constexpr, K: tl.constexpr):
    """The error kept for a tile, in float32; zeros (of any sign) after a reset, whatever the state holds."""
    # A state has 8-bit codes whatever the message has, in the message's groups: 128 * K bytes each.
    codes = state + first.to(tl.int64) * (128 * K)
    lower, upper = load_codes(codes, live[:, None, None], 8, TILE, K)
    scales = (state + scales_offset).to(tl.pointer_type(tl.int16)) + first
    scale = scale_value(tl.load(scales + tl.arange(0, TILE), mask=live, other=0))
    # Codes are finite, so clearing the scale is enough. Chosen, not multiplied: 0 * NaN is NaN.
    scale = tl.where(reset != 0, 0.0, scale)
    return value_pair(lower, upper, scale[:, None, None], 8)


@triton.jit
def keep_error(
    state, scales_offset, first, live, old_lower, old_upper, lost_lower, lost_upper, beta, rest,
    TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Average what was lost now into the state; groups out of ``live`` keep theirs to the bit.

    A group in ``live`` whose new error is not finite gets zeros, as at first.
    """
    # Two products and a sum, each rounded, as in the reference. ``rest`` is 1 - beta, rounded on the host.
    lower = old_lower * beta + lost_lower * rest
    upper = old_upper * beta + lost_upper * rest
    bits, inverse, finite = scale_of(group_peak(lower, upper), 8)
    # No NaN may get into a state, where it would spoil the group for ever.
    bits = tl.where(finite, bits, 0)
    lower, upper, _, _ = encode_pair(lower, upper, inverse)
    store_encoded(state + first.to(tl.int64) * (128 * K), lower, upper, live, finite, 8, TILE, K)
    # Without the zeros that store_scales writes behind the last group: they are there from the beginning.
    scales = (state + scales_offset).to(tl.pointer_type(tl.int16)) + first
    tl.store(scales + tl.arange(0, TILE), bits.to(tl.int16), mask=live)
