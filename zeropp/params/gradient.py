"""The gradient of one flat buffer, from autograd to its sum over the ranks; and the loss scale that it is divided by.

[Note: loss scale] It is taken out of gradients as they are added to their sums, which are float32. So nothing behind
the sums knows of it: norms, clipping and steps are those of unscaled gradients, and what overflows shows as a norm that
is not finite, on every rank. A loss may come from several models, each with a scale: it has that of whoever took it to
its backward, which all of them take out.

That a loss was scaled is said by the backward that goes through it: whoever scales one may want to look at it, and no
more. What backward makes of a scaled loss of detached outputs (a gradient cache, a loss in chunks) is scaled, too, and
nothing says so where it goes on from the outputs: there a plain loss is refused, since it may be either.
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
        # Sums are made where they stay; else they are brought there, through staging buffers.
        self._ring = None if tiers.gradients.serves(device) else tiers.ring
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
        # when the comm stream has come to it.
        self._partly_held = False
        self._scaled = 1.0  # by which the last message is smaller than what it carries
        self._table = None
        # Nothing travels, and one kernel brings gradients to the shard.
        self._gathers = not paths.straight.hops and self._ring is None and summed_by_kernels(self.shard)
        if paths.straight.codec.coded or self._gathers:
            numels = [slot.numel for slot in layout.slots]
            offsets = [slot.offset for slot in layout.slots]
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
        """Bytes that are left of a message where it changes over to another comm stream; 0 where it does not."""
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
        # Held whole: nothing is sent, so it is done here and not on a comm stream.
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
        # Allocated on the caller's stream. Whoever queues the message keeps it until it has been reduced, so comm
        # streams need not say `used_here`. See [Note: memory on several streams].
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
        """Bring gradients to the shard, on the caller's stream; no comm stream has anything to do with it."""
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

    # From messages to a sum; on the comm streams of reductions.

    def prepare_reduce(self, message: Tensor, scale: float, *, hold: bool) -> Work:
        """The work to queue: every rank's message, and what is held, summed into the shard; or into what is held."""
        # By the flag, on the caller's thread: the comm stream may not have come to what was queued before.
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
        """Bring a sum to its tier, added to the values there, and measure the result; pauses first."""
        # On a comm stream of its own: the host waits for copies there, and the next reduction is on its way meanwhile.
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
        # Allocated on the first comm stream, or by an earlier backward; the last hop's comm stream has just written to
        # it.
        used_here(held)
        self._held_backwards += 1
        if hold:
            return
        # ``held`` is a sum over so many backwards and ranks; float16 may have room for their mean only.
        headroom = paths.straight.codec.headroom(self._held_backwards * paths.held_level)
        message = paths.from_held.empty(held.numel(), self.device)
        paths.from_held.encode_(message, held if headroom == 1.0 else held * headroom)
        self.held = None
        self._held_backwards = 0
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
        # Sums end over the links on which the way back begins, so this comm stream is the last that touches a piece.
        used_here(piece)
        used_here(whole)
        yield from replicas.gather(piece, replicas.places(whole), unit)
        # The way back may end on another comm stream than it began on, as where what was held goes on between nodes
        # first.
        used_here(whole)
        # One message, so this is a cast, a scale and perhaps an addition.
        last = PlainCodec(whole.dtype)
        scale = scale / headroom
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
            # On the comm stream, behind the sum and before the event, so that the optimizer never sees what codes left
            # there.
            self._clear_padding(self.shard)
        # Read on the same comm streams only, until the backward has ended and everything has been waited for.
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
        self._reported = self.shard._version
        self._doubted = False

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

    def drop_sum(self) -> None:
        """Forget what was sent or held; gradients that autograd is just bringing stay."""
        self.arrived = False
        self.forget_held()

    def begin_sum(self) -> None:
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
        self.held = None
        self._held_backwards = 0
        self._partly_held = False

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


_log = logging.getLogger("zeropp")

_FACTOR = 2.0
_DETACHED = (
    ". Of outputs that were detached, in float32, take the loss to loss.backward(), and then (outputs.float() * "
    "gradients).sum() to backward() of the engine or optimizer"
)


class LossScaleError(RuntimeError):
    """Gradients are not finite at the least scale there may be."""


