"""The update of weights in a step that is taken, the norms that it clips by, and the results of steps.

Learning rates may be set between steps: ranks that step their slices at different rates would silently diverge, as
after a ReduceLROnPlateau that each fed with its own loss. So a hash of all numbers in the groups travels with the step
sync (:class:`GroupSettings`).

The wrapped optimizer steps on the device, or the host's cores do (`zeropp.optimizer.host_step`). Where weights that are
cached between uses have to travel after a step, the wrapped optimizer is called chunk by chunk, so that the first
new weights are on their way while the last are computed. That takes an optimizer known to treat each parameter by
itself: parameters without a gradient are passed over, as torch's optimizers do.

[Note: GradScaler] Torch's GradScaler asks an optimizer with ``_step_supports_amp_scaling``, as its fused ones are, to
unscale. It sets ``grad_scale`` (None if ``unscale_()`` was called) and ``found_inf`` around ``step()``. So the
``step()`` of ZeroOptimizer knows when GradScaler calls it, and refuses where a window is not finished: unscaled
gradients and those of later micro-batches do not add up.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from zeropp._compat import has_step_post_hooks, loss_scale, unguarded
from zeropp.comm.agreement import SAVED, Agreement
from zeropp.config import Config
from zeropp.config.base import warn_user
from zeropp.engine.engine import Engine
from zeropp.optimizer.checks import treats_each_alone, weakly
from zeropp.optimizer.host_step import HostStep
from zeropp.optimizer.partial_gradient import MARKER_GRADIENT, NOTHING
from zeropp.optimizer.sharded_params import ShardedParams, Slice, SliceStates
from zeropp.optimizer.step_sync import StepStats, StepSync
from zeropp.order.refresh import chunk_of
from zeropp.params.gradient import LossScale
from zeropp.params.unit import FlatBuffer
from zeropp.wire.codecs import Feedback

__all__ = [
    "ErrorFeedback",
    "GradientNorms",
    "GroupSettings",
    "OptimizerStep",
    "StepResult",
    "fold",
    "from_step_result",
    "gradient_norms",
    "load_carried",
    "load_optimizer",
    "scale_gradients",
    "unscale",
]


_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


class OptimizerStep:
    """Steps what has a gradient, and lets new weights travel to where they are cached."""

    def __init__(self, engine: Engine, optimizer: Optimizer, slices: ShardedParams, config: Config) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._slices = slices
        self._elementwise = treats_each_alone(optimizer)
        self._max_norm = config.gradient_clipping
        self._host = HostStep(engine, optimizer, slices, config) if config.steps_on_host else None

    @property
    def may_leave_out(self) -> bool:
        """True if the device can leave a step out by itself, so that the host need not know of it yet."""
        return self._host is None and may_leave_out(self._engine, self._optimizer)

    def run_step(self, norm: Tensor, left_out: Tensor | None) -> None:
        """Step all that has a gradient.

        Args:
            norm: of the gradient over the whole model, float64 scalar.
            left_out: float32 scalar, 1 where nothing is to change; None if that is known not to be so.
        """
        # Hooks after the step may edit weights, and must find them stepped.
        later = has_step_post_hooks(self._optimizer)
        if self._host is not None and self._host.can_step():
            try:
                self._step_on_host(self._host, norm, waits=later)
            finally:
                # After an error, too: some may have been stepped.
                self._engine.weights_changed(self._engine.trainable_buffers, stepped=True, for_now=later)
            return
        with clipping(self._engine, self._optimizer, norm, self._max_norm, left_out):
            step_by_chunks(
                choose_chunks(self._engine, self._slices.stepped, elementwise=self._elementwise),
                self._step,
                lambda buffers: self._changed(buffers, for_now=later),
            )

    def _step_on_host(self, host: HostStep, norm: Tensor, *, waits: bool) -> None:
        """Let the host's cores step, and the wrapped optimizer what the host leaves to it."""
        there = [part for part in self._slices.stepped if part.on_host]
        here = [part for part in self._slices.stepped if not part.on_host]
        taken = host.take_settings(there)
        max_norm = self._max_norm
        # In one way for both, so that it makes no difference which steps a slice.
        if max_norm > 0 and not takes_divisor(self._engine, self._optimizer if here else None):
            scale_gradients(self._engine, norm, max_norm)
            max_norm = 0.0
        # Before the device has more to do: the host waits for this.
        divisor = clip_divisor(norm, max_norm).cpu() if max_norm > 0 else None
        if here:
            # Queued first: a device goes on by itself.
            passed_over = without_gradients([part.parameter for part in there])
            with passed_over, clipping(self._engine, self._optimizer, norm, max_norm):
                self._step()
        host.start_step(there, taken, divisor, waits=waits)

    def _step(self) -> None:
        # Past the profiling wrapper of torch, whose hooks already run around step.
        step = getattr(type(self._optimizer).step, "__wrapped__", type(self._optimizer).step)
        # Its code gets gradients as plain tensors, whatever the user finds in the groups.
        with unguarded():
            self._step_all(step)

    def _step_all(self, step: Callable[[Optimizer], object]) -> None:
        apart = begin_momentum(self._optimizer, len(self._slices.markers))
        if not apart:
            step(self._optimizer)
            # Optimizers of others may set ``parameter.data``, which takes slices out of their places.
            if not step.__module__.startswith("torch."):
                self._slices.take_assigned()
        for others in apart:
            with without_gradients(others):
                step(self._optimizer)

    def _changed(self, buffers: Sequence[FlatBuffer], *, for_now: bool) -> None:
        # What the optimizer's own code has stepped in its place has gone nowhere yet.
        if self._host is not None:
            self._host.keep_states(buffers)
        for buffer in buffers:
            if buffer.wire_copy is not None:
                buffer.wire_copy.renew()
        self._engine.weights_changed(buffers, stepped=True, for_now=for_now)


