"""Squared norms of blocks and the non-finite flag, on CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..wire import BLOCK, blocks_of
from .blocks import TILE, require_cpu, scratch

__all__ = ["measure_", "report_", "scale_number", "scaled"]


def _block_norms(values: Tensor) -> Tensor:
    """Return the sum of squares of each block [blocks, 256], adding two terms at a time in the order of the kernels."""
    # Shape [blocks, rows, halves, runs, 16]. float32 sums depend on the order, so each addition is written out.
    total = values.square().view(-1, 2, 2, 4, 16)
    total = total[:, :, 0] + total[:, :, 1]
    for width in (8, 4, 2, 1):
        total = total[..., :width] + total[..., width:]
    # Shape [blocks, rows, runs].
    total = total.view(-1, 2, 4)
    total = total[..., :2] + total[..., 2:]
    total = total[..., 0] + total[..., 1]
    return total[:, 0] + total[:, 1]


def report_(values: Tensor, first: int, norms: Tensor | None, flag: Tensor | None, dtype: torch.dtype) -> None:
    """Write the norms of a tile that starts at block ``first``; set the flag if a value is not finite in ``dtype``."""
    # Check after the cast to the output's dtype, because the cast can round to Inf.
    if flag is not None and not values.to(dtype).isfinite().all():
        flag.fill_(1)
    if norms is not None:
        norms[first : first + values.shape[0]] = _block_norms(values)


def scale_number(scale: float, device_scale: Tensor | None) -> float:
    """Return the scale as a number: the value of ``device_scale`` if given, else ``scale``."""
    # The tensor is on the CPU here, so reading it does not wait.
    return scale if device_scale is None else float(device_scale)


def scaled(source: Tensor, scale: float) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, scaled float32 values [blocks, 256]) for each tile of a flat tensor.

    The last block is filled up with zeros. A tile is valid only until the next one, because tiles share a scratch
    buffer.
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
    """Write norms and flag of ``scale * values`` in a pass over a flat tensor; do nothing if both are None."""
    if norms is None and flag is None:
        return
    for start, tile in scaled(values, scale):
        report_(tile, start // BLOCK, norms, flag, dtype)
