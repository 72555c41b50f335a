"""The gradient sum of one flat buffer, from ``.grad`` to the reduced shard.

[Note: memory of gradients] A gradient shard on the device has memory from its first reduction to ``zero_grad()``, as in
FSDP2: while activations take the most memory, in forward, there are no gradients. The tensor of the shard stays the
same, and its storage is resized. A gradient that the user keeps over ``zero_grad()`` must stay valid, as in plain
torch. So if anything else refers to the storage, it is left to the user, and the shard gets a new tensor. Shards that
the host steps keep their memory, because a step on the host may run until the next backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn

from zeropp._compat import unguarded
from zeropp.comm.streams import BUS, Stage, Work, copy, in_turn, stages_of, used_here
from zeropp.offload.storage_tiers import MemoryTensor
from zeropp.offload.tier_choice import ALL, Tiers
from zeropp.partition.levels import BufferLayout, Fragment
from zeropp.wire.codecs import PlainCodec, Report, summed_by_kernels
from zeropp.wire.paths import GatherPath, ReducePath, Reduction
from zeropp_kernels import BlockTable, block_table
from zeropp_kernels.wire import BLOCK

__all__ = ["Gradient", "GradientPaths", "ReduceWork"]


_grad = attrgetter("grad")
_PART = 1 << 22  # elements of an offloaded shard that the device reads at a time to add to them

_Parts = tuple[list[Tensor], list[Tensor]]
"""Views of a flat buffer: one for each parameter, and one for each gap between parameters."""


@dataclass(frozen=True)
class GradientPaths:
    """The paths on which the gradient of one buffer is reduced.

    Attributes:
        to_held: path from whole gradients to the level at which gradients of several backwards are summed (held).
        from_held: path from the held level to one piece per rank.
        straight: path from whole gradients to one piece per rank, for gradients that are not held.
        replicas: path that gathers pieces back to the level of the states; None if that is the last level.
    """

    to_held: ReducePath
    from_held: ReducePath
    straight: ReducePath
    replicas: GatherPath | None

    @property
    def held_level(self) -> int:
        """The level at which gradients are held for a later backward."""
        return self.to_held.outer


class ReduceWork(Work):
    """The work of one reduction.

    Attributes:
        message: message that the work may reduce again in later backwards; None if it runs once.
        shard: shard that the reduction of ``message`` fills.
        reduction: the reduction of ``message``.
    """

    __slots__ = ("message", "reduction", "shard")

    def __init__(
        self,
        links: Sequence[str],
        parts: Sequence[Sequence[Stage]],
        then: Callable[[], object] | None,
        message: Tensor | None = None,
        shard: Tensor | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__(links, parts, then)
        self.message = message
        self.shard = shard
        self.reduction = reduction


class Gradient:
    """The gradient sum of one flat buffer.

    Attributes:
        row: stored tensor that holds ``shard``.
        transient: True if ``shard`` has memory only from a reduction to ``zero_grad()``: see
            [Note: memory of gradients].
        shard: sum that the optimizer reads, [numel / states] in the main dtype; a memory mapping if it is in a file.
        feedbacks: error feedback of each hop that has one.
        arrived: True if ``shard`` contains a gradient since the last reset.
        report: statistics of ``shard``: squares per block and a non-finite flag; out of date if ``stale``.
        trained: one flag per parameter; False for parameters that were frozen after wrapping.
        held: [numel / held level] sum in the main dtype of backwards that are to be sent with a later one; or None.
    """

    def __init__(
        self,
        unit: str,
        parameters: Sequence[nn.Parameter],
        layout: BufferLayout,
        main_dtype: torch.dtype,
        device: torch.device,
        paths: GradientPaths,
        tiers: Tiers,
    ) -> None:
        self.unit = unit
        self.parameters = tuple(parameters)
        self.layout = layout
        self.dtype = main_dtype
        self.device = device
        self.paths = paths
        self.placement = paths.straight.placement
        self.row = tiers.gradients.allocate_tensor(layout.numel // self.placement.mode.states, main_dtype)
        self.shard = self.row.tensor
        self.transient = self.row.place == "device" and tiers.device_numel == ALL
        self.feedbacks = [hop.feedback for hop in paths.straight.hops if hop.feedback is not None]
        # True if sums are computed on the device and stored off it. Those in files pass through the staging ring.
        self._stores = not tiers.gradients.serves(device)
        self._ring = tiers.ring
        # Classes of links behind the reduction: for the gather to replicas, and for the copy to an offloaded shard.
        back = [*(paths.replicas.links if paths.replicas is not None else ()), *([BUS] if self._stores else [])]
        self._straight_links = [*paths.straight.links, *back]
        self._from_held_links = [*paths.from_held.links, *back]
        # Bytes of a sum that waits to be copied off the device.
        self._stored_nbytes = self.row.nbytes if self._stores else 0
        self.arrived = False
        self.report = Report(self.shard, device)
        self._reported = -1  # autograd version of ``shard`` when ``report`` was made
        self._stale = False  # True if ``shard`` may have been written without a new version
        self.trained = (True,) * len(self.parameters)
        self.held: Tensor | None = None
        # Number of backwards summed in ``held``. A float16 message of the sum is scaled down accordingly.
        self._held_backwards = 0
        # True if the last queued reduction leaves a sum in ``held`` at a level above 1. The comm stream sets ``held``
        # later than this flag.
        self._partly_held = False
        self._scaled = 1.0  # factor that the last message was scaled by for float16 headroom
        # True if there is no hop, and the shard is on the device and not in 16 bits: gradients are then added to the
        # shard without a message, on a GPU by one kernel.
        self._gathers = not self._stores and adds_directly(paths.straight, self.shard)
        self._plain = PlainCodec(self.dtype)
        by_kernel = self._gathers and summed_by_kernels(self.shard)
        # The parts of parameters in the shard, and the gaps between them; None if a kernel adds or messages are sent.
        self._parts: _Parts | None = None
        if self._gathers and not by_kernel:
            self._parts = layout.views(self.shard), layout.gap_views(self.shard)
        # The message of a reduction and its parts are made once; its memory is allocated for each use.
        self._message: Tensor | None = None
        self._message_parts: _Parts = [], []
        self._table = _table_of(layout, device) if paths.straight.codec.coded or by_kernel else None
        # Rotated codes spread their error over whole blocks, padding included. Padding must be cleared before norms.
        rotates = any(hop.codec.rotate for hop in paths.straight.hops)
        self._padding = self._find_padding() if rotates else []
        if self.transient:
            self.free_shard()

    @property
    def onward_nbytes(self) -> int:
        """Bytes of a reduction that stay in flight after its first class of links; 0 if it uses one class only."""
        return self.paths.straight.onward_nbytes(self.layout.numel) + self._stored_nbytes

    # From ``.grad`` to a message.

    def pack(self, scale: float, *, hold: bool) -> Tensor | None:
        """Take all gradients out of ``.grad`` and pack them as one message in the wire dtype.

        Args:
            scale: factor on the sum over ranks. It is used only if gradients go to the shard without a message.
            hold: True if the gradient waits for a later backward of the window before it is sent further.

        Returns:
            The message for :meth:`prepare_reduce`. None if there is nothing to send: whole gradients were added to
            ``held``, or a single rank's gradients were added to the shard.
        """
        gradients = self._take()
        path = self.paths.straight
        # Whole gradients are held without any collective, so add them here and not on a comm stream.
        if self.paths.held_level == 1 and (hold or self.held is not None):
            whole = self._hold_whole(gradients)
            if hold:
                return None
            self._scaled = path.codec.headroom(self._held_backwards)
            message = path.empty(self.layout.numel, self.device)
            path.encode_(message, whole if self._scaled == 1.0 else whole * self._scaled)
            self.held = None
            self._held_backwards = 0
            return message
        if self._gathers:
            self._gather(gradients, scale)
            return None
        self._scaled = 1.0
        message = self._empty_message()
        if message is self._message and isinstance(path.codec, PlainCodec):
            parts, gaps = self._message_parts
            path.codec.pack_parts_(parts, gaps, gradients)
        else:
            path.pack_(message, gradients, self.layout, self._table)
        return message

    # Memory of the shard; see [Note: memory of gradients].

    def alloc_shard(self) -> None:
        """Allocate memory for the shard on the caller's stream, unless it has memory."""
        storage = self.shard.untyped_storage()
        if self.transient and not storage.nbytes():
            storage.resize_(self.shard.numel() * self.shard.itemsize)

    def free_shard(self) -> None:
        """Free the memory of the shard, which holds no gradient; nothing else may refer to it."""
        self.shard.untyped_storage().resize_(0)

    def renew_shard(self) -> None:
        """Leave the memory of the shard to the user, who still refers to it, and use a new tensor.

        The caller makes its views of the shard again, and then frees it.
        """
        self.place_shard(torch.empty_like(self.shard))

    def place_shard(self, shard: Tensor, *, transient: bool = True) -> None:
        """Use another tensor for the shard; ``transient`` is False if it keeps its memory."""
        self.row = MemoryTensor(shard)
        self.shard = shard
        self.transient = transient
        if self._parts is not None:
            self._parts = self.layout.views(shard), self.layout.gap_views(shard)
        self.accept_edits()

    def _empty_message(self) -> Tensor:
        """Return memory for the message of a whole gradient, allocated on the caller's stream.

        The caller keeps the message until it has been reduced, so comm streams need not call `used_here`. See [Note:
        memory on several streams].
        """
        path = self.paths.straight
        message = self._message
        if message is None:
            message = self._message = path.empty(self.layout.numel, self.device)
            if isinstance(path.codec, PlainCodec):
                self._message_parts = self.layout.views(message), self.layout.gap_views(message)
            return message
        storage = message.untyped_storage()
        if storage.nbytes():  # an earlier reduction of this gradient is in flight
            return path.empty(self.layout.numel, self.device)
        storage.resize_(message.numel() * message.itemsize)
        return message

    def free_message(self, message: Tensor) -> None:
        """Free the memory of a message that has been reduced."""
        message.untyped_storage().resize_(0)

    def _take(self) -> list[Tensor | None]:
        """Remove and return the ``.grad`` of each parameter."""
        with unguarded():
            # Read ``.grad`` without the guard, which refuses it for released parameters.
            gradients = list(map(_grad, self.parameters))
            for parameter in self.parameters:
                # Reset ``.grad``, or autograd would add the next micro-batch to a gradient that has been sent.
                parameter.grad = None
        return gradients

    def _gather(self, gradients: list[Tensor | None], scale: float) -> None:
        """Add gradients to the shard on the caller's stream, without a message: there is one rank."""
        self.alloc_shard()
        if self._parts is None:
            assert self._table is not None  # made in __init__ if a kernel adds gradients
            self._plain.gather_(
                gradients,
                self.layout,
                self._table,
                self.shard,
                scale=scale,
                accumulate=self.arrived,
                report=self.report,
            )
        elif self.arrived:
            self._add(self._parts[0], gradients, scale)
            self.report.measure(self.shard)
        else:
            parts, gaps = self._parts
            self._plain.pack_parts_(parts, gaps, gradients)
            if scale != 1.0:
                self.shard.mul_(scale)
            self.report.measure(self.shard)
        self._arrive()

    def _hold_whole(self, gradients: list[Tensor | None]) -> Tensor:
        """Add whole gradients to ``held`` in the main dtype, not rounded to the wire dtype, and return ``held``."""
        if self.held is None:
            # Start from zeros, because nothing writes the padding and parameters without a gradient.
            self.held = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        self._held_backwards += 1
        self._add(self.layout.views(self.held), gradients)
        return self.held

    def _add(self, sums: Sequence[Tensor], gradients: list[Tensor | None], scale: float = 1.0) -> None:
        """Add ``scale`` times each gradient to its sum, which is in the main dtype; None adds nothing."""
        present = [(each, g.to(self.dtype)) for each, g in zip(sums, gradients, strict=True) if g is not None]
        if present:
            values = [value for _, value in present]
            scaled = values if scale == 1.0 else torch._foreach_mul(values, scale)
            torch._foreach_add_([each for each, _ in present], scaled)

    # From messages to a sum. These stages run on the comm streams of reductions.

    def prepare_reduce(
        self, message: Tensor, scale: float, *, hold: bool, last: ReduceWork | None = None
    ) -> ReduceWork:
        """Return the work that reduces all ranks' messages into the shard or, if they are held, into ``held``.

        Args:
            message: this rank's message from :meth:`pack`.
            scale: factor on the sum over ranks and backwards.
            hold: as given to :meth:`pack`.
            last: result of an earlier call. It is returned again if its message and its shard are still the same. The
                caller stores it: stored here, it would form a reference cycle.
        """
        # Use the flag instead of ``held``: the comm stream may not have run earlier reductions yet.
        straight = not hold and not self._partly_held
        self._partly_held = hold and self.paths.held_level != 1  # at level 1, pack() holds the gradients itself
        # Read ``_scaled`` now: pack() may change it before the comm stream runs this reduction.
        scale /= self._scaled
        if not straight:
            links = [*self.paths.to_held.links, *([] if hold else self._from_held_links)]
            if not hold:
                self.alloc_shard()
            part = self._add_to_held(message, scale, hold=hold)
            return ReduceWork(links, [stages_of(part, links)], None if hold else self._arrive)
        path, numel, links = self.paths.straight, self.layout.numel, self._straight_links
        self.alloc_shard()
        if self.paths.replicas is not None or self._stores:
            # Several ranks keep a copy of each shard, so the sum is reduced to one piece per rank and gathered back
            # from there. Or the shard is off the device.
            part = self._reduce_replicas(path, message, numel, scale)
            return ReduceWork(links, [stages_of(part, links)], self._arrive)
        if last is not None and last.message is message and last.shard is self.shard:
            assert last.reduction is not None
            last.reduction.scale = scale
            return last
        # A message that is made for each use is not kept.
        again = message is self._message
        reduction = self._into_shard(path, message, numel, scale, again=again)
        kept = message if again else None
        return ReduceWork(links, [reduction.stages()], self._arrive, kept, self.shard, reduction)

    def _into_shard(
        self, path: ReducePath, message: Tensor, numel: int, scale: float, *, again: bool = False
    ) -> Reduction:
        """Return the reduction of messages into the shard."""
        accumulate, unit, report = self._has_arrived, self.unit, self._summed_report
        return path.reduction(
            message, numel, self.shard, scale=scale, accumulate=accumulate, unit=unit, report=report, again=again
        )

    @property
    def _summed_report(self) -> Report | None:
        """The report for the last sum to fill; None if padding must be cleared before the result is measured."""
        return None if self._padding else self.report

    def _reduce(self, path: ReducePath, message: Tensor, numel: int, scale: float) -> Iterator[None]:
        """Return a generator that reduces messages into the shard."""
        if self._stores:
            return self._reduce_and_store(path, message, numel, scale)
        return in_turn(self._into_shard(path, message, numel, scale).stages())

    def _reduce_and_store(self, path: ReducePath, message: Tensor, numel: int, scale: float) -> Iterator[None]:
        """Reduce messages on the device, then copy the sum to the offloaded shard."""
        total, report = self._empty_sum(), self._summed_report
        sums = path.reduction(
            message, numel, total, scale=scale, accumulate=lambda: False, unit=self.unit, report=report
        )
        yield from in_turn(sums.stages())
        yield from self._store(total)

    def _empty_sum(self) -> Tensor:
        return torch.empty(self.shard.numel(), dtype=self.dtype, device=self.device)

    def _store(self, total: Tensor) -> Iterator[None]:
        """Add a sum, which is measured unless there is padding, to the offloaded shard; pauses once before that."""
        # Pause, so that the copies run on the comm stream of the host link. The host waits for them there, and the next
        # reduction runs meanwhile.
        yield
        used_here(total)
        self._clear_padding(total)
        # Measure again after an addition: the optimizer steps with the accumulated gradient.
        if self.arrived:
            self.report.reset()
        elif self._padding:
            self.report.measure(total)
        if not self.row.in_memory:
            self._store_in_file(total)
            return
        if self.arrived:
            for start in range(0, total.numel(), _PART):
                self.report.add_part(total[start : start + _PART], self.shard[start : start + _PART], start)
        # The device writes to host memory itself, without a staging buffer. The host waits, because the step reads the
        # shard.
        self.row.write(0, total).wait(threading.TIMEOUT_MAX)

    def _store_in_file(self, total: Tensor) -> None:
        """Add a sum to the shard in a file, part by part through the staging ring."""
        assert self._ring is not None  # there is a ring if there are files
        # Whole blocks at a time, so that the report has the same bits as one of the whole shard.
        most = self._ring.nbytes // self.dtype.itemsize // BLOCK * BLOCK
        for start in range(0, total.numel(), most):
            part = total[start : start + most]
            with self._ring.taken() as buffer:
                staged = buffer[: part.nbytes].view(self.dtype)
                if self.arrived:
                    self.row.read(start, staged).wait(threading.TIMEOUT_MAX)
                    self.report.add_part(part, staged, start)
                copy(staged, part).wait(threading.TIMEOUT_MAX)
                self.row.write(start, staged).wait(threading.TIMEOUT_MAX)

    def _add_to_held(self, message: Tensor, scale: float, *, hold: bool) -> Iterator[None]:
        """Reduce messages into ``held``; unless ``hold`` is set, then reduce ``held`` into the shard."""
        paths, fresh = self.paths, self.held is None
        if self.held is None:
            self.held = torch.empty(self.layout.numel // paths.held_level, dtype=self.dtype, device=self.device)
        held = self.held
        # Do not scale here: the last sum applies the scale, once.
        sums = paths.to_held.reduction(
            message, self.layout.numel, held, scale=1.0, accumulate=lambda: not fresh, unit=self.unit
        )
        yield from in_turn(sums.stages())
        # ``held`` was allocated on the first comm stream, or by an earlier backward, and this comm stream has written
        # to it.
        used_here(held)
        self._held_backwards += 1
        if hold:
            return
        # ``held`` is a sum of held_backwards * held_level gradients. In float16 such a sum may overflow, so scale it
        # down.
        headroom = paths.straight.codec.headroom(self._held_backwards * paths.held_level)
        message = paths.from_held.empty(held.numel(), self.device)
        paths.from_held.encode_(message, held if headroom == 1.0 else held * headroom)
        self.held = None
        self._held_backwards = 0
        yield
        used_here(message)
        onward = self._reduce_replicas(paths.from_held, message, held.numel(), scale / headroom)
        del message, held  # or this frame would keep both alive until the sum is complete
        yield from onward

    def _reduce_replicas(self, path: ReducePath, message: Tensor, numel: int, scale: float) -> Iterator[None]:
        """Reduce to one piece per rank, then gather pieces to the level of the states if the states have replicas."""
        replicas, unit = self.paths.replicas, self.unit
        if replicas is None:
            yield from self._reduce(path, message, numel, scale)
            return
        # ``piece`` is [numel / world] in the main dtype, ``whole`` is [numel / states] in the wire dtype. All replicas
        # receive the same message of each piece, so their states keep the same bits. An all-reduce would not guarantee
        # that.
        piece = torch.empty(self.layout.piece_numel, dtype=self.dtype, device=self.device)
        whole = replicas.empty(self.shard.numel(), self.device)
        # The sum is gathered in the wire dtype before the scale is applied, so a float16 sum is scaled down for the
        # gather.
        headroom = path.codec.headroom(self.layout.world)
        sums = path.reduction(message, numel, piece, scale=headroom, accumulate=lambda: False, unit=unit)
        yield from in_turn(sums.stages())
        yield
        # The gather begins on the same links on which the reduction ended, so this comm stream is the last to use
        # ``piece``.
        used_here(piece)
        used_here(whole)
        yield from in_turn(replicas.stages(piece, replicas.places(whole), unit))
        # The gather may end on another comm stream than it began on, for instance if held sums were reduced across
        # nodes first.
        used_here(whole)
        # ``whole`` is a single message, so this call only casts, scales and perhaps adds.
        last = PlainCodec(whole.dtype)
        scale = scale / headroom
        if not self._stores:
            last.decode_sum_([whole], self.shard, scale=scale, accumulate=self.arrived, report=self.report)
        else:
            total = self._empty_sum()
            last.decode_sum_([whole], total, scale=scale, report=self._summed_report)
            del piece, whole  # or this frame would keep both alive until the sum is stored
            yield from self._store(total)

    def _has_arrived(self) -> bool:
        """Return ``arrived``, for reductions that must read it when they run."""
        return self.arrived

    def _arrive(self) -> None:
        """Mark the shard as filled, at the end of a reduction."""
        unmeasured = bool(self._padding) and not self._stores
        if unmeasured:
            # Clear the padding on the comm stream, before the reduction's end event, so that the optimizer never reads
            # what rotated codes left in it.
            self._clear_padding(self.shard)
        # Until the backward has ended and its reductions were waited for, only these comm streams read ``arrived``.
        self.arrived = True
        clears = bool(self.feedbacks) and not all(self.trained)
        if clears:
            self.clear([not trained for trained in self.trained])
        if unmeasured or clears:
            self.report.measure(self.shard)
        self.accept_edits()

    def _clear_padding(self, values: Tensor) -> None:
        """Zero the padding, if rotated codes may have left values in it."""
        if self._padding:
            torch._foreach_zero_([values[start:stop] for start, stop in self._padding])

    @property
    def edited(self) -> bool:
        """True if the shard's version shows a write since the report was made."""
        return self.shard._version != self._reported

    @property
    def stale(self) -> bool:
        """True if the report may not match the shard."""
        return self._stale or self.shard._version != self._reported

    def mark_stale(self) -> None:
        """Mark the report as doubtful: torch's GradScaler and writes to ``.data`` leave no trace in the version."""
        self._stale = True

    def accept_edits(self) -> None:
        """Record that the report matches the shard as it is now."""
        self._reported = self.shard._version
        self._stale = False

    def measure(self) -> None:
        """Make the report anew if it is stale."""
        if self.stale:
            self.report.measure(self.shard)
            self.accept_edits()

    def clear(self, unused: Sequence[bool]) -> None:
        """Zero the gradients of unused parameters in the shard.

        Error feedback of earlier steps adds values even to parameters without a gradient. Norms and clipping must not
        include these values.

        Args:
            unused: one flag per parameter, True to zero the parameter's gradient.
        """
        for fragment in self._fragments(self.placement.mode.states):
            if unused[fragment.slot]:
                self.shard[fragment.offset : fragment.offset + fragment.stop - fragment.start].zero_()

    # Presence of gradients, and dropping them.

    def has_unsent(self) -> bool:
        """True if this rank has gradients, held or in ``.grad``, that no reduction has added to a shard."""
        return self.held is not None or self.has_stray()

    def has_stray(self) -> bool:
        """True if some parameter has a ``.grad`` that no message contains."""
        with unguarded():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    return True
        return False

    def forget(self) -> None:
        """Drop all gradients: reduced, held and in ``.grad``."""
        self.drop_sum()
        self._take()

    def drop_sum(self) -> None:
        """Drop reduced and held gradients. Keep ``.grad``, which autograd may be filling right now."""
        self.arrived = False
        self.forget_held()

    def begin_sum(self) -> None:
        """Begin a sum of zeros if no gradient has arrived, because the user sets the gradient of one parameter."""
        if not self.arrived:
            self.alloc_shard()
            self.shard.zero_()
            self.arrived = True
            self.measure()

    def set_to_zero(self) -> None:
        """Set the sum to zero if this rank has any gradient, and drop unsent gradients."""
        present = self.arrived or self.has_unsent()
        self.forget_unsent()
        if present:
            self.alloc_shard()
            self.shard.zero_()
            self.arrived = True
            self.measure()

    def forget_unsent(self) -> None:
        """Drop held gradients and ``.grad``."""
        self.forget_held()
        self.forget_stray()

    def forget_held(self) -> None:
        """Drop gradients that are held for a later backward."""
        self.held = None
        self._held_backwards = 0
        self._partly_held = False

    def forget_stray(self) -> None:
        """Drop the gradients in ``.grad``."""
        self._take()

    def forget_one(self, parameter: nn.Parameter) -> None:
        """Drop all gradients of one parameter: reduced, held and in ``.grad``."""
        # Zero the parameter's range: the same tensor holds the gradients of other parameters.
        shard = self.shard if self.arrived else None
        for values, level in ((shard, self.placement.mode.states), (self.held, self.paths.held_level)):
            if values is not None:
                for fragment in self._fragments(level):
                    if self.parameters[fragment.slot] is parameter:
                        values[fragment.offset : fragment.offset + fragment.stop - fragment.start].zero_()
        with unguarded():
            parameter.grad = None

    def _find_padding(self) -> list[tuple[int, int]]:
        """Return the ranges [start, stop) of the shard that belong to no parameter."""
        ends = [0]
        starts = []
        for fragment in self._fragments(self.placement.mode.states):
            starts.append(fragment.offset)
            ends.append(fragment.offset + fragment.stop - fragment.start)
        starts.append(self.shard.numel())
        return [(start, stop) for start, stop in zip(ends, starts, strict=True) if start < stop]

    def _fragments(self, level: int) -> list[Fragment]:
        return self.layout.fragments(self.placement.chain.slice_index(self.placement.rank, level), level)


def _table_of(layout: BufferLayout, device: torch.device) -> BlockTable:
    """Return the kernels' table of the parameters in a whole buffer."""
    slots = layout.slots
    return block_table([slot.numel for slot in slots], [slot.offset for slot in slots], layout.numel, device=device)


def adds_directly(path: ReducePath, shard: Tensor) -> bool:
    """Return True if gradients are added to the shard without a message: nothing is sent, and no sum is rounded."""
    return not path.hops and shard.dtype.itemsize >= 4
