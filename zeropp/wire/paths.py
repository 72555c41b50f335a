"""Paths: the hops that a buffer's weights or gradients take, and what their messages hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Protocol

import torch
from torch import Tensor

from zeropp.comm.hops import Hop
from zeropp.comm.streams import BUS, used_here
from zeropp.partition.levels import BufferLayout, HopSpec, Placement
from zeropp.wire.codecs import Codec, Feedback, Messages, PlainCodec, Report, dtype_name
from zeropp_kernels import BlockTable

__all__ = ["CodedGatherPath", "GatherPath", "ReduceHop", "ReducePath", "StoredShard"]


def _segments(hops: Sequence[HopSpec]) -> list[tuple[str, list[int]]]:
    """(class of links, numbers of the hops) for each run of hops over such links; one of none where there are none."""
    found = [(link, list(numbers)) for link, numbers in groupby(range(len(hops)), lambda i: hops[i].link)]
    # Without hops (one rank, or two equal levels) a cast or a sum is left to do, and needs a comm stream to run on.
    return found or [("local", [])]


class StoredShard(Protocol):
    """A rank's slice that is brought from where it is kept."""

    def copy_to(self, target: Tensor) -> None:
        """Put all of it into a tensor."""
        ...


def _put(target: Tensor, own: Tensor | StoredShard) -> None:
    if isinstance(own, Tensor):
        target.copy_(own)
    else:
        own.copy_to(target)


