"""Gradients that wait for the optimizer: which parameters have some, and how they are forgotten.

[Note: gradients taken away] In plain torch a gradient that the user sets to None is gone, and its parameter is not
stepped unless a later backward uses it. Here a rank sees this of its own slices only, while other ranks may have used
the parameter. All ranks look for such changes at the same calls, so they number the looks alike. Each rank keeps for a
parameter the look after which it was used last, and the look that found its gradient taken away. Where a gradient is
gone that the owner has not used since, the sum of the next step tells all ranks, and the owners' looks are exchanged:
what a rank used before that look no longer counts. Other steps exchange nothing.
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
        used: for each unit, of each of its trainable parameters, the look after which this rank brought it a gradient
            last; 0 if it has none from this rank.
        removed: the look that found the gradient of a parameter set to None, by its unit and position; 0 where all
            ranks know. An entry stays until gradients are forgotten.
        looks: how often the gradients in the groups were looked at for changes, plus one; alike on every rank.
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

    def forget_unsent(self) -> None:
        """Forget what has not been sent, on this rank."""
        for unit in self._units:
            for gradient in unit.gradients:
                gradient.forget_unsent()

    def forget_stray(self) -> None:
        """Forget what a failed backward has brought, not what earlier ones have."""
        for unit in self._units:
            for gradient in unit.gradients:
                gradient.forget_stray()

    def forget_all(self, *, set_to_none: bool = True) -> None:
        """Forget all gradients, or set those that are there to zero, as in torch's ``zero_grad``.

        Zeros count as gradients: the next step takes their parameters along, and backwards add to them.
        """
        if set_to_none:
            self.forget_unsent()
            self.forget()
            return
        self.backward_ran = False
        for unit in self._units:
            for gradient in unit.gradients:
                gradient.set_to_zero()
        if (listener := self._listener()) is not None:
            listener.gradients_forgotten()

    def forget(self) -> None:
        """Forget the gradients of finished backwards; those that autograd is just bringing stay."""
        self.backward_ran = False
        for unit in self._units:
            for gradient in unit.gradients:
                # Not forget_unsent: this also runs as a backward begins, when autograd may have filled a .grad.
                gradient.forget()
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
                if gradient in kept:
                    gradient.forget_held()
                else:
                    gradient.forget()
