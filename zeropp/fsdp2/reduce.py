"""Summing FSDP2's gradients: inside the node, then between nodes, each an exchange and a sum in float32."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.comm.hops import Hop
from zeropp.comm.streams import Event, used_here
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
"""Sets of parameters with a gradient whose packing is kept: with routed experts there can be any number."""


@dataclass(frozen=True)
class ReduceRoute:
    """The hops over which one process group's gradients are summed: inside the node, between nodes.

    Attributes:
        placement: this rank's among the levels 1, ranks per node, all ranks.
        hops: one or two.
        encoding: how they encode what they carry.
        values: gradients of one-dimensional parameters travel as values where others are codes.
        reductions: that are under way over them.
    """

    placement: Placement
    hops: Sequence[Hop]
    encoding: Encoding
    values: bool
    reductions: ReductionLimit

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.placement.chain.world

    def codecs(self, dtype: torch.dtype) -> list[Codec]:
        """The codec of each hop, for gradients that FSDP2 has in ``dtype``."""
        return self.encoding.gradient_codecs([hop.spec for hop in self.hops], dtype)

    def feedbacks(self, numel: int, codecs: Sequence[Codec], device: torch.device) -> list[Feedback | None]:
        """Errors that each hop feeds back, of buffers of [numel] as they lie in messages; None where it has none."""
        specs = [hop.spec for hop in self.hops]
        found: list[Feedback | None] = []
        for hop, codec in zip(self.hops, codecs, strict=True):
            # Each hop leaves a part; its messages are of that size, one for each member.
            numel //= hop.size
            carried = None
            if self.encoding.feeds_back(specs, hop.spec):
                carried = codec.feedback(numel, hop.size, self.encoding.beta, device)
            found.append(carried)
        return found


class _Packing:
    """From FSDP2's buffer of pieces, in order of rank, to messages in the order of the hops.

    The first hop's messages go to ranks of this node: one holds the pieces of every rank that has the receiver's place
    in its own node. The kernel that encodes reads the pieces where they lie, so that no copy puts them in order.
    Each piece begins on a block of 256 elements, since the second hop cuts the messages there; plain values need none
    of that padding. Elements that travel as values lie behind the codes of a piece, and in their old places are zeros,
    which change no scale.

    Args:
        route: the hops.
        numel: elements of FSDP2's buffer.
        values: ranges [start, stop) of a piece that are to travel as values where others are codes.
        dtype: that FSDP2 reduces in.
        device: where the buffer lies.

    Attributes:
        codecs: of each hop.
        piece: elements that each rank is to have.
        padded: elements that a piece takes in the messages.
        numel: elements of all of them.
        inside: int64, places in a piece of what travels as values; None where nothing does.
        behind: where in a padded piece these values lie.
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
            # Nothing is left for codes, nor are there errors to feed back.
            self.codecs = [PlainCodec(torch.bfloat16)] * len(self.codecs)
            count = 0
        # On any hop: what the first one leaves is cut again by the second.
        coded = [codec for codec in self.codecs if isinstance(codec, BlockCodec)]
        self.padded = _whole_blocks(self.piece) if coded else self.piece
        # Pieces lie in the order in which hops cut a buffer, FSDP2's in order of ranks. With one hop these are the
        # same.
        self.owners = [route.placement.chain.owner(piece) for piece in range(world)]
        self.inside: Tensor | None = None
        if coded and count:
            self._set_values(values, count, VALUE_BITS // min(codec.bits for codec in coded), device)
        self.numel = world * self.padded
        self.in_place = self.padded == self.piece and self.owners == list(range(world))
        # Then FSDP2's buffer is a message already, and no copy is made.
        self.as_it_is = self.in_place and self.codecs[0] == PlainCodec(dtype)
        # A piece is to the layout what a parameter is in the engine: its own place, and padding behind it.
        slots = (Slot(f"piece {rank}", (self.piece,), (1,), at * self.padded) for at, rank in enumerate(self.owners))
        self.layout = BufferLayout(tuple(slots), self.numel, world)
        self.table: BlockTable | None = None
        # Only a kernel that encodes reads through a table; values are copied piece by piece.
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
        # In the order of the messages.
        self.taken = torch.cat([self.inside + rank * self.piece for rank in self.owners])

    def message(self, path: ReducePath, buffer: Tensor) -> Tensor:
        """The buffer [world * piece] as the path wants it; with zeros, from then on, for what travels as values."""
        if self.as_it_is:
            # FSDP2 holds its buffer until the reduction is over.
            return buffer
        message = path.empty(self.numel, buffer.device)
        values = None
        if self.inside is not None:
            values = buffer.index_select(0, self.taken)
            # FSDP2 reads its buffer no more; it is memory from ``allocate``.
            buffer.index_fill_(0, self.taken, 0.0)
        if self.in_place:
            path.encode_(message, buffer)
        else:
            # Put in order and padded on the way into the message.
            pieces = buffer.view(-1, self.piece).unbind()
            path.pack_(message, [pieces[rank] for rank in self.owners], self.layout, self.table)
        if values is not None:
            first = self.codecs[0]
            if isinstance(first, MixedCodec):
                places = first.values_in(message, self.numel // path.count)
            else:
                # A first hop without codes carries these values like any other element.
                places = message.view(-1, self.padded)[:, self.behind]
            places.copy_(values.view(places.shape))
        return message

    def unpack_(self, output: Tensor, total: Tensor) -> None:
        """``output`` [piece] becomes a padded piece without its padding, values in their places."""
        output.copy_(total[: self.piece])
        if self.inside is not None:
            # On the stream of FSDP2's hook; it was made on that of the reductions.
            used_here(self.inside)
            output.index_copy_(0, self.inside, total[self.behind].to(output.dtype))


def _whole_blocks(numel: int) -> int:
    """Elements, up to the end of their last block."""
    return -(-numel // BLOCK) * BLOCK


@dataclass(frozen=True)
class _Pending:
    """A reduction under way: where FSDP2 wants it, and where the last sum goes to, the same if it fits."""

    event: Event
    output: Tensor
    total: Tensor
    packing: _Packing


class ReduceComm(ReduceScatter):
    """The reduce-scatter of one unit: packed on the stream that FSDP2 calls from, and sent on comm streams.

    What FSDP2 does with the result follows :meth:`finish_reduction`, its all-reduce hook: see [Note: FSDP2's order].

    Args:
        unit: whose gradients they are.
        route: its hops.

    Attributes:
        parts: parameters whose errors are fed back; none where no errors are.
        feedbacks: those errors, for each hop; None where there are none.
    """

    def __init__(self, unit: ShardedUnit, route: ReduceRoute) -> None:
        self.unit = unit
        self.route = route
        self.feeds_back = bool(route.hops) and route.encoding.feedback is not None
        coded = any(codec.coded for codec in route.codecs(torch.float32))
        # Else it does not matter which parameters' gradients a buffer holds.
        self.needs_parts = self.feeds_back or (route.values and coded and any(unit.vectors))
        self._noted: Parts | None = None
        self._pending: _Pending | None = None
        # FSDP2 leaves parameters without a gradient out of its buffer, so its parts can vary from step to step.
        self._prepared: dict[tuple[Parts | None, int, torch.dtype], tuple[_Packing, ReducePath]] = {}
        self.parts: Parts = ()
        self._codecs = route.codecs(torch.float32)
        self.feedbacks: list[Feedback | None] = [None] * len(route.hops)
        self.follow(unit.trained())

    def numel(self, parts: Parts) -> int:
        """Elements of FSDP2's buffer of the gradients of some parameters."""
        return self.route.world * sum(self.unit.sizes[at] for at in parts)

    def errors(self) -> dict[str, Feedback]:
        """The errors that are fed back, by names that say of which hop, codec and parameters."""
        parts = [(self.unit.parameters[at], self.unit.sizes[at]) for at in self.parts]
        # A unit may have hundreds of names, too many for a key; a hash differs where they do.
        of = f"of {len(parts)} parameters {zlib.crc32(repr(parts).encode()):08x}"
        return {
            f"{hop.spec.inner}->{hop.spec.outer} {codec.name} {of}": feedback
            for hop, codec, feedback in zip(self.route.hops, self._codecs, self.feedbacks, strict=True)
            if feedback is not None
        }

    def note_parts(self, parts: Parts) -> None:
        """Hear whose gradients the next reduction sums."""
        self._noted = parts

    def follow(self, parts: Parts) -> None:
        """Feed back the errors of these parameters from now on; they begin at nothing unless they were these before."""
        if not self.feeds_back or parts == self.parts:
            return
        self.parts = parts
        self.feedbacks = [None] * len(self.route.hops)
        # Paths refer to the errors of before.
        self._prepared.clear()
        if self.numel(parts):
            # Errors are laid out like messages, padding included. With them no codec depends on the dtype.
            packing = self._packing(parts, self.numel(parts), torch.float32)
            self._codecs = packing.codecs
            self.feedbacks = self.route.feedbacks(packing.numel, packing.codecs, self.unit.device)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Begin what makes ``output_tensor`` [n] this rank's part of the sum of every ``input_tensor`` [ranks * n].

        Or of the mean; the factor is applied once, to the finished sum in float32. The output is filled when
        :meth:`finish_reduction` has been called, by FSDP2 or, where it would call another hook, here.

        Raises:
            RuntimeError: errors are fed back, and parameters that are trained have no gradient.
            ValueError: a reduction that is no sum or mean.
        """
        scale = factor_of(op, self.route.world)
        # Equal on all ranks, as shards are.
        if not output_tensor.numel():
            return None
        packing, path = self._prepare(input_tensor)
        # Float64 is summed in float64, everything else in float32, whatever dtype FSDP2 reduces in.
        exact = torch.float64 if output_tensor.dtype == torch.float64 else torch.float32
        # Then the last sum goes straight to where FSDP2 wants it.
        fits = output_tensor.dtype == exact and packing.padded == packing.piece
        total = output_tensor if fits else torch.empty(packing.padded, dtype=exact, device=output_tensor.device)
        reductions = self.route.reductions
        # Before memory for messages is taken.
        reductions.make_room()
        message = packing.message(path, input_tensor)
        # FSDP2 adds to the gradients that are there by itself, hence never accumulated here.
        part = path.reduce(message, packing.numel, total, scale=scale, accumulate=lambda: False, unit=self.unit.name)
        event = reductions.queue(path.links, _with_message(message, part), f"the reduction of {self.unit.name}")
        self._pending = _Pending(event, output_tensor, total, packing)
        if not self.unit.finishes(self.finish_reduction):
            self.finish_reduction(output_tensor)
        return None

    def finish_reduction(self, output: Tensor) -> None:
        """Let the caller's stream, or on CPU the caller, wait until ``output`` is filled; nothing if none is due.

        Raises:
            RuntimeError: a rank has ended or not come.
        """
        pending, self._pending = self._pending, None
        # FSDP2 calls it, too, where the unit has nothing to reduce: of one rank, or without elements.
        if pending is None:
            return
        wait_for(pending.event)
        # Both were allocated on the stream of the reductions, which does not wait for this one before it goes on.
        used_here(pending.output)
        if pending.total is not pending.output:
            used_here(pending.total)
            pending.packing.unpack_(pending.output, pending.total)

    def _prepare(self, buffer: Tensor) -> tuple[_Packing, ReducePath]:
        """Packing and hops for a buffer; the set of parameters with a gradient can change."""
        parts, self._noted = self._noted, None
        if self.feeds_back:
            # With another set of parameters the same place is another element's, and its error would be added to the
            # wrong one. By parameters and not by size: two can be equally large.
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
                f"{self.unit.name}: {missing} have no gradient in this backward, and errors are fed back for every "
                "parameter that is trained. Call model.set_reduce_scatter_unused_params(True) (torch 2.13), so that "
                "they travel as zeros; freeze them; or give feedback=None"
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
    """The same, on comm streams: the message was packed on the caller's stream, and is sent on the first of them."""
    # FSDP2's own buffer as well, where it is a message: FSDP2 keeps it only until the calling stream goes on.
    used_here(message)
    del message
    yield from part
