"""What one backward uses: which units it has fetched, and when it is done with each."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from zeropp.engine.reductions import Reductions
from zeropp.engine.schedule import Schedule
from zeropp.unit import Unit

__all__ = ["BackwardUses"]


class BackwardUses:
    """Units in use by the running backward.

    A unit is done with when its gradients have come and, if some of it is frozen, the inputs of every call theirs.
    """

    def __init__(self, units: SequenceOf[Unit], schedule: Schedule, reductions: Reductions) -> None:
        self._units = units
        self._schedule = schedule
        self._reductions = reductions
        self._calls: dict[int, int] = {}  # unit in use -> calls that are not known to be over
        self._whole: dict[int, None] = {}

    def foresee(self, units: SequenceOf[Unit], *, whole: bool) -> None:
        """The next backward may use these.

        Args:
            units: used by the running forward.
            whole: fetch them for all of it: nothing will tell when they are needed or done with.
        """
        indices = [unit.index for unit in units]
        self._schedule.foresee(indices)
        if whole:
            self._whole.update(dict.fromkeys(indices))

    def forget_whole(self) -> None:
        """No backward of what has run so far is to come."""
        self._whole.clear()

    def begin(self) -> None:
        """Fetch what is needed for the whole backward, last things first."""
        for index in sorted(self._whole, reverse=True):
            self.use(self._units[index])

    def use(self, unit: Unit, *, lasting: bool = False) -> None:
        """Have a unit for this backward; ``lasting`` if a call needs it until the gradients of its inputs have come.

        Where the inputs of a call have none, nothing tells before the end: what is trained inside it may come last.
        """
        if unit.index not in self._calls:
            self._calls[unit.index] = 0
            unit.holds += 1
            self._schedule.use(unit)
        self._calls[unit.index] += lasting

    def call_ended(self, unit: Unit) -> None:
        """The inputs of a call have their gradients."""
        if self._calls.get(unit.index, 0) > 0:
            self._calls[unit.index] -= 1
        self.end(unit)

    def end(self, unit: Unit) -> None:
        """Let go of a unit if this backward is done with it."""
        index = unit.index
        if index not in self._whole and self._calls.get(index) == 0 and self._reductions.complete(index):
            del self._calls[index]
            self._release(unit)

    def give_up(self) -> bool:
        """Let go of what is left; returns whether anything was."""
        left = [self._units[index] for index in self._calls]
        self._calls.clear()
        for unit in left:
            self._release(unit)
        return bool(left)

    def forget(self) -> None:
        """A pass failed, and everything is released elsewhere."""
        self._calls.clear()
        self._whole.clear()

    def _release(self, unit: Unit) -> None:
        unit.holds -= 1
        self._schedule.settle(unit)
