"""The choice of a codec for each hop of a run, and the resulting bytes of messages and error-feedback state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeropp.partition.levels import HopSpec, Mode
from zeropp.wire.codecs import BlockCodec, Codec, PlainCodec

__all__ = ["Encoding"]

_MANY = 32
# Lower limit on the nodes of a hop, and upper limit on the bytes of one rank's part of a message, for "low_latency".
# In this range, an exchange takes longer for the number of its messages than for their bytes.
_SMALL = 2**19
_PLAIN = {32: torch.float32, 16: torch.bfloat16}


@dataclass(frozen=True)
class Encoding:
    """The configured encodings of weights and gradients, and the codec of each hop that follows from them.

    Attributes:
        weights: codec of gathered weights; None for plain values.
        frozen: codec of frozen weights whose shards are stored quantized; None if they are stored in their own dtype.
        differences: codec of differences to cached weights, "delta4" or "lossless", sent once per optimizer step; None
            to send whole weights.
        cache_codes: True if hpZ caches the quantized messages, False if it caches decoded values.
        bits: bits per gradient element as (intra-node, inter-node); None to send gradients in the wire dtype.
        rotate: True to rotate gradients (Hadamard) before quantizing them.
        feedback: hops with error feedback: None for no hop, "cross" for hops between nodes (or the only hop), "both"
            for all hops.
        beta: factor on the old error in error feedback.
        reduce_scatter: method of summing plain gradients. "backend": the backend's reduce-scatter. "exchange": an
            all-to-all and a local sum. "auto": reduce-scatter on NCCL for 32 bits or more per element. "low_latency":
            as "auto", and reduce-scatter also for small 16-bit parts between many nodes.
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
        """Return the codec for gathers of a buffer's weights; None for plain values."""
        # Both codecs use 8 bits, so the order of preference does not matter for frozen weights.
        return self.weights or (None if trainable else self.frozen)

    def gradient_codecs(self, path: Sequence[HopSpec], wire_dtype: torch.dtype) -> list[Codec]:
        """Return the codec of each hop of a complete reduce path. A single hop counts as inter-node."""
        return [self._gradient_codec(self._crosses(path, hop), wire_dtype) for hop in path]

    def _gradient_codec(self, crosses: bool, wire_dtype: torch.dtype) -> Codec:
        if self.bits is None:
            return PlainCodec(wire_dtype)
        # (intra-node, inter-node), indexed by a bool.
        bits = self.bits[crosses]
        return PlainCodec(_PLAIN[bits]) if bits in _PLAIN else BlockCodec(bits, self.rotate)

    def feeds_back(self, path: Sequence[HopSpec], hop: HopSpec) -> bool:
        """Return True if a hop of a complete reduce path uses error feedback."""
        return self.feedback == "both" or (self.feedback == "cross" and self._crosses(path, hop))

    def sums_by_backend(self, codec: Codec, hop: HopSpec, nbytes: int, backend: str) -> bool:
        """Return True if a hop sums with the backend's reduce-scatter, False if it uses an all-to-all and a local sum.

        Args:
            codec: codec of the hop's messages.
            hop: ranks and class of link of the hop.
            nbytes: bytes of one rank's part of a message.
            backend: backend of the hop's process group, such as "nccl".
        """
        if codec.coded or self.reduce_scatter == "exchange":
            return False
        if self.reduce_scatter == "backend":
            return True
        # gloo's reduce-scatter sends twice the bytes of an exchange. Other backends are not known to send fewer.
        if backend != "nccl":
            return False
        # A 32-bit sum on the way loses nothing, and an exchange would need memory for every rank's part.
        if codec.dtype.itemsize >= 4:
            return True
        # NCCL rounds a 16-bit sum at each step, so by default 16-bit sums use an exchange. With small parts and many
        # ranks an exchange is bound by the latency of its n - 1 messages, while NCCL's PAT algorithm takes log2(n)
        # steps. "low_latency" chooses less latency and more rounding.
        many = hop.link == "cross" and len(hop.ranks) >= _MANY
        return self.reduce_scatter == "low_latency" and many and nbytes < _SMALL

    def return_codec(self, codecs: Sequence[Codec]) -> Codec:
        """Return the codec that sends gradient sums back to replicas.

        The codec is int8 if a reduce hop before it is quantized, and otherwise the codec of the last reduce hop.

        Args:
            codecs: codecs of the reduce hops, in order.
        """
        coded = any(codec.coded for codec in codecs)
        # Never 4 bits: this direction has no error feedback, and no mean over ranks averages the quantization errors
        # out.
        return BlockCodec(8, self.rotate) if coded else codecs[-1]

    # Sizes, for plans.

    def message_nbytes(self, path: Sequence[HopSpec], numel: int, wire_dtype: torch.dtype) -> int:
        """Return the bytes of the first message that a reduce path sends for a buffer of [numel]."""
        if not path:
            return numel * wire_dtype.itemsize
        codec = self.gradient_codecs(path, wire_dtype)[0]
        count = path[0].outer // path[0].inner
        return codec.nbytes(numel // count) * count

    def feedback_nbytes(self, path: Sequence[HopSpec], numel: int) -> int:
        """Return the bytes of error-feedback state of all hops of a complete reduce path, for a buffer of [numel]."""
        total = 0
        # The wire dtype does not matter here: plain codecs have no error feedback.
        for hop, codec in zip(path, self.gradient_codecs(path, torch.float32), strict=True):
            if self.feeds_back(path, hop):
                total += hop.outer // hop.inner * codec.feedback_nbytes(numel // hop.outer)
        return total

    def secondary_nbytes(self, numel: int, mode: Mode, dtype: torch.dtype, *, trainable: bool) -> int:
        """Return the bytes that hpZ caches on this rank for a buffer of [numel]."""
        assert mode.cached is not None
        codec = self.weight_codec(trainable)
        if codec is None or not self.cache_codes:
            return numel // mode.cached * dtype.itemsize
        # Messages are cached as received: one message per slice at the level of the main weights, each padded
        # separately.
        return mode.states // mode.cached * codec.nbytes(numel // mode.states)

    @staticmethod
    def _crosses(path: Sequence[HopSpec], hop: HopSpec) -> bool:
        # On one node, or with one rank per node, a path has one hop. That hop uses the inter-node codec and its
        # feedback.
        return len(path) == 1 or hop.link == "cross"
