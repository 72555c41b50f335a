"""Triton kernels that copy between many tensors and one flat buffer in one launch, with cast, scale, norms and flag."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..table import locate
from ..wire import BLOCK, blocks_of, ceil_div
from .blocks import load_pair, loop_end, store_pair
from .launch import Launch, launch, launched
from .places import load_blocks, store_blocks, triton_dtype
from .stats import report
from .tiles import tile_of

__all__ = ["gather_", "scatter_"]

# Number of programs if flat is in pinned host memory. Each has 8 to 16 KiB in flight on the bus, and a few hundred KiB
# saturate it. More programs would only occupy multiprocessors that other kernels could use.
_PINNED_PROGRAMS = 32


@triton.jit
def _gather_tile(
    tile, entries, size, owners, flat, numel, blocks, scale, device_scale, norms, flag, DTYPE: tl.constexpr,
    TILE: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    # Block numbers fit 32 bits: 2**31 blocks are 2**39 elements. Element numbers need 64 bits.
    first = tile * TILE
    live = first + tl.arange(0, TILE) < blocks
    start = first.to(tl.int64) * 256
    if device_scale is not None:
        scale = tl.load(device_scale)
    lower, upper = load_blocks(entries, size, owners, start, blocks - first, scale, DTYPE, TILE, 2)
    if ACCUMULATE:
        old_lower, old_upper = load_pair(flat + start, numel - start, TILE, 2)
        lower += old_lower
        upper += old_upper
    # The flag is checked in the dtype that is stored: 70000 is Inf in float16 only.
    report(lower, upper, norms, flag, first, live, flat.dtype.element_ty, TILE)
    store_pair(flat + start, lower, upper, numel - start, TILE, 2)


@triton.jit
def _scatter_tile(
    tile, entries, size, owners, flat, numel, blocks, scale, device_scale, norms, flag, DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    first = tile * TILE
    live = first + tl.arange(0, TILE) < blocks
    start = first.to(tl.int64) * 256
    if device_scale is not None:
        scale = tl.load(device_scale)
    # Read all of flat, also where no tensor is, because norms and flag are those of the whole buffer.
    lower, upper = load_pair(flat + start, numel - start, TILE, 2)
    lower *= scale
    upper *= scale
    report(lower, upper, norms, flag, first, live, DTYPE, TILE)
    store_blocks(entries, size, owners, start, blocks - first, lower, upper, DTYPE, TILE, 2)


@launched("entries", "owners", "flat", "device_scale", "norms", "flag")
def gather_kernel(
    entries, size: tl.int32, owners, flat, numel: tl.int64, blocks: tl.int32, scale: tl.float32, device_scale, norms,
    flag, DTYPE: tl.constexpr, TILE: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Copy one tile of blocks from tensors to the flat buffer. Grid: (tiles,)."""
    tile = tl.program_id(0)
    _gather_tile(
        tile, entries, size, owners, flat, numel, blocks, scale, device_scale, norms, flag, DTYPE, TILE, ACCUMULATE
    )


@launched("entries", "owners", "flat", "device_scale", "norms", "flag")
def gather_pinned_kernel(
    entries, size: tl.int32, owners, flat, numel: tl.int64, blocks: tl.int32, scale: tl.float32, device_scale, norms,
    flag, DTYPE: tl.constexpr, TILE: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Copy from tensors to a flat buffer in pinned host memory. Grid: (n,).

    Program p of n copies tiles p, p + n, p + 2 n, ... in a loop.
    """
    end, step = loop_end(tl.cdiv(blocks, TILE)), loop_end(tl.num_programs(0))
    for tile in tl.range(loop_end(tl.program_id(0)), end, step, num_stages=1, disable_licm=True):
        _gather_tile(
            tile, entries, size, owners, flat, numel, blocks, scale, device_scale, norms, flag, DTYPE, TILE, ACCUMULATE
        )


@launched("entries", "owners", "flat", "device_scale", "norms", "flag")
def scatter_kernel(
    entries, size: tl.int32, owners, flat, numel: tl.int64, blocks: tl.int32, scale: tl.float32, device_scale, norms,
    flag, DTYPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy one tile of blocks from the flat buffer to tensors. Grid: (tiles,)."""
    tile = tl.program_id(0)
    _scatter_tile(tile, entries, size, owners, flat, numel, blocks, scale, device_scale, norms, flag, DTYPE, TILE)


@launched("entries", "owners", "flat", "device_scale", "norms", "flag")
def scatter_pinned_kernel(
    entries, size: tl.int32, owners, flat, numel: tl.int64, blocks: tl.int32, scale: tl.float32, device_scale, norms,
    flag, DTYPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy from a flat buffer in pinned host memory to tensors. Grid: (n,).

    Program p of n copies tiles p, p + n, p + 2 n, ... in a loop.
    """
    end, step = loop_end(tl.cdiv(blocks, TILE)), loop_end(tl.num_programs(0))
    for tile in tl.range(loop_end(tl.program_id(0)), end, step, num_stages=1, disable_licm=True):
        _scatter_tile(tile, entries, size, owners, flat, numel, blocks, scale, device_scale, norms, flag, DTYPE, TILE)


def is_pinned(flat: Tensor, entries: Tensor) -> bool:
    """Return True if ``flat`` is in host memory while the table is on a GPU."""
    return flat.device != entries.device


def _launch(
    kernels: tuple[triton.runtime.KernelInterface, triton.runtime.KernelInterface],
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
) -> Launch | None:
    """Launch the first of ``kernels``, or the second if ``flat`` is in pinned host memory."""
    blocks = blocks_of(flat.numel())
    if blocks == 0:
        return None
    # Addresses are sent on the current stream, before the kernel that reads them.
    locate(tensors, host, entries)
    pinned = is_pinned(flat, entries)
    tile = tile_of(kernels[pinned]).holds(BLOCK)
    tiles = ceil_div(blocks, tile)
    return launch(
        kernels[pinned], (min(tiles, _PINNED_PROGRAMS) if pinned else tiles,),
        entries, len(tensors), owners, flat, flat.numel(), blocks, scale, device_scale, norms, flag,
        DTYPE=triton_dtype(tensors), TILE=tile, **constants,
    )  # fmt: skip


def gather_(
    tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, flat: Tensor, scale: float,
    norms: Tensor | None, flag: Tensor | None, accumulate: bool, device_scale: Tensor | None = None,
) -> Launch | None:  # fmt: skip
    """Copy tensors into a flat buffer with a Triton kernel, with the arguments of :func:`zeropp_kernels.gather_`."""
    kernels = gather_kernel, gather_pinned_kernel
    return _launch(
        kernels, tensors, host, entries, owners, flat, scale, norms, flag, device_scale, ACCUMULATE=accumulate
    )


def scatter_(
    flat: Tensor, tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, scale: float,
    norms: Tensor | None, flag: Tensor | None, device_scale: Tensor | None = None,
) -> Launch | None:  # fmt: skip
    """Copy a flat buffer into tensors with a Triton kernel, with the arguments of :func:`zeropp_kernels.scatter_`."""
    kernels = scatter_kernel, scatter_pinned_kernel
    return _launch(kernels, tensors, host, entries, owners, flat, scale, norms, flag, device_scale)
