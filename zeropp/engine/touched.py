"""Units that a pass uses outside of their modules: a parameter was read where no hook said so."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from zeropp.engine.schedule import Schedule
from zeropp.engine.sequence import PhaseKey
from zeropp.unit import Unit

__all__ = ["Touched"]


class Touched:
    """Such units of the running pass, which keeps them to its end."""

    def __init__(self, units: SequenceOf[Unit], schedule: Schedule) -> None:
        self._units = units
        self._schedule = schedule
        self._now: set[int] = set()
        self._seen: dict[PhaseKey, set[int]] = {}

    def use(self, unit: Unit) -> None:
        """Have a unit for the rest of the pass."""
        if unit.index not in self._now and not unit.persistent:
            self._now.add(unit.index)
            unit.holds += 1
        self._schedule.use(unit)

    def expected(self) -> list[Unit]:
        """Units touched in this kind of pass, now or before.

        Once seen, always expected: the next time the unit may happen to be present, and no touch be noticed.
        """
        seen = self._seen.setdefault(self._schedule.key, set())
        seen |= self._now
        return [self._units[index] for index in sorted(seen)]

    def let_go(self) -> None:
        """The pass is over."""
        for index in sorted(self._now):
            self._units[index].holds -= 1
            self._schedule.settle(self._units[index])
        self._now.clear()

    def forget(self) -> None:
        """The pass failed, and everything is released elsewhere."""
        self._now.clear()
