"""The weight update of an optimizer step, gradient clipping and norms, and the result of the last step.

Users may set learning rates between steps. If ranks stepped their slices with different rates, the weights would
silently diverge. This happens, for example, if each rank feeds its own loss to a ReduceLROnPlateau. So the step sync
compares a hash of all numbers in the groups (:class:`GroupSettings`).

Either the wrapped optimizer steps on the device, or the host's cores step (`zeropp.optimizer.host_step`). If cached
weights must be refreshed after the step, the wrapped optimizer is called chunk by chunk, so that refreshes of the first
units run while later units are stepped. Chunks require an optimizer that steps each parameter by itself. A call steps
only its chunk, because torch's optimizers skip parameters without a gradient.

[Note: GradScaler] torch's GradScaler lets an optimizer with ``_step_supports_amp_scaling`` unscale gradients itself, as
fused optimizers do. Around ``step()`` it sets the optimizer's ``found_inf`` and ``grad_scale`` (None if ``unscale_()``
was called). ZeroOptimizer has this attribute, so its ``step()`` can detect a call by GradScaler. It refuses such a call
before the accumulation window is finished, because unscaled gradients cannot be added to the scaled gradients of later
micro-batches.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
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
from zeropp.optimizer.checks import is_elementwise, weakly
from zeropp.optimizer.host_step import HostStep
from zeropp.optimizer.partial_gradient import MARKER_GRADIENT, NOTHING
from zeropp.optimizer.sharded_params import ShardedParams, Slice
from zeropp.optimizer.slice_states import SliceStates
from zeropp.optimizer.step_sync import StepStats, StepSync
from zeropp.order.refresh import chunk_of
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.loss_scale import LossScale
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
    "load_error_feedback",
    "load_optimizer",
    "scale_gradients",
    "unscale",
]


_EPSILON = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_


class OptimizerStep:
    """Runs the optimizer on all slices that have a gradient, then issues refreshes of the cached weights."""

    def __init__(self, engine: Engine, optimizer: Optimizer, slices: ShardedParams, config: Config) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._slices = slices
        self._elementwise = is_elementwise(optimizer)
        self._max_norm = config.gradient_clipping
        self._host = HostStep(engine, optimizer, slices, config) if config.steps_on_host else None

    @property
    def can_skip_on_device(self) -> bool:
        """True if the device can skip a step by itself, so that the host need not read the result first."""
        return self._host is None and can_skip_on_device(self._engine, self._optimizer)

    def run_step(self, norm: Tensor, skip_flag: Tensor | None) -> None:
        """Step all slices that have a gradient, and start refreshes.

        Args:
            norm: gradient norm over the whole model, float64 scalar.
            skip_flag: float32 scalar on the device: 1 to skip the step (non-finite gradients), 0 to take it. None if
                the step is known to be taken.
        """
        # Step post-hooks may edit weights, so all weights must be stepped before hooks run, and refreshes wait until
        # later.
        later = has_step_post_hooks(self._optimizer)
        if self._host is not None and self._host.can_step():
            try:
                self._step_on_host(self._host, norm, waits=later)
            finally:
                # Mark weights as changed after an error, too, because some may have been stepped.
                self._engine.weights_changed(self._engine.trainable_buffers, stepped=True, delay_refresh=later)
            return
        with clipping(self._engine, self._optimizer, norm, self._max_norm, skip_flag):
            step_by_chunks(
                choose_chunks(self._engine, self._slices.stepped, elementwise=self._elementwise),
                self._step,
                lambda buffers: self._changed(buffers, delay_refresh=later),
            )

    def _step_on_host(self, host: HostStep, norm: Tensor, *, waits: bool) -> None:
        """Queue the host's part of the step, and step the other slices with the wrapped optimizer."""
        there = [part for part in self._slices.stepped if part.on_host]
        here = [part for part in self._slices.stepped if not part.on_host]
        taken = host.take_settings(there)
        max_norm = self._max_norm
        # Clip both parts by the same method, so that a slice gets the same bits whichever part it belongs to.
        if max_norm > 0 and not takes_divisor(self._engine, self._optimizer if here else None):
            scale_gradients(self._engine, norm, max_norm)
            max_norm = 0.0
        # Read the divisor before queuing device work, because the host waits for the device here.
        divisor = clip_divisor(norm, max_norm).cpu() if max_norm > 0 else None
        if here:
            # Queue the device's part first: the device runs it while the host prepares its own part.
            passed_over = without_gradients([part.parameter for part in there])
            with passed_over, clipping(self._engine, self._optimizer, norm, max_norm):
                self._step()
        host.start_step(there, taken, divisor, waits=waits)

    def _step(self) -> None:
        """Call the wrapped optimizer's own step on the gradients that are shown."""
        # Skip torch's profiling wrapper of step, because ZeroOptimizer.step already runs the hooks.
        step = getattr(type(self._optimizer).step, "__wrapped__", type(self._optimizer).step)
        # Give the optimizer plain tensors, because gradients that refuse norms (PartialGradient) would break its code.
        with unguarded():
            self._step_all(step)

    def _step_all(self, step: Callable[[Optimizer], object]) -> None:
        """Call ``step`` once, or twice if fused SGD must start the momentum of some parameters separately."""
        apart = begin_momentum(self._optimizer, len(self._slices.markers))
        if not apart:
            step(self._optimizer)
            # Optimizers outside torch may assign ``parameter.data``, which detaches slices from the main shard.
            if not step.__module__.startswith("torch."):
                self._slices.take_assigned()
        for others in apart:
            with without_gradients(others):
                step(self._optimizer)

    def _changed(self, buffers: Sequence[FlatBuffer], *, delay_refresh: bool) -> None:
        """Move new states to their tier, renew offloaded weight copies, and start or delay refreshes."""
        # If the host steps, the optimizer's own code runs only as a fallback, and its new states are not in their tier
        # yet.
        if self._host is not None:
            self._host.keep_states(buffers)
        for buffer in buffers:
            if buffer.wire_copy is not None:
                buffer.wire_copy.renew()
        self._engine.weights_changed(buffers, stepped=True, delay_refresh=delay_refresh)


