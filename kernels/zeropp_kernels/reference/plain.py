"""The plain operations: many tensors into one flat buffer, n messages into one sum, and a norm.

Callers give the outputs; what is allocated besides on the hot path is small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .blocks import TILE

__all__ = ["pack_", "squared_norm", "sum_messages_"]

# Elements whose squares are summed in their own dtype.
_NORM_BLOCK = 256


def pack_(destinations: Sequence[Tensor], sources: Sequence[Tensor | None]) -> None:
    """Copy each source into its destination, with cast; a source of None writes zeros.

    Args:
        destinations: n views of one flat buffer, any floating dtype, any strides.
        sources: n tensors of the same shapes, or None where there is nothing to send.
    """
    # One call for all tensors: with many small ones a call costs more than its copy.
    present = [(d, s) for d, s in zip(destinations, sources, strict=True) if s is not None]
    if present:
        torch._foreach_copy_([d for d, _ in present], [s for _, s in present])
    if len(present) < len(destinations):
        torch._foreach_zero_([d for d, s in zip(destinations, sources, strict=True) if s is None])


def sum_messages_(
    messages: Tensor | Sequence[Tensor], out: Tensor, *, scale: float = 1.0, accumulate: bool = False
) -> None:
    """``out = scale * sum(messages)``, or ``out += ...``, summed in ``out``'s dtype, or float32, in message order.

    The scale multiplies the finished sum, once, so that a mean over ranks is rounded once.

    Args:
        messages: [n, numel], or n tensors of [numel], the wire dtype.
        out: [numel], floating; one of 16 bits gets the sum rounded to it.
        scale: factor applied to the sum.
        accumulate: add to ``out`` in place of overwriting it.
    """
    if out.dtype.itemsize < 4:
        # Each addition in 16 bits would round, the more of them the more ranks there are.
        total = torch.empty_like(out, dtype=torch.float32)
        sum_messages_(messages, total, scale=scale)
        # Rounded first, as where the sum goes elsewhere to be added: no placement gives other bits.
        out.add_(total.to(out.dtype)) if accumulate else out.copy_(total)
        return
    count = len(messages)
    if accumulate:
        # A message that is in that dtype already would be its own copy, and be added to below.
        total = messages[0].to(out.dtype, copy=count > 1)
    else:
        total = out
        # In one pass, but of one dtype only: two 16-bit messages would be added in 16 bits.
        if count > 1 and messages[0].dtype == out.dtype:
            torch.add(messages[0], messages[1], out=total)
        else:
            total.copy_(messages[0])
            if count > 1:
                total.add_(messages[1])
    # Those that are not in the total yet.
    for index in range(1 if accumulate else 2, count):
        total.add_(messages[index])
    if accumulate and math.frexp(scale)[0] == 0.5:
        # A power of two, by which the product is exact: one pass, and rounded once in any case.
        out.add_(total, alpha=scale)
    elif accumulate:
        # Rounded, and added only then, as where the sum goes elsewhere to be added: ``alpha`` would do both at once.
        for start in range(0, out.numel(), TILE):
            out[start : start + TILE].add_(total[start : start + TILE] * scale)
    elif scale != 1.0:
        out.mul_(scale)


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares over all tensors, a float64 scalar on their device; not finite only if a value is not.

    On CPU squares are summed in blocks of 256, and the blocks in float64: much faster than float64 throughout,
    within 1e-8 of it, and the same whatever tensors the blocks are spread over.

    Args:
        tensors: one or more, floating, each of a multiple of 256 elements.
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
    # Squares of large finite values overflow float32, and would look like values that are not finite.
    return torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64)).square().sum()