# The order of a step: some slices after others.


@dataclass(frozen=True)
class StepChunk:
    """Slices that are stepped in one call, and the buffers that have new weights after it."""

    slices: list[Slice]
    buffers: list[FlatBuffer]


def choose_chunks(engine: Engine, slices: Sequence[Slice], *, elementwise: bool) -> list[StepChunk]:
    """Units in the order of the next forward: one, one, two, four, ...; all at once where little travels after a step.

    All at once, too, where units are stale already: their renewal would begin before they are stepped. Equal on every
    rank but for the slices.
    """
    # The first unit that forward wants goes alone: it travels while the others are stepped. Later ones have time, and
    # every chunk costs a call of step().
    units = [unit for unit in engine.units_in_forward_order() if unit.trainable_buffers]
    buffers = engine.trainable_buffers
    travelling = sum(b.layout.numel for b in buffers if b.paths.refresh is not None and b.paths.refresh.hops)
    # Several calls of a fused step cost more than one: they pay only where something is hidden behind them.
    little = 2 * travelling < sum(buffer.layout.numel for buffer in buffers)
    if little or engine.refresh_is_delayed or not elementwise:
        return [StepChunk(list(slices), engine.trainable_buffers)]
    by_unit: dict[int, list[Slice]] = {}
    for part in slices:
        by_unit.setdefault(part.unit, []).append(part)
    chunks = []
    for _, numbered in groupby(enumerate(units), lambda each: chunk_of(each[0])):
        chosen = [unit for _, unit in numbered]
        found = [part for unit in chosen for part in by_unit.get(unit.index, [])]
        chunks.append(StepChunk(found, [buffer for unit in chosen for buffer in unit.trainable_buffers]))
    # A stand-in, which belongs to no unit.
    chunks[0].slices.extend(by_unit.get(-1, []))
    return chunks


