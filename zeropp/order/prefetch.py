"""The prefetch plan: units to gather ahead and to release at each use of an order, under limits on memory.

The plan is a pure function of the order, the limits and the units gathered before, so all ranks make the same plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Limits", "Plan", "make_plan"]


@dataclass(frozen=True)
class Limits:
    """Limits of prefetching, in elements.

    Attributes:
        prefetch: limit on units gathered ahead and not yet used (``stage3_prefetch_bucket_size``). A single unit may
            exceed it; 0 turns prefetching off.
        live: limit on the units that are gathered ahead or kept for their next use, without the unit in use
            (``stage3_max_live_parameters``).
        reuse: a unit may be kept for its next use if the uses up to that one, included, have at most so many elements
            (``stage3_max_reuse_distance``).
    """

    prefetch: int
    live: int
    reuse: int


@dataclass(frozen=True)
class Plan:
    """The units to gather and to release at each use of an order.

    Attributes:
        issue: for each use, the units whose gathers are issued, in order: the used unit first, unless it is gathered
            already, then units gathered ahead.
        drop: for each use, the units that the plan gives up: the used unit after the use, other units before the
            gathers of this use.
        live: units that the plan keeps gathered at the end of the order.
    """

    issue: tuple[tuple[int, ...], ...]
    drop: tuple[tuple[int, ...], ...]
    live: frozenset[int]


@dataclass
class _Walk:
    """State of the simulated phase. Positions count over the order and the look-ahead behind it."""

    horizon: Sequence[int]
    numel: Sequence[int]
    limits: Limits
    live: set[int]  # gathered units of the plan, without the unit in use
    ahead: set[int]  # units of ``live`` that have been gathered ahead and not been used

    def __post_init__(self) -> None:
        self.positions: dict[int, list[int]] = {}
        for position, unit in enumerate(self.horizon):
            self.positions.setdefault(unit, []).append(position)
        # distance[i] is the number of elements of all uses before position i.
        self.distance = [0]
        for unit in self.horizon:
            self.distance.append(self.distance[-1] + self.numel[unit])

    def next_use(self, unit: int, after: int) -> int | None:
        """Return the first position of a unit after position ``after``; None if there is none."""
        places = self.positions.get(unit, [])
        index = bisect_right(places, after)
        return places[index] if index < len(places) else None

    def live_numel(self) -> int:
        """Return the number of elements of the live units."""
        return sum(self.numel[unit] for unit in self.live)

    def make_room(self, numel: int, needed_at: int, now: int) -> list[int] | None:
        """Choose units to release so that ``numel`` more elements are within the limit on live elements.

        Args:
            numel: elements to make room for.
            needed_at: position of their use. Only units whose next use is later are released.
            now: position of the unit in use.

        Returns:
            The units to release, those used latest first; None if they would not be enough.
        """
        excess = self.live_numel() + numel - self.limits.live
        if excess <= 0:
            return []
        # Units gathered ahead are kept: releasing one before its first use would waste its gather.
        later = [(self.next_use(unit, now), unit) for unit in self.live - self.ahead]
        victims = []
        # A unit without a next use counts as used behind the last position, so it is released first.
        for use, unit in sorted(((len(self.horizon) if u is None else u, unit) for u, unit in later), reverse=True):
            if excess <= 0 or use <= needed_at:
                break
            victims.append(unit)
            excess -= self.numel[unit]
        return victims if excess <= 0 else None

    def near(self, now: int, again: int) -> bool:
        """Return True if the next use of the unit in use, at position ``again``, is within the reuse limit."""
        return self.distance[again + 1] - self.distance[now + 1] <= self.limits.reuse

    def prefetch(self, now: int) -> tuple[list[int], list[int]]:
        """Choose units to gather ahead at a use.

        Args:
            now: position of the use.

        Returns:
            The units to gather, the next one first, and the units to release for them.
        """
        current = self.horizon[now]
        fetched: list[int] = []
        dropped: list[int] = []
        outstanding = sum(self.numel[unit] for unit in self.ahead)
        again = self.next_use(current, now)
        # If the unit in use will be released and gathered again later, a unit gathered ahead from behind that position
        # would delay that gather. So the loop stops there. If the unit is used again at once, as between forward and
        # backward, one unit is gathered ahead all the same, to overlap with the computation of this one.
        overtaking = False
        for position in range(now + 1, len(self.horizon)):
            unit = self.horizon[position]
            if unit == current and not self.near(now, position):
                if position > now + 1:
                    break
                overtaking = True
            if unit == current or unit in self.live:
                continue
            numel = self.numel[unit]
            # A single unit may exceed the limit, or large units would never overlap with computation.
            if (outstanding and outstanding + numel > self.limits.prefetch) or not self.limits.prefetch:
                break
            sooner = again is not None and again < position  # then room for the unit in use is kept free
            victims = self.make_room(numel + (self.numel[current] if sooner else 0), position, now)
            if victims is None:
                break
            self.live.difference_update(victims)
            dropped += victims
            self.live.add(unit)
            self.ahead.add(unit)
            fetched.append(unit)
            outstanding += numel
            if overtaking:
                break
        return fetched, dropped

    def keep(self, now: int) -> list[int]:
        """Keep the unit in use gathered until its next use, if the limits allow it.

        Args:
            now: position of the unit in use.

        Returns:
            The units to release for it.
        """
        unit = self.horizon[now]
        again = self.next_use(unit, now)
        if again is None or not self.near(now, again):
            return []
        victims = self.make_room(self.numel[unit], again, now)
        if victims is None:
            return []
        self.live.difference_update(victims)
        self.live.add(unit)
        return victims


def make_plan(
    uses: Sequence[int], lookahead: Sequence[int], live: frozenset[int], numel: Sequence[int], limits: Limits
) -> Plan:
    """Plan the gathers and releases of one phase.

    Args:
        uses: units of the order, one for each use.
        lookahead: units of the order expected in the next phase.
        live: units that an earlier plan has left gathered.
        numel: number of elements of each unit.
        limits: limits in elements.

    Returns:
        The plan, with one entry for each use.
    """
    walk = _Walk([*uses, *lookahead], numel, limits, set(live), set())
    issue = []
    drop = []
    for step, unit in enumerate(uses):
        issued = [] if unit in walk.live else [unit]
        # The unit in use does not count towards the limits.
        walk.live.discard(unit)
        walk.ahead.discard(unit)
        fetched, dropped = walk.prefetch(step)
        victims = walk.keep(step)
        issue.append((*issued, *fetched))
        # ``keep`` has put the unit in use back into ``live`` if it stays. Otherwise it is released last.
        drop.append((*victims, *dropped, *(() if unit in walk.live else (unit,))))
    return Plan(tuple(issue), tuple(drop), frozenset(walk.live))
