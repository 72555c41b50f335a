"""Copies between many tensors and one flat buffer, with cast, scale, squared norms and a non-finite flag, on CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..table import in_memory_order
from ..wire import BLOCK
from .blocks import TILE
from .stats import measure_, report_, scale_number, scaled

__all__ = ["gather_", "scatter_"]


def _add(tensors: Sequence[Tensor], host: Tensor, flat: Tensor, scale: float) -> None:
    """Add tensors to a flat buffer, ``flat += scale * tensor``, and zeros between tensors. Round before adding."""
    end = 0
    for tensor, offset in zip(tensors, host[2].tolist(), strict=True):
        # Adding zero only turns -0 into +0, which the kernels do, too.
        flat[end:offset].add_(0.0)
        end = offset + tensor.numel()
        for start, values in scaled(in_memory_order(tensor), scale):
            part = flat[offset + start : end][:TILE]
            part.add_(values.view(-1)[: part.numel()])
    flat[end:].add_(0.0)


def gather_(
    tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, flat: Tensor, scale: float,
    norms: Tensor | None, flag: Tensor | None, accumulate: bool, device_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Copy tensors into a flat buffer on CPU, with the arguments of :func:`zeropp_kernels.gather_`."""
    scale = scale_number(scale, device_scale)
    if accumulate:
        _add(tensors, host, flat, scale)
        measure_(flat, norms, flag)
        return
    end = 0
    # If nothing is scaled or measured, torch's copy_ does all the work and no tiles are needed.
    plain = scale == 1.0 and norms is None and flag is None
    if norms is not None:
        # Blocks without a tensor are never reported below, so their norms are set to zero here.
        norms.zero_()
    for tensor, offset in zip(tensors, host[2].tolist(), strict=True):
        if end < offset:
            # Zeros between tensors, and from a tensor's end to the next block.
            flat[end:offset].zero_()
        end = offset + tensor.numel()
        if plain:
            flat[offset:end].copy_(in_memory_order(tensor))
            continue
        for start, values in scaled(in_memory_order(tensor), scale):
            begin, stop = offset + start, min(offset + start + TILE, end)
            flat[begin:stop].copy_(values.view(-1)[: stop - begin])
            # Tensors start on blocks and tiles are whole blocks, so each block is reported once and in full.
            report_(values, begin // BLOCK, norms, flag, flat.dtype)
    flat[end:].zero_()


def scatter_(
    flat: Tensor, tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, scale: float,
    norms: Tensor | None, flag: Tensor | None, device_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Copy a flat buffer into tensors on CPU, with the arguments of :func:`zeropp_kernels.scatter_`."""
    scale = scale_number(scale, device_scale)
    # Norms and flag need a pass of their own, because blocks without a tensor count, too.
    measure_(flat, norms, flag, scale, tensors[0].dtype if tensors else torch.float32)
    for tensor, offset in zip(tensors, host[2].tolist(), strict=True):
        target = in_memory_order(tensor)
        if scale == 1.0:
            target.copy_(flat[offset : offset + target.numel()])
            continue
        for start, values in scaled(flat[offset : offset + tensor.numel()], scale):
            part = target[start : start + TILE]
            part.copy_(values.view(-1)[: part.numel()])
