"""Triton: tiles of tensors that lie anywhere, found by the addresses in a :class:`~zeropp_kernels.table.BlockTable`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import aligned, cast, half_rows, loop_end, wide, widen, within

__all__ = ["load_blocks", "store_blocks", "triton_dtype"]

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def triton_dtype(tensors: Sequence[Tensor]) -> tl.dtype:
    """That of all tensors of a table; of none, any will do."""
    return _DTYPES[tensors[0].dtype] if tensors else tl.float32


@triton.jit
def _sole(entries, size, owners, start, blocks, DTYPE: tl.constexpr, BLOCKS: tl.constexpr):
    """(pointer to a tile of BLOCKS blocks, elements from there on) in the tensor that has the first of these blocks.

    No elements where there is no such tensor, or where there are fewer ``blocks``. All scalars: a tile is looked up
    once, not row by row.
    """
    # A tensor has its blocks in a row, so one with so many elements left has all of the tile.
    owner = tl.load(owners + start // 256, mask=blocks >= BLOCKS, other=-1)
    found = owner >= 0
    address = tl.load(entries + owner, mask=found, other=0)
    # entries [3, size]: addresses, elements, offsets.
    numel = tl.load(entries + size + owner, mask=found, other=0)
    position = start - tl.load(entries + 2 * size + owner, mask=found, other=0)
    return address.to(tl.pointer_type(DTYPE)) + position, tl.where(found, numel - position, 0)


@triton.jit
def _rows(entries, size, owners, start, blocks, DTYPE: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """(pointers [TILE, K, 1] to the rows of a tile, elements that their tensors have from there on, at most 128)."""
    row = tl.arange(0, TILE)[:, None] * K + tl.arange(0, K)[None, :]
    # ``start`` is a multiple of 128. A block is two rows, so a row never has two owners.
    block = (start // 128 + row) // 2
    # -1 where no tensor lies; that row of the table is not read.
    owner = tl.load(owners + block, mask=block - start // 256 < blocks, other=-1)
    owned = owner >= 0
    address = tl.load(entries + owner, mask=owned, other=0)
    numel = tl.load(entries + size + owner, mask=owned, other=0)
    # Below zero nowhere: a tensor begins on a block.
    position = start + row * 128 - tl.load(entries + 2 * size + owner, mask=owned, other=0)
    left = within(tl.where(owned, numel - position, 0), 128)
    return (address.to(tl.pointer_type(DTYPE)) + position)[:, :, None], left[:, :, None]


@triton.jit
def _several(owners, start, blocks, BLOCKS: tl.constexpr):
    """(first, one behind the last) of the tensors that have blocks of a tile; nothing between them if none has."""
    block = tl.arange(0, BLOCKS)
    owner = tl.load(owners + start // 256 + block, mask=block < blocks, other=-1)
    return tl.min(tl.where(owner < 0, 0x7FFFFFFF, owner), axis=0), tl.max(owner, axis=0) + 1


@triton.jit
def _part(entries, size, owner, start, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """Where the tile's element 0 would lie in a tensor, and which of its SIZE elements do: from one on, up to one."""
    offset = tl.load(entries + 2 * size + owner) - start
    end = offset + tl.load(entries + size + owner)
    pointer = tl.load(entries + owner).to(tl.pointer_type(DTYPE)) - offset
    return pointer, within(offset, SIZE), within(end, SIZE)


@triton.jit
def load_blocks(entries, size, owners, start, blocks, scale, DTYPE: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """A tile of values in float32, times ``scale``, from element ``start`` of the flat buffer on.

    Zeros where no tensor lies, under a negative scale too, and from the block on that is ``blocks`` after the first.
    """
    SIZE: tl.constexpr = TILE * K * 128
    source, left = _sole(entries, size, owners, start, blocks, DTYPE, TILE * K // 2)
    if wide(source, left, SIZE):
        at = half_rows(128, TILE, K)
        lower = widen(tl.load(aligned(source, at))) * scale
        upper = widen(tl.load(aligned(source, at + 64))) * scale
    else:
        pointers, there = _rows(entries, size, owners, start, blocks, DTYPE, TILE, K)
        column = tl.arange(0, 64)[None, None, :]
        is_lower = column < there
        is_upper = column + 64 < there
        # Gaps stay +0: 0.0 times a negative scale would be -0.
        lower = widen(tl.load(pointers + column, mask=is_lower, other=0.0)) * tl.where(is_lower, scale, 1.0)
        upper = widen(tl.load(pointers + (column + 64), mask=is_upper, other=0.0)) * tl.where(is_upper, scale, 1.0)
    return lower, upper


@triton.jit
def store_blocks(
    entries, size, owners, start, blocks, lower, upper, DTYPE: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr
):
    """Write a tile of float32 values to the tensors that lie there; the mirror of :func:`load_blocks`."""
    at = half_rows(128, TILE, K)
    SIZE: tl.constexpr = TILE * K * 128
    lower = cast(lower, DTYPE)
    upper = cast(upper, DTYPE)
    target, left = _sole(entries, size, owners, start, blocks, DTYPE, TILE * K // 2)
    if wide(target, left, SIZE):
        tl.store(aligned(target, at), lower)
        tl.store(aligned(target, at + 64), upper)
    else:
        # One tensor after the other. A pointer and a bound for each row would take half as many registers again; so
        # would what the loop's invariants are, if they were computed before it.
        first, behind = _several(owners, start, blocks, TILE * K // 2)
        for owner in tl.range(loop_end(first), loop_end(behind), disable_licm=True):
            target, begin, end = _part(entries, size, owner, start, DTYPE, SIZE)
            tl.store(target + at, lower, mask=(at >= begin) & (at < end))
            tl.store(target + at + 64, upper, mask=(at + 64 >= begin) & (at + 64 < end))
