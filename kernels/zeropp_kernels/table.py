"""Tables of tensors at arbitrary addresses, which kernels read or write as one flat buffer."""

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
    """Places of n tensors in a flat buffer. :func:`block_table` makes it once for tensors with fixed sizes and offsets.

    Kernels find the tensors by their addresses, which the table keeps on the device. Each operation sends the addresses
    again only if they have changed, and without waiting. Because the device's copy is overwritten, all calls that share
    a table must be on one stream. A table that was used in a captured CUDA graph must not be used outside that graph.

    Attributes:
        numel: elements of the flat buffer.
        host: int64 [3, n] on CPU: addresses that were last sent to the device (0 before the first call), numbers of
            elements, and offsets in the flat buffer in elements.
        entries: int64 [3, n], copy of ``host`` on the device of the tensors.
        owners: int32 [ceil(numel / 256)] on that device: index of the tensor that has elements in each block of 256, or
            -1.
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
    """Return a flat view [numel] of a tensor without gaps, with its elements in memory order."""
    # The caller must have checked that the tensor has no gaps: of another tensor, this view would include memory in the
    # gaps and miss elements.
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
    """Make the table of n tensors in a flat buffer.

    Args:
        numels: elements of each tensor, n integers.
        offsets: element of the flat buffer at which each tensor starts: ascending multiples of 256, without overlaps.
            By default each tensor starts on the first free block.
        numel: elements of the flat buffer. By default the buffer ends with the last block of the last tensor. Elements
            of the buffer that no tensor has count as zeros.
        device: device of the tensors.

    Raises:
        TypeError: an entry is not an integer.
        ValueError: an offset is no multiple of 256, tensors overlap, or a tensor ends beyond the buffer. The message
            has the tensor's index.
    """
    numels = _integers("numels", numels)
    # max() because negative numels are refused only below, by _check, which reports their index.
    ends = list(accumulate((blocks_of(max(count, 0)) * BLOCK for count in numels), initial=0))
    offsets = ends[:-1] if offsets is None else _integers("offsets", offsets)
    # The default buffer ends with a whole block.
    if numel is None:
        numel = blocks_of(max(offsets[-1] + numels[-1], 0)) * BLOCK if numels and len(offsets) == len(numels) else 0
    (numel,) = _integers("numel", [numel])
    _check(numels, offsets, numel)
    # Tensors made in inference mode could not be written to by later calls outside it.
    with torch.inference_mode(False):
        host = torch.tensor([[0] * len(numels), numels, offsets], dtype=torch.int64, device="cpu")
        owners = torch.full((blocks_of(numel),), -1, dtype=torch.int32, device="cpu")
        for index, (count, offset) in enumerate(zip(numels, offsets, strict=True)):
            # An empty tensor owns no block.
            owners[offset // BLOCK : blocks_of(offset + count)] = index
        # Copy on CPU, too: operations declare both host and entries as outputs, and outputs must not share memory.
        return BlockTable(numel, host, host.to(device, copy=True), owners.to(device))


def locate(tensors: Sequence[Tensor], host: Tensor, entries: Tensor) -> None:
    """Make ``entries`` (on the device) hold the addresses of the tensors.

    The host does not wait for the copy. The addresses are sent from pinned memory, which torch's caching allocator does
    not reuse before the copy has finished.

    Raises:
        RuntimeError: addresses have changed while a CUDA graph is being captured. Replays would send the old addresses.
    """
    known = host[0].tolist()
    addresses = [tensor.data_ptr() for tensor in tensors]
    # Compare on the host, so that nothing is sent while the tensors stay at their addresses.
    if addresses != known:
        # A captured copy would send the addresses of the capture at every replay, even after other addresses have been
        # sent.
        if entries.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "tensors have other addresses than at the table's last use, and a CUDA graph is being captured; call "
                "the operation once before, with the tensors that the graph will use"
            )
        # Allocate new pinned memory each time: an earlier copy may not have finished reading its own.
        staged = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=entries.is_cuda)
        entries[0].copy_(staged, non_blocking=True)
        host[0].copy_(staged)
