"""The update of weights in a step that is taken, the norms that it clips by, and the results of steps.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from zeropp._compat import has_step_post_hooks, unguarded
from zeropp.config import Config
from zeropp.engine.engine import Engine
from zeropp.optimizer.checks import treats_each_alone
from zeropp.optimizer.host_step import HostStep
from zeropp.optimizer.partial_gradient import MARKER_GRADIENT, NOTHING
from zeropp.optimizer.sharded_params import ShardedParams, Slice
from zeropp.optimizer.step_sync import StepStats
from zeropp.order.refresh import chunk_of
from zeropp.params.unit import FlatBuffer

__all__ = ["GradientNorms", "OptimizerStep", "gradient_norms", "scale_gradients", "unscale"]


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


# Results of steps.
