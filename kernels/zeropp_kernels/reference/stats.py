"""Squared norms of blocks, and a flag for values that are not finite."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..wire import BLOCK, blocks_of
from .blocks import TILE, require_cpu, scratch

__all__ = ["measure_", "report_", "scale_number", "scaled"]


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


def report_(values: Tensor, first: int, norms: Tensor | None, flag: Tensor | None, dtype: torch.dtype) -> None:
    """Norms of a tile that starts at block ``first``; the flag is set if a value is not finite in ``dtype``."""
    # In the dtype that is written: rounding to it can make Inf.
    if flag is not None and not values.to(dtype).isfinite().all():
        flag.fill_(1)
    if norms is not None:
        norms[first : first + values.shape[0]] = _block_norms(values)


def scale_number(scale: float, device_scale: Tensor | None) -> float:
    """The factor of an operation, which the tensor holds where there is one."""
    # Here it lies on CPU, where a read waits for nothing; and so one way serves both.
    return scale if device_scale is None else float(device_scale)


def scaled(source: Tensor, scale: float) -> Iterator[tuple[int, Tensor]]:
    """Walk over a flat tensor in tiles: (where the tile starts, its scaled float32 values [blocks, 256]).

    The last tile ends in zeros; callers may not keep a tile.
    """
    require_cpu(source)
    for start in range(0, source.numel(), TILE):
        part = source[start : start + TILE]
        values = scratch("values", blocks_of(part.numel()), BLOCK)
        flat = values.view(-1)
        flat[: part.numel()].copy_(part).mul_(scale)
        flat[part.numel() :].zero_()
        yield start, values


def measure_(
    values: Tensor, norms: Tensor | None, flag: Tensor | None, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> None:
    """Norms and flag of ``scale`` times a flat tensor, in a pass of their own; nothing where both are None."""
    if norms is None and flag is None:
        return
    for start, tile in scaled(values, scale):
        report_(tile, start // BLOCK, norms, flag, dtype)
