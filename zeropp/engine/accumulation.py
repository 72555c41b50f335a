"""Gradients between a backward and the step: the count of micro-batches, and the parameters that have gradients.

:class:`GradAccumulation` counts micro-batches. :class:`PendingGradients` stores which parameters have gradients.
:class:`Listener` is the interface through which the engine notifies the wrapper of the optimizer.

[Note: when a step acts] With ``managed_gradient_accumulation`` true, the default, ``step()`` acts if at least
``gradient_accumulation_steps`` micro-batches have run since the last step, or with ``now=True``. Otherwise ``step()``
does nothing. With ``managed_gradient_accumulation`` false, every ``step()`` acts. A micro-batch consists of all
backwards since the last forward of the model with gradients enabled. No earlier call changes this rule. Every rank
makes the same calls, so ranks agree without an exchange.

[Note: gradients taken away] In plain torch, a parameter whose gradient the user sets to None is not stepped, unless a
later backward uses it. With sharded gradients, only ranks with a slice of the parameter see the None, and other ranks
may have used the parameter before. All ranks check for such changes in the same calls. Each check is a *look*; looks
are counted, so a look has the same number on every rank. For each parameter a rank stores the number of the last look
before it used the parameter, and the number of the look that found the gradient gone. If a rank has found a gradient
gone and has not used the parameter since, it sets a flag in the sum of the next step sync. Only then do ranks exchange
the numbers of these looks. Each rank forgets its own use of such a parameter if the use came before the look.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from torch import nn

from zeropp.params.gradient import Gradient
from zeropp.params.unit import Unit

__all__ = ["NO_LISTENER", "GradAccumulation", "Listener", "PendingGradients"]


class GradAccumulation:
    """Counts the micro-batches since the last step; see [Note: when a step acts].

    Args:
        steps: number of micro-batches in an accumulation window (``gradient_accumulation_steps``).
        managed: False to let every ``step()`` act.

    Attributes:
        steps: number of micro-batches in an accumulation window.
        managed: False if every ``step()`` acts.
        count: number of micro-batches with a backward since the last step.
        together: number of micro-batches in the running or next forward and backward, as set by `accumulate`.
        divided: True if ``optimizer.backward()`` has divided a loss of this window by ``steps``.
    """

    def __init__(self, steps: int, *, managed: bool) -> None:
        self.steps = steps
        self.managed = managed
        self.count = 0
        self.together = 1
        self.divided = False
        # True if the next backward begins a micro-batch.
        self._fresh = True
        # True once the model itself was called with gradients enabled, and not only modules inside it.
        self._model_ran = False
        # True if step() did nothing, and no backward has ended or failed since.
        self._ignored = False
        self._warned_of_ignored = self._warned_of_long = False  # True once the warning was given

    @property
    def every_step_acts(self) -> bool:
        """True if ``step()`` acts after any number of micro-batches."""
        return self.steps == 1 or not self.managed

    @property
    def unfinished(self) -> bool:
        """True if a ``step()`` without ``now=True`` would do nothing."""
        return not self.every_step_acts and self.count < self.steps

    @property
    def ignores_zero_grad(self) -> bool:
        """True if ``zero_grad()`` does nothing, because the ``step()`` before it did nothing."""
        return self._ignored

    @property
    def closing(self) -> bool:
        """True if the running or next backward belongs to the last micro-batch before a step.

        This is an estimate if every ``step()`` acts, or if ``step(now=True)`` follows. If it is wrong, more bytes are
        sent, and the result is the same.
        """
        # ``_fresh`` is False for a second backward of one micro-batch (another loss of the same forward).
        return self.count + self._fresh * self.together >= self.steps

    def note_forward(self, path: str) -> None:
        """Note that a forward with a graph begins.

        Args:
            path: path of the called module, "" for the model. Modules called inside another one are not reported.
        """
        # A forward of a part, for an auxiliary loss, for example, belongs to the micro-batch of the model's forward.
        if path == "":
            self._fresh = self._model_ran = True

    def note_backward(self) -> None:
        """Count a backward that has ended."""
        if self._fresh:
            self.count += self.together
        # A zero_grad() after this backward does not belong to a step() that did nothing, so it must act.
        self._fresh = self._ignored = False

    def note_failure(self) -> None:
        """Note that a backward has failed: the next ``zero_grad()`` acts, to discard the gradients left by it."""
        self._ignored = False

    def note_step_call(self, *, now: bool = False) -> bool:
        """Return True if a call of ``step()`` acts. With ``now`` it acts after any micro-batch."""
        if now:
            return self.every_step_acts or self.count > 0
        if self.unfinished:
            self.ignore_step()
            return False
        return True

    def ignore_step(self) -> None:
        """Note that a ``step()`` has done nothing, so that the ``zero_grad()`` after it does nothing either."""
        self._ignored = True

    def warning(self) -> str | None:
        """Return a warning the first time that a ``step()`` did nothing or came too late; else None."""
        if self._ignored and not self._warned_of_ignored:
            self._warned_of_ignored = True
            parts = ""
            if not self._model_ran:
                parts = (
                    " Micro-batches begin with forwards of the wrapped model, which has never been called with "
                    "gradients enabled, only modules inside it."
                )
            return (
                f"step() did nothing after {self.count} of gradient_accumulation_steps {self.steps} micro-batches, and "
                f"so will the zero_grad() after it; every later step() before micro-batch {self.steps} does the same "
                f"without a warning.{parts} step(now=True) steps with what is there, as at the end of the data, "
                "and clip_grad_norm_(max_norm, now=True) clips that before; "
                '{"managed_gradient_accumulation": false} lets every step() act. optimizer.step_was_taken tells a '
                "scheduler whether to go on"
            )
        if self.divided and self.count > self.steps > 1 and not self._warned_of_long:
            self._warned_of_long = True
            return (
                f"step() acts after {self.count} micro-batches, and gradient_accumulation_steps is {self.steps}. "
                f"optimizer.backward() divides each loss by {self.steps}, which makes the gradient "
                f"{self.count / self.steps:g} times the mean; set gradient_accumulation_steps to {self.count}, or call "
                "step(now=True) where a window ends early"
            )
        return None

    def restart(self) -> None:
        """Begin a new window, after a step was taken or skipped, or after gradients were discarded."""
        self.count = 0
        self._fresh = True
        self._ignored = self.divided = False


class Listener(Protocol):
    """Interface of the optimizer's wrapper: methods that the engine calls. Without a wrapper none is called.

    Attributes:
        accumulation_type: class that counts the micro-batches of this wrapper.
    """

    accumulation_type: type[GradAccumulation] = GradAccumulation

    def forward_begins(self) -> None:
        """Called when a forward of the model begins, before it gathers or reads weights."""
        return

    def weights_wanted(self) -> None:
        """Called before main weights are read or loaded between passes."""
        return

    def graph_begins(self) -> None:
        """Called before a forward of the model records a graph."""
        return

    def backward_begins(self) -> None:
        """Called when a backward begins, before its first gather or reduction."""
        return

    def backward_ended(self) -> None:
        """Called when a backward has ended and all its reductions have arrived."""
        return

    def gradients_wanted(self) -> None:
        """Called before the gradients are set to zero."""
        return

    def gradient_forgotten(self, parameter: nn.Parameter) -> None:
        """Called after the gradient of one parameter was set to None, on every rank."""
        return

    def gradients_forgotten(self) -> None:
        """Called after the gradients of all finished backwards were forgotten or set to zero."""
        return


class _NullListener(Listener):
    """A listener that does nothing when it is notified."""


NO_LISTENER = _NullListener()
"""The listener of an engine without an optimizer."""


class PendingGradients:
    """The gradients that backwards have brought since the last step, and methods that forget them.

    Attributes:
        backward_ran: True if a backward has brought gradients since all gradients were last forgotten.
        used: for each unit and each of its trainable parameters, the number of the last look before this rank used the
            parameter; 0 if this rank has no gradient of it. See [Note: gradients taken away].
        removed: (unit, position of a parameter) -> number of the look that found its gradient set to None; 0 if every
            rank knows it. An entry stays until the gradients are forgotten.
        looks: number of checks for changed gradients so far, plus one; the same on every rank.
    """

    def __init__(self, units: Sequence[Unit], listener: weakref.ref[Listener]) -> None:
        self._units = units
        # A weak reference, because the wrapper owns the engine and so this object. See [Note: ownership].
        self._listener = listener
        self.backward_ran = False
        self.used: list[list[int]] = [[] for _ in units]
        self.removed: dict[tuple[int, int], int] = {}
        self.looks = 1
        self._told = 0  # number of the last look up to which all ranks have exchanged removed gradients
        self.make_room()

    def make_room(self) -> None:
        """Add flags for parameters that are newly trained."""
        for flags, unit in zip(self.used, self._units, strict=True):
            # Unfrozen parameters are in a new buffer, the last of their unit, so their flags are the last ones, too.
            flags += [0] * (len(unit.trained) - len(flags))

    def note_used(self, counts: Sequence[Sequence[int]]) -> None:
        """Note the parameters that have gradients in a backward; ``counts`` has their numbers, for each unit."""
        looks = self.looks
        for flags, numbers in zip(self.used, counts, strict=True):
            if 0 not in numbers:
                flags[:] = [looks] * len(flags)
                continue
            for position, number in enumerate(numbers):
                if number:
                    flags[position] = looks

    def forget_stray(self) -> None:
        """Forget the gradients in ``.grad`` that a failed backward left; keep those of earlier backwards."""
        for unit in self._units:
            for gradient in unit.gradients:
                gradient.forget_stray()

    def forget_all(self, *, set_to_none: bool = True) -> None:
        """Forget all gradients, or set the existing ones to zero, as torch's ``zero_grad``.

        Zeros count as gradients: the next step takes their parameters along, and backwards add to them.

        Args:
            set_to_none: True to forget gradients; False to set them to zero.
        """
        self.backward_ran = False
        for unit in self._units:
            for gradient in unit.gradients:
                if set_to_none:
                    gradient.forget()
                else:
                    gradient.set_to_zero()
        if set_to_none:
            for flags in self.used:
                flags[:] = [0] * len(flags)
            self.removed.clear()
        if (listener := self._listener()) is not None:
            listener.gradients_forgotten()

    def forget_one(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Forget the gradient of one parameter. Every rank does so in the same call."""
        position = unit.drop_gradient(parameter)
        if position is not None:
            # 0 instead of the number of a look, because every rank makes this call.
            self.used[unit.index][position] = 0
            self.removed[unit.index, position] = 0

    # See [Note: gradients taken away].

    def note_removed(self, unit: int, position: int) -> None:
        """Note that the user has set this rank's slice of a gradient to None."""
        self.used[unit][position] = 0
        self.removed[unit, position] = self.looks

    def is_gone(self, unit: int, position: int) -> bool:
        """Return True if the user took a gradient away and this rank has not used the parameter since."""
        return (unit, position) in self.removed and not self.used[unit][position]

    def untold(self) -> dict[tuple[int, int], int]:
        """Return the entries of ``removed`` that the other ranks have not received."""
        return {place: look for place, look in self.removed.items() if look > self._told and self.is_gone(*place)}

    def learn_removed(self, told: Iterable[dict[tuple[int, int], int]]) -> None:
        """Forget this rank's uses of parameters whose gradients were taken away later.

        Args:
            told: entries of ``removed``, from each rank.
        """
        self._told = self.looks
        for removed in told:
            for (unit, position), look in removed.items():
                if self.used[unit][position] < look:
                    self.used[unit][position] = 0

    def forget_removed(self, kept: Collection[Gradient]) -> None:
        """Begin new sums after the user set all gradients in the groups to None, except the gradients in ``kept``."""
        for unit in self._units:
            for gradient in unit.gradients:
                # Not forget_unsent: a backward is beginning, and autograd may have written its first .grad already.
                if gradient in kept:
                    gradient.forget_held()
                else:
                    gradient.drop_sum()
