"""Paths: sequences of hops that gather a buffer's weights or reduce its gradients, with codecs for the messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Protocol

import torch
from torch import Tensor

from zeropp.comm.hops import Hop, TrafficKey
from zeropp.comm.streams import BUS, Stage, used_here
from zeropp.partition.levels import BufferLayout, HopSpec, Placement
from zeropp.wire.codecs import Codec, Feedback, Messages, PlainCodec, Report, dtype_name
from zeropp_kernels import BlockTable

__all__ = ["CodedGatherPath", "GatherPath", "ReduceHop", "ReducePath", "Reduction", "StoredShard"]


def _segments(hops: Sequence[HopSpec]) -> list[tuple[str, list[int]]]:
    """Return (class of link, indices of hops) for each run of consecutive hops over one class of link."""
    found = [(link, list(numbers)) for link, numbers in groupby(range(len(hops)), lambda i: hops[i].link)]
    # A path without hops (one rank, or two equal levels) still casts or sums, and that work needs a comm stream.
    return found or [("local", [])]


class StoredShard(Protocol):
    """A shard that is not in device memory: an offloaded slice that can be copied to the device."""

    def copy_to(self, target: Tensor) -> None:
        """Copy the whole slice to ``target``, a tensor on the device."""
        ...


def _put(target: Tensor, own: Tensor | StoredShard) -> None:
    if isinstance(own, Tensor):
        target.copy_(own)
    else:
        own.copy_to(target)


class GatherPath:
    """A gather of plain values from slices at an outer level to a slice at an inner level, slowest link first.

    All hops work in place. This rank copies its own slice to its place in the result, casting it to the result's dtype.
    Each hop then fills the parts around it.

    Args:
        placement: levels of the unit, and this rank's slices.
        outer: level at which the gather starts: each rank has 1 / outer of the buffer.
        inner: level at which the gather ends: each rank has 1 / inner of the buffer.
        hops: hops from ``outer`` to ``inner``, in order.
        dtype: dtype of the result.
        stored: True if the own slice may have to be copied from host memory, which takes a comm stream of its own.

    Attributes:
        links: classes of links that the gather uses, in order: one comm stream each.
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
        # There is one stage for each entry: see :meth:`stages` and comm.streams.Work.
        self.links = [*([BUS] if stored else []), *(link for link, _ in self._segments)]

    def empty(self, numel: int, device: torch.device) -> Tensor:
        """Return uninitialized memory for a result of [numel] elements."""
        return torch.empty(numel, dtype=self.dtype, device=device)

    def places(self, whole: Tensor) -> list[Tensor]:
        """Return the views of a result that a gather fills.

        The first view is this rank's own slice. The following ones are the gathered part after each hop.
        """
        return self._views(whole)

    def results(self, numel: int) -> Iterator[tuple[Hop, int]]:
        """Yield each hop, with the bytes that a rank holds after it, for a whole buffer of [numel] elements."""
        views = self._views(self._travels(numel // self.inner))
        yield from zip(self.hops, [view.nbytes for view in views[1:]], strict=True)

    def _travels(self, numel: int) -> Tensor:
        """Return a meta tensor with the size and dtype of the data after the last hop."""
        return self.empty(numel, torch.device("meta"))

    def _views(self, whole: Tensor) -> list[Tensor]:
        # ``whole`` is the slice at level ``inner``, of values or of message bytes. All slices of one level have equal
        # length in both cases, so the same formula cuts them; ``numel`` counts elements of ``whole``, values or bytes.
        views = []
        numel = whole.numel() * self.inner
        # Each view contains the previous one, so each hop sends from inside the memory that it receives into.
        for level in [self.outer, *(hop.spec.inner for hop in self.hops)]:
            start, stop = self.placement.slice_of(numel, level, self.inner)
            views.append(whole[start:stop])
        return views

    def stages(self, own: Tensor | StoredShard, places: list[Tensor], unit: str) -> list[Stage]:
        """Return the stages of a gather from every rank's slice at ``outer``, one for each entry of ``links``.

        The stages may run again, with the same tensors, once the last one has run.

        Args:
            own: this rank's slice at ``outer``.
            places: views of the result, from :meth:`places`.
            unit: name of the unit for the ledger.
        """
        gather = _Gather(self, own, places, unit)
        # With an own slice that is copied from host memory, that copy is the first stage.
        runs = [(), *(hops for _, hops in self._segments)] if self._stored else [hops for _, hops in self._segments]
        last = len(runs) - 1
        return [partial(gather.run, number == 0, hops, number == last) for number, hops in enumerate(runs)]

    def gather_at_once(self, own: Tensor | StoredShard, places: list[Tensor], unit: str) -> None:
        """Gather without stopping between classes of links, on the current stream."""
        for stage in self.stages(own, places, unit):
            stage()

    def codec_name(self, travels: Tensor) -> str:
        """Return the codec's name for the ledger, given the tensor that is sent."""
        # Not ``self.dtype``: a state dict gathers main weights over a path that was made for the compute dtype.
        return dtype_name(travels.dtype)

    def begin(self, own: Tensor | StoredShard, places: list[Tensor]) -> list[Tensor]:
        """Copy this rank's slice to its place. Return the views of the data before the first and after each hop."""
        # The cast from main weights to the compute dtype happens here, so that hops carry the compute dtype.
        _put(places[0], own)
        return places

    def end(self, whole: Tensor, places: list[Tensor]) -> None:
        """Turn the data after the last hop into the result. Plain values need no further step."""


class _Gather:
    """One gather with its tensors, which may run many times.

    Args:
        path: path of the gather.
        own: this rank's slice.
        places: views of the result.
        unit: name of the unit for the ledger.
    """

    __slots__ = ("_hops", "_own", "_path", "_places", "_views")

    def __init__(self, path: GatherPath, own: Tensor | StoredShard, places: list[Tensor], unit: str) -> None:
        self._path = path
        self._own = own
        self._places = places
        self._hops = [(hop, hop.gather_key(unit, path.codec_name(places[-1]))) for hop in path.hops]
        self._views: Sequence[Tensor] = ()

    def run(self, first: bool, hops: Sequence[int], last: bool) -> None:
        """Run the stage with these hops, on its comm stream."""
        path = self._path
        if first:
            self._views = path.begin(self._own, self._places)
        views = self._views
        # Messages were allocated on the previous comm stream, so the allocator must be told of this one. The result
        # belongs to the caller, who keeps it alive. See [Note: memory on several streams].
        if not first and views[-1] is not self._places[-1]:
            used_here(views[-1])
        for index in hops:
            hop, key = self._hops[index]
            hop.all_gather(views[index + 1], views[index], key)
        if last:
            self._views = ()  # frees the memory of messages
            path.end(views[-1], self._places)


class CodedGatherPath(GatherPath):
    """A gather of quantized weights: encoded once by the owner, forwarded unchanged by each hop, decoded at the end.

    Every rank decodes the same messages, including its own, so all ranks compute with equal weights.

    Args:
        placement: levels of the unit, and this rank's slices.
        outer: level at which the gather starts.
        inner: level at which the gather ends.
        hops: hops from ``outer`` to ``inner``, in order.
        dtype: dtype of decoded values.
        codec: codec of the messages.
        level: level whose slices are one message each.
        coded: True if this rank's slice is stored as messages already: one per slice of ``level`` in it.
        decodes: True if the result is decoded values, False if it is the messages.
        stored: True if the own slice may have to be copied from host memory.
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
        # Number of messages in the result. When hpZ caches messages, ``level > outer`` and this rank contributes
        # several.
        self.count = level // inner
        self.coded = coded
        self.decodes = decodes

    def codec_name(self, travels: Tensor) -> str:
        """Return the name of the codec in the ledger."""
        return self.codec.name

    def empty(self, numel: int, device: torch.device) -> Tensor:
        """Return memory for a result of [numel] elements: values, or their messages if the path does not decode."""
        return super().empty(numel, device) if self.decodes else self._messages(numel, device)

    def _travels(self, numel: int) -> Tensor:
        return self._messages(numel, torch.device("meta"))

    def _messages(self, numel: int, device: torch.device) -> Tensor:
        return self.codec.empty(numel // self.count, self.count, device)

    def places(self, whole: Tensor) -> list[Tensor]:
        """Return [result] if the path decodes, else the views of the messages before the first and after each hop."""
        # Messages that are decoded at the end live in temporary memory of their own, allocated in ``begin``.
        return [whole] if self.decodes else self._views(whole)

    def begin(self, own: Tensor | StoredShard, places: list[Tensor]) -> list[Tensor]:
        """Encode this rank's slice, or copy its messages. Return the views before the first and after each hop."""
        # Allocated here, on the comm stream, so that gathers waiting in the queue hold no message memory.
        views = self._views(self._messages(places[0].numel(), places[0].device)) if self.decodes else places
        if self.coded:
            _put(views[0], own)
        else:
            assert isinstance(own, Tensor)  # a slice that is not in device memory is stored as messages
            self.codec.encode_(views[0], own)
        return views

    def end(self, whole: Tensor, places: list[Tensor]) -> None:
        """Decode the messages after the last hop into the result, if the path decodes."""
        if self.decodes:
            # Decode this rank's own slice, too, so that this rank uses the same rounded values as the others.
            self.codec.decode_(whole, places[0], count=self.count)


@dataclass(frozen=True)
class ReduceHop:
    """One hop of a reduce path, with the codec of its messages.

    Attributes:
        transport: the hop, which carries messages over its process group.
        codec: codec of the messages.
        feedback: error-feedback state of this hop; None without error feedback.
        by_backend: True if the backend's reduce-scatter computes the sum, in the dtype of the messages.
    """

    transport: Hop
    codec: Codec
    feedback: Feedback | None = None
    by_backend: bool = False

    @property
    def spec(self) -> HopSpec:
        """Levels, ranks and class of link of this hop."""
        return self.transport.spec

    @property
    def size(self) -> int:
        """Number of ranks in this hop."""
        return self.transport.size

    @property
    def name(self) -> str:
        """Name of the encoding in the ledger, such as "int8" or "feedback(int4)"."""
        return self.codec.name if self.feedback is None else f"feedback({self.codec.name})"

    def empty(self, numel: int, device: torch.device) -> Tensor:
        """Return memory for the messages of a slice of [numel], one message for each rank of the hop."""
        return self.codec.empty(numel // self.size, self.size, device)

    def encode_sum_(
        self, source: Codec, parts: Messages, numel: int, message: Tensor, *, scale: float, dtype: torch.dtype
    ) -> None:
        """Sum the messages that the previous hop received, and encode ``scale * sum`` as this hop's messages.

        Args:
            source: codec of ``parts``.
            parts: messages of [numel] elements from the ranks of the previous hop.
            numel: elements of the sum.
            message: output, from :meth:`empty`.
            scale: factor on the sum.
            dtype: dtype of the sum, at least float32.
        """
        self.codec.encode_sum_(
            source, parts, numel, message, count=self.size, feedback=self.feedback, scale=scale, dtype=dtype
        )


class ReducePath:
    """A reduction from slices at an inner level to sums at an outer level, fastest link first.

    Each hop is an all-to-all and a local sum. The sum is in the accumulation dtype, so it rounds less on a 16-bit wire
    than a ring reduce-scatter. An all-to-all sends as many bytes as a ring, and half as many as gloo's reduce-scatter.
    For some hops (`ReduceHop.by_backend`) the backend's reduce-scatter computes the sum, which saves the memory for all
    ranks' parts. Then the backend chooses the order of additions.

    Args:
        placement: levels of the unit, and this rank's slices.
        outer: level of the sums.
        hops: hops of the path, in order.
        dtype: wire dtype of gradients if there are no hops.

    Attributes:
        links: classes of links that the reduction uses, in order: one comm stream each.
        codec: codec of the first hop's messages.
        count: number of messages that the first hop sends, one per rank.
        hops_by_link: for each entry of ``links``, the indices of the hops over it.
    """

    def __init__(self, placement: Placement, outer: int, hops: Sequence[ReduceHop], dtype: torch.dtype) -> None:
        self.placement = placement
        self.outer = outer
        self.hops = hops
        # Without hops nothing is sent, so quantizing would lose accuracy and save no bytes.
        self.codec = hops[0].codec if hops else PlainCodec(dtype)
        self.count = hops[0].size if hops else 1
        segments = _segments([hop.spec for hop in hops])
        self.links = [link for link, _ in segments]
        self.hops_by_link = [numbers for _, numbers in segments]

    def empty(self, numel: int, device: torch.device) -> Tensor:
        """Return memory for the first hop's messages of a slice of [numel] elements."""
        return self.codec.empty(numel // self.count, self.count, device)

    def onward_nbytes(self, numel: int) -> int:
        """Return the bytes of the messages that continue on a second class of links; 0 if no hop does.

        Args:
            numel: elements of the whole buffer; the path must start at level 1.
        """
        for before, hop in pairwise(self.hops):
            if hop.spec.link != before.spec.link:
                return hop.codec.nbytes(numel // hop.spec.outer) * hop.size
        return 0

    def pack_(
        self, message: Tensor, gradients: Sequence[Tensor | None], layout: BufferLayout, table: BlockTable | None
    ) -> None:
        """Encode gradients as the messages of a whole buffer; a gradient of None becomes zeros.

        Args:
            message: output, from :meth:`empty`.
            gradients: one tensor or None per parameter of the layout.
            layout: offset of each parameter in the buffer.
            table: the layout's block table; None for a plain codec.
        """
        feedback = self.hops[0].feedback if self.hops else None
        self.codec.pack_(message, gradients, layout, table, count=self.count, feedback=feedback)

    def encode_(self, message: Tensor, values: Tensor) -> None:
        """Encode a slice of [numel] values as the messages for :meth:`reduction`."""
        feedback = self.hops[0].feedback if self.hops else None
        self.codec.encode_(message, values, count=self.count, feedback=feedback)

    def reduction(
        self,
        message: Tensor,
        numel: int,
        out: Tensor,
        *,
        scale: float,
        accumulate: Callable[[], bool],
        unit: str,
        report: Report | None = None,
        again: bool = False,
    ) -> Reduction:
        """Return a sum of all ranks' slices: ``out = scale * sum``, or ``out +=``.

        Args:
            message: this rank's slice at the path's first level, encoded; the caller keeps it alive to the end.
            numel: elements of that slice.
            out: this rank's slice at the last level, in the main dtype.
            scale: factor on the sum, applied once, in the last sum.
            accumulate: called just before the last sum: returns True to add to ``out``.
            unit: name of the unit for the ledger.
            report: statistics to compute of the new ``out``; None for none.
            again: True to keep ``message`` for further runs.
        """
        return Reduction(self, message, numel, out, scale, accumulate, unit, report, again)


class Reduction:
    """One reduction with its tensors, which may run many times, one run after another.

    The other arguments are as for :meth:`ReducePath.reduction`.

    Attributes:
        scale: factor on the sum. It may be set before each run.
    """

    __slots__ = (
        "_accumulate", "_again", "_first", "_hops", "_message", "_out", "_path", "_report", "_scale", "scale",
    )  # fmt: skip

    def __init__(
        self,
        path: ReducePath,
        message: Tensor,
        numel: int,
        out: Tensor,
        scale: float,
        accumulate: Callable[[], bool],
        unit: str,
        report: Report | None,
        again: bool,
    ) -> None:
        self.scale = scale
        self._path = path
        self._first: Tensor | None = message
        self._again = again
        self._out = out
        self._accumulate = accumulate
        self._report = report
        # Each hop, its key for the ledger, and the elements of its sum.
        self._hops: list[tuple[ReduceHop, TrafficKey, int]] = []
        for hop in path.hops:
            numel //= hop.size
            self._hops.append((hop, hop.transport.reduce_key(unit, hop.name), numel))
        # State between the stages of one run: the message of the next hop, and the factor on the last sum.
        self._message: Tensor | None = None
        self._scale = 1.0

    def stages(self) -> list[Stage]:
        """Return the stages, one for each entry of the path's ``links``."""
        return [partial(self.run, hops) for hops in self._path.hops_by_link]

    def run(self, hops: Sequence[int]) -> None:
        """Run the stage with these hops, on its comm stream."""
        first = not hops or hops[0] == 0
        message = self._first if first else self._message
        assert message is not None  # of the caller, or of the stage before
        if not hops:
            # One rank, or equal levels: the only message is this rank's own.
            self._sum(self._path.codec, [message], self.scale)
            return
        if first:
            scale = self.scale
            if not self._again:
                self._first = None  # or this object would keep it alive until the sum is complete
        else:
            scale = self._scale
            # The message was allocated on the previous comm stream. See [Note: memory on several streams].
            used_here(message)
        for number in hops:
            hop, key, numel = self._hops[number]
            # The backend sums plain values in the wire dtype, as FSDP2 always does. A backend cannot sum quantized
            # codes.
            if hop.by_backend:
                room = hop.codec.headroom(hop.size)
                if room != 1.0:
                    message.mul_(room)
                    scale /= room
                parts: Tensor | list[Tensor] = [hop.transport.reduce_scatter(message, key)]
            else:
                parts = hop.transport.all_to_all(message, key, apart=hop.codec.apart)
            if number + 1 == len(self._hops):
                self._message = None
                self._sum(hop.codec, parts, scale)
                return
            # The partial sum is encoded again, and in float16 it may overflow although the mean does not. So scale it
            # by a power of two, and divide the last scale by it. FSDP2 divides float16 gradients by about sqrt(world)
            # before and after.
            headroom = hop.codec.headroom(len(parts))
            scale /= headroom
            following = self._hops[number + 1][0]
            message = following.empty(numel, parts[0].device)
            following.encode_sum_(hop.codec, parts, numel, message, scale=headroom, dtype=self._out.dtype)
        # The object lives longer than this stage, and the next comm stream may run the next stage much later.
        self._message = message
        self._scale = scale

    def _sum(self, codec: Codec, parts: Messages, scale: float) -> None:
        # Call ``accumulate`` only now: since this reduction was queued, an earlier one may have filled the buffer.
        codec.decode_sum_(parts, self._out, scale=scale, accumulate=self._accumulate(), report=self._report)
