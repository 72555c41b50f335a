"""Descriptions of the work of simulated ranks, step by step.

A route is the sequence of units that a rank uses in a pass.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tests.order.rank import ENDLESS
from zeropp.order.prefetch import Limits

__all__ = ["LIMITS", "UNITS", "Failure", "Pass", "Program", "Step", "Uses", "alike"]

UNITS = 4
LIMITS = [ENDLESS, Limits(0, 0, 0), Limits(4, 8, 100), Limits(100, 8, 8)]
Uses = tuple[int, ...]


@dataclass(frozen=True)
class Pass:
    """One micro-batch.

    Attributes:
        forward: route of forward on each rank.
        back: route of backward on each rank.
        late: for each rank, units whose gradients come only at the end of backward.
        again: for each rank, units whose modules run once more, as by checkpointing, when backward first reaches one of
            them.
        no_sync: True if the backward runs inside ``no_sync``. The last backward before the step never does.
    """

    forward: tuple[Uses, ...]
    back: tuple[Uses, ...]
    late: tuple[Uses, ...] = ()
    again: tuple[Uses, ...] = ()
    no_sync: bool = False

    def late_on(self, rank: int) -> frozenset[int]:
        """Return the units whose gradients come late on a rank."""
        return frozenset(self.late[rank]) if self.late else frozenset()

    def again_on(self, rank: int) -> Uses:
        """Return the units whose modules a rank runs once more; none if its backward reaches none of them."""
        again = self.again[rank] if self.again else ()
        return again if set(again).intersection(self.back[rank]) else ()

    def back_on(self, rank: int, frozen: Collection[int]) -> Uses:
        """Return the gathers that a rank's backward needs, in order.

        A late unit stays gathered to the end. A unit that is run again stays gathered until backward reaches it.
        """
        way, late = self.back[rank], self.late_on(rank).difference(frozen)
        once = (unit for place, unit in enumerate(way) if unit not in late or unit not in way[:place])
        return (*once, *(unit for unit in self.again_on(rank) if unit not in way))


@dataclass(frozen=True)
class Failure:
    """The place where an error ends a rank's work: the micro-batch ``part``, forward or backward, after some uses."""

    backward: bool
    uses: int
    part: int = 0


@dataclass(frozen=True)
class Step:
    """The micro-batches of one step, and the actions before and after them.

    Attributes:
        passes: micro-batches.
        evaluation: route of a forward without gradients after the step, for each rank; None for no evaluation.
        fails: the place where a first attempt at the step ends, for each rank; None for a rank without a failure, or
            for no attempt.
        freezes: units that are frozen from this step on, while all others are trained; None for no change.
    """

    passes: tuple[Pass, ...]
    evaluation: tuple[Uses, ...] | None = None
    fails: tuple[Failure | None, ...] | None = None
    freezes: Uses | None = None

    @property
    def fails_apart(self) -> bool:
        """True if ranks fail at different places, or at the same place after different routes."""
        return self.fails is not None and len({self._attempt(*each) for each in enumerate(self.fails)}) > 1

    def _attempt(self, rank: int, failure: Failure | None) -> tuple[object, ...]:
        """Return a description of a rank's work in the step up to its failure."""
        ways: list[object] = []
        for place, part in enumerate(self.passes):
            aside = part.late_on(rank), part.again_on(rank)
            for backward, way in ((False, part.forward[rank]), (True, part.back[rank])):
                if failure is not None and (failure.backward, failure.part) == (backward, place):
                    return failure, *ways, way[: failure.uses], *(aside if backward else ())
                ways.append(way)
            ways += aside
        return failure, *ways


@dataclass(frozen=True)
class Program:
    """The work of each rank.

    Attributes:
        ranks: number of ranks.
        steps: steps of all ranks.
        leaves: for each rank, units whose modules record no graph there.
        persistent: units that are never gathered.
    """

    ranks: int
    steps: tuple[Step, ...]
    leaves: tuple[Uses, ...] = ()
    persistent: Uses = ()


def alike(ranks: int, forward: Uses, back: Uses | None = None, *, no_sync: bool = False) -> Pass:
    """Return a micro-batch with the same routes on every rank."""
    return Pass((forward,) * ranks, (forward[::-1] if back is None else back,) * ranks, no_sync=no_sync)
