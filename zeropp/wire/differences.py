"""Codecs and the path for weights that travel as differences to cached weights: in four bits, or exactly.

A weight changes little in one optimizer step, and all ranks of a cache (hpZ's secondary shards, or persistent
parameters) hold the same cached bits. So a rank sends ``main weights - cached weights`` in few bits. With four bits,
the rounding error of a difference stays in the main weights and is part of the next difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

import zeropp_kernels as kernels
from zeropp.comm.hops import Hop
from zeropp.comm.streams import used_here
from zeropp.partition.levels import Placement
from zeropp.wire.paths import GatherPath, StoredShard

__all__ = ["BASES", "Delta4", "DifferenceCodec", "DifferencePath", "Lossless", "make_difference_codec"]

# ``lossless`` takes differences of bit patterns, and its message layout is made for the 16 bits of bfloat16.
BASES = {"delta4": (torch.bfloat16, torch.float16), "lossless": (torch.bfloat16,)}
"""The dtypes of cached weights for which each difference codec works."""


class DifferenceCodec(Protocol):
    """The interface of a codec of differences between weights and a base, the cached weights.

    Attributes:
        name: name of the codec in the ledger of traffic.
    """

    name: str

    def nbytes(self, numel: int) -> int:
        """Return the bytes of one message of [numel] elements."""
        ...

    def encode_(self, message: Tensor, values: Tensor, base: Tensor) -> None:
        """Encode ``values - base`` as one message: values are float32 [numel], base [numel] has the cached dtype."""
        ...

    def decode_(self, messages: Tensor, base: Tensor, *, count: int) -> None:
        """Update ``base`` [count * numel] in place to the weights that ``count`` messages encode."""
        ...


class Delta4:
    """The codec of 4-bit differences: int4 codes with a bfloat16 scale per 128 elements, 4.13 bits per weight."""

    name = "delta4"

    def nbytes(self, numel: int) -> int:
        """Return the bytes of one message of [numel] int4 differences."""
        return kernels.message_layout(numel, 4).nbytes

    def encode_(self, message: Tensor, values: Tensor, base: Tensor) -> None:
        """Quantize ``values - base`` as one message; the base is not changed."""
        # The owner updates its own base by decoding its own message, in `DifferencePath.end`, with the kernel that the
        # other ranks use. So the bases of all ranks stay equal to the bit.
        kernels.delta_encode_(values, base, message, update=False)

    def decode_(self, messages: Tensor, base: Tensor, *, count: int) -> None:
        """Add ``count`` decoded messages to ``base`` in place."""
        kernels.delta_apply_(messages, base, count=count)


class Lossless:
    """The codec of exact bfloat16 weights: 4 bits for a small difference, 8 or 16 more for a larger one (an escape).

    Attributes:
        room: (number of 8-bit escapes, number of 16-bit escapes) that a message has space for. All ranks use the
            maximum over the ranks' counts from :meth:`count_escapes`.
    """

    name = "lossless"

    def __init__(self) -> None:
        # All ranks must send messages of one size, so each message has space for the largest count of any rank.
        self.room = (0, 0)
        self._starts: Tensor | None = None

    def nbytes(self, numel: int) -> int:
        """Return the bytes of one message of [numel] elements with the agreed space for escapes."""
        return kernels.lossless_layout(numel, *self.room).nbytes

    def count_escapes(self, values: Tensor, base: Tensor) -> Tensor:
        """Count the differences that need 8 bits and 16 bits; returns them as int64 [2] on the device.

        The counts are kept for the next :meth:`encode_`, which must get the same values and base.
        """
        # [2, sections + 1]: index of the first 8-bit and 16-bit escape of each section; the last column holds the
        # totals.
        sections = kernels.lossless_layout(values.numel(), 0, 0).sections
        self._starts = torch.empty(2, sections + 1, dtype=torch.int64, device=values.device)
        kernels.lossless_count_(values, base, self._starts)
        return self._starts[:, -1]

    def encode_(self, message: Tensor, values: Tensor, base: Tensor) -> None:
        """Encode ``values - base`` as one message, after :meth:`count_escapes` with the same tensors."""
        assert self._starts is not None
        # The counts were allocated on the "cross" comm stream, where ranks agree on sizes. A refresh inside one node
        # encodes on the "local" stream, so the allocator must wait for that stream before it reuses the memory.
        used_here(self._starts)
        room8, room16 = self.room
        kernels.lossless_encode_(values, base, self._starts, message, room8=room8, room16=room16)
        self._starts = None

    def decode_(self, messages: Tensor, base: Tensor, *, count: int) -> None:
        """Replace ``base`` by the weights that ``count`` messages encode, bit for bit."""
        room8, room16 = self.room
        # The kernel may decode in place, so the cached weights need no second copy.
        kernels.lossless_decode_(messages, base, base, count=count, room8=room8, room16=room16)

    def set_capacity(self, room: tuple[int, int], numel: int, most: int) -> bool:
        """Set the space for 8-bit and 16-bit escapes. Return True if a message then has fewer than ``most`` bytes.

        Args:
            room: largest counts of any rank, (8-bit escapes, 16-bit escapes).
            numel: elements of a message.
            most: bytes of the same weights when they are sent whole.
        """
        self.room = room
        # The kernels count escapes in int32, so a message has a largest number of escapes.
        if max(room) <= kernels.MOST_ESCAPES and self.nbytes(numel) < most:
            return True
        # Whole weights will be sent, so no ``encode_`` frees the counts. Free them now instead of at the next step.
        self._starts = None
        return False


def make_difference_codec(name: str) -> DifferenceCodec:
    """Return a new difference codec for one buffer, by its name in ``BASES``.

    Buffers must not share a codec, because `Lossless` stores the counts of its buffer.
    """
    made: dict[str, type[DifferenceCodec]] = {"delta4": Delta4, "lossless": Lossless}
    return made[name]()


class DifferencePath(GatherPath):
    """A refresh of cached weights in which each rank sends the differences of its own slice.

    Differences are encoded once, at the owner, and forwarded unchanged. At the end every rank, the owner included, adds
    them to its cached weights.

    Args:
        placement: levels of the unit, and this rank's slices.
        outer: level of the main weights.
        inner: level of the cached weights.
        hops: hops from ``outer`` to ``inner``.
        dtype: dtype of the cached weights.
        codec: codec of the differences.

    Attributes:
        counted: the codec if the size of its messages depends on the values (`Lossless`); then ranks agree on the size
            before each refresh. None otherwise.
        count: number of messages after the last hop, ``outer / inner``.
    """

    def __init__(
        self,
        placement: Placement,
        outer: int,
        inner: int,
        hops: Sequence[Hop],
        dtype: torch.dtype,
        codec: DifferenceCodec,
    ) -> None:
        super().__init__(placement, outer, inner, hops, dtype)
        self.codec = codec
        self.counted = codec if isinstance(codec, Lossless) else None
        self.count = outer // inner

    def places(self, whole: Tensor) -> list[Tensor]:
        """Return two views of the cached weights ``whole``: this rank's own slice, and all of it."""
        # The slice is the base of this rank's differences. All ranks' differences are added to the whole tensor.
        return [self._views(whole)[0], whole]

    def codec_name(self, travels: Tensor) -> str:
        """Return the name of the difference codec, for the ledger."""
        return self.codec.name

    def begin(self, own: Tensor | StoredShard, places: list[Tensor]) -> list[Tensor]:
        """Encode the differences of this rank's slice. Return the views before the first and after each hop."""
        # Main weights in host memory or on NVMe are copied to the device before this call.
        assert isinstance(own, Tensor)
        # Allocate only when this work runs on its comm stream: the size of lossless messages is agreed on just before.
        nbytes = self.count * self.codec.nbytes(own.numel())
        views = self._views(torch.empty(nbytes, dtype=torch.uint8, device=own.device))
        self.codec.encode_(views[0], own, places[0])
        return views

    def end(self, whole: Tensor, places: list[Tensor]) -> None:
        """Add the differences of all ranks to the cached weights."""
        self.codec.decode_(whole, places[-1], count=self.count)