# Chunks: slices that are stepped in one call.


@dataclass(frozen=True)
class StepChunk:
    """Slices that are stepped in one call, and the buffers that have new weights afterwards."""

    slices: list[Slice]
    buffers: list[FlatBuffer]


def choose_chunks(engine: Engine, slices: Sequence[Slice], *, elementwise: bool) -> list[StepChunk]:
    """Divide the slices of a step into chunks, in the order of the next forward: 1, 1, 2, 4, ... units.

    There is only one chunk if less than half of the elements are refreshed by collectives, or if the optimizer may not
    be called on parts. There is also only one if a refresh is delayed: otherwise the first chunk's refresh would also
    send units that are not stepped yet. All ranks get the same chunks, each with its own slices.

    ``elementwise`` is True if the optimizer's step of a parameter does not depend on other parameters.
    """
    # Step the first unit by itself, so that its refresh runs while the others are stepped. Later chunks are larger,
    # because each chunk costs a call of step().
    units = [unit for unit in engine.units_in_forward_order() if unit.trainable_buffers]
    buffers = engine.trainable_buffers
    travelling = sum([b.layout.numel for b in buffers if b.paths.refresh is not None and b.paths.refresh.hops])
    # Several calls of a fused step take longer than one, so chunks pay off only if they hide enough communication.
    little = 2 * travelling < sum([buffer.layout.numel for buffer in buffers])
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
    # A stand-in belongs to no unit, so step it with the first chunk.
    chunks[0].slices.extend(by_unit.get(-1, []))
    return chunks


def step_by_chunks(
    chunks: Sequence[StepChunk], step: Callable[[], None], changed: Callable[[Sequence[FlatBuffer]], None]
) -> None:
    """Step chunk by chunk.

    Args:
        chunks: all chunks of the step.
        step: function that steps all parameters with a gradient.
        changed: function that is called with the buffers that have new weights. If a step fails, it is also called with
            the buffers of all remaining chunks, because the failed step may have changed them.
    """
    if len(chunks) == 1:
        try:
            return step()
        finally:
            changed(chunks[0].buffers)
    waiting = list(chunks)
    # torch's optimizers skip parameters whose .grad is None. So a chunk is stepped by hiding all other gradients, and
    # the groups stay unchanged.
    gradients = [[(part.parameter, part.parameter.grad) for part in chunk.slices] for chunk in chunks]
    try:
        for parameter, _ in chain(*gradients):
            parameter.grad = None
        for chunk, own in zip(chunks, gradients, strict=True):
            for parameter, gradient in own:
                parameter.grad = gradient
            step()
            for parameter, _ in own:
                parameter.grad = None
            # Remove the chunk only after its step: a step that fails half-way may have changed weights.
            waiting.remove(chunk)
            changed(chunk.buffers)
    finally:
        # Restore gradients, also after an error: as in torch, they stay until zero_grad().
        for parameter, gradient in chain(*gradients):
            parameter.grad = gradient
        for chunk in waiting:
            changed(chunk.buffers)


