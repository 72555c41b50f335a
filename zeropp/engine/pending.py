"""Gradients that wait for the optimizer: which parameters have some, and how they are forgotten.

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

from torch import nn

from zeropp.engine.listener import Listener
from zeropp.params.gradient import Gradient
from zeropp.params.unit import Unit

__all__ = ["Pending"]


class Pending:
    """What backwards have brought since the last step.

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
        """Forget one parameter's gradient on this rank; the next backward starts anew."""
        position = unit.drop_gradient(parameter)
        if position is not None:
            # Look 0, as every rank does the same.
            self.used[unit.index][position], self.removed[unit.index, position] = 0, 0

    # See [Note: gradients taken away].

    def note_removed(self, unit: int, position: int) -> None:
        """The user has set this rank's part of a gradient to None."""
        self.used[unit][position], self.removed[unit, position] = 0, self.looks

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
                    gradient.forget()
