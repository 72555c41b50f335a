"""A context in which zeropp keeps no prepared work, for comparison with runs that keep it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import count
from typing import Any
from unittest import mock

from torch import Tensor

from zeropp.order import reductions
from zeropp.params.gradient import Gradient, ReduceWork
from zeropp.params.parameter_swap import Generation

__all__ = ["unprepared"]


@contextlib.contextmanager
def unprepared() -> Iterator[None]:
    """Prepare the work of each unit anew whenever it runs, and let every parameter report its gradients."""
    numbers = count()
    prepare = Gradient.prepare_reduce

    def number(generation: Generation) -> int:
        return next(numbers)

    def ignored(generation: Generation, value: int) -> None:
        """Do nothing: the number changes at every look."""

    def anew(gradient: Gradient, message: Tensor, scale: float, *, hold: bool, last: Any = None) -> ReduceWork:
        return prepare(gradient, message, scale, hold=hold)

    with (
        mock.patch.object(Generation, "number", property(number, ignored)),
        mock.patch.object(Gradient, "prepare_reduce", anew),
        mock.patch.object(reductions._UnitHooks, "note_last", lambda hooks, position, trained: None),
    ):
        yield