@dataclass(eq=False)
class _Scaled:
    """A backward that goes through a scaled loss.

    Attributes:
        task: autograd's number of it.
        thread: in which it came to the loss.
        owner: whose scale it is.
        value: the scale.
        running: dead once it is over.
        met: whether it has come to the owner's model.
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
        enabled: losses are scaled.
        loss_scale: the scale for good; 0 for one that moves.
        initial_scale_power: exponent of 2 of the first scale that moves.
        loss_scale_window: steps without overflow until the scale is doubled.
        hysteresis: overflows until it is halved.
        consecutive_hysteresis: each step without overflow fills the hysteresis.
        min_loss_scale: the scale is never halved below it.
    """

    enabled: bool = False
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0


class LossScale:
    """Static, or dynamic: halved after steps that overflow, doubled after many that do not.

    It is moved by what all ranks learn in a step, so it is the same on every rank. The sequence is DeepSpeed's: the
    first ``hysteresis - 1`` overflows change nothing; each further one halves the scale, down to ``min_loss_scale``.
    Where ``loss_scale_window`` iterations lie between the last overflow and a step, and again after as many, it is
    doubled and the hysteresis full again; with ``consecutive_hysteresis`` each step without overflow fills it.

    Args:
        scaling: its settings; where they are not enabled the scale is 1, and stays.
        factor: on sums of gradients over ranks that nobody has scaled, 1/world for a mean.

    Attributes:
        value: the factor.
        dynamic: whether it moves.
        divides_plain: whether losses that nobody has divided by the micro-batches of a window are to count for that
            part, as DeepSpeed's engine has it; else they count whole, as in plain torch.
        iterations: steps so far, skipped ones included; of a dynamic scale.
    """

    # Of all models: a loss may go through several. And those whose own model a scaled backward of this window has not
    # come to.
    _running: ClassVar[list[_Scaled]] = []
    _unmet: ClassVar[weakref.WeakSet[LossScale]] = weakref.WeakSet()

    def __init__(self, scaling: LossScaling, factor: float) -> None:
        self._scaling = scaling
        self._factor = factor
        self.dynamic = scaling.enabled and scaling.loss_scale == 0
        self.value = 1.0
        if scaling.enabled:
            self.value = 2.0**scaling.initial_scale_power if self.dynamic else scaling.loss_scale
        self.iterations = 0
        self.divides_plain = False
        # Of the losses of a window: a micro-batch's part, where they were not divided, and the scale that they have.
        self._share = 1.0
        self._scale = self.value
        self._last_overflow = -1
        self._left = scaling.hysteresis  # overflows until the scale is halved, that one included
        # Waits for what has become of the last step, where the host does not know yet.
        self.wait_for_last: Callable[[], object] = lambda: None

    def apply(self, loss: Tensor) -> Tensor:
        """The loss times the scale; a backward that goes through it is one of a loss that was scaled."""
        if self._scaling.enabled:
            if self.dynamic:
                self.wait_for_last()
            # In float32: 65536 is more than float16 has.
            scaled = loss.float() * self.value
        else:
            # Another tensor than the model's output, whose hooks would run before that of this one; and no view of it,
            # which an edit in place would take the hook off.
            scaled = loss.clone()
        if scaled.requires_grad:
            this = weakref.ref(self)
            value = self.value
            scaled.register_hook(partial(_begin_scaled_backward, this, value))
        return scaled

    @property
    def factor(self) -> float:
        """By which sums of gradients over ranks are multiplied, which takes the scale out."""
        return self._factor * self._share / self._scale

    def backward_begins(self, steps: int, first: bool) -> None:
        """Look at how the loss came to its backward.

        Args:
            steps: micro-batches of a window.
            first: whether this backward is the first of one.

        Raises:
            RuntimeError: it was not scaled, and float16 needs it; or it may have been, by way of detached outputs; or
                losses of one window were divided in two ways, or have two scales.
        """
        scale = self._found()
        if scale is None and self._scaling.enabled:
            # Small gradients would vanish.
            raise RuntimeError(
                "fp16 is enabled, and this backward is of a loss that was not scaled; call optimizer.backward(loss), "
                f"or optimizer.scale(loss).backward(){_DETACHED if LossScale._unmet else ''}"
            )
        matters = (self.divides_plain and steps > 1) or any(each._scaling.enabled for each in LossScale._unmet)
        if scale is None and LossScale._unmet and matters:
            raise RuntimeError(
                "a loss was scaled by an engine that has not stepped since, and its backward did not come to that "
                f"engine's model, so whether this one is scaled or divided already cannot be told{_DETACHED}"
            )
        share = 1 / steps if scale is None and self.divides_plain else 1.0
        scale = 1.0 if scale is None else scale
        # Gradients that are held back are multiplied once, all of a window together.
        if not first and share != self._share:
            raise RuntimeError(
                "of this window some losses went through engine.backward(loss) and others through loss.backward(); "
                "take one of the two for all micro-batches between two steps"
            )
        if not first and scale != self._scale:
            raise RuntimeError(
                f"losses of this window have loss scales of {self._scale:g} and {scale:g}, since two models took them "
                "to backward; step or zero_grad() between them, or take all of them to backward by one model"
            )
        self._share = share
        self._scale = scale

    def _found(self) -> float | None:
        """The scale of the loss whose backward has come to this model; None if it has none."""
        running = _running()
        task = current_graph_task()
        # Of another task where checkpointing runs a backward inside that of the loss, mostly in the same thread.
        found = [each for each in running if each.task == task]
        found = found or [each for each in running if each.thread == threading.get_ident()] or running
        for each in found:
            each.met |= each.owner() is self
        return found[-1].value if found else None

    def drop_losses(self) -> None:
        """The window is over, and with it what was said of its losses."""
        LossScale._unmet.discard(self)

    def update(self, *, overflow: bool) -> None:
        """A step was taken, or skipped.

        Raises:
            RuntimeError: it overflowed at the least scale; on every rank.
        """
        # A static scale is the user's: an overflow there is skipped and counted, and no more.
        if not self.dynamic:
            return
        if overflow:
            self._overflow()
        else:
            if self._scaling.consecutive_hysteresis:
                self._left = self._scaling.hysteresis
            # Steps that lie between the overflow and this one, neither of them included.
            between = self.iterations - self._last_overflow - 1
            if between > 0 and between % self._scaling.loss_scale_window == 0:
                self._left = self._scaling.hysteresis
                self.value *= _FACTOR
        self.iterations += 1

    def _overflow(self) -> None:
        self._last_overflow = self.iterations
        # A single one is often a batch's fault, and not the scale's.
        if self._left > 1:
            self._left -= 1
            _log.info(
                "gradients overflowed at loss scale %g, and it stays for now: hysteresis %d", self.value, self._left
            )
            return
        least = self._scaling.min_loss_scale
        if self.value == least:
            # For whoever goes on all the same: the step is counted as it would have been.
            self.iterations += 1
            raise LossScaleError(
                f"gradients are not finite at a loss scale of {self.value:g}, fp16.min_loss_scale, and it cannot be "
                "lowered any more. Nothing was stepped. Losses or weights are most likely not finite themselves; look "
                "at these, lower the learning rate, or train in bf16"
            )
        # Also where it began below the least, which a file may say.
        value = max(self.value / _FACTOR, least)
        _log.info(
            "gradients overflowed at loss scale %g, which is %g from here on; the step was skipped", self.value, value
        )
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """The numbers from which a loss scale goes on."""
        return {
            "value": self.value,
            "iterations": self.iterations,
            "last_overflow": self._last_overflow,
            "left": self._left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; a static scale stays as it is configured."""
        self.drop_losses()
        # A run may go on with another scale than it was saved with, but only if somebody has said so.
        if self.dynamic:
            self.value = float(state["value"])
            self.iterations = int(state["iterations"])
            self._last_overflow = int(state["last_overflow"])
            self._left = int(state["left"])


def _running() -> list[_Scaled]:
    """Backwards of scaled losses that are not over; one that failed is."""
    for each in [each for each in LossScale._running if each.running() is None]:
        # Another thread may have been first.
        with contextlib.suppress(ValueError):
            LossScale._running.remove(each)
    return list(LossScale._running)


@uncompiled
def _begin_scaled_backward(owner: weakref.ref[LossScale], value: float, gradient: Tensor) -> None:
    """The running backward comes to a loss with this scale."""
    task = current_graph_task()
    same = [each for each in _running() if each.task == task]
    for each in same:
        if each.value != value:
            # Where both losses go through one model, no single factor takes both scales out.
            raise RuntimeError(
                f"one backward goes through losses with scales {each.value:g} and {value:g}, of two engines; take each "
                "to a backward of its own, or scale their sum by one of the engines"
            )

    @uncompiled
    def over() -> None:
        if not scaled.met and (this := owner()) is not None:
            LossScale._unmet.add(this)

    # Of several losses of one backward, the first may have come to the model already.
    met = any(each.met for each in same if each.owner() is owner())
    scaled = _Scaled(task, threading.get_ident(), owner, value, queue_end_of_backward(over), met)
    LossScale._running.append(scaled)