def begin_momentum(optimizer: Optimizer, markers: int) -> list[list[nn.Parameter]]:
    """Return two lists of parameters if fused SGD needs two calls; an empty list if one call is enough.

    The lists are the parameters whose momentum starts in this step and those that already have a momentum buffer. Each
    call must hide the gradients of one list. A single call would fail: torch's fused SGD treats a step as the first one
    for all parameters of a group or for none. Both kinds occur together if a branch of the model gets its first
    gradient late.

    Args:
        optimizer: the wrapped optimizer.
        markers: number of tensors in its groups that are never stepped.
    """
    # Only a class that inherits SGD's step is called twice. A step of its own may not allow two calls.
    if not isinstance(optimizer, SGD) or inspect.unwrap(type(optimizer).step) is not inspect.unwrap(SGD.step):
        return []
    groups = optimizer.param_groups
    state = optimizer.state
    # Fast path for most steps: every parameter has a momentum buffer.
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
    """Hide the gradients of some parameters inside this context, so that an optimizer skips them."""
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


# Norms and clipping.


def scale_gradients(engine: Engine, norm: Tensor, max_norm: float) -> Tensor:
    """Multiply all gradient shards in place by ``min(1, max_norm / norm)``, and return this factor."""
    # Compute the factor on the device, so that the host does not wait for it.
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    for gradient in engine.gradients:
        if gradient.arrived:
            gradient.shard.mul_(factor.to(gradient.shard))
    return factor


def unscale(optimizer: Optimizer, scale: Tensor) -> None:
    """Divide the gradients in an optimizer's groups by a scale, with the same rounding as torch's GradScaler.

    ``scale`` is a float32 scalar. See [Note: GradScaler].
    """
    inverse = scale.double().reciprocal().float()
    with unguarded():
        for group in optimizer.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.mul_(inverse.to(each.grad.device))


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Return a float32 scalar >= 1; dividing gradients of this norm by it bounds their norm by ``max_norm``."""
    return torch.clamp((norm + _EPSILON) / max_norm, min=1.0).float()


def takes_divisor(engine: Engine, optimizer: Optimizer | None) -> bool:
    """Return True if the step's kernels can divide gradients while reading them.

    ``optimizer`` is None for the host's kernels.
    """
    # The divisor is float32, which is not precise enough for float64 gradients.
    single = {gradient.dtype for gradient in engine.gradients} <= {torch.float32}
    if optimizer is None:
        return single
    # Read the setting from the groups, because loading a state saved by an unfused optimizer overwrites it.
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return single and fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def can_skip_on_device(engine: Engine, optimizer: Optimizer) -> bool:
    """Return True if the device can skip a step of the optimizer so that neither weights nor states change."""
    # If fused SGD skips its first step, its momentum buffers stay uninitialized but count as valid.
    return _is_adam(optimizer) and takes_divisor(engine, optimizer)


def _is_adam(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's step is that of torch's Adam, which is AdamW's, too."""
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(torch.optim.Adam.step)


