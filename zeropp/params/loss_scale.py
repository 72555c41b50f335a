"""The loss scale, static or dynamic, of one model.

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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from zeropp._compat import current_graph_task, queue_end_of_backward, uncompiled

__all__ = ["LossScale", "LossScaleError", "LossScaling"]


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
