"""The plan of units to fetch ahead and to release: a pure function of the agreed order of uses and the limits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Limits", "Plan", "make_plan"]


@dataclass(frozen=True)
class Limits:
    """Bounds in elements.

    Attributes:
        prefetch: fetched ahead of use at any time (``stage3_prefetch_bucket_size``); one unit may be larger.
        live: elements beside the unit in use, fetched ahead or planned for reuse (``stage3_max_live_parameters``).
        reuse: a unit stays if it is used again within this many elements of uses, its own included
            (``stage3_max_reuse_distance``).
    """

    prefetch: int
    live: int
    reuse: int


@dataclass(frozen=True)
class Plan:
    """The units to fetch and to release at each use of an order.

    Attributes:
        issue: units whose gather starts at this use, in order; the used unit first if it must be fetched.
        drop: units the plan no longer holds after this use.
        live: units that stay gathered at its end.
    """

    issue: tuple[tuple[int, ...], ...]
    drop: tuple[tuple[int, ...], ...]
    live: frozenset[int]


@dataclass
class _Walk:
    """State of the simulation; positions count over the order and the look-ahead."""

    horizon: Sequence[int]
    numel: Sequence[int]
    limits: Limits
    live: set[int]  # planned to be gathered now, the unit in use aside
    ahead: set[int]  # of these, fetched and not yet used

    def __post_init__(self) -> None:
        self.positions: dict[int, list[int]] = {}
        for position, unit in enumerate(self.horizon):
            self.positions.setdefault(unit, []).append(position)
        # Elements of all uses before each position, so that a difference of two is the distance between them.
        self.distance = [0]
        for unit in self.horizon:
            self.distance.append(self.distance[-1] + self.numel[unit])

    def next_use(self, unit: int, after: int) -> int | None:
        places = self.positions.get(unit, [])
        index = bisect_right(places, after)
        return places[index] if index < len(places) else None

    def live_numel(self) -> int:
        return sum(self.numel[unit] for unit in self.live)

    def make_room(self, numel: int, needed_at: int, now: int) -> list[int] | None:
        """Units to let go whose next use is later than ``needed_at``, furthest first; None if that is not enough."""
        excess = self.live_numel() + numel - self.limits.live
        if excess <= 0:
            return []
        # Not what was fetched ahead: it has travelled, and would have to travel again before its first use.
        later = [(self.next_use(unit, now), unit) for unit in self.live - self.ahead]
        victims = []
        # A unit without a next use counts as used behind the horizon, so it goes first.
        for use, unit in sorted(((len(self.horizon) if u is None else u, unit) for u, unit in later), reverse=True):
            if excess <= 0 or use <= needed_at:
                break
            victims.append(unit)
            excess -= self.numel[unit]
        return victims if excess <= 0 else None

    def near(self, now: int, again: int) -> bool:
        """Tell whether the next use is so near that the unit in use may stay for it."""
        return self.distance[again + 1] - self.distance[now + 1] <= self.limits.reuse

    def prefetch(self, now: int) -> tuple[list[int], list[int]]:
        """Units to fetch ahead at a use, nearest first, and units that give way."""
        current = self.horizon[now]
        fetched: list[int] = []
        dropped: list[int] = []
        outstanding = sum(self.numel[unit] for unit in self.ahead)
        again = self.next_use(current, now)
        # A unit that is let go now and needed again before others would wait behind all of their gathers. Only where
        # it is needed right again, as between forward and backward, one unit is fetched before it, while it computes.
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
            # One unit may pass the limit alone, or large units would never overlap; 0 still means none.
            if (outstanding and outstanding + numel > self.limits.prefetch) or not self.limits.prefetch:
                break
            sooner = again is not None and again < position  # then the unit in use has the first claim to room
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
        """Leave the unit in use gathered until its next use, if limits allow; returns units that give way to it."""
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
    """Plan one phase.

    Args:
        uses: units in agreed order of use.
        lookahead: uses expected in the phase after this one.
        live: units live from before.
        numel: elements of each unit.
        limits: bounds.
    """
    walk = _Walk([*uses, *lookahead], numel, limits, set(live), set())
    issue = []
    drop = []
    for step, unit in enumerate(uses):
        issued = [] if unit in walk.live else [unit]
        # In use, it comes on top of the limits, which bound the rest.
        walk.live.discard(unit)
        walk.ahead.discard(unit)
        fetched, dropped = walk.prefetch(step)
        victims = walk.keep(step)
        issue.append((*issued, *fetched))
        # The unit in use is none of the others, having been taken out of ``live``: it goes last, unless it stays.
        drop.append((*victims, *dropped, *(() if unit in walk.live else (unit,))))
    return Plan(tuple(issue), tuple(drop), frozenset(walk.live))
