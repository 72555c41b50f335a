"""Uses of ``GatheredParameters`` that are open, and forwards on what they lend.

Where all parameters have their whole values, a forward without gradients needs no other rank: hooks have nothing to
gather. So ranks may generate as many tokens as each of them has to, and no weight travels twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn

from zeropp.params.guard import is_guarded
from zeropp.params.unit import Unit

__all__ = ["Loan", "Loans"]


class Loan(Protocol):
    """Whole values, lent to parameters."""

    def lends(self, parameter: nn.Parameter, modifier_rank: int | None) -> bool:
        """Whether a parameter has its values of this, and edits of that rank are kept."""
        ...

    def lower(self) -> None:
        """Let parameters have the dtypes that they are computed with.

        Raises:
            RuntimeError: edits would be rounded.
        """
        ...


class Loans:
    """Those of one engine's parameters; true while any is open.

    Attributes:
        computed: what is lent to be read has the dtype that it is computed with, as weights outside have; of a training
            engine, whose scripts send values on to others, and name the dtype that they found outside.
    """

    computed = False

    def __init__(self) -> None:
        self._open: list[Loan] = []
        self._computing = False

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, loan: Loan) -> None:
        """Parameters have been lent."""
        self._open.append(loan)
        self._computing = False

    def end(self, loan: Loan) -> None:
        """They are about to be partitioned again."""
        self._open.remove(loan)
        self._computing = False

    def lend(self, parameter: nn.Parameter, modifier_rank: int | None) -> bool:
        """Whether one that is open lends a parameter; see :meth:`Loan.lends`."""
        return any(loan.lends(parameter, modifier_rank) for loan in self._open)

    @property
    def computing(self) -> bool:
        """Whether the forward that is running, or ran last, is on what is lent."""
        return self._computing and bool(self._open)

    def serve(self, units: Iterable[Unit], *, outermost: bool) -> bool:
        """Whether a forward can run, or goes on, on what is lent.

        Raises:
            RuntimeError: it can, and edits would be rounded.
        """
        if outermost:
            # A graph would lead to values that go back, and through which no gradient is reduced.
            whole = not torch.is_grad_enabled() and not any(is_guarded(p) for unit in units for p in unit.parameters)
            if whole:
                for loan in self._open:
                    loan.lower()
            self._computing = whole
        return self._computing
