"""A codec of messages in which some elements are plain values of 16 bits or more, and all others are quantized.

The plain values are the gradients of one-dimensional parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.wire.codecs import BlockCodec, Codec, Feedback, Messages, Report, adjacent, dtype_name

__all__ = ["VALUE_BITS", "MixedCodec"]

VALUE_BITS = 16
"""Bits of a plain value on the hop with the narrowest codes; on a hop with wider codes it has proportionally more."""

_DTYPES = {16: torch.bfloat16, 32: torch.float32}


@dataclass(frozen=True, kw_only=True)
class MixedCodec(BlockCodec):
    """The codec of messages with quantized elements and plain values.

    A message consists of pieces of equal length. In each piece, the plain values start at element ``start``, behind all
    quantized elements. A plain value takes the bytes of ``width`` codes, so the kernels process a message as if it had
    codes only. This codec overwrites those bytes after the kernels encode, and replaces the kernels' result there after
    they decode. No group contains both codes and plain values. ``width`` is equal on all hops, so that their messages
    have equal numbers of elements: beside 4-bit codes a value has 16 bits, and beside the 8-bit codes of another hop 32
    bits.

    Attributes:
        piece: elements of a piece: codes, ``width`` elements per plain value, and padding.
        start: first element of a piece that holds plain values, a multiple of 256.
        values: number of plain values in a piece.
        width: number of codes that take as many bytes as one plain value.
    """

    piece: int
    start: int
    values: int
    width: int

    @property
    def name(self) -> str:
        """Name of the codec in the ledger, such as "int4+bf16"."""
        return f"{super().name}+{dtype_name(self.value_dtype)}"

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype of plain values in messages: bfloat16 or float32."""
        return _DTYPES[self.bits * self.width]

    def values_in(self, messages: Tensor, numel: int) -> Tensor:
        """Return a view [messages, pieces, values] of the plain values in messages of [numel] elements."""
        rows = messages.view(-1, self.nbytes(numel))
        # A message starts with its codes, block by block, and a piece is a whole number of blocks.
        width = self.value_dtype.itemsize
        codes, piece, first = (count * width // self.width for count in (numel, self.piece, self.start))
        pieces: Tensor = rows[:, :codes].unflatten(1, (-1, piece))
        return pieces[..., first : first + self.values * width].view(self.value_dtype)

    def encode_(self, messages: Tensor, values: Tensor, *, count: int = 1, feedback: Feedback | None = None) -> None:
        """Quantize ``values`` as ``count`` messages, then store the plain values in their bytes."""
        # The kernel comes first, because it also writes the bytes of plain values.
        super().encode_(messages, values, count=count, feedback=feedback)
        pieces = values.view(count, -1, self.piece)
        places = self.values_in(messages, values.numel() // count)
        places.copy_(pieces[..., self.start : self.start + self.values])

    def decode_sum_(
        self,
        messages: Messages,
        out: Tensor,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        report: Report | None = None,
    ) -> None:
        """Decode and sum messages: ``out = scale * sum(messages)``.

        FSDP2 itself adds the sum to existing gradients, so ``accumulate`` must be False.
        """
        # ReduceComm uses neither argument, and neither is implemented for plain values.
        assert not accumulate and report is None
        super().decode_sum_(messages, out, scale=scale)
        total = self._sum_of_values(messages, out.numel()).mul_(scale)
        out.view(-1, self.piece)[:, self.start : self.start + self.values].copy_(total)

    def encode_sum_(
        self,
        source: Codec,
        parts: Messages,
        numel: int,
        messages: Tensor,
        *,
        count: int,
        feedback: Feedback | None,
        scale: float,
        dtype: torch.dtype,
    ) -> None:
        """Sum messages, encode the sum as ``count`` messages, and write the sums of plain values to their places."""
        super().encode_sum_(source, parts, numel, messages, count=count, feedback=feedback, scale=scale, dtype=dtype)
        # If the source hop is not quantized, ``encode_`` has written the plain values already.
        if isinstance(source, MixedCodec):
            places = self.values_in(messages, numel // count)
            places.copy_(source._sum_of_values(parts, numel).view(places.shape))

    def _sum_of_values(self, messages: Messages, numel: int) -> Tensor:
        # Sum in float32, as the kernels sum codes.
        return self.values_in(adjacent(messages), numel).sum(0, dtype=torch.float32)
