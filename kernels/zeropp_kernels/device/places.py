"""Device functions that load and store tiles of tensors at arbitrary addresses, through a block table.

Kernels get the table's ``entries`` and ``owners``, see :class:`~zeropp_kernels.table.BlockTable`, and ``size``, the
number of tensors.
"""

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
    """Return the Triton dtype of the tensors of a table; float32 for a table without tensors."""
    return _DTYPES[tensors[0].dtype] if tensors else tl.float32


@triton.jit
def _sole(entries, size, owners, start, blocks, DTYPE: tl.constexpr, BLOCKS: tl.constexpr):
    """Return (pointer, elements left) of a tile in the tensor that has its first block.

    The pointer is to the tile's first element. Elements left is the number of elements of the tensor from there on: 0
    if no tensor has the first block, or if fewer than BLOCKS blocks of the buffer are left. All values are scalars, so
    a tile needs one lookup.
    """
    # The blocks of a tensor follow each other, so a tensor with enough elements left has the whole tile.
    owner = tl.load(owners + start // 256, mask=blocks >= BLOCKS, other=-1)
    found = owner >= 0
    address = tl.load(entries + owner, mask=found, other=0)
    # entries is [3, size]: rows of addresses, numbers of elements, and offsets.
    numel = tl.load(entries + size + owner, mask=found, other=0)
    position = start - tl.load(entries + 2 * size + owner, mask=found, other=0)
    return address.to(tl.pointer_type(DTYPE)) + position, tl.where(found, numel - position, 0)


@triton.jit
def _rows(entries, size, owners, start, blocks, DTYPE: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """Return (pointers, elements left), each [TILE, K, 1], of the rows of a tile, at most 128 elements per row."""
    row = tl.arange(0, TILE)[:, None] * K + tl.arange(0, K)[None, :]
    # start is a multiple of 128. A block is two rows, so a row belongs to at most one tensor.
    block = (start // 128 + row) // 2
    # -1 where no tensor is; the table's entries are then not read.
    owner = tl.load(owners + block, mask=block - start // 256 < blocks, other=-1)
    owned = owner >= 0
    address = tl.load(entries + owner, mask=owned, other=0)
    numel = tl.load(entries + size + owner, mask=owned, other=0)
    # position is never negative, because a tensor starts on a block.
    position = start + row * 128 - tl.load(entries + 2 * size + owner, mask=owned, other=0)
    left = within(tl.where(owned, numel - position, 0), 128)
    return (address.to(tl.pointer_type(DTYPE)) + position)[:, :, None], left[:, :, None]


@triton.jit
def _several(owners, start, blocks, BLOCKS: tl.constexpr):
    """Return (first, last + 1): the range of indices of tensors that have blocks in a tile; empty if there are none."""
    block = tl.arange(0, BLOCKS)
    owner = tl.load(owners + start // 256 + block, mask=block < blocks, other=-1)
    return tl.min(tl.where(owner < 0, 0x7FFFFFFF, owner), axis=0), tl.max(owner, axis=0) + 1


@triton.jit
def _part(entries, size, owner, start, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """Return (pointer, begin, end) of one tensor in a tile: elements [begin, end) of the tile belong to the tensor.

    The pointer is the address at which element 0 of the tile would be; it may be outside the tensor.
    """
    offset = tl.load(entries + 2 * size + owner) - start
    end = offset + tl.load(entries + size + owner)
    pointer = tl.load(entries + owner).to(tl.pointer_type(DTYPE)) - offset
    return pointer, within(offset, SIZE), within(end, SIZE)


@triton.jit
def load_blocks(entries, size, owners, start, blocks, scale, DTYPE: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """Load a tile of tensors as float32 times ``scale``, from element ``start`` of the flat buffer on.

    Elements where no tensor is are +0, also with a negative scale. So are elements of blocks past ``blocks``, counted
    from the tile's first block.
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
        # Gaps must stay +0: 0.0 times a negative scale would be -0.
        lower = widen(tl.load(pointers + column, mask=is_lower, other=0.0)) * tl.where(is_lower, scale, 1.0)
        upper = widen(tl.load(pointers + (column + 64), mask=is_upper, other=0.0)) * tl.where(is_upper, scale, 1.0)
    return lower, upper


@triton.jit
def store_blocks(
    entries, size, owners, start, blocks, lower, upper, DTYPE: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr
):
    """Store a tile of float32 values to the tensors that have its elements; it starts at element ``start``."""
    at = half_rows(128, TILE, K)
    SIZE: tl.constexpr = TILE * K * 128
    lower = cast(lower, DTYPE)
    upper = cast(upper, DTYPE)
    target, left = _sole(entries, size, owners, start, blocks, DTYPE, TILE * K // 2)
    if wide(target, left, SIZE):
        tl.store(aligned(target, at), lower)
        tl.store(aligned(target, at + 64), upper)
    else:
        # Store to one tensor at a time. A pointer and a bound per row, as in load_blocks, would take half as many
        # registers again. Loop invariants hoisted out of the loop would do the same, hence disable_licm.
        first, behind = _several(owners, start, blocks, TILE * K // 2)
        for owner in tl.range(loop_end(first), loop_end(behind), disable_licm=True):
            target, begin, end = _part(entries, size, owner, start, DTYPE, SIZE)
            tl.store(target + at, lower, mask=(at >= begin) & (at < end))
            tl.store(target + at + 64, upper, mask=(at + 64 >= begin) & (at + 64 < end))
