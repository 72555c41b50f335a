"""Summing FSDP2's gradients: inside the node, then between nodes, each an exchange and a sum in float32."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.comm.events import Event
from zeropp.comm.hops import Hop
from zeropp.comm.streams import used_here
from zeropp.fsdp2.overlap import Reductions, wait_for
from zeropp.fsdp2.shards import Parts, ReduceOp, ReduceScatter, ShardedUnit, factor_of
from zeropp.partition.layout import BLOCK, BufferLayout, Slot
from zeropp.partition.levels import Placement
from zeropp.wire.codecs import Codec, Feedback, PlainCodec
from zeropp.wire.encoding import Encoding
from zeropp.wire.paths import ReduceHop, ReducePath
from zeropp_kernels import BlockTable, block_table

__all__ = ["ReduceComm", "ReduceRoute"]


@dataclass(frozen=True)
class ReduceRoute:
    """The hops over which one process group's gradients are summed: inside the node, between nodes.

    Attributes:
        placement: this rank's among the levels 1, ranks per node, all ranks.
        hops: one or two.
        encoding: how they encode what they carry.
        reductions: that are under way over them.
    """

    placement: Placement
    hops: Sequence[Hop]
    encoding: Encoding
    reductions: Reductions

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.placement.chain.world

    def codecs(self, dtype: torch.dtype) -> Sequence[Codec]:
        """The codec of each hop, for gradients that FSDP2 has in ``dtype``."""
        return self.encoding.gradient_codecs([hop.spec for hop in self.hops], dtype)

    def feedbacks(self, numel: int, device: torch.device) -> list[Feedback | None]:
        """Errors that each hop feeds back, of buffers of [numel] as they lie in messages; None where it has none."""
        specs = [hop.spec for hop in self.hops]
        found: list[Feedback | None] = []
        # Which hops have codes does not depend on the dtype that is given here.
        for hop, codec in zip(self.hops, self.codecs(torch.float32), strict=True):
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
    of that padding.

    Attributes:
        piece: elements that each rank is to have.
        padded: elements that a piece takes in the messages.
        numel: elements of all of them.
    """

    def __init__(self, route: ReduceRoute, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        world, codecs = route.world, route.codecs(dtype)
        self.piece = numel // world
        # On any hop: what the first one leaves is cut again by the second.
        coded = any(codec.coded for codec in codecs)
        self.padded = -(-self.piece // BLOCK) * BLOCK if coded else self.piece
        self.numel = world * self.padded
        # Pieces lie in the order in which hops cut a buffer, FSDP2's in order of ranks. With one hop these are the
        # same.
        self.owners = [route.placement.chain.owner(piece) for piece in range(world)]
        self.in_place = self.padded == self.piece and self.owners == list(range(world))
        # Then FSDP2's buffer is a message already, and no copy is made.
        self.as_it_is = self.in_place and codecs[0] == PlainCodec(dtype)
        # A piece is to the layout what a parameter is in the engine: its own place, and padding behind it.
        slots = (Slot(f"piece {rank}", (self.piece,), (1,), at * self.padded) for at, rank in enumerate(self.owners))
        self.layout = BufferLayout(tuple(slots), self.numel, world)
        self.table: BlockTable | None = None
        # Only a kernel that encodes reads through a table; values are copied piece by piece.
        if codecs[0].coded and not self.in_place:
            offsets = [slot.offset for slot in self.layout.slots]
            self.table = block_table([self.piece] * world, offsets, self.numel, device=device)

    def message(self, path: ReducePath, buffer: Tensor) -> Tensor:
        """The buffer [world * piece] as the path wants it."""
        if self.as_it_is:
            # FSDP2 holds its buffer until the reduction is over.
            return buffer
        message = path.empty(self.numel, buffer.device)
        if self.in_place:
            path.encode_(message, buffer)
        else:
            # Put in order and padded on the way into the message.
            pieces = buffer.view(-1, self.piece).unbind()
            path.pack_(message, [pieces[rank] for rank in self.owners], self.layout, self.table)
        return message


@dataclass(frozen=True)
class _Pending:
    """A reduction under way: where FSDP2 wants it, and where the last sum goes to, the same if it fits."""

    event: Event
    output: Tensor
    total: Tensor


class ReduceComm(ReduceScatter):
    """The reduce-scatter of one unit: packed on the stream that FSDP2 calls from, and sent on lanes.

    What FSDP2 does with the result follows :meth:`finish`, its all-reduce hook: see [Note: FSDP2's order].

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
        self._noted: Parts | None = None
        self._pending: _Pending | None = None
        # FSDP2 leaves parameters without a gradient out of its buffer, so its parts can vary from step to step.
        self._prepared: dict[tuple[Parts | None, int, torch.dtype], tuple[_Packing, ReducePath]] = {}
        self.parts: Parts = ()
        self.feedbacks: list[Feedback | None] = [None] * len(route.hops)
        self.follow(unit.trained())

    def numel(self, parts: Parts) -> int:
        """Elements of FSDP2's buffer of the gradients of some parameters."""
        return self.route.world * sum(self.unit.sizes[at] for at in parts)

    @property
    def parts_name(self) -> str:
        """A name that tells the parameters whose errors are fed back from any others."""
        parts = [(self.unit.parameters[at], self.unit.sizes[at]) for at in self.parts]
        return f"{len(parts)} parameters {zlib.crc32(repr(parts).encode()):08x}"

    def note(self, parts: Parts) -> None:
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
            # Errors are laid out like messages, padding included.
            packed = _Packing(self.route, self.numel(parts), torch.float32, self.unit.device).numel
            self.feedbacks = self.route.feedbacks(packed, self.unit.device)

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
        :meth:`finish` has been called, by FSDP2 or, where it would call another hook, here.

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
        self._pending = _Pending(event, output_tensor, total)
        if not self.unit.finishes(self.finish):
            self.finish(output_tensor)
        return None

    def finish(self, output: Tensor) -> None:
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
            pending.output.copy_(pending.total[: pending.output.numel()])

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
                f"{[self.unit.parameters[at] for at in parts]} have {self.numel(parts)}"
            )
        key = (parts, buffer.numel(), buffer.dtype)
        if key not in self._prepared:
            self._prepared[key] = self._make(*key, buffer.device)
        return self._prepared[key]

    def _require_all(self, parts: Parts) -> None:
        missing = [self.unit.parameters[at] for at in self.unit.trained() if at not in parts]
        if missing:
            raise RuntimeError(
                f"{self.unit.name}: {missing} have no gradient in this backward, and errors are fed back for every "
                "parameter that is trained. Call model.set_reduce_scatter_unused_params(True) (torch 2.13), so that "
                "they travel as zeros; freeze them; or give feedback=None"
            )

    def _make(
        self, parts: Parts | None, numel: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[_Packing, ReducePath]:
        route = self.route
        packing = _Packing(route, numel, dtype, device)
        return packing, ReducePath(route.placement, route.world, self.reduce_hops(dtype), torch.float32)

    def reduce_hops(self, dtype: torch.dtype) -> list[ReduceHop]:
        """The hops, with the codecs and the feedback for gradients in this dtype."""
        route = self.route
        return [ReduceHop(*each) for each in zip(route.hops, route.codecs(dtype), self.feedbacks, strict=True)]


def _with_message(message: Tensor, part: Iterator[None]) -> Iterator[None]:
    """The same, on lanes: the message was packed on the caller's stream, and is sent on the first of them."""
    # FSDP2's own buffer as well, where it is a message: FSDP2 keeps it only until the calling stream goes on.
    used_here(message)
    del message
    yield from part
