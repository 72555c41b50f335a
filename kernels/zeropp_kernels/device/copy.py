"""Triton: many tensors <-> one flat buffer in one launch, with cast, scale, squared norms and a non-finite flag."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..table import locate
from ..wire import BLOCK, blocks_of, ceil_div
from .blocks import load_pair, loop_end, store_pair
from .launch import ROWS, launched
from .places import load_blocks, store_blocks, triton_dtype
from .stats import report

__all__ = ["gather_", "scatter_"]

# Blocks; one is two rows.
_TILE = ROWS * 128 // BLOCK
# Programs that read or write pinned host memory at a time. Each waits for the bus with 8 to 16 KiB of its own on the
# way, of which a few hundred KiB fill it; more programs would only keep others from the multiprocessors meanwhile.
_PINNED_PROGRAMS = 32


@triton.jit
def _gather_tile(
    tile, entries, size, owners, flat, numel, blocks, scale, device_scale, norms, flag, DTYPE: tl.constexpr,
    TILE: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    # Blocks fit 32 bits, elements need not: 2**31 blocks are 2**39 elements.
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
    # The flag is that of the dtype that is written, here and below: 70000 is Inf in float16 only.
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
    # ``flat`` is read where no tensor lies, too: norms and flag are those of all of it.
    lower, upper = load_pair(flat + start, numel - start, TILE, 2)
    lower *= scale
    upper *= scale
    report(lower, upper, norms, flag, first, live, DTYPE, TILE)
    store_blocks(entries, size, owners, start, blocks - first, lower, upper, DTYPE, TILE, 2)


@launched("entries", "owners", "flat", "device_scale", "norms", "flag", registers=104)
def gather_kernel(
    entries, size: tl.int32, owners, flat, numel: tl.int64, blocks: tl.int32, scale: tl.float32, device_scale, norms,
    flag, DTYPE: tl.constexpr, TILE: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """A tile of blocks: tensors -> flat buffer. Grid: (tiles,)."""
    tile = tl.program_id(0)
    _gather_tile(
        tile, entries, size, owners, flat, numel, blocks, scale, device_scale, norms, flag, DTYPE, TILE, ACCUMULATE
    )


@launched("entries", "owners", "flat", "device_scale", "norms", "flag")
def gather_pinned_kernel(
    entries, size: tl.int32, owners, flat, numel: tl.int64, blocks: tl.int32, scale: tl.float32, device_scale, norms,
    flag, DTYPE: tl.constexpr, TILE: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """The same by programs that take turns. Grid: (as many as there are to be,)."""
    end, step = loop_end(tl.cdiv(blocks, TILE)), loop_end(tl.num_programs(0))
    for tile in tl.range(loop_end(tl.program_id(0)), end, step, num_stages=1, disable_licm=True):
        _gather_tile(
            tile, entries, size, owners, flat, numel, blocks, scale, device_scale, norms, flag, DTYPE, TILE, ACCUMULATE
        )


@launched("entries", "owners", "flat", "device_scale", "norms", "flag", registers=88)
def scatter_kernel(
    entries, size: tl.int32, owners, flat, numel: tl.int64, blocks: tl.int32, scale: tl.float32, device_scale, norms,
    flag, DTYPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of blocks: flat buffer -> tensors. Grid: (tiles,)."""
    tile = tl.program_id(0)
    _scatter_tile(tile, entries, size, owners, flat, numel, blocks, scale, device_scale, norms, flag, DTYPE, TILE)


@launched("entries", "owners", "flat", "device_scale", "norms", "flag")
def scatter_pinned_kernel(
    entries, size: tl.int32, owners, flat, numel: tl.int64, blocks: tl.int32, scale: tl.float32, device_scale, norms,
    flag, DTYPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The same by programs that take turns. Grid: (as many as there are to be,)."""
    end, step = loop_end(tl.cdiv(blocks, TILE)), loop_end(tl.num_programs(0))
    for tile in tl.range(loop_end(tl.program_id(0)), end, step, num_stages=1, disable_licm=True):
        _scatter_tile(tile, entries, size, owners, flat, numel, blocks, scale, device_scale, norms, flag, DTYPE, TILE)


def is_pinned(flat: Tensor, entries: Tensor) -> bool:
    """Whether ``flat`` is in the host's memory, and the table is not."""
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
) -> None:
    """Launch the first of ``kernels``, or the second where ``flat`` is in pinned memory."""
    blocks = blocks_of(flat.numel())
    if blocks == 0:
        return
    # Addresses are sent on this stream, so the kernel finds them.
    locate(tensors, host, entries)
    tiles, pinned = ceil_div(blocks, _TILE), is_pinned(flat, entries)
    kernel = kernels[pinned]
    kernel[(min(tiles, _PINNED_PROGRAMS) if pinned else tiles,)](
        entries, len(tensors), owners, flat, flat.numel(), blocks, scale, device_scale, norms, flag,
        DTYPE=triton_dtype(tensors), TILE=_TILE, **constants, **kernel.options,
    )  # fmt: skip


def gather_(
    tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, flat: Tensor, scale: float,
    norms: Tensor | None, flag: Tensor | None, accumulate: bool, device_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.gather_`."""
    kernels = gather_kernel, gather_pinned_kernel
    _launch(kernels, tensors, host, entries, owners, flat, scale, norms, flag, device_scale, ACCUMULATE=accumulate)


def scatter_(
    flat: Tensor, tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, scale: float,
    norms: Tensor | None, flag: Tensor | None, device_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.scatter_`."""
    kernels = scatter_kernel, scatter_pinned_kernel
    _launch(kernels, tensors, host, entries, owners, flat, scale, norms, flag, device_scale)
