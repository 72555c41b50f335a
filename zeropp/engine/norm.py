"""Gradient norms as every rank sees them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["norm_of", "rounded"]


def norm_of(square: float) -> float:
    """The norm whose square was summed over ranks."""
    return float(rounded(torch.tensor(square, dtype=torch.float64, device="cpu").sqrt()))


def rounded(norm: Tensor) -> Tensor:
    """A norm to 40 bits, which no order of summation changes: how units are cut must not show in clipped gradients."""
    mantissa, exponent = torch.frexp(norm)
    return torch.ldexp(torch.round(mantissa * 2.0**40) / 2.0**40, exponent)
