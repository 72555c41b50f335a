"""Weights that travel as differences to those that every rank caches: in four bits, or exactly.

Between two optimizer steps a weight changes little, and what hpZ or a persistent unit caches is the same on every rank
that caches it. So a rank sends what its main weights have become less what the others hold of them; what four bits lose
is still in the main weights, and goes with the next difference.
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
"""Dtypes of weights that a codec can take differences of."""


class DifferenceCodec(Protocol):
    """The codec of differences to a base.

    Attributes:
        name: in the ledger.
    """

    name: str

    def nbytes(self, numel: int) -> int:
        """Bytes of one message of [numel] elements."""
        ...

    def encode_(self, message: Tensor, values: Tensor, base: Tensor) -> None:
        """Write float32 values less a base [numel] as a message."""
        ...

    def decode_(self, messages: Tensor, base: Tensor, *, count: int) -> None:
        """Make a base [count * numel] what ``count`` messages say it has become."""
        ...


class Delta4:
    """4-bit differences with a scale for every 128; 4.13 bits a weight, whatever the weights."""

    name = "delta4"

    def nbytes(self, numel: int) -> int:
        """See :class:`DifferenceCodec`."""
        return kernels.message_layout(numel, 4).nbytes

    def encode_(self, message: Tensor, values: Tensor, base: Tensor) -> None:
        """See :class:`DifferenceCodec`; the base stays as it is."""
        # The owner's base moves when it decodes its own message beside the others', in ``_end``: by the same kernel
        # on every rank, so that bases stay equal to the bit.
        kernels.delta_encode_(values, base, message, update=False)

    def decode_(self, messages: Tensor, base: Tensor, *, count: int) -> None:
        """See :class:`DifferenceCodec`."""
        kernels.delta_apply_(messages, base, count=count)


class Lossless:
    """The very bits of bfloat16 weights: 4 bits for a small difference, more for each that is larger.

    Attributes:
        room: (differences that need 8 bits, that need 16) in a message; the same on all ranks, made by
            :meth:`count_escapes` and what ranks make of it together.
    """

    name = "lossless"

    def __init__(self) -> None:
        # Ranks must send messages of one size, whatever their values: room is for the rank that needs most.
        self.room = (0, 0)
        self._starts: Tensor | None = None

    def nbytes(self, numel: int) -> int:
        """See :class:`DifferenceCodec`."""
        return kernels.lossless_layout(numel, *self.room).nbytes

    def count_escapes(self, values: Tensor, base: Tensor) -> Tensor:
        """int64 [2]: how many differences need 8 bits, and 16; :meth:`encode_` must follow with the same values."""
        # Where each section's escapes begin, of 8 and of 16 bits. Encoding needs the same.
        sections = kernels.lossless_layout(values.numel(), 0, 0).sections
        self._starts = torch.empty(2, sections + 1, dtype=torch.int64, device=values.device)
        kernels.lossless_count_(values, base, self._starts)
        return self._starts[:, -1]

    def encode_(self, message: Tensor, values: Tensor, base: Tensor) -> None:
        """See :class:`DifferenceCodec`."""
        assert self._starts is not None
        # Counted on the comm stream between nodes, where ranks agree; a refresh inside a node encodes on the other.
        used_here(self._starts)
        room8, room16 = self.room
        kernels.lossless_encode_(values, base, self._starts, message, room8=room8, room16=room16)
        self._starts = None

    def decode_(self, messages: Tensor, base: Tensor, *, count: int) -> None:
        """See :class:`DifferenceCodec`."""
        room8, room16 = self.room
        # In place, base and result in one: what is cached needs no second copy.
        kernels.lossless_decode_(messages, base, base, count=count, room8=room8, room16=room16)

    def take_room(self, room: tuple[int, int], numel: int, most: int) -> bool:
        """Set the room for differences of 8 and 16 bits; whether a message of [numel] has fewer than ``most`` bytes."""
        self.room = room
        # No message holds more escapes than that.
        if max(room) <= kernels.MOST_ESCAPES and self.nbytes(numel) < most:
            return True
        # Whole weights are sent, and no message encoded: the counts would otherwise stay in memory until the next step.
        self._starts = None
        return False


def make_difference_codec(name: str) -> DifferenceCodec:
    """A codec for one buffer, by its name in ``BASES``; it may remember things of that buffer."""
    made: dict[str, type[DifferenceCodec]] = {"delta4": Delta4, "lossless": Lossless}
    return made[name]()


class DifferencePath(GatherPath):
    """A gather whose result is already there, but for what has changed; each rank brings differences of its slice.

    They are encoded once, forwarded as they are, and added at the end, by their owner, too.

    Attributes:
        counted: the codec, if the size of its messages depends on the values; ranks agree on it before each use.
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
        """This rank's own part of the last result, and all of it."""
        # Two roles of one memory: what to take the difference to, and what to add everyone's differences to.
        return [self._views(whole)[0], whole]

    def codec_name(self, travels: Tensor) -> str:
        """See :class:`GatherPath`."""
        return self.codec.name

    def _begin(self, own: Tensor | StoredShard, places: list[Tensor]) -> list[Tensor]:
        # Values are sent on from memory, whatever keeps them between steps.
        assert isinstance(own, Tensor)
        # Not before this work's turn: ranks have agreed on the room of lossless messages by then.
        nbytes = self.count * self.codec.nbytes(own.numel())
        views = self._views(torch.empty(nbytes, dtype=torch.uint8, device=own.device))
        self.codec.encode_(views[0], own, places[0])
        return views

    def _end(self, whole: Tensor, places: list[Tensor]) -> None:
        self.codec.decode_(whole, places[-1], count=self.count)