def step_by_chunks(
    chunks: Sequence[StepChunk], step: Callable[[], None], changed: Callable[[Sequence[FlatBuffer]], None]
) -> None:
    """Step chunk by chunk.

    Args:
        chunks: all there is to step.
        step: of the optimizer, over what has a gradient.
        changed: told of buffers with new weights; of all that are left if a step fails, which may have changed them.
    """
    waiting = list(chunks)
    # torch's optimizers pass over parameters whose .grad is None: so one portion is stepped, and the groups stay
    # whole.
    gradients = [(part.parameter, part.parameter.grad) for chunk in chunks for part in chunk.slices]
    try:
        if len(chunks) > 1:
            for parameter, _ in gradients:
                parameter.grad = None
        own = iter(gradients)
        for chunk in chunks:
            shown = [next(own) for _ in chunk.slices]
            for parameter, gradient in shown:
                parameter.grad = gradient
            step()
            if len(chunks) > 1:
                for parameter, _ in shown:
                    parameter.grad = None
            # Only after the step: one that fails half-way may have changed weights, and they are told of below.
            waiting.remove(chunk)
            changed(chunk.buffers)
    finally:
        # Gradients stay until zero_grad(), as in torch, also after an error.
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for chunk in waiting:
            changed(chunk.buffers)


def begin_momentum(optimizer: Optimizer, markers: int) -> list[list[nn.Parameter]]:
    """Parameters to be stepped apart, in as many calls: those whose momentum begins now, and those that have one.

    torch's fused SGD takes a group's first step for all parameters or for none, and fails where some of them get their
    first gradient later than others, as in a branch that is taken late. Empty where one call does.

    Args:
        optimizer: that is about to step.
        markers: how many tensors in its groups are never stepped.
    """
    # By the class's step: that of a class derived from SGD may not be meant to be called twice.
    if not isinstance(optimizer, SGD) or inspect.unwrap(type(optimizer).step) is not inspect.unwrap(SGD.step):
        return []
    groups = optimizer.param_groups
    state = optimizer.state
    # As in most steps: every parameter has its momentum.
    if len(state) + markers >= sum(len(group["params"]) for group in groups) and all(state.values()):
        return []
    groups = [group for group in groups if group["fused"] and group["momentum"]]
    fresh = list[nn.Parameter]()
    begun = list[nn.Parameter]()
    for parameter in (p for group in groups for p in group["params"] if p.grad is not None):
        (fresh if state.get(parameter, {}).get("momentum_buffer") is None else begun).append(parameter)
    return [fresh, begun] if fresh and begun else []


@contextlib.contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let the optimizer pass over some of the parameters in its groups."""
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


# Norms, and scaling by them.


def scale_gradients(engine: Engine, norm: Tensor, max_norm: float) -> Tensor:
    """Multiply all gradients by at most ``max_norm / norm``, and by no more than 1; returns the factor."""
    # On the device: the host does not learn the factor, and so does not wait for it.
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    for gradient in engine.gradients:
        gradient.shard.mul_(factor.to(gradient.shard))
    return factor


def unscale(optimizer: Optimizer, scale: Tensor) -> None:
    """Divide the gradients in an optimizer's groups by a scale, with the bits of torch's GradScaler.

    See [Note: GradScaler].

    Args:
        optimizer: the wrapped one, with this rank's slices.
        scale: float32 scalar.
    """
    inverse = scale.double().reciprocal().float()
    with unguarded():
        for group in optimizer.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.mul_(inverse.to(each.grad.device))


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Divisor of gradients that makes their norm at most ``max_norm``: a float32 scalar, at least 1."""
    return torch.clamp((norm + _EPSILON) / max_norm, min=1.0).float()


def takes_divisor(engine: Engine, optimizer: Optimizer | None) -> bool:
    """Tell whether kernels can divide gradients as they read them: an optimizer's, or for None the host's own."""
    # The divisor is float32, which is too little for gradients of 64 bits.
    single = all(gradient.dtype == torch.float32 for gradient in engine.gradients)
    if optimizer is None:
        return single
    # A state that was saved by an optimizer that is not fused brings that setting with it.
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return single and fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def may_leave_out(engine: Engine, optimizer: Optimizer) -> bool:
    """Tell whether a step of ``optimizer`` changes nothing at all, states included, where the device says so."""
    # SGD's fused step leaves out the first momentum, too, and takes uninitialised memory for it.
    adam = inspect.unwrap(type(optimizer).step) is inspect.unwrap(torch.optim.Adam.step)
    return adam and takes_divisor(engine, optimizer)


