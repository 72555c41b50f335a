"""Gradient norms as every rank sees them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeropp_kernels.reference import squared_norm

__all__ = ["norm_of", "rounded", "square_over"]


def norm_of(square: float) -> float:
    """The norm whose square was summed over ranks."""
    return float(rounded(torch.tensor(square, dtype=torch.float64, device="cpu").sqrt()))


def rounded(norm: Tensor) -> Tensor:
    """A norm to 40 bits, which no order of summation changes: how units are cut must not show in clipped gradients."""
    mantissa, exponent = torch.frexp(norm)
    return torch.ldexp(torch.round(mantissa * 2.0**40) / 2.0**40, exponent)


def square_over(shards: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over shards in any memories: a float64 scalar on a device, finite where all values are."""
    # Some may be the device's, and some the host's: each memory's are summed there.
    memories = dict.fromkeys(shard.device for shard in shards)
    parts = [squared_norm([shard for shard in shards if shard.device == memory]) for memory in memories]
    return torch.stack([part.to(device) for part in parts]).sum()
