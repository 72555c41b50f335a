"""Programs of simulated ranks: what each of them does, step by step."""

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
        forward: of each rank its way.
        back: of each rank what of that its backward comes back to.
        late: of each rank those of them whose gradients come only at its end.
        again: of each rank units whose modules are run once more, as by checkpointing, where its backward first comes
            to one of them.
        no_sync: whether the backward runs inside ``no_sync``, if it is not the last before the step.
    """

    forward: tuple[Uses, ...]
    back: tuple[Uses, ...]
    late: tuple[Uses, ...] = ()
    again: tuple[Uses, ...] = ()
    no_sync: bool = False

    def late_on(self, rank: int) -> frozenset[int]:
        """Units whose gradients come late on a rank."""
        return frozenset(self.late[rank]) if self.late else frozenset()

    def again_on(self, rank: int) -> Uses:
        """Units whose modules a rank runs once more: none where its backward comes to none of them."""
        again = self.again[rank] if self.again else ()
        return again if set(again).intersection(self.back[rank]) else ()

    def back_on(self, rank: int, frozen: Collection[int]) -> Uses:
        """What a rank's backward asks for: late units stay to its end, and those run again until it comes to them."""
        way, late = self.back[rank], self.late_on(rank).difference(frozen)
        once = (unit for place, unit in enumerate(way) if unit not in late or unit not in way[:place])
        return (*once, *(unit for unit in self.again_on(rank) if unit not in way))


@dataclass(frozen=True)
class Failure:
    """Where an error of its own ends what a rank does in a step: in which micro-batch, after how many uses."""

    backward: bool
    uses: int
    part: int = 0


@dataclass(frozen=True)
class Step:
    """Micro-batches, and what comes before and after them.

    Attributes:
        passes: micro-batches.
        evaluation: of each rank a forward without gradients after the step.
        fails: of each rank where a first attempt at the step ends, if it does not come to the end of it.
        freezes: units of which nothing is trained from this step on; None leaves that as it is.
    """

    passes: tuple[Pass, ...]
    evaluation: tuple[Uses, ...] | None = None
    fails: tuple[Failure | None, ...] | None = None
    freezes: Uses | None = None

    @property
    def fails_apart(self) -> bool:
        """Whether ranks fail at places that differ, or have come there by ways that differ."""
        return self.fails is not None and len({self._attempt(*each) for each in enumerate(self.fails)}) > 1

    def _attempt(self, rank: int, failure: Failure | None) -> tuple[object, ...]:
        """What a rank does of the step before it fails."""
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
    """What each of so many ranks does.

    Attributes:
        ranks: how many.
        steps: of all of them.
        leaves: of each rank units that have no graph there.
        persistent: units that are never gathered.
    """

    ranks: int
    steps: tuple[Step, ...]
    leaves: tuple[Uses, ...] = ()
    persistent: Uses = ()


def alike(ranks: int, forward: Uses, back: Uses | None = None, *, no_sync: bool = False) -> Pass:
    """A micro-batch that every rank has alike."""
    return Pass((forward,) * ranks, (forward[::-1] if back is None else back,) * ranks, no_sync=no_sync)