@contextlib.contextmanager
def clipping(
    engine: Engine, optimizer: Optimizer, norm: Tensor, max_norm: float, left_out: Tensor | None = None
) -> Iterator[None]:
    """Steps of ``optimizer`` inside clip gradients to ``max_norm``, all of them together; 0 for no clipping.

    Args:
        engine: whose gradients have that norm.
        optimizer: one that divides gradients by a scale while it reads them, as torch's fused ones do for GradScaler,
            saves a pass over them. It leaves them divided.
        norm: float64 scalar.
        max_norm: bound.
        left_out: float32 scalar, 1 where steps inside are to change nothing; of an optimizer that `may_leave_out`.
    """
    if left_out is None and not (max_norm > 0 and takes_divisor(engine, optimizer)):
        if max_norm > 0:
            scale_gradients(engine, norm, max_norm)
        yield
        return
    # Names that torch's GradScaler has given them.
    none = torch.zeros((), dtype=torch.float32, device=norm.device)
    optimizer.found_inf = none if left_out is None else left_out  # type: ignore[attr-defined]
    if max_norm > 0:
        optimizer.grad_scale = clip_divisor(norm, max_norm)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
        if max_norm > 0:
            del optimizer.grad_scale  # type: ignore[attr-defined]
            # They are divided now, and their versions do not say so.
            for gradient in engine.gradients:
                gradient.doubt()


def gradient_norms(engine: Engine, stats: StepStats) -> GradientNorms:
    """Norm of each parameter's gradient by its name, for those that have one. Collective: one sum of 8 bytes each."""
    names: list[str] = []
    squares: list[Tensor] = []
    for unit in engine.units:
        used = iter(stats.used[unit.index])
        for buffer in unit.trainable_buffers:
            gradient = buffer.gradient
            assert gradient is not None  # the buffer is trainable
            own = torch.zeros(len(buffer.names), dtype=torch.float64, device=engine.device)
            # Replicas hold the same sums; the first one's count.
            for fragment in buffer.fragments() if gradient.arrived and gradient.placement.replica == 0 else ():
                part = gradient.shard[fragment.offset : fragment.offset + fragment.stop - fragment.start]
                own[fragment.slot] += part.double().square().sum()
            # Used on any rank, so that every rank brings as many numbers; this one's may be zeros.
            found = [index for index in range(len(buffer.names)) if next(used)]
            names += [buffer.names[index] for index in found]
            squares.append(own[found])
    total = torch.cat(squares) if squares else torch.zeros(0, dtype=torch.float64, device=engine.device)
    if total.numel():
        with engine.agreement.watching("adding up norms of parameters", call="grad_norms()"):
            engine.comm.sum(total)
    return GradientNorms(zip(names, total.sqrt().tolist(), strict=True))


class GradientNorms(dict[str, float]):
    """Norms by name. The markers at the end of each group have one, too, as loops over names and tensors ask for it."""

    def __missing__(self, name: str) -> float:
        if name == NOTHING:
            return MARKER_GRADIENT
        raise KeyError(name)


# Carried errors.


