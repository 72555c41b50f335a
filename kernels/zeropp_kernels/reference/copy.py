"""Many tensors <-> one flat buffer, with cast, scale, squared norms and a non-finite flag."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..wire import BLOCK, blocks_of

__all__ = ["gather_", "scatter_"]


def _block_norms(values: Tensor) -> Tensor:
    """Sums of squares of blocks [blocks, 256], two terms at a time in the order that the kernels keep too."""
    total = values.square().view(-1, 2, 2, 4, 16)
    total = total[:, :, 0] + total[:, :, 1]
    for width in (8, 4, 2, 1):
        total = total[..., :width] + total[..., width:]
    total = total.view(-1, 2, 4)
    total = total[..., :2] + total[..., 2:]
    total = total[..., 0] + total[..., 1]
    return total[:, 0] + total[:, 1]


def _report(values: Tensor, first: int, norms: Tensor | None, flag: Tensor | None) -> None:
    """Norms of ``values`` [n], which start at block ``first``; the flag is set, never cleared."""
    if flag is not None and not values.isfinite().all():
        flag.fill_(1)
    if norms is not None and values.numel():
        blocks = blocks_of(values.numel())
        padded = values if values.numel() % BLOCK == 0 else values.new_zeros(blocks * BLOCK)
        if padded is not values:
            padded[: values.numel()] = values
        norms[first : first + blocks] = _block_norms(padded.view(blocks, BLOCK))


def gather_(
    tensors: Sequence[Tensor], offsets: Sequence[int], flat: Tensor, scale: float, norms: Tensor | None,
    flag: Tensor | None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.gather_`."""
    end = 0
    if norms is not None:
        norms.zero_()
    for tensor, offset in zip(tensors, offsets, strict=True):
        flat[end:offset].zero_()
        end = offset + tensor.numel()
        values = tensor.reshape(-1).to(torch.float32)
        if scale != 1.0:
            values = values * scale
        flat[offset:end].copy_(values)
        _report(values, offset // BLOCK, norms, flag)
    flat[end:].zero_()


def scatter_(
    flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], scale: float, norms: Tensor | None,
    flag: Tensor | None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.scatter_`."""
    values = flat.to(torch.float32)
    if scale != 1.0:
        values = values * scale
    _report(values, 0, norms, flag)
    for tensor, offset in zip(tensors, offsets, strict=True):
        tensor.view(-1).copy_(values[offset : offset + tensor.numel()])
