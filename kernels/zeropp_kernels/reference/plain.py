"""Plain operations in torch without codes: pack tensors into a flat buffer, sum messages, and compute a norm.

Callers allocate the outputs, so these functions allocate little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .blocks import TILE

__all__ = ["pack_", "squared_norm", "sum_messages_"]

# Elements in a block whose squares are summed in the tensor's own dtype (at least float32).
_NORM_BLOCK = 256


def pack_(destinations: Sequence[Tensor], sources: Sequence[Tensor | None]) -> None:
    """Copy each source into its destination, with a cast if dtypes differ. Write zeros where the source is None.

    Args:
        destinations: n views of one flat buffer, any floating dtype, any strides.
        sources: n tensors of the same shapes, or None for zeros.
    """
    # One call for all tensors, because with many small tensors a call costs more than the copy.
    if len(destinations) == len(sources) > 0 and not any([source is None for source in sources]):
        torch._foreach_copy_(list(destinations), list(sources))  # type: ignore[arg-type]  # none is missing
        return
    present = [(d, s) for d, s in zip(destinations, sources, strict=True) if s is not None]
    if present:
        torch._foreach_copy_([d for d, _ in present], [s for _, s in present])
    if len(present) < len(destinations):
        torch._foreach_zero_([d for d, s in zip(destinations, sources, strict=True) if s is None])


def sum_messages_(
    messages: Tensor | Sequence[Tensor], out: Tensor, *, scale: float = 1.0, accumulate: bool = False
) -> None:
    """Sum messages of plain values: ``out = scale * sum(messages)``, or ``out += scale * sum(messages)``.

    The sum is computed in the order of the messages, in float32 if ``out`` has 16 bits, else in ``out``'s dtype. The
    scale multiplies the finished sum once, so a mean over ranks has one rounding of the scale.

    Args:
        messages: [n, numel], or n tensors [numel], any floating dtype.
        out: [numel], floating. For a 16-bit dtype the float32 result is rounded to it.
        scale: factor of the sum.
        accumulate: True to add to ``out`` instead of overwriting it.
    """
    if out.dtype.itemsize < 4:
        # Sums in 16 bits would be rounded at each addition, and the error would grow with the number of ranks.
        total = torch.empty_like(out, dtype=torch.float32)
        sum_messages_(messages, total, scale=scale)
        # Round the sum before adding it, as happens when another device adds it. So bits do not depend on where
        # gradients are stored.
        out.add_(total.to(out.dtype)) if accumulate else out.copy_(total)
        return
    count = len(messages)
    if accumulate:
        # Copy, because for equal dtypes to() returns the message itself, which would be overwritten below.
        total = messages[0].to(out.dtype, copy=count > 1)
    else:
        total = out
        # One pass adds the first two messages if their dtype is out's. 16-bit messages would be added in 16 bits.
        if count > 1 and messages[0].dtype == out.dtype:
            torch.add(messages[0], messages[1], out=total)
        else:
            total.copy_(messages[0])
            if count > 1:
                total.add_(messages[1])
    # Add the messages that are not in the total yet.
    for index in range(1 if accumulate else 2, count):
        total.add_(messages[index])
    if accumulate and math.frexp(scale)[0] == 0.5:
        # With a power of two the product is exact, so one fused pass has the same single rounding.
        out.add_(total, alpha=scale)
    elif accumulate:
        # Round the product before adding it, as happens when another device adds it. alpha could do both with one
        # rounding.
        for start in range(0, out.numel(), TILE):
            out[start : start + TILE].add_(total[start : start + TILE] * scale)
    elif scale != 1.0:
        out.mul_(scale)


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares over all tensors, a float64 scalar on their device.

    The result is finite if all values are finite, also if their squares overflow float32. On CPU, squares are summed in
    float32 (or float64 for float64 tensors) in blocks of 256, and blocks in float64. This is much faster than float64
    throughout and within a relative error of 1e-8. The sum of a block does not depend on the tensor that it belongs to.

    Args:
        tensors: one or more floating tensors on one device, each with a multiple of 256 elements.
    """
    if tensors[0].device.type == "cpu":
        wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
        blocks = [
            torch.linalg.vector_norm(tensor.view(-1, _NORM_BLOCK), dim=1, dtype=dtype)
            for tensor, dtype in zip(tensors, wide, strict=True)
        ]
        total = torch.cat(blocks).to(torch.float64).square().sum()
        if total.isfinite():
            return total
    # Compute again in float64: squares of large finite values overflow float32 and would look like Inf gradients.
    return torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64)).square().sum()