class ErrorFeedback:
    """Errors that quantized gradients carry over, of all units: cleared every so many steps, saved and restored.

    An error goes with the next gradient, and a new one takes its place in the same memory. Where a step is skipped, or
    gradients are forgotten before a step, the old one is lost, and the new one is of a gradient that may be huge: one
    rank has NaN, another perhaps 1e8. So all are cleared then. To keep the old ones would take as much memory again.

    Args:
        engine: whose gradients carry them.
        reset: steps after which all of them are cleared, at once.
    """

    def __init__(self, engine: Engine, reset: int) -> None:
        self._engine = engine
        self._reset = reset
        # Since they were cleared.
        self._steps = 0
        # Scale of the losses that the errors came from; None if nobody scaled them.
        self._scale: Tensor | None = None

    def follow(self, scaler: torch.amp.GradScaler | None) -> None:
        """Bring the errors to the scale that the next losses have; exact where that changes by powers of two."""
        if scaler is None:
            # They are of losses that somebody scaled, and by how much the next ones are is not known.
            if self._scale is not None:
                self._scale = None
                self.clear()
            return
        scale = loss_scale(scaler, self._engine.device)
        before = self._scale
        # A copy: update() changes the scaler's own tensor in place.
        self._scale = scale.clone()
        found = [feedback.scales for feedback in self._named().values()]
        if before is not None and found:
            # Errors are codes with scales, so the scales alone follow; on the device, and the host does not wait.
            torch._foreach_mul_(found, (scale / before).to(torch.bfloat16))

    def _named(self) -> dict[str, Feedback]:
        found: dict[str, Feedback] = {}
        seen: Counter[str] = Counter()
        for buffer in self._engine.trainable_buffers:
            name = f"{buffer.unit}/{buffer.compute_dtype}"
            for hop in buffer.gradient.paths.straight.hops if buffer.gradient is not None else ():
                # Named with the codec: errors of another one are not what this one would lose.
                if hop.feedback is not None:
                    found[f"{name}/{seen[name]}/{hop.spec.outer} {hop.codec.name}"] = hop.feedback
            seen[name] += 1
        return found

    def count_step(self) -> None:
        """An optimizer step was taken; skipped ones do not count."""
        self._steps += 1
        if self._steps >= self._reset:
            self.clear()

    def clear(self) -> None:
        """Begin anew with the next gradients."""
        self._steps = 0
        for feedback in self._named().values():
            # A flag, and no zeros: what is fresh is written, and not read.
            feedback.fresh = True

    def state_dict(self) -> dict[str, Any]:
        """Steps since they were cleared, and the errors of this rank."""
        errors = {name: each.saved() for name, each in self._named().items()}
        return {"steps": self._steps, "errors": errors, "scale": None if self._scale is None else float(self._scale)}

    def fits(self, saved: dict[str, Any] | None) -> bool:
        """Tell whether saved errors are of the same units, hops, codecs and sizes; none fit if nothing is carried."""
        errors: dict[str, Tensor] = saved["errors"] if saved is not None else {}
        here = {name: feedback.state.numel() for name, feedback in self._named().items()}
        return {name: each.numel() for name, each in errors.items()} == here

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        """Take back saved errors that fit."""
        self.clear()
        if saved is None:
            return
        self._steps = saved["steps"]
        scale = saved.get("scale")
        self._scale = None if scale is None else torch.tensor(scale, device=self._engine.device)
        for name, feedback in self._named().items():
            feedback.state.copy_(saved["errors"][name])
            feedback.fresh = False


