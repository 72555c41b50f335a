"""Triton: many tensors <-> one flat buffer in one launch, with cast, scale, squared norms and a non-finite flag."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..table import locate
from ..wire import BLOCK, blocks_of, ceil_div
from .blocks import ROWS, launched, load_pair, store_pair
from .places import load_blocks, store_blocks, triton_dtype
from .stats import report

__all__ = ["gather_", "scatter_"]

# Blocks; one is two rows.
_TILE = ROWS * 128 // BLOCK


@launched("entries", "owners", "device_scale", "norms", "flag")
def gather_kernel(
    entries, size: tl.int32, owners, flat, numel: tl.int64, blocks: tl.int32, scale: tl.float32, device_scale, norms,
    flag, DTYPE: tl.constexpr, EVEN: tl.constexpr, FLAT_EVEN: tl.constexpr, TILE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """A tile of blocks: tensors -> flat buffer. Grid: (tiles,)."""
    # Blocks fit 32 bits, elements need not: 2**31 blocks are 2**39 elements.
    first = tl.program_id(0) * TILE
    live = first + tl.arange(0, TILE) < blocks
    start = first.to(tl.int64) * 256
    if device_scale is not None:
        scale = tl.load(device_scale)
    lower, upper = load_blocks(entries, size, owners, start, live, scale, DTYPE, EVEN, TILE, 2)
    if ACCUMULATE:
        old_lower, old_upper = load_pair(flat + start, numel - start, live, FLAT_EVEN, TILE, 2)
        lower += old_lower
        upper += old_upper
    # The flag is that of the dtype that is written, here and below: 70000 is Inf in float16 only.
    report(lower, upper, norms, flag, first, live, flat.dtype.element_ty, TILE)
    store_pair(flat + start, lower, upper, numel - start, live, FLAT_EVEN, TILE, 2)


@launched("entries", "owners", "device_scale", "norms", "flag")
def scatter_kernel(
    entries, size: tl.int32, owners, flat, numel: tl.int64, blocks: tl.int32, scale: tl.float32, device_scale, norms,
    flag, DTYPE: tl.constexpr, EVEN: tl.constexpr, FLAT_EVEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of blocks: flat buffer -> tensors. Grid: (tiles,)."""
    first = tl.program_id(0) * TILE
    live = first + tl.arange(0, TILE) < blocks
    start = first.to(tl.int64) * 256
    if device_scale is not None:
        scale = tl.load(device_scale)
    # ``flat`` is read where no tensor lies, too: norms and flag are those of all of it.
    lower, upper = load_pair(flat + start, numel - start, live, FLAT_EVEN, TILE, 2)
    lower *= scale
    upper *= scale
    report(lower, upper, norms, flag, first, live, DTYPE, TILE)
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
    device_scale: Tensor | None,
    **constants: bool,
) -> None:
    blocks = blocks_of(flat.numel())
    if blocks == 0:
        return
    kernel[(ceil_div(blocks, _TILE),)](
        entries, len(tensors), owners, flat, flat.numel(), blocks, scale, device_scale, norms, flag,
        # locate sends addresses on this stream, so the kernel finds them. FLAT_EVEN: the buffer ends with a block, and
        # masks need not look at elements.
        DTYPE=triton_dtype(tensors), EVEN=locate(tensors, host, entries), FLAT_EVEN=flat.numel() % BLOCK == 0,
        TILE=_TILE, **constants, **kernel.options,
    )  # fmt: skip


def gather_(
    tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, flat: Tensor, scale: float,
    norms: Tensor | None, flag: Tensor | None, accumulate: bool, device_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.gather_`."""
    _launch(
        gather_kernel, tensors, host, entries, owners, flat, scale, norms, flag, device_scale, ACCUMULATE=accumulate
    )


def scatter_(
    flat: Tensor, tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, scale: float,
    norms: Tensor | None, flag: Tensor | None, device_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.scatter_`."""
    _launch(scatter_kernel, tensors, host, entries, owners, flat, scale, norms, flag, device_scale)
