"""Triton: many tensors <-> one flat buffer in one launch, with cast, scale, squared norms and a non-finite flag."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..table import locate
from ..wire import BLOCK, blocks_of
from .blocks import ROWS, launched, load_pair, store_pair
from .places import load_blocks, store_blocks, triton_dtype

__all__ = ["gather_", "scatter_"]

# Blocks; one is two rows.
_TILE = ROWS * 128 // BLOCK


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
def _report(lower, upper, norms, flag, first, live, dtype: tl.constexpr, TILE: tl.constexpr):
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


@launched("entries", "owners", "norms", "flag")
def gather_kernel(
    entries, size: tl.int32, owners, flat, numel: tl.int64, blocks: tl.int32, scale: tl.float32, norms, flag,
    DTYPE: tl.constexpr, EVEN: tl.constexpr, FLAT_EVEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of blocks: tensors -> flat buffer. Grid: (tiles,)."""
    # Blocks fit 32 bits, elements need not: 2**31 blocks are 2**39 elements.
    first = tl.program_id(0) * TILE
    live = first + tl.arange(0, TILE) < blocks
    start = first.to(tl.int64) * 256
    lower, upper = load_blocks(entries, size, owners, start, live, scale, DTYPE, EVEN, TILE, 2)
    # The flag is that of the dtype that is written, here and below: 70000 is Inf in float16 only.
    _report(lower, upper, norms, flag, first, live, flat.dtype.element_ty, TILE)
    store_pair(flat + start, lower, upper, numel - start, live, FLAT_EVEN, TILE, 2)


@launched("entries", "owners", "norms", "flag")
def scatter_kernel(
    entries, size: tl.int32, owners, flat, numel: tl.int64, blocks: tl.int32, scale: tl.float32, norms, flag,
    DTYPE: tl.constexpr, EVEN: tl.constexpr, FLAT_EVEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of blocks: flat buffer -> tensors. Grid: (tiles,)."""
    first = tl.program_id(0) * TILE
    live = first + tl.arange(0, TILE) < blocks
    start = first.to(tl.int64) * 256
    # ``flat`` is read where no tensor lies, too: norms and flag are those of all of it.
    lower, upper = load_pair(flat + start, numel - start, live, FLAT_EVEN, TILE, 2)
    lower *= scale
    upper *= scale
    _report(lower, upper, norms, flag, first, live, DTYPE, TILE)
    store_blocks(entries, size, owners, start, live, lower, upper, DTYPE, EVEN, TILE, 2)


def _launch(
    kernel: triton.runtime.KernelInterface,
    tensors: Sequence[Tensor],
    host: Tensor,
    entries: Tensor,
    owners: Tensor,
    flat: Tensor,
    scale: float,
    norms: Tensor | None,
    flag: Tensor | None,
) -> None:
    blocks = blocks_of(flat.numel())
    if blocks == 0:
        return
    kernel[(triton.cdiv(blocks, _TILE),)](
        entries, len(tensors), owners, flat, flat.numel(), blocks, scale, norms, flag,
        # locate sends addresses on this stream, so the kernel finds them. FLAT_EVEN: the buffer ends with a block, and
        # masks need not look at elements.
        DTYPE=triton_dtype(tensors), EVEN=locate(tensors, host, entries), FLAT_EVEN=flat.numel() % BLOCK == 0,
        TILE=_TILE, **kernel.options,
    )  # fmt: skip


def gather_(
    tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, flat: Tensor, scale: float,
    norms: Tensor | None, flag: Tensor | None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.gather_`."""
    _launch(gather_kernel, tensors, host, entries, owners, flat, scale, norms, flag)


def scatter_(
    flat: Tensor, tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, scale: float,
    norms: Tensor | None, flag: Tensor | None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.scatter_`."""
    _launch(scatter_kernel, tensors, host, entries, owners, flat, scale, norms, flag)