@contextlib.contextmanager
def clipping(
    engine: Engine, optimizer: Optimizer, norm: Tensor, max_norm: float, skip_flag: Tensor | None = None
) -> Iterator[None]:
    """Clip gradients to ``max_norm`` in steps of the optimizer inside this context.

    Fused optimizers divide gradients while reading them, as they do for GradScaler, which saves a pass over the
    gradients. The gradients stay divided afterwards. For other optimizers, the gradients are scaled before the step.

    Args:
        engine: engine of the gradients.
        optimizer: the wrapped optimizer.
        norm: gradient norm over the whole model, float64 scalar.
        max_norm: upper bound of the norm; 0 for no clipping.
        skip_flag: float32 scalar, 1 to make the steps change nothing; only for an optimizer for which
            `can_skip_on_device` returns True. None to take the steps.
    """
    if skip_flag is None and not (max_norm > 0 and takes_divisor(engine, optimizer)):
        if max_norm > 0:
            scale_gradients(engine, norm, max_norm)
        yield
        return
    # torch's fused optimizers read these two attributes, which GradScaler normally sets.
    read: dict[str, Tensor] = {}
    if skip_flag is not None:
        read["found_inf"] = skip_flag
    elif not _is_adam(optimizer):  # Adam needs no flag, and without it runs an operation less for each parameter
        read["found_inf"] = torch.zeros((), dtype=torch.float32, device=norm.device)
    if max_norm > 0:
        read["grad_scale"] = clip_divisor(norm, max_norm)
    vars(optimizer).update(read)
    try:
        yield
    finally:
        for name in read:
            delattr(optimizer, name)
        if max_norm > 0:
            # The step divided gradients in place without raising their versions, so their norms must count as outdated.
            for gradient in engine.gradients:
                gradient.mark_stale()


def gradient_norms(engine: Engine, stats: StepStats) -> GradientNorms:
    """Return the norm of each used parameter's gradient, by parameter name.

    Collective: all ranks sum a vector with 8 bytes per used parameter, and the host waits for it.
    """
    names: list[str] = []
    squares: list[Tensor] = []
    for unit in engine.units:
        used = iter(stats.used[unit.index])
        for buffer in unit.trainable_buffers:
            gradient = buffer.gradient
            assert gradient is not None  # trainable buffers have a gradient
            own = torch.zeros(len(buffer.names), dtype=torch.float64, device=engine.device)
            # Replicas hold the same sums, so only the first replica contributes.
            for fragment in buffer.fragments() if gradient.arrived and gradient.placement.replica == 0 else ():
                part = gradient.shard[fragment.offset : fragment.offset + fragment.stop - fragment.start]
                own[fragment.slot] += part.double().square().sum()
            # Send a number for each parameter used on any rank, so that all ranks send equally many. A rank without a
            # part of a parameter sends 0.
            found = [index for index in range(len(buffer.names)) if next(used)]
            names += [buffer.names[index] for index in found]
            squares.append(own[found])
    total = torch.cat(squares) if squares else torch.zeros(0, dtype=torch.float64, device=engine.device)
    if total.numel():
        with engine.agreement.watching("adding up norms of parameters", call="grad_norms()"):
            engine.comm.sum(total)
    return GradientNorms(zip(names, total.sqrt().tolist(), strict=True))


class GradientNorms(dict[str, float]):
    """Gradient norms by parameter name. The markers' name has a norm, too, because loops over groups look it up."""

    def __missing__(self, name: str) -> float:
        if name == NOTHING:
            return MARKER_GRADIENT
        raise KeyError(name)


# Error feedback.


