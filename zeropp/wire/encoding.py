"""The codec of each hop of a run, with the sizes of its messages and of the errors that are fed back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeropp.partition.levels import HopSpec, Mode
from zeropp.wire.codecs import BlockCodec, Codec, PlainCodec

__all__ = ["Encoding"]

_MANY = 32
_SMALL = 2**19  # ranks between nodes, and bytes of a part, for which an exchange is bound by its messages
_PLAIN = {32: torch.float32, 16: torch.bfloat16}


@dataclass(frozen=True)
class Encoding:
    """The codec of each hop.

    Attributes:
        weights: codec of gathered weights; None for values as they are.
        frozen: codec of frozen weights that exist in codes only; None for values in their own dtype.
        differences: to what is cached, "delta4" or "lossless", once a step; None for whole values.
        cache_codes: hpZ caches the messages, not the values in them.
        bits: how many a gradient element has inside a node and between nodes; None for values in the wire dtype.
        rotate: quantized gradients are rotated.
        feedback: on which hops errors are fed back: none, those between nodes (or the only one), or all.
        beta: share of the old error that is kept.
        reduce_scatter: sums of plain values are left to the backend, "backend", or not, "exchange"; or, "auto", where
            it sums in 32 bits or more and sends no more for it; or, "low_latency", for small parts of 16 bits, too.
    """

    weights: Codec | None = None
    frozen: Codec | None = None
    differences: str | None = None
    cache_codes: bool = False
    bits: tuple[int, int] | None = None
    rotate: bool = False
    feedback: str | None = None
    beta: float = 0.8
    reduce_scatter: str = "auto"

    def weight_codec(self, trainable: bool) -> Codec | None:
        """The codec for gathers of a buffer's weights; None for plain values."""
        # Both are 8-bit codes, so where both are asked for it does not matter which one answers for frozen weights.
        return self.weights or (None if trainable else self.frozen)

    def gradient_codecs(self, path: Sequence[HopSpec], wire_dtype: torch.dtype) -> list[Codec]:
        """The codec for each hop of a whole reduce path; a single one counts as between nodes."""
        return [self._gradient_codec(self._crosses(path, hop), wire_dtype) for hop in path]

    def _gradient_codec(self, crosses: bool, wire_dtype: torch.dtype) -> Codec:
        if self.bits is None:
            return PlainCodec(wire_dtype)
        # A pair (inside, between), indexed by a bool.
        bits = self.bits[crosses]
        return PlainCodec(_PLAIN[bits]) if bits in _PLAIN else BlockCodec(bits, self.rotate)

    def feeds_back(self, path: Sequence[HopSpec], hop: HopSpec) -> bool:
        """Tell whether the encoding error on a hop of a whole reduce path is fed back."""
        return self.feedback == "both" or (self.feedback == "cross" and self._crosses(path, hop))

    def sums_by_backend(self, codec: Codec, hop: HopSpec, nbytes: int, backend: str) -> bool:
        """Tell whether a hop leaves its sum to the backend's reduce-scatter.

        Args:
            codec: of the hop's messages.
            hop: its ranks and link.
            nbytes: of one rank's part of a message.
            backend: of its process group.
        """
        if codec.coded or self.reduce_scatter == "exchange":
            return False
        if self.reduce_scatter == "backend":
            return True
        # gloo sends twice the bytes, and of other backends nothing is known.
        if backend != "nccl":
            return False
        # Of 32 bits nothing is lost on the way, and an exchange would need memory for every rank's message.
        if codec.dtype.itemsize >= 4:
            return True
        # NCCL rounds a sum of 16 bits at each step. An exchange of small parts with many ranks takes longer for each of
        # its n - 1 messages than for their bytes, and NCCL's PAT has log2(n) steps: a choice between bits and time.
        many = hop.link == "cross" and len(hop.ranks) >= _MANY
        return self.reduce_scatter == "low_latency" and many and nbytes < _SMALL

    def return_codec(self, codecs: Sequence[Codec]) -> Codec:
        """The codec for sums that go back to several copies, after hops with ``codecs``: 8 bits if one is coded."""
        coded = any(codec.coded for codec in codecs)
        # Never 4 bits: on the way back nothing is fed back, and no mean over ranks evens out what encoding loses.
        return BlockCodec(8, self.rotate) if coded else codecs[-1]

    # Sizes, for plans.

    def message_nbytes(self, path: Sequence[HopSpec], numel: int, wire_dtype: torch.dtype) -> int:
        """Bytes that a reduce path sends first, for a buffer of [numel]."""
        if not path:
            return numel * wire_dtype.itemsize
        codec = self.gradient_codecs(path, wire_dtype)[0]
        count = path[0].outer // path[0].inner
        return codec.nbytes(numel // count) * count

    def feedback_nbytes(self, path: Sequence[HopSpec], numel: int) -> int:
        """Bytes of the errors that are fed back on all hops of a whole reduce path."""
        total = 0
        # Any dtype would do: plain values have no error to feed back.
        for hop, codec in zip(path, self.gradient_codecs(path, torch.float32), strict=True):
            if self.feeds_back(path, hop):
                total += hop.outer // hop.inner * codec.feedback_nbytes(numel // hop.outer)
        return total

    def secondary_nbytes(self, numel: int, mode: Mode, dtype: torch.dtype, *, trainable: bool) -> int:
        """Bytes that hpZ caches of a buffer of [numel]."""
        assert mode.cached is not None
        codec = self.weight_codec(trainable)
        if codec is None or not self.cache_codes:
            return numel // mode.cached * dtype.itemsize
        # Cached as they came: one message for each slice at the states' level, each padded for itself.
        return mode.states // mode.cached * codec.nbytes(numel // mode.states)

    @staticmethod
    def _crosses(path: Sequence[HopSpec], hop: HopSpec) -> bool:
        # On one node, or with one rank a node, there is one hop only. It gets the narrow codec, and the feedback.
        return len(path) == 1 or hop.link == "cross"
