"""Paths: the hops that a buffer's weights or gradients take, and what their messages hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.codecs import BlockCodec, Codec, Feedback, PlainCodec, dtype_name
from zeropp.comm import Hop
from zeropp.layout import BufferLayout
from zeropp.placement import Placement
from zeropp_kernels import BlockTable

__all__ = ["CodedGatherPath", "GatherPath", "Leg", "ReducePath"]


class GatherPath:
    """From slices at one level to slices at a smaller one, hop by hop, slowest link first; values as they are.

    Every hop works in place: a rank casts its slice to where it belongs in the result, and each hop fills what is
    around it.
    """

    def __init__(self, placement: Placement, outer: int, inner: int, hops: Sequence[Hop], dtype: torch.dtype) -> None:
        self.placement = placement
        self.outer = outer
        self.inner = inner
        self.hops = hops
        self.dtype = dtype

    def empty(self, numel: int, device: torch.device) -> Tensor:
        """Memory for a result of [numel] elements."""
        return torch.empty(numel, dtype=self.dtype, device=device)

    def places(self, whole: Tensor) -> list[Tensor]:
        """Parts of a result that :meth:`run` will fill: this rank's own, then what it has after each hop."""
        return self._views(whole)

    def _views(self, whole: Tensor) -> list[Tensor]:
        views, numel = [], whole.numel() * self.inner
        for level in [self.outer, *(hop.spec.inner for hop in self.hops)]:
            start, stop = self.placement.slice_of(numel, level, self.inner)
            views.append(whole[start:stop])
        return views

    def run(self, own: Tensor, places: list[Tensor], unit: str) -> None:
        """Fill a result from every rank's slice at ``outer``.

        Args:
            own: this rank's.
            places: of the result, from :meth:`places`.
            unit: for the ledger.
        """
        places[0].copy_(own)
        self._send(places, unit, dtype_name(self.dtype))

    def _send(self, views: list[Tensor], unit: str, codec: str) -> None:
        for index, hop in enumerate(self.hops):
            hop.all_gather(views[index + 1], views[index], unit, codec)


class CodedGatherPath(GatherPath):
    """The same with codes on the way: encoded once, at the shard, forwarded as they are, decoded at the end.

    So every rank computes with the same values, its own included, whatever the number of ranks.

    Args:
        level: at which slices are encoded, one message each.
        coded: what this rank brings are messages already, those of the slices at ``level`` in its slice at ``outer``.
        decodes: the result is values; else it is the messages.
    """

    def __init__(
        self,
        placement: Placement,
        outer: int,
        inner: int,
        hops: Sequence[Hop],
        dtype: torch.dtype,
        codec: BlockCodec,
        *,
        level: int,
        coded: bool = False,
        decodes: bool = True,
    ) -> None:
        super().__init__(placement, outer, inner, hops, dtype)
        self.codec = codec
        self.count = level // inner
        self.coded = coded
        self.decodes = decodes

    def empty(self, numel: int, device: torch.device) -> Tensor:
        """See :class:`GatherPath`; the messages of [numel] elements, if that is the result."""
        return super().empty(numel, device) if self.decodes else self._messages(numel, device)

    def _messages(self, numel: int, device: torch.device) -> Tensor:
        return self.codec.empty(numel // self.count, self.count, device)

    def places(self, whole: Tensor) -> list[Tensor]:
        """See :class:`GatherPath`."""
        return [whole] if self.decodes else self._views(whole)

    def run(self, own: Tensor, places: list[Tensor], unit: str) -> None:
        """See :class:`GatherPath`."""
        messages = self._messages(places[0].numel(), own.device) if self.decodes else None
        views = places if messages is None else self._views(messages)
        if self.coded:
            views[0].copy_(own)
        else:
            self.codec.encode_(views[0], own)
        self._send(views, unit, self.codec.name)
        if messages is not None:
            self.codec.decode_(messages, places[0], count=self.count)


@dataclass(frozen=True)
class Leg:
    """A hop of a reduce path, and how what it carries is encoded."""

    hop: Hop
    codec: Codec
    feedback: Feedback | None = None

    @property
    def name(self) -> str:
        """Of the encoding, in the ledger."""
        return self.codec.name if self.feedback is None else f"feedback({self.codec.name})"


class ReducePath:
    """From slices at one level to sums at a larger one, fastest link first; each hop is an exchange and a local sum.

    Summing in the accumulation dtype after an exchange costs the same bytes as a ring reduce-scatter, rounds less on a
    16-bit wire, and halves what gloo's own reduce-scatter sends.
    """

    def __init__(self, placement: Placement, outer: int, legs: Sequence[Leg], dtype: torch.dtype) -> None:
        self.placement = placement
        self.outer = outer
        self.legs = legs
        self.codec = legs[0].codec if legs else PlainCodec(dtype)
        self.count = legs[0].hop.size if legs else 1

    def empty(self, numel: int, device: torch.device) -> Tensor:
        """Memory for what :meth:`run` sends of a slice of [numel]."""
        return self.codec.empty(numel // self.count, self.count, device)

    def pack_(
        self, message: Tensor, gradients: Sequence[Tensor | None], layout: BufferLayout, table: BlockTable | None
    ) -> None:
        """Write tensors, zeros where there is none, as the whole buffer that the layout says."""
        feedback = self.legs[0].feedback if self.legs else None
        self.codec.pack_(message, gradients, layout, table, count=self.count, feedback=feedback)

    def encode_(self, message: Tensor, values: Tensor) -> None:
        """Write a slice of [numel] as :meth:`run` wants it."""
        feedback = self.legs[0].feedback if self.legs else None
        self.codec.encode_(message, values, count=self.count, feedback=feedback)

    def run(self, message: Tensor, numel: int, out: Tensor, *, scale: float, accumulate: bool, unit: str) -> None:
        """``out`` becomes, or gains, ``scale`` times the sum of all ranks' parts.

        Args:
            message: this rank's slice at the path's first level, from :meth:`encode_`.
            numel: of that slice.
            out: float32 or float64, this rank's slice at the last one.
            scale: applied once, in the last sum.
            accumulate: add to ``out``.
            unit: for the ledger.
        """
        parts, codec = [message], self.codec
        for index, leg in enumerate(self.legs):
            if index:
                headroom = codec.headroom(len(parts))
                scale /= headroom
                message = leg.codec.empty(numel // leg.hop.size, leg.hop.size, out.device)
                _pass_on(codec, parts, numel, headroom, leg, message, out.dtype)
            codec = leg.codec
            parts = leg.hop.exchange(message, unit, leg.name, apart=codec.apart)
            numel //= leg.hop.size
        codec.decode_sum_(parts, out, scale=scale, accumulate=accumulate)


def _pass_on(
    codec: Codec, parts: Sequence[Tensor], numel: int, headroom: float, leg: Leg, message: Tensor, dtype: torch.dtype
) -> None:
    """Sum what has come over one hop, and encode the sum for the next."""
    if isinstance(codec, BlockCodec) and isinstance(leg.codec, BlockCodec):
        leg.codec.encode_sum_(codec, parts, numel, message, leg.hop.size, leg.feedback)
        return
    partial = torch.empty(numel, dtype=dtype, device=message.device)
    codec.decode_sum_(parts, partial, scale=headroom)
    leg.codec.encode_(message, partial, count=leg.hop.size, feedback=leg.feedback)
