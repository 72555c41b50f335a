"""Device functions for squared norms of blocks and the non-finite flag, computed from tiles in registers."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["report"]


@triton.jit
def _block_norm(lower, upper, TILE: tl.constexpr):
    """Return the sum of squares of each block, [TILE], adding two terms at a time in a fixed order."""
    # Two products and a sum, each rounded, never fused. The order is that of _block_norms in the reference.
    total = lower * lower + upper * upper
    # Within runs of 16, add elements that are 8, 4, 2 and 1 apart. A sum over an axis of two has one order; over a
    # longer axis the compiler would choose it.
    for step in tl.static_range(4):
        total = tl.sum(tl.reshape(total, [TILE, 2, 4, 2, 8 >> step]), axis=3)
    # Then the four runs of a half row: first with third, second with fourth, and their sums. Last the two rows.
    total = tl.sum(tl.reshape(total, [TILE, 2, 2, 2]), axis=2)
    return tl.sum(tl.sum(total, axis=2), axis=1)


@triton.jit
def report(lower, upper, norms, flag, first, live, dtype: tl.constexpr, TILE: tl.constexpr):
    """Store the norm of each live block, and set the flag to 1 if a value is Inf or NaN when rounded to ``dtype``.

    ``norms`` or ``flag`` may be None, which is a constant for the compiler, so that its part is not compiled.
    """
    if norms is not None:
        tl.store(norms + first + tl.arange(0, TILE), _block_norm(lower, upper, TILE), mask=live)
    if flag is not None:
        # Smallest magnitude, as bits, that is Inf in dtype: half a step past the largest finite value, or Inf for
        # float32.
        if dtype == tl.float32:
            limit = 0x7F800000
        elif dtype == tl.bfloat16:
            limit = 0x7F7F8000
        else:
            limit = 0x477FF000
        lower = lower.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        upper = upper.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        bad = tl.max(tl.max(tl.maximum(lower, upper), axis=2), axis=1) >= limit
        # No atomics needed, because every program that stores to the flag stores 1.
        tl.store(flag + tl.zeros([TILE], tl.int32), tl.full([TILE], 1, tl.int32), mask=live & bad)
