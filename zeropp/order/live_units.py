"""Which units stay gathered while nothing uses them: because the plan says so, or since another rank needed them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zeropp.comm.agreement import Agreement
from zeropp.comm.streams import Lanes
from zeropp.params.unit import Unit, UnitState

__all__ = ["LiveUnits"]


class LiveUnits:
    """Gathered units of one engine beside those in use.

    Attributes:
        planned: because the plan says so; equal on every rank.
        retained: gathered for others, the oldest first; this rank's own affair.
        numel: elements of each unit.
        owed: for each unit, calls that the uses passed so far serve, less those that this rank has made. While it has
            some left it keeps the unit: see [Note: how ranks may diverge].
        due: for units of which several calls are in the running backward, those that it has yet to come to, less the
            uses that are left. While there are more calls it keeps the unit, too.
    """

    def __init__(self, units: Sequence[Unit], lanes: Lanes, agreement: Agreement, live: int) -> None:
        """Keep nothing yet; ``live`` bounds the elements of what is planned, and retained where ranks may ask again."""
        self.planned: set[int] = set()
        self.retained: dict[int, None] = {}
        self.numel: list[int] = []
        self.owed = [0] * len(units)
        self.due: dict[int, int] = {}
        self._units = units
        self._lanes = lanes
        self._agreement = agreement
        self._live = live
        self.note_sizes()

    def note_sizes(self) -> None:
        """Look at the sizes of units."""
        self.numel = [unit.numel for unit in self._units]

    def fit(self, units: Iterable[int]) -> bool:
        """Whether these may be gathered at once."""
        return sum(self.numel[index] for index in set(units)) <= self._live

    def retain(self, index: int, *, bounded: bool) -> None:
        """Keep what was gathered for others: this rank may still come to use it, if it runs in another order.

        Args:
            index: the unit.
            bounded: whether the limit holds; what was retained first gives way.
        """
        # A dict, whose order is that of entry: the newest comes last, and so is the last to give way below.
        self.retained[index] = None
        if not bounded:
            return
        excess = sum(self.numel[other] for other in self.planned.union(self.retained)) - self._live
        for other in [other for other in self.retained if other not in self.planned]:
            if excess <= 0:
                break
            del self.retained[other]
            excess -= self.numel[other]
            self.release_if_unused(self._units[other])

    def release_if_unused(self, unit: Unit) -> None:
        """Release a unit that nothing needs any more; hide one that is to stay and that no module uses now."""
        index = unit.index
        needed = index in self.planned or index in self.retained or unit.users > 0 or unit.persistent
        if not (needed or self.owed[index] > 0 or self.due.get(index, 0) > 0) and unit.state is not UnitState.SHARDED:
            # A gather that is still under way would write to memory that is no longer there.
            self._agreement.wait(unit.wait_gathered, f"releasing unit {unit.name!r}")
            unit.release(self._lanes)
        elif unit.users == 0 and unit.state is UnitState.EXPOSED and not unit.persistent:
            # Or nobody would notice that code outside of its module uses a weight, which backward then has to fetch.
            unit.hide()

    def drop(self, indices: Iterable[int]) -> None:
        """The plan wants these no longer."""
        gone = sorted(indices)
        self.planned.difference_update(gone)
        for index in gone:
            self.release_if_unused(self._units[index])

    def release_planned(self) -> None:
        """Release what is only planned to be used again; the same on every rank."""
        self.drop(set(self.planned))

    def forget_owed(self) -> None:
        """This rank makes no more calls that it could make, or asks for them from here on."""
        kept = sorted({index for index, calls in enumerate(self.owed) if calls > 0}.union(self.due))
        self.owed[:] = [0] * len(self.owed)
        self.due.clear()
        for index in kept:
            self.release_if_unused(self._units[index])

    def release_retained(self) -> None:
        """Release what was gathered for others."""
        gone = sorted(self.retained)
        self.retained.clear()
        for index in gone:
            self.release_if_unused(self._units[index])
