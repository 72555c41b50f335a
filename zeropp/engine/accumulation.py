"""Gradients between backwards and the step: how many micro-batches they are of, and which parameters have some.

:class:`GradAccumulation` counts micro-batches, :class:`PendingGradients` knows which parameters have gradients, and
:class:`Listener` is the wrapper of the optimizer as the engine sees it, to which it tells what becomes of them.

[Note: when a step acts] With ``managed_gradient_accumulation`` true, the default, ``step()`` acts when at least
``gradient_accumulation_steps`` micro-batches have been taken since the last step, or with ``now=True``; otherwise it
does nothing. With false every ``step()`` acts. A micro-batch is all backwards since the last training forward of the
model, that is, one with gradients enabled. No earlier call changes this rule. Every rank makes the same calls, so ranks
agree without an exchange.

[Note: gradients taken away] In plain torch a parameter whose gradient the user sets to None is not stepped, unless a
later backward uses it. Here only ranks with a slice of the parameter see the None, and others may have used it before.
All ranks look for such changes at the same calls and count these looks, so a look has the same number on every rank.
For each parameter a rank keeps the number of the last look before it used the parameter, and the number of the look
that found its gradient gone. If a rank has found a gradient gone and has not used the parameter since, a flag in the
sum of the next step says so. Ranks then exchange the numbers of these looks, and each drops its own use of a parameter
if it came before. A step without that flag exchanges nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from torch import nn

from zeropp.params.gradient import Gradient
from zeropp.params.unit import Unit

__all__ = ["GradAccumulation", "Listener", "PendingGradients"]


class GradAccumulation:
    """Counts the micro-batches since the last step; see [Note: when a step acts].

    Args:
        steps: micro-batches of a window, gradient_accumulation_steps.
        managed: False lets every ``step()`` act.

    Attributes:
        steps: as given.
        count: micro-batches of which a backward has run since the last step.
        together: micro-batches that the running or next forward and backward take together.
        divided: True if ``optimizer.backward()`` has divided a loss of this window by ``steps``.
    """

    def __init__(self, steps: int, *, managed: bool) -> None:
        self.steps = steps
        self.managed = managed
        self.count = 0
        self.together = 1
        self.divided = False
        # The next backward begins a micro-batch.
        self._fresh = True
        # The model itself was called, and not only modules inside it.
        self._model_ran = False
        # step() did nothing, and no backward has run or failed since.
        self._ignored = False
        self._warned_of_ignored = self._warned_of_long = False  # warnings that were given

    @property
    def every_step_acts(self) -> bool:
        """True if ``step()`` acts whatever has been taken."""
        return self.steps == 1 or not self.managed

    @property
    def unfinished(self) -> bool:
        """True if a ``step()`` would do nothing now."""
        return not self.every_step_acts and self.count < self.steps

    @property
    def ignores_zero_grad(self) -> bool:
        """True if ``zero_grad()`` does nothing, since the ``step()`` before it did nothing."""
        return self._ignored

    @property
    def closing(self) -> bool:
        """True if the running or next backward belongs to the last micro-batch before a step.

        It is an estimate where every ``step()`` acts, or with ``now=True``. A wrong one costs bytes and changes no
        result.
        """
        # A second backward of one micro-batch, for another loss of the same forward, does not count once more.
        return self.count + self._fresh * self.together >= self.steps

    def note_forward(self, path: str) -> None:
        """A forward begins at the module of that name and records a graph; inside another it does not count."""
        # A forward of a part, for an auxiliary loss perhaps, belongs to the micro-batch of the model.
        if path == "":
            self._fresh = self._model_ran = True

    def note_backward(self) -> None:
        """A backward is over."""
        if self._fresh:
            self.count += self.together
        # A zero_grad() from here on does not belong to the step() that did nothing: it means the gradients.
        self._fresh = self._ignored = False

    def note_failure(self) -> None:
        """A backward has failed: ``zero_grad()`` is to discard the gradients that it leaves."""
        self._ignored = False

    def note_step_call(self, *, now: bool = False) -> bool:
        """Tell whether a call of ``step()`` acts. With ``now`` it does if anything has been taken."""
        if now:
            return self.every_step_acts or self.count > 0
        if self.unfinished:
            self.ignore_step()
            return False
        return True

    def ignore_step(self) -> None:
        """A ``step()`` has done nothing, and so is the ``zero_grad()`` after it to do."""
        self._ignored = True

    def warning(self) -> str | None:
        """A warning for the caller of ``step()``, the first time that it did nothing or came too late; else None."""
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
        """A step was taken or skipped, or gradients were discarded."""
        self.count = 0
        self._fresh = True
        self._ignored = self.divided = False


class Listener(Protocol):
    """Methods that the engine calls on the wrapper, which it outlives. Without a wrapper nothing happens.

    Attributes:
        accumulation_type: the class that counts this wrapper's micro-batches.
    """

    accumulation_type: type[GradAccumulation] = GradAccumulation

    def forward_begins(self) -> None:
        """A forward from outside is about to gather or to read weights."""
        return

    def weights_wanted(self) -> None:
        """Main weights are about to be read or loaded, outside of a pass."""
        return

    def graph_begins(self) -> None:
        """A forward from outside is about to record a graph."""
        return

    def backward_begins(self) -> None:
        """A backward starts; called before its first gather or reduction."""
        return

    def backward_ended(self) -> None:
        """All that is to be sent of it has arrived."""
        return

    def gradients_wanted(self) -> None:
        """Gradients are about to be set to zero, if there are some."""
        return

    def gradient_forgotten(self, parameter: nn.Parameter) -> None:
        """The gradient of one parameter was set to None, on every rank."""
        return

    def gradients_forgotten(self) -> None:
        """No gradient of a finished backward is left, or only zeros in its place."""
        return


class PendingGradients:
    """Gradients that backwards have brought since the last step, and how they are forgotten.

    Attributes:
        backward_ran: whether there are gradients of one since the last step or ``zero_grad``.
        used: for each unit, and each of its trainable parameters, the number of the last look before this rank used it;
            0 if the parameter has no gradient from this rank.
        removed: by unit and position of a parameter, the number of the look that found its gradient set to None; 0
            where every rank knows. An entry stays until gradients are forgotten.
        looks: how often gradients in the groups were looked at for changes, plus one; the same on every rank.
    """

    def __init__(self, units: Sequence[Unit], listener: weakref.ref[Listener]) -> None:
        self._units = units
        # Weakly: the wrapper owns the engine, and this with it. See [Note: ownership].
        self._listener = listener
        self.backward_ran = False
        self.used: list[list[int]] = [[] for _ in units]
        self.removed: dict[tuple[int, int], int] = {}
        self.looks = 1
        self._told = 0  # the look up to which other ranks know of removed gradients
        self.make_room()

    def make_room(self) -> None:
        """Add flags for parameters that are trained from now on; they come after the others of their unit."""
        for flags, unit in zip(self.used, self._units, strict=True):
            # What is unfrozen gets a buffer of its own, the last of its unit.
            flags += [0] * (len(unit.trained) - len(flags))

    def forget_stray(self) -> None:
        """Forget what a failed backward has brought, not what earlier ones have."""
        for unit in self._units:
            for gradient in unit.gradients:
                gradient.forget_stray()

    def forget_all(self, *, set_to_none: bool = True) -> None:
        """Forget all gradients, or set those that are there to zero, as in torch's ``zero_grad``.

        Zeros count as gradients: the next step takes their parameters along, and backwards add to them.
        """
        self.backward_ran = False
        for unit in self._units:
            for gradient in unit.gradients:
                if set_to_none:
                    gradient.forget_unsent()
                    gradient.drop_sum()
                else:
                    gradient.set_to_zero()
        if set_to_none:
            for flags in self.used:
                flags[:] = [0] * len(flags)
            self.removed.clear()
        if (listener := self._listener()) is not None:
            listener.gradients_forgotten()

    def forget_one(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Forget one parameter's gradient on this rank; the next backward starts anew."""
        position = unit.drop_gradient(parameter)
        if position is not None:
            # Look 0, as every rank does the same.
            self.used[unit.index][position] = 0
            self.removed[unit.index, position] = 0

    # See [Note: gradients taken away].

    def note_removed(self, unit: int, position: int) -> None:
        """The user has set this rank's part of a gradient to None."""
        self.used[unit][position] = 0
        self.removed[unit, position] = self.looks

    def is_gone(self, unit: int, position: int) -> bool:
        """Tell whether a gradient was taken away, and this rank has not used the parameter since."""
        return (unit, position) in self.removed and not self.used[unit][position]

    def untold(self) -> dict[tuple[int, int], int]:
        """The entries of ``removed`` that other ranks have to know."""
        return {place: look for place, look in self.removed.items() if look > self._told and self.is_gone(*place)}

    def learn_removed(self, told: Iterable[dict[tuple[int, int], int]]) -> None:
        """Drop this rank's flags of gradients that an owner has found taken away since; ``told`` by all ranks."""
        self._told = self.looks
        for removed in told:
            for (unit, position), look in removed.items():
                if self.used[unit][position] < look:
                    self.used[unit][position] = 0

    def forget_removed(self, kept: Collection[Gradient]) -> None:
        """The user has set gradients of all groups to None, apart from parts of ``kept``; the next sums begin anew."""
        for unit in self._units:
            for gradient in unit.gradients:
                # Not forget_unsent: this runs as a backward begins, when autograd may have filled a .grad.
                if gradient in kept:
                    gradient.forget_held()
                else:
                    gradient.drop_sum()
