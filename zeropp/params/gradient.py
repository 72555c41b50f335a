"""One flat buffer's gradient: where autograd leaves it, held, under way, and summed over the ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeropp._compat import unguarded
from zeropp.comm.streams import BUS, Work, issued_here, used_here
from zeropp.offload.homes import Homes
from zeropp.partition.layout import BufferLayout, Fragment
from zeropp.wire.codecs import Feedback, PlainCodec, Report, summed_by_kernels
from zeropp.wire.paths import GatherPath, ReducePath
from zeropp_kernels import block_table
from zeropp_kernels.wire import BLOCK

__all__ = ["Gradient", "GradientPaths"]


@dataclass(frozen=True)
class GradientPaths:
    """The paths by which a gradient travels.

    Attributes:
        to_held: from whole gradients to the level at which those of several backwards are summed before they go on.
        from_held: from there to a piece for every rank.
        straight: both, for gradients that are not held.
        replicas: from pieces back to slices at the level of the states, where that is not the last; else None.
    """

    to_held: ReducePath
    from_held: ReducePath
    straight: ReducePath
    replicas: GatherPath | None

    @property
    def held_level(self) -> int:
        """The level at which gradients are held."""
        return self.to_held.outer


class Gradient:
    """Sums of one flat buffer's gradients.

    Attributes:
        row: where ``shard`` is.
        arrived: whether ``shard`` holds anything yet.
        report: of ``shard``, unless that has been ``edited`` since.
        trained: whether each parameter is to have one; not those that were frozen after wrapping.
        held: [numel / held level] sum of backwards that are to be sent on later, main dtype, or None.
    """

    def __init__(
        self,
        unit: str,
        parameters: Sequence[nn.Parameter],
        layout: BufferLayout,
        main_dtype: torch.dtype,
        device: torch.device,
        paths: GradientPaths,
        homes: Homes,
    ) -> None:
        self.unit = unit
        self.parameters = tuple(parameters)
        self.layout = layout
        self.dtype = main_dtype
        self.device = device
        self.paths = paths
        self.placement = paths.straight.placement
        self.row = homes.gradients.allocate(layout.numel // self.placement.mode.states, main_dtype)
        # Sums are made where they stay; else they are brought there, through staging buffers.
        self._ring = None if homes.gradients.serves(device) else homes.ring
        # Classes of links to the shard, which may be in the host's memory.
        back = [*(paths.replicas.links if paths.replicas is not None else ()), *([] if self._ring is None else [BUS])]
        self._straight_links = [*paths.straight.links, *back]
        self._from_held_links = [*paths.from_held.links, *back]
        # Of a sum on its way to the host.
        self._stored_nbytes = 0 if self._ring is None else self.row.nbytes
        self.arrived = False
        self.report = Report(self.shard, device)
        self._reported = -1  # version of ``shard`` that the report is of
        self._doubted = False  # somebody could have written to it unseen
        self.trained = (True,) * len(self.parameters)
        self.held: Tensor | None = None
        # In ``held``; a float16 message of it needs room for so many.
        self._held_backwards = 0
        # Whether the last reduction that was queued leaves something held below the whole. ``held`` tells of it only
        # when the lane has come to it.
        self._partly_held = False
        self._scaled = 1.0  # by which the last message is smaller than what it carries
        self._table = None
        # Nothing travels, and one kernel brings gradients to the shard.
        self._gathers = not paths.straight.hops and self._ring is None and summed_by_kernels(self.shard)
        if paths.straight.codec.coded or self._gathers:
            numels, offsets = [slot.numel for slot in layout.slots], [slot.offset for slot in layout.slots]
            self._table = block_table(numels, offsets, layout.numel, device=self.device)
        # Rotated codes spread their error over whole blocks, padding included, which norms must not see.
        rotates = any(hop.codec.rotate for hop in paths.straight.hops)
        self._padding = self._find_padding() if rotates else []

    @property
    def shard(self) -> Tensor:
        """[numel / states] accumulated gradient in the main dtype, what the optimizer reads; a mapping of a file."""
        return self.row.tensor

    @property
    def feedbacks(self) -> list[Feedback]:
        """The errors that are fed back on each hop that has some."""
        return [hop.feedback for hop in self.paths.straight.hops if hop.feedback is not None]

    @property
    def onward_nbytes(self) -> int:
        """Bytes that are left of a message where it changes over to another lane; 0 where it does not."""
        return self.paths.straight.onward_nbytes(self.layout.numel) + self._stored_nbytes

    # From autograd to a message.

    def pack(self, scale: float, *, hold: bool) -> Tensor | None:
        """This rank's whole gradient as one message in the wire dtype; takes ``.grad``.

        Args:
            scale: of the sum over ranks; the message is not scaled, but on a single rank there may be none.
            hold: for a backward after which others follow before anything goes on. Where nothing is sent then, the
                gradient is added to what is held, and there is no message.
        """
        gradients = self._take()
        path = self.paths.straight
        # Held whole: nothing is sent, so it is done here and not on a lane.
        if self.paths.held_level == 1 and (hold or self.held is not None):
            whole = self._hold_whole(gradients)
            if hold:
                return None
            self._scaled = path.codec.headroom(self._held_backwards)
            message = path.empty(self.layout.numel, self.device)
            path.encode_(message, whole if self._scaled == 1.0 else whole * self._scaled)
            self.held, self._held_backwards = None, 0
            return message
        if self._gathers:
            self._gather(gradients, scale)
            return None
        self._scaled = 1.0
        # Allocated on the caller's stream. Whoever queues the message keeps it until it has been reduced, so lanes
        # need not say `used_here`. See [Note: memory on several streams].
        message = path.empty(self.layout.numel, self.device)
        path.pack_(message, gradients, self.layout, self._table)
        return message

    def _take(self) -> list[Tensor | None]:
        with unguarded():
            # The unit may be released already, and the guard refuses ``.grad`` of released parameters.
            gradients = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                # Taken away, or autograd would add the next micro-batch to what has been sent.
                parameter.grad = None
        return gradients

    def _gather(self, gradients: list[Tensor | None], scale: float) -> None:
        """Bring gradients to the shard, on the caller's stream; no lane has anything to do with it."""
        assert self._table is not None  # made where this is done
        PlainCodec(self.dtype).gather_(
            gradients, self.layout, self._table, self.shard, scale=scale, accumulate=self.arrived, report=self.report
        )
        self._arrive()

    def _hold_whole(self, gradients: list[Tensor | None]) -> Tensor:
        """Add to the held sum without rounding to the wire dtype."""
        if self.held is None:
            # Zeros: parameters without a gradient, and the padding, are written by nobody.
            self.held = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        self._held_backwards += 1
        views = self.layout.views(self.held)
        present = [(view, g) for view, g in zip(views, gradients, strict=True) if g is not None]
        if present:
            torch._foreach_add_([view for view, _ in present], [g.to(self.dtype) for _, g in present])
        return self.held

    # From messages to a sum; on the lanes of reductions.

    def prepare_reduce(self, message: Tensor, scale: float, *, hold: bool) -> Work:
        """The work to queue: every rank's message, and what is held, summed into the shard; or into what is held."""
        # By the flag, on the caller's thread: the lane may not have come to what was queued before.
        straight = not hold and not self._partly_held
        self._partly_held = hold and self.paths.held_level != 1  # whole gradients are held by ``pack``
        # Now: another message may be packed before this one is sent.
        scale /= self._scaled
        numel = self.layout.numel
        if not straight:
            hops = [*self.paths.to_held.links, *([] if hold else self._from_held_links)]
            return Work(hops, [self._add_to_held(message, scale, hold=hold)], None if hold else self._arrive)
        path = self.paths.straight
        if self.paths.replicas is not None:
            # The sum is for several ranks' shards: it goes on to a piece for each rank, and back.
            return Work(self._straight_links, [self._reduce_replicas(path, message, numel, scale)], self._arrive)
        return Work(self._straight_links, [self._reduce(path, message, numel, scale)], self._arrive)

    def _reduce(self, path: ReducePath, message: Tensor, numel: int, scale: float) -> Iterator[None]:
        """To the shard, which the last sum measures, unless something is done to it after that."""
        if self._ring is not None:
            return self._reduce_and_store(path, message, numel, scale)
        report = None if self._padding else self.report
        return path.reduce(
            message, numel, self.shard, scale=scale, accumulate=self._has_arrived, unit=self.unit, report=report
        )

    def _reduce_and_store(self, path: ReducePath, message: Tensor, numel: int, scale: float) -> Iterator[None]:
        """Make the sum on the device, and bring it to where it stays."""
        total = self._empty_sum()
        sums = path.reduce(message, numel, total, scale=scale, accumulate=lambda: False, unit=self.unit)
        del message  # or this frame would keep it until the sum is there
        yield from sums
        yield from self._store(total)

    def _empty_sum(self) -> Tensor:
        return torch.empty(self.shard.numel(), dtype=self.dtype, device=self.device)

    def _store(self, total: Tensor) -> Iterator[None]:
        """Bring a sum to its home, added to the values there, and measure the result; pauses first."""
        # On a lane of its own: the host waits for copies there, and the next reduction is on its way meanwhile.
        yield
        used_here(total)
        assert self._ring is not None
        self._clear_padding(total)
        self.report.flag.zero_()
        # Whole blocks, so that the report's sums are those of a shard that is measured at once, to the bit.
        most = self._ring.nbytes // self.dtype.itemsize // BLOCK * BLOCK
        for start in range(0, total.numel(), most):
            part = total[start : start + most]
            with self._ring.taken() as buffer:
                staged = buffer[: part.nbytes].view(self.dtype)
                if self.arrived:
                    self.row.read(start, staged).wait(threading.TIMEOUT_MAX)
                self.report.send_part(part, staged, start, accumulate=self.arrived)
                issued_here(self.device).wait(threading.TIMEOUT_MAX)
                self.row.write(start, staged).wait(threading.TIMEOUT_MAX)
        self.report.add_up()

    def _add_to_held(self, message: Tensor, scale: float, *, hold: bool) -> Iterator[None]:
        """Sum messages as far as the level at which they are held; unless ``hold``, the sum then goes all the way."""
        paths, fresh = self.paths, self.held is None
        if self.held is None:
            self.held = torch.empty(self.layout.numel // paths.held_level, dtype=self.dtype, device=self.device)
        held = self.held
        # Unscaled: the mean is applied once, in the last sum.
        yield from paths.to_held.reduce(
            message, self.layout.numel, held, scale=1.0, accumulate=lambda: not fresh, unit=self.unit
        )
        # Allocated on the first lane, or by an earlier backward; the last hop's lane has just written to it.
        used_here(held)
        self._held_backwards += 1
        if hold:
            return
        # ``held`` is a sum over so many backwards and ranks; float16 may have room for their mean only.
        headroom = paths.straight.codec.headroom(self._held_backwards * paths.held_level)
        message = paths.from_held.empty(held.numel(), self.device)
        paths.from_held.encode_(message, held if headroom == 1.0 else held * headroom)
        self.held, self._held_backwards = None, 0
        yield
        used_here(message)
        onward = self._reduce_replicas(paths.from_held, message, held.numel(), scale / headroom)
        del message, held  # as there
        yield from onward

    def _reduce_replicas(self, path: ReducePath, message: Tensor, numel: int, scale: float) -> Iterator[None]:
        """The last hops, and back from pieces to the level of the states where there are replicas."""
        replicas, unit = self.paths.replicas, self.unit
        if replicas is None:
            yield from self._reduce(path, message, numel, scale)
            return
        # [numel / world], then [numel / states] in the wire dtype. All replicas get the same message of each piece,
        # so their states keep the same bits; an all-reduce would not promise that.
        piece = torch.empty(self.layout.piece_numel, dtype=self.dtype, device=self.device)
        whole = replicas.empty(self.shard.numel(), self.device)
        # The sum goes back in the wire dtype before the mean is taken, so a float16 one is scaled down on the way.
        headroom = path.codec.headroom(self.layout.world)
        sums = path.reduce(message, numel, piece, scale=headroom, accumulate=lambda: False, unit=unit)
        del message  # or this frame would keep it until the sum is back
        yield from sums
        yield
        # Sums end over the links on which the way back begins, so this lane is the last that touches a piece.
        used_here(piece)
        used_here(whole)
        yield from replicas.gather(piece, replicas.places(whole), unit)
        # The way back may end on another lane than it began on, as where what was held goes on between nodes first.
        used_here(whole)
        # One message, so this is a cast, a scale and perhaps an addition.
        last, scale = PlainCodec(whole.dtype), scale / headroom
        if self._ring is None:
            last.decode_sum_([whole], self.shard, scale=scale, accumulate=self.arrived, report=self.report)
        else:
            total = self._empty_sum()
            last.decode_sum_([whole], total, scale=scale)
            del piece, whole  # or this frame would keep them until the sum is stored
            yield from self._store(total)

    def _has_arrived(self) -> bool:
        return self.arrived

    def _arrive(self) -> None:
        unmeasured = bool(self._padding) and self._ring is None
        if unmeasured:
            # On the lane, behind the sum and before the event, so that the optimizer never sees what codes left there.
            self._clear_padding(self.shard)
        # Read on the same lanes only, until the backward has ended and everything has been waited for.
        self.arrived = True
        clears = bool(self.feedbacks) and not all(self.trained)
        if clears:
            self.clear([not trained for trained in self.trained])
        if unmeasured or clears:
            self.report.measure(self.shard)
        self.accept_edits()

    def _clear_padding(self, values: Tensor) -> None:
        if self._padding:
            torch._foreach_zero_([values[start:stop] for start, stop in self._padding])

    @property
    def edited(self) -> bool:
        """True if the shard was written to since the report, seen by its version."""
        return self.shard._version != self._reported

    @property
    def doubted(self) -> bool:
        """True if the report may be of another state of the shard."""
        return self._doubted or self.edited

    def doubt(self) -> None:
        """Somebody can write to the shard unseen: torch's GradScaler raises no version, nor does ``.data``."""
        self._doubted = True

    def accept_edits(self) -> None:
        """The report tells of the shard as it is now."""
        self._reported, self._doubted = self.shard._version, False

    def measure(self) -> None:
        """Renew the report where it is doubted."""
        if self.doubted:
            self.report.measure(self.shard)
            self.accept_edits()

    def clear(self, unused: Sequence[bool]) -> None:
        """Zero the shard of some parameters: error feedback of earlier steps also reaches those without a gradient.

        Norms and clipping must not see it.
        """
        for fragment in self._fragments(self.placement.mode.states):
            if unused[fragment.slot]:
                self.shard[fragment.offset : fragment.offset + fragment.stop - fragment.start].zero_()

    # What is there, and forgetting it.

    def has_unsent(self) -> bool:
        """True if this rank holds gradients that no reduction has brought to the shards."""
        return self.held is not None or self.has_stray()

    def has_stray(self) -> bool:
        """True if ``.grad`` has gradients that no message has taken."""
        with unguarded():
            return any(parameter.grad is not None for parameter in self.parameters)

    def forget(self) -> None:
        """Forget what was sent or held; gradients that autograd is just bringing stay."""
        self.arrived = False
        self.forget_held()

    def begin(self) -> None:
        """Begin a sum of zeros where nothing has come: the user has made a gradient of one of the parameters."""
        if not self.arrived:
            self.shard.zero_()
            self.arrived = True
            self.measure()

    def set_to_zero(self) -> None:
        """Set the sum to zero if any gradient has come, and forget what has not been sent."""
        present = self.arrived or self.has_unsent()
        self.forget_unsent()
        if present:
            self.shard.zero_()
            self.arrived = True
            self.measure()

    def forget_unsent(self) -> None:
        """Forget what has not been sent."""
        self.forget_held()
        self.forget_stray()

    def forget_held(self) -> None:
        """Forget what is held for a later backward."""
        self.held, self._held_backwards, self._partly_held = None, 0, False

    def forget_stray(self) -> None:
        """Forget what is in ``.grad``."""
        self._take()

    def forget_one(self, parameter: nn.Parameter) -> None:
        """Forget one parameter's gradient, sent or not."""
        # Zeroed and not dropped: the shard holds other parameters' gradients, too.
        for values, level in ((self.shard, self.placement.mode.states), (self.held, self.paths.held_level)):
            if values is not None:
                for fragment in self._fragments(level):
                    if self.parameters[fragment.slot] is parameter:
                        values[fragment.offset : fragment.offset + fragment.stop - fragment.start].zero_()
        with unguarded():
            parameter.grad = None

    def _find_padding(self) -> list[tuple[int, int]]:
        """The ranges of the shard that hold no parameter."""
        ends = [0]
        starts = []
        for fragment in self._fragments(self.placement.mode.states):
            starts.append(fragment.offset)
            ends.append(fragment.offset + fragment.stop - fragment.start)
        starts.append(self.shard.numel())
        return [(start, stop) for start, stop in zip(ends, starts, strict=True) if start < stop]

    def _fragments(self, level: int) -> list[Fragment]:
        return self.layout.fragments(self.placement.chain.slice_index(self.placement.rank, level), level)