class ErrorFeedback:
    """Error feedback of quantized gradients in all units: cleared at intervals, saved and restored.

    The error of one message is added to the next gradient, and the new error overwrites the old one in place. If a step
    is skipped or gradients are forgotten, the old errors are lost. The new errors then belong to gradients that may be
    huge or NaN, so all errors are cleared. Keeping a copy of the old errors would double the memory.

    Args:
        engine: engine whose gradients use error feedback.
        reset: number of steps after which all errors are cleared; None if no gradient has error feedback.
    """

    def __init__(self, engine: Engine, reset: int | None) -> None:
        self._engine = engine
        self._reset = reset
        self._steps = 0  # steps since the errors were cleared
        # GradScaler's scale of the losses that the errors came from; None if no GradScaler scaled them.
        self._scale: Tensor | None = None

    def follow(self, scaler: torch.amp.GradScaler | None) -> None:
        """Rescale the errors to the current scale of the losses. Changes of the scale by powers of two are exact.

        ``scaler`` is the GradScaler that scales the losses, or None if there is none.
        """
        if scaler is None:
            # The errors come from scaled losses, but the scale of the next losses is unknown, so clear the errors.
            if self._scale is not None:
                self._scale = None
                self.clear()
            return
        scale = loss_scale(scaler, self._engine.device)
        before = self._scale
        # Store a copy, because GradScaler.update() changes its own tensor in place.
        self._scale = scale.clone()
        found = [feedback.scales for feedback in self._named().values()]
        if before is not None and found:
            # Errors are stored as codes with scales, so rescaling the scales is enough. The host does not wait for the
            # device.
            torch._foreach_mul_(found, (scale / before).to(torch.bfloat16))

    def _named(self) -> dict[str, Feedback]:
        """Return the error feedback of every hop, by unit, compute dtype, level and codec."""
        found: dict[str, Feedback] = {}
        seen: Counter[str] = Counter()
        for buffer in self._engine.trainable_buffers:
            name = f"{buffer.unit}/{buffer.compute_dtype}"
            for hop in buffer.gradient.paths.straight.hops if buffer.gradient is not None else ():
                # The codec is part of the name, because errors of one codec are meaningless to another.
                if hop.feedback is not None:
                    found[f"{name}/{seen[name]}/{hop.spec.outer} {hop.codec.name}"] = hop.feedback
            seen[name] += 1
        return found

    def count_step(self) -> None:
        """Count an optimizer step that was taken, and clear the errors if the interval is over."""
        if self._reset is None:
            return
        self._steps += 1
        if self._steps >= self._reset:
            self.clear()

    def clear(self) -> None:
        """Clear all errors, so that the next gradients are sent without compensation."""
        self._steps = 0
        for feedback in self._named().values():
            # Set a flag instead of writing zeros. The kernel does not read errors that are marked fresh.
            feedback.fresh = True

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps since the last clearing, this rank's errors, and the scale of their losses."""
        errors = {name: each.saved() for name, each in self._named().items()}
        return {"steps": self._steps, "errors": errors, "scale": None if self._scale is None else float(self._scale)}

    def fits(self, saved: dict[str, Any] | None) -> bool:
        """Return True if saved errors have the units, hops, codecs and sizes of this rank's error feedback.

        Without saved errors, the result is True only if this rank has no error feedback.
        """
        errors: dict[str, Tensor] = saved["errors"] if saved is not None else {}
        here = {name: feedback.state.numel() for name, feedback in self._named().items()}
        return {name: each.numel() for name, each in errors.items()} == here

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        """Restore saved errors, for which :meth:`fits` must have returned True. None clears the errors."""
        self.clear()
        if saved is None:
            return
        self._steps = saved["steps"]
        scale = saved.get("scale")
        self._scale = None if scale is None else torch.tensor(scale, device=self._engine.device)
        for name, feedback in self._named().items():
            feedback.state.copy_(saved["errors"][name])
            feedback.fresh = False


