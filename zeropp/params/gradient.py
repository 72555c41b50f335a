"""The gradient sum of one flat buffer, from ``.grad`` to the reduced shard, and the loss scale.

[Note: loss scale] The loss scale is divided out when gradients are added to sums in the main dtype. So norms, clipping
and steps work on unscaled gradients, and an overflow appears as a non-finite norm on every rank. One loss may depend on
several models, each with its own engine and loss scale. The engine that scaled the loss determines the scale, and all
engines divide by this scale.

A loss counts as scaled when a backward runs through the scaled tensor, not when the tensor is made, because a user may
scale a loss without ever running its backward. Losses of detached outputs (a gradient cache, a loss in chunks) need two
backwards: the first goes through the scaled loss and ends at the outputs; the second continues from the outputs with
scaled gradients. The second one does not pass the scaled loss, so nothing marks it as scaled. Therefore an unscaled
loss is refused after such a first backward: its gradients may be scaled or not.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zeropp._compat import current_graph_task, queue_end_of_backward, uncompiled, unguarded
from zeropp.comm.streams import BUS, Work, issued_here, used_here
from zeropp.offload.tier_choice import Tiers
from zeropp.partition.levels import BufferLayout, Fragment
from zeropp.wire.codecs import Feedback, PlainCodec, Report, summed_by_kernels
from zeropp.wire.paths import GatherPath, ReducePath
from zeropp_kernels import block_table
from zeropp_kernels.wire import BLOCK

__all__ = ["Gradient", "GradientPaths", "LossScale", "LossScaleError", "LossScaling"]


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


class Gradient:
    """The gradient sum of one flat buffer.

    Attributes:
        row: stored tensor that holds ``shard``.
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
        # Staging ring for sums that are stored off the device; None if the shard is on the device.
        self._ring = None if tiers.gradients.serves(device) else tiers.ring
        # Classes of links behind the reduction: for the gather to replicas, and for the copy to an offloaded shard.
        back = [*(paths.replicas.links if paths.replicas is not None else ()), *([] if self._ring is None else [BUS])]
        self._straight_links = [*paths.straight.links, *back]
        self._from_held_links = [*paths.from_held.links, *back]
        # Bytes of a sum that waits to be copied off the device.
        self._stored_nbytes = 0 if self._ring is None else self.row.nbytes
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
        self._table = None
        # True if there is no hop and the shard is on the device: one kernel then adds gradients to the shard, without a
        # message.
        self._gathers = not paths.straight.hops and self._ring is None and summed_by_kernels(self.shard)
        if paths.straight.codec.coded or self._gathers:
            numels = [slot.numel for slot in layout.slots]
            offsets = [slot.offset for slot in layout.slots]
            self._table = block_table(numels, offsets, layout.numel, device=self.device)
        # Rotated codes spread their error over whole blocks, padding included. Padding must be cleared before norms.
        rotates = any(hop.codec.rotate for hop in paths.straight.hops)
        self._padding = self._find_padding() if rotates else []

    @property
    def shard(self) -> Tensor:
        """The sum that the optimizer reads, [numel / states] in the main dtype; a memory mapping if it is in a file."""
        return self.row.tensor

    @property
    def feedbacks(self) -> list[Feedback]:
        """The error feedback of each hop that has one."""
        return [hop.feedback for hop in self.paths.straight.hops if hop.feedback is not None]

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
        # Allocated on the caller's stream. The caller keeps the message until it has been reduced, so comm streams need
        # not call `used_here`. See [Note: memory on several streams].
        message = path.empty(self.layout.numel, self.device)
        path.pack_(message, gradients, self.layout, self._table)
        return message

    def _take(self) -> list[Tensor | None]:
        """Remove and return the ``.grad`` of each parameter."""
        with unguarded():
            # Read ``.grad`` without the guard, which refuses it for released parameters.
            gradients = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                # Reset ``.grad``, or autograd would add the next micro-batch to a gradient that has been sent.
                parameter.grad = None
        return gradients

    def _gather(self, gradients: list[Tensor | None], scale: float) -> None:
        """Add gradients to the shard with one kernel, on the caller's stream, without a message."""
        assert self._table is not None  # made in __init__ if ``_gathers``
        PlainCodec(self.dtype).gather_(
            gradients, self.layout, self._table, self.shard, scale=scale, accumulate=self.arrived, report=self.report
        )
        self._arrive()

    def _hold_whole(self, gradients: list[Tensor | None]) -> Tensor:
        """Add whole gradients to ``held`` in the main dtype, not rounded to the wire dtype, and return ``held``."""
        if self.held is None:
            # Start from zeros, because nothing writes the padding and parameters without a gradient.
            self.held = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        self._held_backwards += 1
        views = self.layout.views(self.held)
        present = [(view, g) for view, g in zip(views, gradients, strict=True) if g is not None]
        if present:
            torch._foreach_add_([view for view, _ in present], [g.to(self.dtype) for _, g in present])
        return self.held

    # From messages to a sum. These generators run on the comm streams of reductions.

    def prepare_reduce(self, message: Tensor, scale: float, *, hold: bool) -> Work:
        """Return the work that reduces all ranks' messages into the shard or, if they are held, into ``held``.

        Args:
            message: this rank's message from :meth:`pack`.
            scale: factor on the sum over ranks and backwards.
            hold: as given to :meth:`pack`.
        """
        # Use the flag instead of ``held``: the comm stream may not have run earlier reductions yet.
        straight = not hold and not self._partly_held
        self._partly_held = hold and self.paths.held_level != 1  # at level 1, pack() holds the gradients itself
        # Read ``_scaled`` now: pack() may change it before the comm stream runs this reduction.
        scale /= self._scaled
        numel = self.layout.numel
        if not straight:
            hops = [*self.paths.to_held.links, *([] if hold else self._from_held_links)]
            return Work(hops, [self._add_to_held(message, scale, hold=hold)], None if hold else self._arrive)
        path = self.paths.straight
        if self.paths.replicas is not None:
            # Several ranks keep a copy of each shard. The sum is reduced to one piece per rank and gathered back from
            # there.
            return Work(self._straight_links, [self._reduce_replicas(path, message, numel, scale)], self._arrive)
        return Work(self._straight_links, [self._reduce(path, message, numel, scale)], self._arrive)

    def _reduce(self, path: ReducePath, message: Tensor, numel: int, scale: float) -> Iterator[None]:
        """Return a generator that reduces messages into the shard."""
        if self._ring is not None:
            return self._reduce_and_store(path, message, numel, scale)
        report = None if self._padding else self.report
        return path.reduce(
            message, numel, self.shard, scale=scale, accumulate=self._has_arrived, unit=self.unit, report=report
        )

    def _reduce_and_store(self, path: ReducePath, message: Tensor, numel: int, scale: float) -> Iterator[None]:
        """Reduce messages on the device, then copy the sum to the offloaded shard."""
        total = self._empty_sum()
        sums = path.reduce(message, numel, total, scale=scale, accumulate=lambda: False, unit=self.unit)
        del message  # or this frame would keep the message alive until the sum is complete
        yield from sums
        yield from self._store(total)

    def _empty_sum(self) -> Tensor:
        return torch.empty(self.shard.numel(), dtype=self.dtype, device=self.device)

    def _store(self, total: Tensor) -> Iterator[None]:
        """Add a sum to the offloaded shard and measure the result; pauses once before that."""
        # Pause, so that the copies run on the comm stream of the host link. The host waits for them there, and the next
        # reduction runs meanwhile.
        yield
        used_here(total)
        assert self._ring is not None
        self._clear_padding(total)
        self.report.flag.zero_()
        # Store whole blocks at a time, so that the report has the same bits as one of the whole shard.
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
        """Reduce messages into ``held``; unless ``hold`` is set, then reduce ``held`` into the shard."""
        paths, fresh = self.paths, self.held is None
        if self.held is None:
            self.held = torch.empty(self.layout.numel // paths.held_level, dtype=self.dtype, device=self.device)
        held = self.held
        # Do not scale here: the last sum applies the scale, once.
        yield from paths.to_held.reduce(
            message, self.layout.numel, held, scale=1.0, accumulate=lambda: not fresh, unit=self.unit
        )
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
        sums = path.reduce(message, numel, piece, scale=headroom, accumulate=lambda: False, unit=unit)
        del message  # or this frame would keep the message alive until the gather has ended
        yield from sums
        yield
        # The gather begins on the same links on which the reduction ended, so this comm stream is the last to use
        # ``piece``.
        used_here(piece)
        used_here(whole)
        yield from replicas.gather(piece, replicas.places(whole), unit)
        # The gather may end on another comm stream than it began on, for instance if held sums were reduced across
        # nodes first.
        used_here(whole)
        # ``whole`` is a single message, so this call only casts, scales and perhaps adds.
        last = PlainCodec(whole.dtype)
        scale = scale / headroom
        if self._ring is None:
            last.decode_sum_([whole], self.shard, scale=scale, accumulate=self.arrived, report=self.report)
        else:
            total = self._empty_sum()
            last.decode_sum_([whole], total, scale=scale)
            del piece, whole  # or this frame would keep both alive until the sum is stored
            yield from self._store(total)

    def _has_arrived(self) -> bool:
        """Return ``arrived``, for reductions that must read it when they run."""
        return self.arrived

    def _arrive(self) -> None:
        """Mark the shard as filled, at the end of a reduction."""
        unmeasured = bool(self._padding) and self._ring is None
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
        return self._stale or self.edited

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
            return any(parameter.grad is not None for parameter in self.parameters)

    def drop_sum(self) -> None:
        """Drop reduced and held gradients. Keep ``.grad``, which autograd may be filling right now."""
        self.arrived = False
        self.forget_held()

    def begin_sum(self) -> None:
        """Begin a sum of zeros if no gradient has arrived, because the user sets the gradient of one parameter."""
        if not self.arrived:
            self.shard.zero_()
            self.arrived = True
            self.measure()

    def set_to_zero(self) -> None:
        """Set the sum to zero if this rank has any gradient, and drop unsent gradients."""
        present = self.arrived or self.has_unsent()
        self.forget_unsent()
        if present:
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
        for values, level in ((self.shard, self.placement.mode.states), (self.held, self.paths.held_level)):
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


_log = logging.getLogger("zeropp")

_FACTOR = 2.0
_DETACHED = (
    ". If a loss is computed from detached outputs: detach them in float32, call loss.backward() on the loss, then "
    "pass (outputs.float() * gradients).sum() to backward() of the engine or optimizer"
)


class LossScaleError(RuntimeError):
    """Gradients are non-finite although the loss scale has its minimum value."""


@dataclass(eq=False)
class _Scaled:
    """A running backward that has reached a scaled loss.

    Attributes:
        task: id of the backward in autograd (graph task).
        thread: id of the thread in which the backward reached the loss.
        owner: loss scale that scaled the loss.
        value: factor that the loss was scaled by.
        running: weak reference that is dead once the backward has ended or failed.
        met: True if the backward has reached the model of ``owner``.
    """

    task: int
    thread: int
    owner: weakref.ref[LossScale]
    value: float
    running: weakref.ref[Any]
    met: bool


@dataclass(frozen=True)
class LossScaling:
    """Settings of the loss scale.

    Attributes:
        enabled: True if losses are scaled.
        loss_scale: constant scale; 0 for a dynamic scale.
        initial_scale_power: exponent of 2 of the first dynamic scale.
        loss_scale_window: number of steps without overflow after which the scale is doubled.
        hysteresis: number of overflows until the scale is halved.
        consecutive_hysteresis: True if each step without overflow restores the hysteresis.
        min_loss_scale: lower bound of a dynamic scale.
    """

    enabled: bool = False
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0


class LossScale:
    """A static loss scale, or a dynamic one that is halved after overflows and doubled after many steps without any.

    All ranks update the scale with the same global result of each step, so the scale is the same on every rank. The
    sequence is DeepSpeed's: the first ``hysteresis - 1`` overflows change nothing, and each further one halves the
    scale, down to ``min_loss_scale``. A step without overflow doubles the scale and restores the hysteresis if the
    number of steps between the last overflow and this step is a positive multiple of ``loss_scale_window``. With
    ``consecutive_hysteresis`` every step without overflow restores the hysteresis.

    Args:
        scaling: settings; if they are not enabled, the scale is 1 and never changes.
        factor: factor on sums of unscaled gradients over ranks: 1 / world for a mean.

    Attributes:
        value: factor that losses are multiplied by.
        dynamic: True if the scale is dynamic.
        averages_unscaled: True if losses of a plain ``loss.backward()`` are divided by the micro-batches of a window,
            as DeepSpeed's engine does; False if they count in full, as in plain torch.
        iterations: number of steps so far, skipped ones included; counted for a dynamic scale only.
    """

    # Shared by all models, because a loss may depend on several. ``_running``: running backwards of scaled losses.
    # ``_unreached``: loss scales that scaled a loss of this window whose backward did not reach their own model.
    _running: ClassVar[list[_Scaled]] = []
    _unreached: ClassVar[weakref.WeakSet[LossScale]] = weakref.WeakSet()

    def __init__(self, scaling: LossScaling, factor: float) -> None:
        self._scaling = scaling
        self._factor = factor
        self.dynamic = scaling.enabled and scaling.loss_scale == 0
        self.value = 1.0
        if scaling.enabled:
            self.value = 2.0**scaling.initial_scale_power if self.dynamic else scaling.loss_scale
        self.iterations = 0
        self.averages_unscaled = False
        # For the losses of a window: the factor that divides them (1 / micro-batches, or 1 for losses that zeropp does
        # not divide), and their loss scale.
        self._share = 1.0
        self._scale = self.value
        self._last_overflow = -1
        self._left = scaling.hysteresis  # number of overflows until the scale is halved
        # Waits for the result of the last step, which may still be unknown to the host.
        self.wait_for_last: Callable[[], object] = lambda: None

    def apply(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale; a backward through the returned tensor counts as one of a scaled loss."""
        if self._scaling.enabled:
            if self.dynamic:
                self.wait_for_last()
            # Scale in float32: the first scale, 65536, exceeds the range of float16.
            scaled = loss.float() * self.value
        else:
            # Clone the loss. On the model's output itself, hooks of the model would run before the hook below. On a
            # view, an edit in place would drop the hook.
            scaled = loss.clone()
        if scaled.requires_grad:
            this = weakref.ref(self)
            value = self.value
            scaled.register_hook(partial(_begin_scaled_backward, this, value))
        return scaled

    @property
    def factor(self) -> float:
        """The factor on sums of gradients over ranks, which divides out the loss scale."""
        return self._factor * self._share / self._scale

    def backward_begins(self, steps: int, first: bool) -> None:
        """Determine the scale and the divisor of the loss whose backward has reached this model.

        Args:
            steps: number of micro-batches in a window.
            first: True if this backward is the first of a window.

        Raises:
            RuntimeError: The loss was not scaled although float16 needs it, or may have been scaled through detached
                outputs, or the losses of one window have different divisors or scales.
        """
        scale = self._found()
        if scale is None and self._scaling.enabled:
            # Without a scale, small float16 gradients would underflow to zero.
            raise RuntimeError(
                "fp16 is enabled, and this backward is of a loss that was not scaled; call optimizer.backward(loss), "
                f"or optimizer.scale(loss).backward(){_DETACHED if LossScale._unreached else ''}"
            )
        matters = (self.averages_unscaled and steps > 1) or any(each._scaling.enabled for each in LossScale._unreached)
        if scale is None and LossScale._unreached and matters:
            raise RuntimeError(
                "an engine scaled a loss, and the backward of that loss did not reach the engine's model. Until "
                "that engine steps, zeropp cannot tell whether the loss of this backward is already scaled or divided"
                f"{_DETACHED}"
            )
        share = 1 / steps if scale is None and self.averages_unscaled else 1.0
        scale = 1.0 if scale is None else scale
        # The held gradients of a window are one sum, which is multiplied by one factor.
        if not first and share != self._share:
            raise RuntimeError(
                "some losses of this accumulation window went through engine.backward(loss) and some through "
                "loss.backward(); take one of the two for all micro-batches between two steps"
            )
        if not first and scale != self._scale:
            raise RuntimeError(
                f"losses of this accumulation window have loss scales {self._scale:g} and {scale:g}, because two "
                "engines scaled them; call step() or zero_grad() between them, or use one engine's backward for all"
            )
        self._share = share
        self._scale = scale

    def _found(self) -> float | None:
        """Return the scale of the loss whose backward has reached this model; None if the loss was not scaled."""
        running = _running()
        task = current_graph_task()
        # Activation checkpointing runs an inner backward, which has another task id, usually in the thread of the loss.
        # So search by task first, then by thread.
        found = [each for each in running if each.task == task]
        found = found or [each for each in running if each.thread == threading.get_ident()] or running
        for each in found:
            each.met |= each.owner() is self
        return found[-1].value if found else None

    def drop_losses(self) -> None:
        """Forget the losses that were scaled in this window, because the window has ended."""
        LossScale._unreached.discard(self)

    def update(self, *, overflow: bool) -> None:
        """Update a dynamic scale after a step was taken or skipped.

        Args:
            overflow: True if the step was skipped because of non-finite gradients; the same on every rank.

        Raises:
            LossScaleError: The step overflowed at the minimum scale, with no hysteresis left. Raised on every rank.
        """
        # A static scale never changes. The caller skips and counts the step.
        if not self.dynamic:
            return
        if overflow:
            self._overflow()
        else:
            if self._scaling.consecutive_hysteresis:
                self._left = self._scaling.hysteresis
            # Number of steps strictly between the last overflow and this step.
            between = self.iterations - self._last_overflow - 1
            if between > 0 and between % self._scaling.loss_scale_window == 0:
                self._left = self._scaling.hysteresis
                self.value *= _FACTOR
        self.iterations += 1

    def _overflow(self) -> None:
        """Lower the hysteresis or halve the scale."""
        self._last_overflow = self.iterations
        # A single overflow is often caused by one batch, so the hysteresis delays the change of the scale.
        if self._left > 1:
            self._left -= 1
            _log.info(
                "gradients overflowed at loss scale %g; overflows until the scale is halved: %d", self.value, self._left
            )
            return
        least = self._scaling.min_loss_scale
        if self.value == least:
            # Count the step before raising, so that the count is right if the caller catches the error and continues.
            self.iterations += 1
            raise LossScaleError(
                f"gradients are not finite at a loss scale of {self.value:g}, fp16.min_loss_scale, and it cannot be "
                "lowered any more. Nothing was stepped. Losses or weights are most likely not finite themselves; look "
                "at these, lower the learning rate, or train in bf16"
            )
        # A loaded scale may be below the minimum; max() then raises the scale to the minimum.
        value = max(self.value / _FACTOR, least)
        _log.info(
            "gradients overflowed at loss scale %g, and the step was skipped; the scale is now %g", self.value, value
        )
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a dynamic scale, as plain numbers."""
        return {
            "value": self.value,
            "iterations": self.iterations,
            "last_overflow": self._last_overflow,
            "left": self._left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; a static scale keeps its configured value."""
        self.drop_losses()
        # A static scale was configured explicitly, so it overrides the saved value.
        if self.dynamic:
            self.value = float(state["value"])
            self.iterations = int(state["iterations"])
            self._last_overflow = int(state["last_overflow"])
            self._left = int(state["left"])


def _running() -> list[_Scaled]:
    """Return the running backwards of scaled losses; ended and failed ones are removed first."""
    for each in [each for each in LossScale._running if each.running() is None]:
        # Another thread may have removed the entry already.
        with contextlib.suppress(ValueError):
            LossScale._running.remove(each)
    return list(LossScale._running)


@uncompiled
def _begin_scaled_backward(owner: weakref.ref[LossScale], value: float, gradient: Tensor) -> None:
    """Register a running backward that has reached a scaled loss. This is a hook of the scaled loss."""
    task = current_graph_task()
    same = [each for each in _running() if each.task == task]
    for each in same:
        if each.value != value:
            # If both losses depend on one model, no single factor divides out both scales.
            raise RuntimeError(
                f"one backward goes through losses with scales {each.value:g} and {value:g}, of two engines; take each "
                "to a backward of its own, or scale their sum by one of the engines"
            )

    @uncompiled
    def over() -> None:
        if not scaled.met and (this := owner()) is not None:
            LossScale._unreached.add(this)

    # If one backward goes through several scaled losses, it may have reached the owner's model before this loss.
    met = any(each.met for each in same if each.owner() is owner())
    scaled = _Scaled(task, threading.get_ident(), owner, value, queue_end_of_backward(over), met)
    LossScale._running.append(scaled)
