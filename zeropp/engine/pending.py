"""Gradients that wait for the optimizer: which parameters have some, and how they are forgotten."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from zeropp.engine.listener import Listener
from zeropp.params.unit import Unit

__all__ = ["Pending"]


class Pending:
    """What backwards have brought since the last step.

    Attributes:
        backward_ran: whether there are gradients of one since the last step or ``zero_grad``.
        used: for each unit, whether each of its trainable parameters has a gradient from this rank, if only of zeros.
    """

    def __init__(self, units: Sequence[Unit], listener: weakref.ref[Listener]) -> None:
        self._units = units
        # Weakly: the wrapper owns the engine, and this with it. See [Note: ownership].
        self._listener = listener
        self.backward_ran = False
        self.used: list[list[bool]] = [[] for _ in units]
        self.make_room()

    def make_room(self) -> None:
        """Add flags for parameters that are trained from now on; they come after the others of their unit."""
        for flags, unit in zip(self.used, self._units, strict=True):
            # What is unfrozen gets a buffer of its own, the last of its unit.
            flags += [False] * (len(unit.trained) - len(flags))

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
            flags[:] = [False] * len(flags)
        if (listener := self._listener()) is not None:
            listener.gradients_forgotten()

    def forget_one(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Forget one parameter's gradient on this rank; the next backward starts anew."""
        position = unit.drop_gradient(parameter)
        if position is not None:
            self.used[unit.index][position] = False
