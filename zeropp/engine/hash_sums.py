"""Whether all ranks have one hash, told from sums over the ranks.

The sum of squares is at least the square of the sum over the number of ranks, and equal to it only if all hashes are
(Cauchy and Schwarz). So two sums tell it, and no rank's hash need be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["differ", "differ_on_device", "spread"]

_Code = TypeVar("_Code", int, Tensor)

# The square of a hash has 48 bits, and sums of it over more than 32 ranks are not exact in float64. So it is summed in
# two halves.
_HALF = 4096


def spread(code: _Code) -> list[_Code]:
    """A hash of 24 bits, and its square in two halves: what is summed over the ranks, in float64."""
    return [code, code * code // _HALF, code * code % _HALF]


def differ(sums: Sequence[float], world: int) -> bool:
    """Whether sums of :func:`spread` over ``world`` ranks come from different hashes."""
    # In Python's integers, which do not round.
    total, squares = int(sums[0]), int(sums[1]) * _HALF + int(sums[2])
    return world * squares != total * total


def differ_on_device(sums: Tensor, world: int) -> Tensor:
    """The same of float64 [3] as a bool scalar on its device; no host waits."""
    total, high, low = sums.to(torch.int64).unbind()
    # Both sides wrap at 64 bits. For less than 512 ranks their difference is smaller than that; for more a wrong answer
    # would take a difference of just 2**64 or a multiple.
    return world * (high * _HALF + low) != total * total
