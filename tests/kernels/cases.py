"""Values, lengths and comparisons that the kernel tests share."""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp_kernels.wire import GROUPS

__all__ = ["BITS", "DEVICE", "DTYPES", "LENGTHS", "poisoned", "same_bits", "values"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = tuple(GROUPS)
LENGTHS = (1, 127, 128, 129, 255, 256, 257, 100_003)


def values(numel: int, dtype: torch.dtype, seed: int = 0, *, spoilt: bool = True) -> Tensor:
    """Return heavy-tailed values [numel] at a misaligned address, with special cases if ``numel`` is large enough.

    The special cases are whole groups of zeros and of subnormals, -0, the largest finite value, and with ``spoilt``
    also Inf and NaN.
    """
    generator = torch.Generator().manual_seed(1000 * seed + numel)
    spread = torch.randn(numel + 1, generator=generator).mul_(3).exp_()
    x = torch.randn(numel + 1, generator=generator).mul_(spread).clamp_(-6e4, 6e4).to(dtype)[1:]
    if numel >= 3:
        x[1] = -0.0
    if numel > 5000:
        x[256:512] = 0.0
        x[512:768] = torch.finfo(dtype).smallest_normal / 3 * torch.randn(256, generator=generator)
        x[1024] = torch.finfo(dtype).max
        if spoilt:
            x[1300] = float("inf")
            x[2000] = float("nan")
            x[-1] = float("-inf")
    return x


def poisoned(nbytes: int) -> Tensor:
    """Return bytes of 0xA5, to show places that an operation has not overwritten."""
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True if dtype, shape and bits are equal. Any NaN equals any other, because machines choose NaN payloads."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    # A tensor without dimensions cannot be viewed as bytes, so flatten first.
    a, b = a.cpu().reshape(-1), b.cpu().reshape(-1)
    if a.dtype.is_floating_point:
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
