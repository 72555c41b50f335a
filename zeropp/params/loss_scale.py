"""The factor on losses in float16, by which small gradients do not vanish.

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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from zeropp._compat import current_graph_task, queue_end_of_backward, uncompiled
from zeropp.config.blocks import Fp16Config

__all__ = ["LossScale", "LossScaleError"]

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


class LossScale:
    """Static, or dynamic: halved after steps that overflow, doubled after many that do not.

    It is moved by what all ranks learn in a step, so it is the same on every rank. The sequence is DeepSpeed's: the
    first ``hysteresis - 1`` overflows change nothing; each further one halves the scale, down to ``min_loss_scale``.
    Where ``loss_scale_window`` iterations lie between the last overflow and a step, and again after as many, it is
    doubled and the hysteresis full again; with ``consecutive_hysteresis`` each step without overflow fills it.

    Args:
        config: the ``fp16`` block; where it is not enabled the scale is 1, and stays.
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

    def __init__(self, config: Fp16Config, factor: float) -> None:
        self._config = config
        self._factor = factor
        self.dynamic = config.enabled and config.loss_scale == 0
        self.value = 1.0
        if config.enabled:
            self.value = 2.0**config.initial_scale_power if self.dynamic else config.loss_scale
        self.iterations = 0
        self.divides_plain = False
        # Of the losses of a window: a micro-batch's part, where they were not divided, and the scale that they have.
        self._share, self._scale = 1.0, self.value
        self._last_overflow = -1
        self._left = config.hysteresis  # overflows until the scale is halved, that one included
        # Waits for what has become of the last step, where the host does not know yet.
        self.wait_for_last: Callable[[], object] = lambda: None

    def apply(self, loss: Tensor) -> Tensor:
        """The loss times the scale; a backward that goes through it is one of a loss that was scaled."""
        if self._config.enabled:
            if self.dynamic:
                self.wait_for_last()
            # In float32: 65536 is more than float16 has.
            scaled = loss.float() * self.value
        else:
            # Another tensor than the model's output, whose hooks would run before that of this one; and no view of it,
            # which an edit in place would take the hook off.
            scaled = loss.clone()
        if scaled.requires_grad:
            this, value = weakref.ref(self), self.value
            scaled.register_hook(partial(_begin, this, value))
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
        if scale is None and self._config.enabled:
            # Small gradients would vanish.
            raise RuntimeError(
                "fp16 is enabled, and this backward is of a loss that was not scaled; call optimizer.backward(loss), "
                f"or optimizer.scale(loss).backward(){_DETACHED if LossScale._unmet else ''}"
            )
        matters = (self.divides_plain and steps > 1) or any(each._config.enabled for each in LossScale._unmet)
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
        self._share, self._scale = share, scale

    def _found(self) -> float | None:
        """The scale of the loss whose backward has come to this model; None if it has none."""
        running, task = _running(), current_graph_task()
        # Of another task where checkpointing runs a backward inside that of the loss, mostly in the same thread.
        found = [each for each in running if each.task == task]
        found = found or [each for each in running if each.thread == threading.get_ident()] or running
        for each in found:
            each.met |= each.owner() is self
        return found[-1].value if found else None

    def forget(self) -> None:
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
            if self._config.consecutive_hysteresis:
                self._left = self._config.hysteresis
            # Steps that lie between the overflow and this one, neither of them included.
            between = self.iterations - self._last_overflow - 1
            if between > 0 and between % self._config.loss_scale_window == 0:
                self._left = self._config.hysteresis
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
        least = self._config.min_loss_scale
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
        self.forget()
        # A run may go on with another scale than it was saved with, but only if somebody has said so.
        if self.dynamic:
            self.value, self.iterations = float(state["value"]), int(state["iterations"])
            self._last_overflow, self._left = int(state["last_overflow"]), int(state["left"])


def _running() -> list[_Scaled]:
    """Backwards of scaled losses that are not over; one that failed is."""
    for each in [each for each in LossScale._running if each.running() is None]:
        # Another thread may have been first.
        with contextlib.suppress(ValueError):
            LossScale._running.remove(each)
    return list(LossScale._running)


@uncompiled
def _begin(owner: weakref.ref[LossScale], value: float, gradient: Tensor) -> None:
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