def load_error_feedback(engine: Engine, carried: ErrorFeedback, saved: dict[str, Any] | None) -> None:
    """Restore saved errors if they fit on every rank; otherwise clear the errors on all ranks and warn. Collective.

    Cleared errors cost little accuracy, so this is no failure.
    """
    steps = saved["steps"] if saved is not None else 0
    # Compare the step counts, too: ranks with different counts would clear their errors at different steps.
    rows = engine.agreement.exchange(SAVED, [int(carried.fits(saved)), steps], "checking carried errors")
    if all(row == [1, rows[0][1]] for row in rows):
        carried.load_state_dict(saved)
        return
    wrong = [rank for rank, row in enumerate(rows) if row[0] == 0]
    cause = f"of ranks {wrong} do not fit this configuration, or were not saved" if wrong else "differ in step counts"
    warn_user(f"carried errors of quantized gradients {cause}; all ranks start with zero errors")
    carried.clear()


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Call ``optimizer.load_state_dict(state)``, but keep the group dicts, and a sharded optimizer's ``state`` dict.

    torch replaces these dicts with new ones. A scheduler may hold the old ones through another optimizer that shares
    them, as after Accelerate has replaced torch's Adam with DeepSpeed's. Such a scheduler would then set learning rates
    that no step reads.
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
    """The result of the last step, which may still be unread, and counts of steps. See [Note: sums read late].

    Args:
        step_sync: step sync that holds the sum of a step whose result the host has not read.
        loss_scale: loss scale that is updated with the result of each step.

    Attributes:
        grad_norm: gradient norm over the whole model at the last step.
        skipped_steps: number of skipped steps since training began.
        step_was_skipped: True if the last step was skipped.
        step_was_taken: True if a step has changed weights since the last backward.
    """

    def __init__(self, step_sync: StepSync, loss_scale: LossScale) -> None:
        self._step_sync = step_sync
        self._loss_scale = loss_scale
        # Pass a weak method, because the engine owns the loss scale and must not keep its wrapper alive.
        loss_scale.wait_for_last = weakly(self.wait_for_result)
        self._unread = False
        # Message of an error that the next step raises again. An exception object would hold this object through its
        # traceback.
        self._error: str | None = None
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self.step_was_skipped = self.step_was_taken = False

    def decided(self, stats: StepStats) -> None:
        """Record the decision about a step, before or after the weights are stepped."""
        self._unread = stats.norm is None
        self.step_was_skipped = stats.skips
        self.step_was_taken = False
        self.skipped_steps += self.step_was_skipped
        if not self._unread:
            self.grad_norm = stats.norm
            # Update the loss scale last, because the update may raise.
            self._loss_scale.update(overflow=self.step_was_skipped)

    def load(self, skipped_steps: int, loss_scale: dict[str, Any] | None = None) -> None:
        """Restore a saved count, and drop the result and the error of the last step.

        ``loss_scale`` is the saved state of the loss scale, or None to keep the current one.
        """
        # Drop an unread sum on every rank. If only some ranks dropped it, the others would raise or read it at the next
        # step.
        self._step_sync.forget_unread()
        self._error = None
        self._unread = False
        self.step_was_skipped = self.step_was_taken = False
        self.skipped_steps = skipped_steps
        if loss_scale is not None:
            self._loss_scale.load_state_dict(loss_scale)

    def count_skipped(self) -> int:
        """Return ``skipped_steps`` for saving.

        A step that was refused because ranks disagreed does not count as skipped.

        Raises:
            RuntimeError: the ranks have lost each other, so some ranks may have stepped and others not.
        """
        try:
            self.wait_for_result()
        except RuntimeError:
            # The error is about differing settings or missed weight edits, which the next step will report.
            if self._step_sync.engine.agreement.lost is not None:
                raise
        return self.skipped_steps

    def pass_over(self) -> None:
        """Record a call of ``step()`` that does nothing, because the accumulation window is not finished."""
        self.wait_for_result()
        self.step_was_skipped = self.step_was_taken = False

    def wait_for_result(self, *, stepping: bool = False) -> None:
        """Read the result of the last step if the device has decided about it without the host.

        The error for a step at which ranks disagreed is raised by every call, up to and including the next step's call.
        So the next step raises on all ranks, even on those that have seen the error before. Otherwise these would
        continue and wait for the others.

        Args:
            stepping: True if the caller is the next step, which clears the error.

        Raises:
            RuntimeError: ranks disagreed at the last step; no weight was changed.
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
            # A backward may have cleared step_was_taken since the step, so keep its value.
            self.step_was_taken = taken and not found.skips


def from_step_result(name: str) -> Any:
    """Return a property that waits for the last step's result and returns this attribute of its StepResult."""

    def ask(optimizer: Any) -> Any:
        optimizer.step_result.wait_for_result()
        return getattr(optimizer.step_result, name)

    return property(ask)


# Comparison of the numbers in parameter groups.

# Bits of the hash, as many as the hash of issued collectives has: the square must be exact in float64.
_BITS = 24
# Multiplier of the hash. Any odd number loses no bits. 2**64 is subtracted to fit int64.
_ODD = 0x9E3779B97F4A7C15 - 2**64
# Group entries that differ between ranks: slices and their names.
_OWN = ("params", "param_names")