def load_carried(engine: Engine, carried: ErrorFeedback, saved: dict[str, Any] | None) -> None:
    """Restore carried errors; where some rank's do not fit, all ranks begin anew, with a warning. That costs little."""
    steps = saved["steps"] if saved is not None else 0
    # With the steps since they were cleared: ranks that clear at different steps would part.
    rows = engine.agreement.exchange(SAVED, [int(carried.fits(saved)), steps], "checking carried errors")
    if all(row == [1, rows[0][1]] for row in rows):
        carried.load_state_dict(saved)
        return
    wrong = [rank for rank, row in enumerate(rows) if row[0] == 0]
    cause = f"of ranks {wrong} do not fit this configuration, or were not saved" if wrong else "differ in age"
    warn_user(f"carried errors of quantized gradients {cause}; they begin anew")
    carried.clear()


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Call ``optimizer.load_state_dict(state)``, and let its groups and its ``state`` stay the dicts that they were.

    torch puts new ones in their place. Where a scheduler holds them through another optimizer of the same dicts, as
    after Accelerate has put DeepSpeed's Adam in place of torch's, it would set learning rates that nobody reads.
    """
    groups = list(optimizer.param_groups)
    states = optimizer.state
    optimizer.load_state_dict(state)
    if isinstance(states, SliceStates) and optimizer.state is not states:
        states.clear()
        states.update(optimizer.state)
        optimizer.state = states
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    optimizer.param_groups[:] = groups


# The result of a step.


class StepResult:
    """The result of the last step: taken, skipped, or not known yet; and counts. See [Note: sums read late].

    Args:
        step_sync: has the sum of a step that no host has waited for.
        loss_scale: follows the results of steps.

    Attributes:
        grad_norm: at the last step.
        skipped_steps: since the beginning.
        step_was_skipped: the last one.
        step_was_taken: since the last backward.
    """

    def __init__(self, step_sync: StepSync, loss_scale: LossScale) -> None:
        self._step_sync = step_sync
        self._loss_scale = loss_scale
        # The engine has the scale, and must not keep its wrapper alive.
        loss_scale.wait_for_last = weakly(self.wait_for_result)
        self._unread = False
        # Text of an error that the next step raises, too. No exception: it would hold what holds this.
        self._error: str | None = None
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self.step_was_skipped = self.step_was_taken = False

    def decided(self, stats: StepStats) -> None:
        """A step is over, or is going to be."""
        self._unread = stats.norm is None
        self.step_was_skipped = stats.skips
        self.step_was_taken = False
        self.skipped_steps += self.step_was_skipped
        if not self._unread:
            self.grad_norm = stats.norm
            # Last, since it may raise.
            self._loss_scale.update(overflow=self.step_was_skipped)

    def load(self, skipped_steps: int, loss_scale: dict[str, Any] | None = None) -> None:
        """Go on from a saved count; what is wrong with the step before is of no interest any more."""
        # On every rank, whether it has asked or not: one alone would raise at the next step, or read a sum.
        self._step_sync.forget_unread()
        self._error = None
        self._unread = False
        self.step_was_skipped = self.step_was_taken = False
        self.skipped_steps = skipped_steps
        if loss_scale is not None:
            self._loss_scale.load_state_dict(loss_scale)

    def count_skipped(self) -> int:
        """``skipped_steps``, to be saved: also after a step at which ranks were out of step, which is none of them.

        Raises:
            RuntimeError: the ranks have lost each other. Some may have stepped and others not.
        """
        try:
            self.wait_for_result()
        except RuntimeError:
            # Settings that differ the next step tells of.
            if self._step_sync.engine.agreement.lost is not None:
                raise
        return self.skipped_steps

    def pass_over(self) -> None:
        """A step was asked for inside a window, and does nothing."""
        self.wait_for_result()
        self.step_was_skipped = self.step_was_taken = False

    def wait_for_result(self, *, stepping: bool = False) -> None:
        """Wait for a step's sum, by which the device has decided alone.

        Raises:
            RuntimeError: ranks were out of step; no weight was changed. Until the next step, at which every rank raises
                it: one that has asked before would otherwise go on there, and wait for the others.
        """
        found = None
        if self._error is None and self._unread:
            try:
                found = self._step_sync.read_unread()
            except RuntimeError as caught:
                self._error = str(caught)
                self.step_was_taken = False
        self._unread = False
        if (error := self._error) is not None:
            self._error = None if stepping else error
            raise RuntimeError(error)
        if found is not None:
            taken = self.step_was_taken
            self.decided(found)
            # A backward since then has cleared it.
            self.step_was_taken = taken and not found.skips


def from_step_result(name: str) -> Any:
    """Make a property of the optimizer that waits for its last step's result and returns the attribute of that name."""

    def ask(optimizer: Any) -> Any:
        optimizer.step_result.wait_for_result()
        return getattr(optimizer.step_result, name)

    return property(ask)


# Numbers in the groups.

# As few as the hash of what is issued has: the square must be exact in float64.
_BITS = 24
# Any odd number, so that no bit is lost; less 2**64, since it multiplies int64.
_ODD = 0x9E3779B97F4A7C15 - 2**64
# What each rank has of its own: its slices, and their names.
_OWN = ("params", "param_names")


