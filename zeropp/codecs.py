"""Codecs: what a hop's messages hold. The kernels do the work; a codec knows which ones, and in which dtype.

This version has the plain codec. A codec that compresses offers the same three methods on messages of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp_kernels.reference import sum_messages_

__all__ = ["PlainCodec"]


@dataclass(frozen=True)
class PlainCodec:
    """Values as they are, cast to the wire dtype: 32 or 16 bits an element."""

    dtype: torch.dtype

    def headroom(self, count: int) -> float:
        """Exact power of two to scale a sum of ``count`` messages by, so that it fits a message again."""
        return 2.0 ** -(count - 1).bit_length() if self.dtype == torch.float16 else 1.0

    def empty(self, numel: int, device: torch.device) -> Tensor:
        """Memory for messages of ``numel`` elements in total."""
        return torch.empty(numel, dtype=self.dtype, device=device)

    def encode_(self, message: Tensor, values: Tensor) -> None:
        """Write ``values`` [numel], any floating dtype, as a message."""
        message.copy_(values)

    def decode_sum_(
        self, messages: Sequence[Tensor], out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        """``out`` [numel] becomes, or gains, ``scale`` times the sum of messages of [numel], in ``out``'s dtype."""
        sum_messages_(messages, out, scale=scale, accumulate=accumulate)
