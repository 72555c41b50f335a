"""Tensors that lie anywhere in memory, addressed as one flat buffer in which each starts on a block."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from .wire import BLOCK, blocks_of

__all__ = ["BlockTable", "block_table", "in_memory_order", "locate"]


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Where each of n tensors lies in a flat buffer: made once, for tensors that keep their sizes and places.

    A kernel finds the tensors by their addresses, which the table keeps on the device. They are sent again only when
    they have changed, without a wait; calls that share a table therefore belong on one stream, and a table whose calls
    are in a CUDA graph belongs to that graph.

    Attributes:
        numel: elements of the flat buffer.
        host: int64 [3, n] on CPU: addresses as the device knows them (0 before the first call), elements, offsets.
        entries: the same on the device of the tensors.
        owners: int32 [blocks] on that device: which tensor lies in a block, -1 where none does.
    """

    numel: int
    host: Tensor
    entries: Tensor
    owners: Tensor


def _integers(name: str, given: Iterable[int]) -> list[int]:
    try:
        return [operator.index(each) for each in given]
    except TypeError as error:
        raise TypeError(f"{name} is {given!r}; expected integers") from error


def in_memory_order(tensor: Tensor) -> Tensor:
    """Flat view of a tensor without gaps: its elements in the order in which they lie in memory."""
    # Only of tensors that checks have found to be without gaps: this view would read over them.
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _check(numels: Sequence[int], offsets: Sequence[int], numel: int) -> None:
    if len(numels) != len(offsets):
        raise ValueError(f"numels has {len(numels)} entries and offsets {len(offsets)}; expected one offset a tensor")
    end = 0
    for index, (count, offset) in enumerate(zip(numels, offsets, strict=True)):
        if count < 0:
            raise ValueError(f"numels[{index}] is {count}; expected 0 or more elements")
        if offset % BLOCK or offset < end:
            raise ValueError(
                f"offsets[{index}] is {offset}; expected a multiple of {BLOCK} that is at least {end}, the end of the "
                f"tensor before it"
            )
        end = offset + count
        if end > numel:
            raise ValueError(f"tensor {index} would end at element {end}; the flat buffer has {numel}")


def block_table(
    numels: Iterable[int],
    offsets: Iterable[int] | None = None,
    numel: int | None = None,
    *,
    device: torch.device | str = "cpu",
) -> BlockTable:
    """Table of n tensors in a flat buffer of ``numel`` elements.

    Args:
        numels: elements of each tensor.
        offsets: where each begins in the flat buffer, in order, apart, on multiples of 256; by default each on the
            first block after the one before it.
        numel: elements of the flat buffer, by default up to the end of the last tensor's last block; what lies
            between tensors counts as zeros.
        device: that of the tensors.

    Raises:
        TypeError: what is no integer.
        ValueError: what does not fit, by index.
    """
    numels = _integers("numels", numels)
    # Negative numbers are refused below, by their index.
    ends = list(accumulate((blocks_of(max(count, 0)) * BLOCK for count in numels), initial=0))
    offsets = ends[:-1] if offsets is None else _integers("offsets", offsets)
    # Up to the end of the last block, so that the buffer has whole blocks.
    if numel is None:
        numel = blocks_of(max(offsets[-1] + numels[-1], 0)) * BLOCK if numels and len(offsets) == len(numels) else 0
    (numel,) = _integers("numel", [numel])
    _check(numels, offsets, numel)
    # What that mode makes could not be written to outside it.
    with torch.inference_mode(False):
        host = torch.tensor([[0] * len(numels), numels, offsets], dtype=torch.int64, device="cpu")
        owners = torch.full((blocks_of(numel),), -1, dtype=torch.int32, device="cpu")
        for index, (count, offset) in enumerate(zip(numels, offsets, strict=True)):
            # An empty tensor owns no block.
            owners[offset // BLOCK : blocks_of(offset + count)] = index
        # Copied on CPU, too: operations write to both, and what they write must not overlap.
        return BlockTable(numel, host, host.to(device, copy=True), owners.to(device))


def locate(tensors: Sequence[Tensor], host: Tensor, entries: Tensor) -> None:
    """Make ``entries`` hold the addresses of the tensors.

    The host does not wait: what is sent lies in pinned memory that torch keeps until it has arrived.

    Raises:
        RuntimeError: a CUDA graph is being captured and addresses have changed; it would send stale ones when replayed.
    """
    known = host[0].tolist()
    addresses = [tensor.data_ptr() for tensor in tensors]
    # Compared on the host, so that nothing is sent while tensors stay where they are.
    if addresses != known:
        # A replay would run the copy with the addresses of the capture, whatever the host knows by then.
        if entries.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "tensors have other addresses than at the table's last use, and a CUDA graph is being captured; call "
                "the operation once before, with the tensors that the graph will use"
            )
        # New memory each time: what was sent before may still be on its way.
        staged = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=entries.is_cuda)
        entries[0].copy_(staged, non_blocking=True)
        host[0].copy_(staged)
