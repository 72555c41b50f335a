"""Triton: tiles of tensors that lie anywhere, found by the addresses in a :class:`~zeropp_kernels.table.BlockTable`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import cast, widen

__all__ = ["load_blocks", "store_blocks", "triton_dtype"]

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def triton_dtype(tensors: Sequence[Tensor]) -> tl.dtype:
    """That of all tensors of a table; of none, any will do."""
    return _DTYPES[tensors[0].dtype] if tensors else tl.float32


@triton.jit
def _places(entries, size, owners, start, live, DTYPE: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """(pointers [TILE, K, 1] to the rows of a tile, elements that their tensors have from there on)."""
    # ``start`` is a multiple of 128. A block is two rows, so a row never has two owners.
    row = start // 128 + tl.arange(0, TILE)[:, None] * K + tl.arange(0, K)[None, :]
    # -1 where no tensor lies; that row of the table is not read.
    owner = tl.load(owners + row // 2, mask=live[:, None], other=-1)
    owned = owner >= 0
    # entries [3, size]: addresses, elements, offsets.
    address = tl.load(entries + owner, mask=owned, other=0)
    numel = tl.load(entries + size + owner, mask=owned, other=0)
    position = row * 128 - tl.load(entries + 2 * size + owner, mask=owned, other=0)
    # ``position`` is below zero nowhere: a tensor begins on a block.
    pointers = address.to(tl.pointer_type(DTYPE)) + position
    return pointers[:, :, None], tl.where(owned, numel - position, 0)[:, :, None]


@triton.jit
def _half(pointers, EVEN: tl.constexpr):
    """Pointers to 64 elements of each row."""
    pointers = pointers + tl.arange(0, 64)[None, None, :]
    if EVEN:
        # An address that comes out of memory tells the compiler nothing. ``locate`` has looked: multiples of 16 bytes,
        # so what it is told here holds.
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, 1, 16)), (1, 1, 64))
    return pointers


@triton.jit
def load_blocks(
    entries, size, owners, start, live, scale,
    DTYPE: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile of values in float32, times ``scale``, from element ``start`` of the flat buffer on.

    Zeros where no tensor lies, under a negative scale too.
    """
    pointers, left = _places(entries, size, owners, start, live, DTYPE, TILE, K)
    at = tl.arange(0, 64)[None, None, :]
    # If EVEN, tensors are multiples of 64 elements, and half a row is there or is not.
    in_lower = left >= 64 if EVEN else at < left
    in_upper = left >= 128 if EVEN else at + 64 < left
    lower = tl.load(_half(pointers, EVEN), mask=in_lower, other=0.0)
    upper = tl.load(_half(pointers + 64, EVEN), mask=in_upper, other=0.0)
    # Gaps stay +0: 0.0 times a negative scale would be -0.
    return widen(lower) * tl.where(in_lower, scale, 1.0), widen(upper) * tl.where(in_upper, scale, 1.0)


@triton.jit
def store_blocks(
    entries, size, owners, start, live, lower, upper,
    DTYPE: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write a tile of float32 values to the tensors that lie there; the mirror of :func:`load_blocks`."""
    pointers, left = _places(entries, size, owners, start, live, DTYPE, TILE, K)
    at = tl.arange(0, 64)[None, None, :]
    lower = cast(lower, DTYPE)
    upper = cast(upper, DTYPE)
    if EVEN:
        tl.store(_half(pointers, True), lower, mask=left >= 64)
        tl.store(_half(pointers + 64, True), upper, mask=left >= 128)
    else:
        tl.store(_half(pointers, False), lower, mask=at < left)
        tl.store(_half(pointers + 64, False), upper, mask=at + 64 < left)
