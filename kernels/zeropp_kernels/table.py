"""Triton: tensors that lie anywhere in memory, addressed as one flat buffer in which each starts on a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import cast, widen
from .wire import BLOCK, blocks_of

__all__ = ["BlockTable", "block_table", "load_blocks", "store_blocks"]

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class BlockTable:
    """What a kernel needs to find the tensors."""

    tensors: Tensor  # int64 [n, 3]: address, elements, offset in the flat buffer
    tensor_of_block: Tensor  # int32 [blocks]: -1 where there is none
    dtype: tl.dtype
    even: bool  # each tensor is a multiple of 64 elements at an address that is a multiple of 16 bytes


@lru_cache(maxsize=256)
def _tensor_of_block(offsets: tuple[int, ...], numels: tuple[int, ...], blocks: int, device: torch.device) -> Tensor:
    owners = torch.full((blocks,), -1, dtype=torch.int32, device="cpu")
    for index, (offset, numel) in enumerate(zip(offsets, numels, strict=True)):
        owners[offset // BLOCK : blocks_of(offset + numel)] = index
    return owners.to(device)


def block_table(tensors: Sequence[Tensor], offsets: Sequence[int], numel: int, device: torch.device) -> BlockTable:
    """Table of ``tensors`` (one dtype, contiguous) at ``offsets`` of a flat buffer of ``numel`` elements.

    Which block belongs to which tensor is kept for the next call; the addresses are sent each time.
    """
    numels = tuple(tensor.numel() for tensor in tensors)
    rows = [(tensor.data_ptr(), count, offset) for tensor, count, offset in zip(tensors, numels, offsets, strict=True)]
    host = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3)
    if device.type == "cuda":
        host = host.pin_memory()
    return BlockTable(
        tensors=host.to(device, non_blocking=True),
        tensor_of_block=_tensor_of_block(tuple(offsets), numels, blocks_of(numel), device),
        dtype=_TRITON_DTYPES[tensors[0].dtype if tensors else torch.float32],
        even=all(address % 16 == 0 and count % 64 == 0 for address, count, _ in rows),
    )


@triton.jit
def _places(table, tensor_of_block, start, live, DTYPE: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """(pointers [TILE, K, 1] to the rows of a tile, elements left in their tensors from there on)."""
    row = start // 128 + tl.arange(0, TILE)[:, None] * K + tl.arange(0, K)[None, :]
    owner = tl.load(tensor_of_block + row // 2, mask=live[:, None], other=-1)
    owned = owner >= 0
    entry = table + owner * 3
    address = tl.load(entry, mask=owned, other=0)
    numel = tl.load(entry + 1, mask=owned, other=0)
    position = row * 128 - tl.load(entry + 2, mask=owned, other=0)
    pointers = address.to(tl.pointer_type(DTYPE)) + position
    return pointers[:, :, None], tl.where(owned, numel - position, 0)[:, :, None]


@triton.jit
def _half(pointers, EVEN: tl.constexpr):
    """Pointers to 64 elements of each row."""
    pointers = pointers + tl.arange(0, 64)[None, None, :]
    if EVEN:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, 1, 16)), (1, 1, 64))
    return pointers


@triton.jit
def load_blocks(
    table, tensor_of_block, start, live, DTYPE: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr
):
    """A tile of values in float32 from element ``start`` of the flat buffer on; zeros where no tensor lies."""
    pointers, left = _places(table, tensor_of_block, start, live, DTYPE, TILE, K)
    at = tl.arange(0, 64)[None, None, :]
    if EVEN:
        lower = tl.load(_half(pointers, True), mask=left >= 64, other=0.0)
        upper = tl.load(_half(pointers + 64, True), mask=left >= 128, other=0.0)
    else:
        lower = tl.load(_half(pointers, False), mask=at < left, other=0.0)
        upper = tl.load(_half(pointers + 64, False), mask=at + 64 < left, other=0.0)
    return widen(lower), widen(upper)


@triton.jit
def store_blocks(
    table, tensor_of_block, start, live, lower, upper,
    DTYPE: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write a tile of float32 values to the tensors that lie there; the mirror of :func:`load_blocks`."""
    pointers, left = _places(table, tensor_of_block, start, live, DTYPE, TILE, K)
    at = tl.arange(0, 64)[None, None, :]
    lower = cast(lower, DTYPE)
    upper = cast(upper, DTYPE)
    if EVEN:
        tl.store(_half(pointers, True), lower, mask=left >= 64)
        tl.store(_half(pointers + 64, True), upper, mask=left >= 128)
    else:
        tl.store(_half(pointers, False), lower, mask=at < left)
        tl.store(_half(pointers + 64, False), upper, mask=at + 64 < left)