class GroupSettings:
    """Numbers in the groups of one optimizer.

    Args:
        groups: gives them as they are now.
        agreement: for naming what differs.
    """

    def __init__(self, groups: Callable[[], list[dict[str, Any]]], agreement: Agreement) -> None:
        self._groups = groups
        self._agreement = agreement

    def code(self) -> int | Tensor:
        """24 bits; an int64 scalar on a card if some setting is a tensor there, which the host must not wait for."""
        numbers = []
        tensors = []
        for name, value in self._numbers():
            if isinstance(value, Tensor):
                tensors.append(value)
                # Its place and kind are compared on the host, its bits on the device.
                numbers.append((name, "on a card"))
            else:
                numbers.append((name, _written(value)))
        # Not hash(), which Python salts for each process.
        host = zlib.crc32(repr(numbers).encode()) >> (32 - _BITS)
        return fold(host, tensors) if tensors else host

    def disagreement(self, *, late: bool = False) -> RuntimeError:
        """The error for codes that differ: which setting of which group, and what each rank has. Collective.

        Of a step that is over, ``late``, it has what this rank has, and is local: one rank alone may ask for it, in the
        middle of what the others do.
        """
        # There is an error already, and waiting for the device costs nothing any more.
        own = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in self._numbers()}
        if late:
            return self._late_disagreement(own)
        tables = self._agreement.exchange_objects(own, "comparing the settings of parameter groups")
        names = dict.fromkeys(name for table in tables for name in table)
        differing = [name for name in names if len({repr(table.get(name)) for table in tables}) > 1]
        given = {name: [table.get(name) for table in tables] for name in differing[:3]}
        if not differing:
            return RuntimeError(
                "parameter groups differed between ranks at the last step, which was left out for it, and are alike by "
                "now. Every rank must set the same numbers before it calls step()"
            )
        return RuntimeError(
            "parameter groups differ between ranks, and nothing was stepped: "
            + "; ".join(f"{name} is {_by_rank(values)}" for name, values in given.items())
            + ("; ..." if differing[3:] else "")
            + ". Every rank must set the same: give schedulers such as ReduceLROnPlateau a loss averaged over the ranks"
        )

    def _late_disagreement(self, own: dict[str, Any]) -> RuntimeError:
        # Rates first: they are what schedulers set, and there may be many groups.
        own = dict(sorted(own.items(), key=lambda each: not each[0].endswith(" lr")))
        shown = ", ".join(f"{name} is {value!r}" for name, value in [*own.items()][:8])
        return RuntimeError(
            "parameter groups differed between ranks at the last step, which was left out for it on every rank; rank "
            f"{self._agreement.comm.rank} has: {shown}{', ...' if len(own) > 8 else ''}. Every rank must set the same: "
            "give schedulers such as ReduceLROnPlateau a loss averaged over the ranks"
        )

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        """(group and key, number); tensors that the host can read at once count as numbers, too."""
        for index, group in enumerate(self._groups()):
            for key, value in group.items():
                if key not in _OWN:
                    yield from _numbers_in(f"group {index} {key}", value)


def fold(code: int, tensors: Sequence[Tensor]) -> Tensor:
    """A hash and the bits of tensors as another hash: an int64 scalar of 24 bits, on their device; nobody waits."""
    total: Tensor = torch.full((), code, dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        # In float64, so that one value has the same bits in every dtype that a rank may give it.
        for bits in tensor.detach().double().reshape(-1).view(torch.int64).unbind():
            total = (total ^ bits) * _ODD
    folded: Tensor = (total >> (64 - _BITS)) & (2**_BITS - 1)
    return folded


def _numbers_in(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield name, value.tolist() if value.is_cpu else value
    elif isinstance(value, (list, tuple)):
        for position, entry in enumerate(value):
            yield from _numbers_in(f"{name}[{position}]", entry)
    # Strings and objects were compared when ranks wrapped; numbers are what schedulers change. A bool is a number,
    # too.
    elif isinstance(value, Real):
        yield name, value


def _written(value: Any) -> str:
    """The value to nine digits, since mathematical libraries of different machines may differ in later ones."""
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return f"{value:.9g}" if isinstance(value, float) and math.isfinite(value) else repr(value)


def _by_rank(values: list[object]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    return ", ".join(f"{value} on ranks {of[:4]}{'...' if of[4:] else ''}" for value, of in ranks.items())
