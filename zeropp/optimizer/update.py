"""The update of weights: the wrapped optimizer steps them on the device, or the host's cores do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from zeropp._compat import has_step_post_hooks, unguarded
from zeropp.engine.engine import Engine
from zeropp.optimizer.host_step import HostStep
from zeropp.optimizer.norms import clip_divisor, clipping, may_leave_out, scale_gradients, takes_divisor
from zeropp.optimizer.portions import begin_momentum, choose_portions, step_by_portions, without_gradients
from zeropp.optimizer.slices import Slices
from zeropp.params.flat_buffer import FlatBuffer

__all__ = ["Update"]


class Update:
    """Steps what has a gradient, and lets new weights travel to where they are cached."""

    def __init__(self, engine: Engine, optimizer: Optimizer, slices: Slices) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._slices = slices
        self._max_norm = engine.maker.config.gradient_clipping
        self._host = HostStep(engine, optimizer, slices) if engine.maker.config.steps_on_host else None

    @property
    def may_leave_out(self) -> bool:
        """True if the device can leave a step out by itself, so that the host need not know of it yet."""
        return self._host is None and may_leave_out(self._engine, self._optimizer)

    def run(self, norm: Tensor, left_out: Tensor | None) -> None:
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
            step_by_portions(
                choose_portions(self._engine, self._optimizer, self._slices.stepped),
                self._step,
                lambda buffers: self._changed(buffers, for_now=later),
            )

    def _step_on_host(self, host: HostStep, norm: Tensor, *, waits: bool) -> None:
        """Let the host's cores step, and the wrapped optimizer what the host leaves to it."""
        # A stand-in is nobody's, and is there for GradScaler alone.
        parts = [part for part in self._slices.stepped if part.buffer is not None]
        there = [part for part in parts if part.on_host]
        here = [part for part in parts if not part.on_host]
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
        host.start(there, taken, divisor, waits=waits)

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
            if buffer.source is not None:
                buffer.source.renew()
        self._engine.weights_changed(buffers, stepped=True, for_now=for_now)
