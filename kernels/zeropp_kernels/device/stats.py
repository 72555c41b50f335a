"""Triton: squared norms of blocks, and a flag for values that are not finite, out of tiles that are in registers."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["report"]


@triton.jit
def _block_norm(lower, upper, TILE: tl.constexpr):
    """[TILE]: sum of squares of each block; always two terms at a time, so that every machine adds in one order."""
    # Rounded three times, never fused. The order below is that of ``_block_norms`` in the reference.
    total = lower * lower + upper * upper
    # In runs of 16, what is 8, 4, 2 and 1 apart. A reduction over two elements has one order; over more, it would be
    # the compiler's.
    for step in tl.static_range(4):
        total = tl.sum(tl.reshape(total, [TILE, 2, 4, 2, 8 >> step]), axis=3)
    # Then the four runs of a half row, first with third and second with fourth, their sums, and last the two rows.
    total = tl.sum(tl.reshape(total, [TILE, 2, 2, 2]), axis=2)
    return tl.sum(tl.sum(total, axis=2), axis=1)


@triton.jit
def report(lower, upper, norms, flag, first, live, dtype: tl.constexpr, TILE: tl.constexpr):
    """Write the norm of each block, and set the flag if a value is Inf or NaN in ``dtype``; programs only write a 1.

    Either may be None, which is a constant to the compiler.
    """
    if norms is not None:
        tl.store(norms + first + tl.arange(0, TILE), _block_norm(lower, upper, TILE), mask=live)
    if flag is not None:
        # Magnitudes from here on are rounded to Inf: half a step past the largest finite value, or Inf itself.
        if dtype == tl.float32:
            limit = 0x7F800000
        elif dtype == tl.bfloat16:
            limit = 0x7F7F8000
        else:
            limit = 0x477FF000
        lower = lower.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        upper = upper.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        bad = tl.max(tl.max(tl.maximum(lower, upper), axis=2), axis=1) >= limit
        # Without atomics: whoever writes, writes 1.
        tl.store(flag + tl.zeros([TILE], tl.int32), tl.full([TILE], 1, tl.int32), mask=live & bad)
