"""Reduction of FSDP2's gradients: inside the node, then between nodes, each an all-to-all and a local sum."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.comm.hops import Hop
from zeropp.comm.streams import Event, in_turn, used_here
from zeropp.fsdp2.overlap import ReductionLimit, wait_for
from zeropp.fsdp2.shards import Parts, ReduceOp, ReduceScatter, ShardedUnit, factor_of
from zeropp.fsdp2.vectors import VALUE_BITS, MixedCodec
from zeropp.partition.levels import BLOCK, BufferLayout, Placement, Slot
from zeropp.wire.codecs import BlockCodec, Codec, Feedback, PlainCodec
from zeropp.wire.encoding import Encoding
from zeropp.wire.paths import ReduceHop, ReducePath
from zeropp_kernels import BlockTable, block_table

__all__ = ["ReduceComm", "ReduceRoute"]

_MOST_PREPARED = 64
"""Largest number of cached packings, one per set of parameters with a gradient.

With routed experts, such sets vary from step to step.
"""


@dataclass(frozen=True)
class ReduceRoute:
    """The hops that reduce one process group's gradients: inside the node, then between nodes.

    Attributes:
        placement: this rank's position in the levels 1, ranks per node, all ranks.
        hops: one or two hops; none with one rank.
        encoding: codecs of the hops.
        values: True to send gradients of one-dimensional parameters as plain values beside quantized ones.
        reductions: limit on the reductions in flight over these hops.
    """

    placement: Placement
    hops: Sequence[Hop]
    encoding: Encoding
    values: bool
    reductions: ReductionLimit

    @property
    def world(self) -> int:
        """Number of ranks in the process group."""
        return self.placement.chain.world

    def codecs(self, dtype: torch.dtype) -> list[Codec]:
        """Return the codec of each hop, for gradients that FSDP2 reduces in ``dtype``."""
        return self.encoding.gradient_codecs([hop.spec for hop in self.hops], dtype)

    def feedbacks(self, numel: int, codecs: Sequence[Codec], device: torch.device) -> list[Feedback | None]:
        """Return the error-feedback state of each hop, None for a hop without.

        Args:
            numel: padded elements of all messages of the first hop together.
            codecs: codec of each hop.
            device: device of the state.
        """
        specs = [hop.spec for hop in self.hops]
        found: list[Feedback | None] = []
        for hop, codec in zip(self.hops, codecs, strict=True):
            # A hop leaves ``numel / hop.size`` elements, and sends messages of that size, one to each member.
            numel //= hop.size
            carried = None
            if self.encoding.feeds_back(specs, hop.spec):
                carried = codec.feedback(numel, hop.size, self.encoding.beta, device)
            found.append(carried)
        return found


class _Packing:
    """Conversion of FSDP2's gradient buffer to the messages of the first hop.

    FSDP2's buffer holds one piece per rank, in the order of ranks. The first hop sends one message to each rank of this
    node: the pieces of all ranks with the receiver's position in their nodes. The encoding kernel reads the pieces from
    the buffer through a table, so no copy reorders them.

    With quantized hops, each piece is padded to blocks of 256 elements, because the second hop splits messages between
    pieces. Elements that are sent as plain values are placed behind the codes of their piece. Zeros replace them among
    the codes, so they do not affect the scales.

    Args:
        route: the hops.
        numel: elements of FSDP2's buffer.
        values: ranges [start, stop) of a piece whose elements are sent as plain values.
        dtype: dtype in which FSDP2 reduces.
        device: device of the buffer.

    Attributes:
        codecs: codec of each hop.
        piece: elements of one rank's piece in FSDP2's buffer, ``numel / world``.
        padded: elements of one piece in the messages.
        numel: elements of all messages, ``world * padded``.
        inside: int64 indices in a piece of the elements sent as plain values; None if there are none.
        behind: slice of a padded piece that holds these elements.
    """

    def __init__(
        self,
        route: ReduceRoute,
        numel: int,
        values: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        world = route.world
        self.codecs = route.codecs(dtype)
        self.piece = numel // world
        count = sum(stop - start for start, stop in values)
        if count == self.piece and any(codec.coded for codec in self.codecs):
            # All elements are plain values, so no codec and no error feedback is needed.
            self.codecs = [PlainCodec(torch.bfloat16)] * len(self.codecs)
            count = 0
        # If any hop is quantized, all pieces are padded, because the second hop splits the result of the first.
        coded = [codec for codec in self.codecs if isinstance(codec, BlockCodec)]
        self.padded = _whole_blocks(self.piece) if coded else self.piece
        # Messages hold pieces in the order in which the hops split a buffer; FSDP2's buffer has the order of ranks.
        # With one hop both orders are equal.
        self.owners = [route.placement.chain.owner(piece) for piece in range(world)]
        self.inside: Tensor | None = None
        if coded and count:
            self._set_values(values, count, VALUE_BITS // min(codec.bits for codec in coded), device)
        self.numel = world * self.padded
        self.in_place = self.padded == self.piece and self.owners == list(range(world))
        # If packing changes nothing and the first hop sends plain values in the buffer's dtype, FSDP2's buffer serves
        # as the message without a copy.
        self.as_it_is = self.in_place and self.codecs[0] == PlainCodec(dtype)
        # Describe pieces to the layout like parameters: each with its offset, and padding behind.
        slots = (Slot(f"piece {rank}", (self.piece,), (1,), at * self.padded) for at, rank in enumerate(self.owners))
        self.layout = BufferLayout(tuple(slots), self.numel, world)
        self.table: BlockTable | None = None
        # Only the quantizing kernel uses a table; plain values are copied piece by piece.
        if self.codecs[0].coded and not self.in_place:
            offsets = [slot.offset for slot in self.layout.slots]
            self.table = block_table([self.piece] * world, offsets, self.numel, device=device)

    def _set_values(self, values: Sequence[tuple[int, int]], count: int, width: int, device: torch.device) -> None:
        start = self.padded
        self.padded += _whole_blocks(count * width)
        self.behind = slice(start, start + count)
        self.codecs = [
            MixedCodec(codec.bits, codec.rotate, piece=self.padded, start=start, values=count, width=width)
            if isinstance(codec, BlockCodec)
            else codec
            for codec in self.codecs
        ]
        self.inside = torch.cat([torch.arange(*each, device=device) for each in values])
        # Indices in FSDP2's buffer, in the order of the messages.
        self.taken = torch.cat([self.inside + rank * self.piece for rank in self.owners])

    def message(self, path: ReducePath, buffer: Tensor) -> Tensor:
        """Encode FSDP2's buffer [world * piece] as the first hop's messages.

        The buffer's elements that are sent as plain values are set to zero.
        """
        if self.as_it_is:
            # FSDP2 may drop its buffer before the reduction has read it: see `_with_message`.
            return buffer
        message = path.empty(self.numel, buffer.device)
        values = None
        if self.inside is not None:
            values = buffer.index_select(0, self.taken)
            # The buffer may be changed: it is a copy of the gradients, made for this reduction only.
            buffer.index_fill_(0, self.taken, 0.0)
        if self.in_place:
            path.encode_(message, buffer)
        else:
            # Reorder and pad the pieces while they are encoded.
            pieces = buffer.view(-1, self.piece).unbind()
            path.pack_(message, [pieces[rank] for rank in self.owners], self.layout, self.table)
        if values is not None:
            first = self.codecs[0]
            if isinstance(first, MixedCodec):
                places = first.values_in(message, self.numel // path.count)
            else:
                # With a plain first hop, the values are stored behind their piece in the same dtype.
                places = message.view(-1, self.padded)[:, self.behind]
            places.copy_(values.view(places.shape))
        return message

    def unpack_(self, output: Tensor, total: Tensor) -> None:
        """Copy a padded piece ``total`` to ``output`` [piece], with plain values back at their indices."""
        output.copy_(total[: self.piece])
        if self.inside is not None:
            # ``inside`` may have been allocated on another stream than that of FSDP2's all-reduce hook.
            used_here(self.inside)
            output.index_copy_(0, self.inside, total[self.behind].to(output.dtype))


def _whole_blocks(numel: int) -> int:
    """Return ``numel`` rounded up to a multiple of 256."""
    return -(-numel // BLOCK) * BLOCK


@dataclass(frozen=True)
class _Pending:
    """A reduction in flight.

    Attributes:
        event: end of the reduction.
        output: tensor that FSDP2 reads the result from.
        total: tensor that the last hop's sum is written to: ``output`` itself if dtype and size are equal.
        packing: conversion that copies ``total`` to ``output``.
    """

    event: Event
    output: Tensor
    total: Tensor
    packing: _Packing


class ReduceComm(ReduceScatter):
    """The reduce-scatter of one unit: messages are packed on FSDP2's calling stream, and hops run on comm streams.

    FSDP2 uses the result after :meth:`finish_reduction`, which is its all-reduce hook. With replicas, or if FSDP2 has
    another such hook, this object calls the method itself: see [Note: FSDP2's order].

    Args:
        unit: unit whose gradients are reduced.
        route: hops of the reduction.

    Attributes:
        parts: indices of the parameters that have error feedback; empty without feedback.
        feedbacks: error-feedback state of each hop; None for a hop without.
    """

    def __init__(self, unit: ShardedUnit, route: ReduceRoute) -> None:
        self.unit = unit
        self.route = route
        self.feeds_back = bool(route.hops) and route.encoding.feedback is not None
        coded = any(codec.coded for codec in route.codecs(torch.float32))
        # Without error feedback, and without plain values beside codes, a reduction does not depend on which
        # parameters' gradients are in the buffer.
        self.needs_parts = self.feeds_back or (route.values and coded and any(unit.vectors))
        self._noted: Parts | None = None
        self._pending: _Pending | None = None
        # FSDP2 omits parameters without a gradient, so the contents of its buffer may vary from step to step.
        self._prepared: dict[tuple[Parts | None, int, torch.dtype], tuple[_Packing, ReducePath]] = {}
        self.parts: Parts = ()
        self._codecs = route.codecs(torch.float32)
        self.feedbacks: list[Feedback | None] = [None] * len(route.hops)
        self.follow(unit.trained())

    def numel(self, parts: Parts) -> int:
        """Return the elements of FSDP2's gradient buffer for the parameters with these indices."""
        return self.route.world * sum(self.unit.sizes[at] for at in parts)

    def errors(self) -> dict[str, Feedback]:
        """Return the quantization errors by name; a name contains the hop, the codec and a hash of the parameters."""
        parts = [(self.unit.parameters[at], self.unit.sizes[at]) for at in self.parts]
        # A unit may have hundreds of parameters, too many for a name, so use a hash of their names and sizes.
        of = f"of {len(parts)} parameters {zlib.crc32(repr(parts).encode()):08x}"
        return {
            f"{hop.spec.inner}->{hop.spec.outer} {codec.name} {of}": feedback
            for hop, codec, feedback in zip(self.route.hops, self._codecs, self.feedbacks, strict=True)
            if feedback is not None
        }

    def note_parts(self, parts: Parts) -> None:
        """Store the indices of the parameters whose gradients the next reduction sums."""
        self._noted = parts

    def follow(self, parts: Parts) -> None:
        """Use error feedback for the parameters ``parts`` from now on, with zero errors if the parameters changed."""
        if not self.feeds_back or parts == self.parts:
            return
        self.parts = parts
        self.feedbacks = [None] * len(self.route.hops)
        # Cached paths refer to the previous error tensors.
        self._prepared.clear()
        if self.numel(parts):
            # Errors have the layout of messages, with padding. With error feedback, no codec depends on the reduce
            # dtype.
            packing = self._packing(parts, self.numel(parts), torch.float32)
            self._codecs = packing.codecs
            self.feedbacks = self.route.feedbacks(packing.numel, packing.codecs, self.unit.device)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory for FSDP2's gradient buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Start a reduction: ``output_tensor`` becomes this rank's part of the sum or mean over ranks.

        The factor of a mean is applied once, to the last sum. :meth:`finish_reduction` waits for the output. FSDP2
        calls that method, or this method does if FSDP2 has another all-reduce hook.

        Args:
            output_tensor: output [n].
            input_tensor: this rank's gradients [ranks * n].
            group: process group of the unit; not used.
            op: SUM, AVG or PREMUL_SUM.
            async_op: not used.

        Raises:
            RuntimeError: with error feedback, a trained parameter has no gradient; FSDP2's buffer has an unexpected
                size; or an earlier hop has failed.
            ValueError: ``op`` is another operation.
        """
        scale = factor_of(op, self.route.world)
        # Shards have equal size, so they are empty on all ranks or on none.
        if not output_tensor.numel():
            return None
        packing, path = self._prepare(input_tensor)
        # The last sum is float64 if FSDP2 reduces in float64, and float32 otherwise. Quantized messages are summed in
        # float32 in both cases.
        exact = torch.float64 if output_tensor.dtype == torch.float64 else torch.float32
        # If dtype and size are equal, the last hop writes its sum straight to FSDP2's output.
        fits = output_tensor.dtype == exact and packing.padded == packing.piece
        total = output_tensor if fits else torch.empty(packing.padded, dtype=exact, device=output_tensor.device)
        reductions = self.route.reductions
        # Wait before the message is allocated, so that on CPU the limit also bounds the memory of messages.
        reductions.make_room()
        message = packing.message(path, input_tensor)
        # FSDP2 itself adds the result to existing gradients, so never accumulate here.
        name = self.unit.name
        work = path.reduction(message, packing.numel, total, scale=scale, accumulate=lambda: False, unit=name)
        part = _with_message(message, in_turn(work.stages()))
        event = reductions.queue(path.links, part, f"the reduction of {name}")
        self._pending = _Pending(event, output_tensor, total, packing)
        if not self.unit.finishes(self.finish_reduction):
            self.finish_reduction(output_tensor)
        return None

    def finish_reduction(self, output: Tensor) -> None:
        """Make the calling stream (on CPU, the calling thread) wait for the pending reduction, if there is one.

        Afterwards ``output`` holds the result.

        Raises:
            RuntimeError: a rank has failed or is absent.
        """
        pending, self._pending = self._pending, None
        # FSDP2 also calls this hook if nothing was reduced: with one rank, or without elements.
        if pending is None:
            return
        wait_for(pending.event)
        # In FSDP2's all-reduce hook, both tensors come from another stream, which may reuse their memory without
        # waiting for this stream.
        used_here(pending.output)
        if pending.total is not pending.output:
            used_here(pending.total)
            pending.packing.unpack_(pending.output, pending.total)

    def _prepare(self, buffer: Tensor) -> tuple[_Packing, ReducePath]:
        """Return the packing and the path for a gradient buffer, cached per set of parameters with a gradient."""
        parts, self._noted = self._noted, None
        if self.feeds_back:
            # Errors are stored by position. With other parameters in the buffer, an error would be added to the wrong
            # element. Compare parameters and not sizes, because two sets may have equal size.
            if parts is not None and parts != self.parts:
                self._require_all(parts)
                self.follow(parts)
            parts = self.parts
        if parts is not None and buffer.numel() != self.numel(parts):
            raise RuntimeError(
                f"{self.unit.name}: FSDP2 reduces {buffer.numel()} elements; the gradients of "
                f"{[self.unit.parameters[at] for at in parts]} have {self.numel(parts)}. This version of torch packs "
                "them in a way that zeropp does not know; give vector_bits=None and feedback=None"
            )
        key = (parts, buffer.numel(), buffer.dtype)
        if key not in self._prepared:
            if len(self._prepared) == _MOST_PREPARED:
                self._prepared.clear()
            self._prepared[key] = self._make(*key)
        return self._prepared[key]

    def _require_all(self, parts: Parts) -> None:
        missing = [self.unit.parameters[at] for at in self.unit.trained() if at not in parts]
        if missing:
            raise RuntimeError(
                f"{self.unit.name}: {missing} have no gradient in this backward, and error feedback needs one of "
                "every trained parameter. Call model.set_reduce_scatter_unused_params(True) (torch 2.13), so that "
                "zeros are sent for them; freeze them; or give feedback=None"
            )

    def _make(self, parts: Parts | None, numel: int, dtype: torch.dtype) -> tuple[_Packing, ReducePath]:
        route = self.route
        packing = self._packing(parts, numel, dtype)
        hops = [ReduceHop(*each) for each in zip(route.hops, packing.codecs, self.feedbacks, strict=True)]
        return packing, ReducePath(route.placement, route.world, hops, torch.float32)

    def _packing(self, parts: Parts | None, numel: int, dtype: torch.dtype) -> _Packing:
        values = []
        start = 0
        for at in parts or ():
            stop = start + self.unit.sizes[at]
            if self.route.values and self.unit.vectors[at]:
                values.append((start, stop))
            start = stop
        return _Packing(self.route, numel, values, dtype, self.unit.device)


def _with_message(message: Tensor, part: Iterator[None]) -> Iterator[None]:
    """Run ``part`` on comm streams, and record that the first of them uses the message."""
    # The message was allocated on another stream, and its last reference may go before the comm stream has read it. So
    # the allocator must wait for the comm stream, too.
    used_here(message)
    del message
    yield from part
