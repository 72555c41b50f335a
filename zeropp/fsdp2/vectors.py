"""Gradients of one-dimensional parameters as values of 16 bits or more, in messages whose other elements are codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.wire.codecs import BlockCodec, Codec, Feedback, Messages, Report, adjacent, dtype_name

__all__ = ["VALUE_BITS", "MixedCodec"]

VALUE_BITS = 16
"""Bits of an element that travels as a value, on the hop with the narrowest codes."""

_DTYPES = {16: torch.bfloat16, 32: torch.float32}


@dataclass(frozen=True, kw_only=True)
class MixedCodec(BlockCodec):
    """Codes, and beside them values.

    A message is a number of pieces. Each of them has ``values`` elements at its end, from ``start`` on, that travel as
    values; one takes the bytes of ``width`` codes. So the kernels see messages of codes only. What they make of those
    bytes is written over, or not read; no group has codes and values. ``width`` is the same for all hops, so that their
    messages have the same number of elements. On a hop of 8 bits before one of 4 bits a value has 32.

    Attributes:
        piece: elements of a piece: codes, ``width`` elements for each value, and padding.
        start: element of a piece at which values begin, a multiple of 256.
        values: how many there are.
        width: codes that take the bytes of one value.
    """

    piece: int
    start: int
    values: int
    width: int

    @property
    def name(self) -> str:
        """See :class:`Codec`."""
        return f"{super().name}+{dtype_name(self.value_dtype)}"

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype in which values travel."""
        return _DTYPES[self.bits * self.width]

    def values_in(self, messages: Tensor, numel: int) -> Tensor:
        """The values in messages of [numel], as a view [messages, pieces, values]."""
        rows = messages.view(-1, self.nbytes(numel))
        # Codes come first in a message, block by block; a piece is a number of blocks.
        width = self.value_dtype.itemsize
        codes, piece, first = (count * width // self.width for count in (numel, self.piece, self.start))
        pieces: Tensor = rows[:, :codes].unflatten(1, (-1, piece))
        return pieces[..., first : first + self.values * width].view(self.value_dtype)

    def encode_(self, messages: Tensor, values: Tensor, *, count: int = 1, feedback: Feedback | None = None) -> None:
        """See :class:`Codec`."""
        # First, since the kernel writes the whole message, the bytes of values included.
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
        """See :class:`Codec`; ``out`` is written, not added to: FSDP2 adds by itself."""
        # ReduceComm asks for neither, and neither would be right for the values.
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
        """See :class:`Codec`."""
        super().encode_sum_(source, parts, numel, messages, count=count, feedback=feedback, scale=scale, dtype=dtype)
        # Of a hop without codes ``encode_`` has written the values.
        if isinstance(source, MixedCodec):
            places = self.values_in(messages, numel // count)
            places.copy_(source._sum_of_values(parts, numel).view(places.shape))

    def _sum_of_values(self, messages: Messages, numel: int) -> Tensor:
        # In float32, as kernels sum codes.
        return self.values_in(adjacent(messages), numel).sum(0, dtype=torch.float32)