class GroupSettings:
    """The numbers in an optimizer's parameter groups, which must be equal on all ranks.

    Args:
        groups: function that returns the current parameter groups.
        agreement: exchanges settings between ranks, to name those that differ.
    """

    def __init__(self, groups: Callable[[], list[dict[str, Any]]], agreement: Agreement) -> None:
        self._groups = groups
        self._agreement = agreement

    def code(self) -> int | Tensor:
        """Return a 24-bit hash of all numbers: an int, or an int64 scalar on the device if a setting is a CUDA tensor.

        The host does not wait for settings that are CUDA tensors.
        """
        numbers = []
        tensors = []
        for name, value in self._numbers():
            if isinstance(value, Tensor):
                tensors.append(value)
                # The host's hash covers the name of a CUDA tensor. Its values enter the hash on the device.
                numbers.append((name, "on a card"))
            else:
                numbers.append((name, _written(value)))
        # Use crc32, because Python salts hash() in each process.
        host = zlib.crc32(repr(numbers).encode()) >> (32 - _BITS)
        return fold(host, tensors) if tensors else host

    def disagreement(self, *, late: bool = False) -> RuntimeError:
        """Return the error for differing hashes, which names the differing settings and their values on each rank.

        Collective, except for a step that is over (``late``). Then other ranks may be elsewhere, so the call is local
        and the error shows this rank's settings only.
        """
        # Reading CUDA tensors makes the host wait, which does not matter before an error.
        own = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in self._numbers()}
        if late:
            return self._late_disagreement(own)
        tables = self._agreement.exchange_objects(own, "comparing the settings of parameter groups")
        names = dict.fromkeys(name for table in tables for name in table)
        differing = [name for name in names if len({repr(table.get(name)) for table in tables}) > 1]
        given = {name: [table.get(name) for table in tables] for name in differing[:3]}
        if not differing:
            return RuntimeError(
                "parameter groups differed between ranks at the last step, so it was skipped; they are equal now. "
                "Every rank must set the same numbers before it calls step()"
            )
        return RuntimeError(
            "parameter groups differ between ranks, and nothing was stepped: "
            + "; ".join(f"{name} is {_by_rank(values)}" for name, values in given.items())
            + ("; ..." if differing[3:] else "")
            + ". Every rank must set the same: give schedulers such as ReduceLROnPlateau a loss averaged over the ranks"
        )

    def _late_disagreement(self, own: dict[str, Any]) -> RuntimeError:
        """Return the error for a step that is over, with this rank's settings only."""
        # Show learning rates first, because schedulers set them and there may be many groups.
        own = dict(sorted(own.items(), key=lambda each: not each[0].endswith(" lr")))
        shown = ", ".join(f"{name} is {value!r}" for name, value in [*own.items()][:8])
        return RuntimeError(
            "parameter groups differed between ranks at the last step, so every rank skipped that step; rank "
            f"{self._agreement.comm.rank} has: {shown}{', ...' if len(own) > 8 else ''}. Every rank must set the same: "
            "give schedulers such as ReduceLROnPlateau a loss averaged over the ranks"
        )

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        """Yield the group and key of each number with its value. CPU tensors are yielded as numbers or lists."""
        for index, group in enumerate(self._groups()):
            for key, value in group.items():
                if key not in _OWN:
                    yield from _numbers_in(f"group {index} {key}", value)


def fold(code: int, tensors: Sequence[Tensor]) -> Tensor:
    """Return a hash that combines ``code`` with the bits of tensors: a 24-bit int64 scalar on their device.

    The host does not wait for the device.
    """
    total: Tensor = torch.full((), code, dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        # Convert to float64, so that a value has the same bits in every dtype that a rank may use.
        for bits in tensor.detach().double().reshape(-1).view(torch.int64).unbind():
            total = (total ^ bits) * _ODD
    folded: Tensor = (total >> (64 - _BITS)) & (2**_BITS - 1)
    return folded


def _numbers_in(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors in a setting, with their names."""
    if isinstance(value, Tensor):
        yield name, value.tolist() if value.is_cpu else value
    elif isinstance(value, (list, tuple)):
        for position, entry in enumerate(value):
            yield from _numbers_in(f"{name}[{position}]", entry)
    # Only numbers are compared at each step, including bools, because schedulers change numbers. Strings and other
    # objects were compared when the optimizer was wrapped.
    elif isinstance(value, Real):
        yield name, value


def _written(value: Any) -> str:
    """Return a value as text with nine digits, because math libraries of different machines differ in later digits."""
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return f"{value:.9g}" if isinstance(value, float) and math.isfinite(value) else repr(value)


def _by_rank(values: list[object]) -> str:
    """Return a text that lists the ranks of each value."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    return ", ".join(f"{value} on ranks {of[:4]}{'...' if of[4:] else ''}" for value, of in ranks.items())
