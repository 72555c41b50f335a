"""Many tensors <-> one flat buffer, with cast, scale, squared norms and a non-finite flag."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..table import in_memory_order
from ..wire import BLOCK, blocks_of
from .blocks import TILE, scratch

__all__ = ["gather_", "scatter_"]


def _block_norms(values: Tensor) -> Tensor:
    """Sums of squares of blocks [blocks, 256], two terms at a time in the order that the kernels keep too."""
    # [blocks, rows, halves, runs, 16]. Sums depend on their order, so each is spelled out.
    total = values.square().view(-1, 2, 2, 4, 16)
    total = total[:, :, 0] + total[:, :, 1]
    for width in (8, 4, 2, 1):
        total = total[..., :width] + total[..., width:]
    # [blocks, rows, runs].
    total = total.view(-1, 2, 4)
    total = total[..., :2] + total[..., 2:]
    total = total[..., 0] + total[..., 1]
    return total[:, 0] + total[:, 1]


def _scaled(source: Tensor, scale: float) -> Iterator[tuple[int, Tensor]]:
    """Walk over a flat tensor in tiles: (where the tile starts, its scaled float32 values [blocks, 256]).

    The last tile ends in zeros; callers may not keep a tile.
    """
    for start in range(0, source.numel(), TILE):
        part = source[start : start + TILE]
        values = scratch("values", blocks_of(part.numel()), BLOCK)
        flat = values.view(-1)
        flat[: part.numel()].copy_(part).mul_(scale)
        flat[part.numel() :].zero_()
        yield start, values


def _report(values: Tensor, first: int, norms: Tensor | None, flag: Tensor | None, dtype: torch.dtype) -> None:
    """Norms of a tile that starts at block ``first``; the flag is set if a value is not finite in ``dtype``."""
    # In the dtype that is written: rounding to it can make Inf.
    if flag is not None and not values.to(dtype).isfinite().all():
        flag.fill_(1)
    if norms is not None:
        norms[first : first + values.shape[0]] = _block_norms(values)


def gather_(
    tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, flat: Tensor, scale: float,
    norms: Tensor | None, flag: Tensor | None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.gather_`."""
    end = 0
    # Then torch's own copy does all of it, and no tile has to be gone through.
    plain = scale == 1.0 and norms is None and flag is None
    if norms is not None:
        # Blocks where no tensor lies have no other chance to get their zero.
        norms.zero_()
    for tensor, offset in zip(tensors, host[2].tolist(), strict=True):
        if end < offset:
            # Between tensors, and from a tensor's end to the next block.
            flat[end:offset].zero_()
        end = offset + tensor.numel()
        if plain:
            flat[offset:end].copy_(in_memory_order(tensor))
            continue
        for start, values in _scaled(in_memory_order(tensor), scale):
            begin, stop = offset + start, min(offset + start + TILE, end)
            flat[begin:stop].copy_(values.view(-1)[: stop - begin])
            # A tensor begins on a block and a tile is whole blocks, so no block is reported in parts.
            _report(values, begin // BLOCK, norms, flag, flat.dtype)
    flat[end:].zero_()


def scatter_(
    flat: Tensor, tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, scale: float,
    norms: Tensor | None, flag: Tensor | None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.scatter_`."""
    if norms is not None or flag is not None:
        dtype = tensors[0].dtype if tensors else torch.float32
        # A walk of its own: blocks can lie where no tensor does, and count all the same.
        for start, values in _scaled(flat, scale):
            _report(values, start // BLOCK, norms, flag, dtype)
    for tensor, offset in zip(tensors, host[2].tolist(), strict=True):
        target = in_memory_order(tensor)
        if scale == 1.0:
            target.copy_(flat[offset : offset + target.numel()])
            continue
        for start, values in _scaled(flat[offset : offset + tensor.numel()], scale):
            part = target[start : start + TILE]
            part.copy_(values.view(-1)[: part.numel()])