class GatherPath:
    """From slices at one level to slices at a smaller one, hop by hop, slowest link first; values as they are.

    Every hop works in place: a rank casts its slice to where it belongs in the result, and each hop fills what is
    around it.

    Args:
        placement: of the unit.
        outer: level that it begins at.
        inner: level that it ends at.
        hops: between them.
        dtype: of the result.
        stored: slices may be brought from the host's memory, on a comm stream of their own.

    Attributes:
        links: classes of links on the way, in order.
    """

    def __init__(
        self,
        placement: Placement,
        outer: int,
        inner: int,
        hops: Sequence[Hop],
        dtype: torch.dtype,
        *,
        stored: bool = False,
    ) -> None:
        self.placement = placement
        self.outer = outer
        self.inner = inner
        self.hops = hops
        self.dtype = dtype
        self._stored = stored
        self._segments = _segments([hop.spec for hop in hops])
        # A generator from ``gather`` is resumed once for each of these: see comm.streams.Work.
        self.links = [*([BUS] if stored else []), *(link for link, _ in self._segments)]

    def empty(self, numel: int, device: torch.device) -> Tensor:
        """Memory for a result of [numel] elements."""
        return torch.empty(numel, dtype=self.dtype, device=device)

    def places(self, whole: Tensor) -> list[Tensor]:
        """Parts of a result that :meth:`gather` will fill: this rank's own, then what it has after each hop."""
        return self._views(whole)

    def results(self, numel: int) -> Iterator[tuple[Hop, int]]:
        """Each hop, and the bytes that a rank has after it of a whole buffer of [numel] elements."""
        views = self._views(self._travels(numel // self.inner))
        yield from zip(self.hops, [view.nbytes for view in views[1:]], strict=True)

    def _travels(self, numel: int) -> Tensor:
        """The result as the last hop leaves it, on the meta device."""
        return self.empty(numel, torch.device("meta"))

    def _views(self, whole: Tensor) -> list[Tensor]:
        # ``whole`` is a slice at ``inner``, of values or of the bytes of messages. All slices at one level are equally
        # long in either, so both are cut alike, and numel counts whichever it is.
        views = []
        numel = whole.numel() * self.inner
        # Each view contains the one before it, so a hop sends from where it receives to.
        for level in [self.outer, *(hop.spec.inner for hop in self.hops)]:
            start, stop = self.placement.slice_of(numel, level, self.inner)
            views.append(whole[start:stop])
        return views

    def gather(self, own: Tensor | StoredShard, places: list[Tensor], unit: str) -> Iterator[None]:
        """Fill a result from every rank's slice at ``outer``; pauses before each further class of links.

        Args:
            own: this rank's.
            places: of the result, from :meth:`places`.
            unit: for the ledger.
        """
        views = self._begin(own, places)
        for number, (_, hops) in enumerate(self._segments):
            if number or self._stored:
                yield
                # Messages were allocated on the comm stream before this one; the result is the caller's, who looks
                # after it. See [Note: memory on several streams].
                if views[-1] is not places[-1]:
                    used_here(views[-1])
            for index in hops:
                self.hops[index].all_gather(views[index + 1], views[index], unit, self.codec_name(views[index]))
        self._end(views[-1], places)

    def gather_at_once(self, own: Tensor | StoredShard, places: list[Tensor], unit: str) -> None:
        """Gather without a pause."""
        for _ in self.gather(own, places, unit):
            pass

    def codec_name(self, travels: Tensor) -> str:
        """The ledger's name for the encoding of ``travels``."""
        # Not self.dtype: whole main weights for a state dict take a path that was made for the compute dtype.
        return dtype_name(travels.dtype)

    def _begin(self, own: Tensor | StoredShard, places: list[Tensor]) -> list[Tensor]:
        """Put this rank's slice where hops begin; returns what it has there, and will have after each hop."""
        # The cast from main weights to the compute dtype happens here, before anything travels.
        _put(places[0], own)
        return places

    def _end(self, whole: Tensor, places: list[Tensor]) -> None:
        """Make the result of what the last hop has brought."""


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
        codec: Codec,
        *,
        level: int,
        coded: bool = False,
        decodes: bool = True,
        stored: bool = False,
    ) -> None:
        super().__init__(placement, outer, inner, hops, dtype, stored=stored)
        self.codec = codec
        # Messages in the result. With codes cached by hpZ, ``level`` lies beyond ``outer`` and a rank brings several.
        self.count = level // inner
        self.coded = coded
        self.decodes = decodes

    def codec_name(self, travels: Tensor) -> str:
        """See :class:`GatherPath`."""
        return self.codec.name

    def empty(self, numel: int, device: torch.device) -> Tensor:
        """See :class:`GatherPath`; the messages of [numel] elements, if that is the result."""
        return super().empty(numel, device) if self.decodes else self._messages(numel, device)

    def _travels(self, numel: int) -> Tensor:
        return self._messages(numel, torch.device("meta"))

    def _messages(self, numel: int, device: torch.device) -> Tensor:
        return self.codec.empty(numel // self.count, self.count, device)

    def places(self, whole: Tensor) -> list[Tensor]:
        """See :class:`GatherPath`."""
        # Messages have memory of their own, which lives only while they travel.
        return [whole] if self.decodes else self._views(whole)

    def _begin(self, own: Tensor | StoredShard, places: list[Tensor]) -> list[Tensor]:
        # Made on the comm stream, when its turn comes: what waits in a queue holds no messages.
        views = self._views(self._messages(places[0].numel(), places[0].device)) if self.decodes else places
        if self.coded:
            _put(views[0], own)
        else:
            assert isinstance(own, Tensor)  # what is stored elsewhere is stored as it travels
            self.codec.encode_(views[0], own)
        return views

    def _end(self, whole: Tensor, places: list[Tensor]) -> None:
        if self.decodes:
            # This rank's own slice as well: it must compute with the values that the others have of it.
            self.codec.decode_(whole, places[0], count=self.count)


@dataclass(frozen=True)
class ReduceHop:
    """A hop of a reduce path, and how what it carries is encoded.

    Attributes:
        transport: what carries it.
        codec: of its messages.
        feedback: errors that are fed back.
        by_backend: the backend sums on the way, in the messages' dtype.
    """

    transport: Hop
    codec: Codec
    feedback: Feedback | None = None
    by_backend: bool = False

    @property
    def spec(self) -> HopSpec:
        """The hop's levels and ranks."""
        return self.transport.spec

    @property
    def size(self) -> int:
        """The number of ranks that take part."""
        return self.transport.size

    @property
    def name(self) -> str:
        """The name of the encoding in the ledger."""
        return self.codec.name if self.feedback is None else f"feedback({self.codec.name})"

    def empty(self, numel: int, device: torch.device) -> Tensor:
        """Memory for the messages of a slice of [numel], one for each rank."""
        return self.codec.empty(numel // self.size, self.size, device)

    def encode_sum_(
        self, source: Codec, parts: Messages, numel: int, message: Tensor, *, scale: float, dtype: torch.dtype
    ) -> None:
        """Encode the sum of ``parts``, which the hop before has brought; arguments as of :meth:`Codec.encode_sum_`."""
        self.codec.encode_sum_(
            source, parts, numel, message, count=self.size, feedback=self.feedback, scale=scale, dtype=dtype
        )


class ReducePath:
    """From slices at one level to sums at a larger one, fastest link first; each hop is an exchange and a local sum.

    Summing in the accumulation dtype after an exchange costs the same bytes as a ring reduce-scatter, rounds less on a
    16-bit wire, and halves what gloo's own reduce-scatter sends. A hop of 32 bits may leave the sum to the backend,
    which saves the memory of an exchange; in which order it adds is the backend's.

    Attributes:
        links: classes of links on the way, in order.
    """

    def __init__(self, placement: Placement, outer: int, hops: Sequence[ReduceHop], dtype: torch.dtype) -> None:
        self.placement = placement
        self.outer = outer
        self.hops = hops
        # Where nothing travels there is nothing to save, so gradients are not coded.
        self.codec = hops[0].codec if hops else PlainCodec(dtype)
        self.count = hops[0].size if hops else 1
        self._segments = _segments([hop.spec for hop in hops])
        self.links = [link for link, _ in self._segments]

    def empty(self, numel: int, device: torch.device) -> Tensor:
        """Memory for what :meth:`reduce` sends of a slice of [numel]."""
        return self.codec.empty(numel // self.count, self.count, device)

    def onward_nbytes(self, numel: int) -> int:
        """Bytes of the message that goes on over another class of links, of a whole buffer [numel]; 0 where none does.

        Args:
            numel: of the buffer; the path begins at level 1.
        """
        for before, hop in pairwise(self.hops):
            if hop.spec.link != before.spec.link:
                return hop.codec.nbytes(numel // hop.spec.outer) * hop.size
        return 0

    def pack_(
        self, message: Tensor, gradients: Sequence[Tensor | None], layout: BufferLayout, table: BlockTable | None
    ) -> None:
        """Write tensors, zeros where there is none, as the whole buffer that the layout says."""
        feedback = self.hops[0].feedback if self.hops else None
        self.codec.pack_(message, gradients, layout, table, count=self.count, feedback=feedback)

    def encode_(self, message: Tensor, values: Tensor) -> None:
        """Write a slice of [numel] as :meth:`reduce` wants it."""
        feedback = self.hops[0].feedback if self.hops else None
        self.codec.encode_(message, values, count=self.count, feedback=feedback)

    def reduce(
        self,
        message: Tensor,
        numel: int,
        out: Tensor,
        *,
        scale: float,
        accumulate: Callable[[], bool],
        unit: str,
        report: Report | None = None,
    ) -> Iterator[None]:
        """Make ``out``, or add to it, ``scale`` times the sum of all ranks' parts; pauses as a gather does.

        Args:
            message: this rank's slice at the path's first level, from :meth:`encode_`; the caller keeps it to the end.
            numel: of that slice.
            out: in the main dtype, this rank's slice at the last one.
            scale: applied once, in the last sum.
            accumulate: asked at the end, whether to add to ``out``.
            unit: for the ledger.
            report: tells of ``out`` afterwards.
        """
        if not self.hops:
            # One rank, or nothing further to go: a single message, already for this rank.
            self.codec.decode_sum_([message], out, scale=scale, accumulate=accumulate(), report=report)
        for number, hop in enumerate(self.hops):
            if number and hop.spec.link != self.hops[number - 1].spec.link:
                yield
                # Made below, on the comm stream before. See [Note: memory on several streams].
                used_here(message)
            # FSDP2 always leaves the addition to a reduce-scatter, in the wire dtype. No backend could add codes.
            if hop.by_backend:
                room = hop.codec.headroom(hop.size)
                if room != 1.0:
                    message.mul_(room)
                    scale /= room
                parts: Tensor | list[Tensor] = [hop.transport.reduce_scatter(message, unit, hop.name)]
            else:
                parts = hop.transport.all_to_all(message, unit, hop.name, apart=hop.codec.apart)
            numel //= hop.size
            if number + 1 == len(self.hops):
                # Asked only now: an earlier message of the same buffer may have arrived since this one was queued.
                hop.codec.decode_sum_(parts, out, scale=scale, accumulate=accumulate(), report=report)
            else:
                # A power of two, taken back by the last scale: a sum that goes on in float16 must not overflow where
                # the mean does not. FSDP2 divides float16 by about the root of the world, before and after.
                headroom = hop.codec.headroom(len(parts))
                scale /= headroom
                following = self.hops[number + 1]
                message = following.empty(numel, parts[0].device)
                following.encode_sum_(hop.codec, parts, numel, message, scale=headroom, dtype=out.dtype)
            # A paused generator keeps its locals, and the next comm stream may come to it much later.
            del parts
