"""The cases in which a deadlock is allowed: a rank needs a unit that other ranks do not need, and no exchange follows.

A route is the sequence of units that a rank gathers in a pass. A silent pass is one that ends without an exchange.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from tests.order.programs import UNITS, Program, Uses

__all__ = ["Refusals"]

_When = tuple[int, int]  # step, and number of the micro-batch in it


class Refusals:
    """A record of the passes of one program so far, which decides if a deadlock is allowed.

    Attributes:
        there: for each rank, its current pass and the kind of it: "forward", "backward", "last backward", "evaluation",
            "attempt" (anything in a step that fails), or "" before the first pass.
    """

    def __init__(self, program: Program) -> None:
        self.there: list[tuple[_When, str]] = [((0, 0), "")] * program.ranks
        self._program = program
        self._taken: defaultdict[str, list[tuple[_When, Uses]]] = defaultdict(list)
        self._foreseen: set[int] = set()  # units that a backward may use

    def enter(self, rank: int, when: _When, kind: str) -> None:
        """Record that a rank begins a pass."""
        self.there[rank] = when, kind
        if kind == "attempt":
            return
        way, taken = self._way(rank, when, kind), self._taken[self._name(when, kind)]
        taken.append((when, way))
        if kind == "forward" and when == taken[0][0]:  # a first forward is learned, and ranks exchange its units
            leaves = self._program.leaves
            self._foreseen.update(set(way).difference(leaves[rank] if leaves else ()))

    def have_failed_apart(self) -> bool:
        """Return True if ranks have failed at different places so far."""
        steps = self._program.steps[: 1 + max(step for (step, _), _ in self.there)]
        return any(step.fails_apart for step in steps)

    def are_excused(self) -> bool:
        """Return True if a deadlock, which a real job reports as an error, is allowed now."""
        for (step, place), kind in self.there:
            # After failures at different places, a failed rank waits for an exchange while another rank waits for a
            # collective. Or all have failed, and begin again after different numbers of passes.
            again = kind == "attempt" or (place, kind) == (0, "forward")
            if again and self._program.steps[step].fails_apart:
                return True
            if kind not in ("", "attempt") and self._asks_in_vain((step, place), kind):
                return True
        return False

    def _asks_in_vain(self, when: _When, kind: str) -> bool:
        """Return True if ranks differ in this pass, a rank uses a unit more often than known, and the pass is silent.

        A number of uses that occurred before is known: the rank that used the unit had requested the unit, or had found
        it still gathered and reported that at the step sync.
        """
        ways = {rank: self._way(rank, when, kind) for rank in range(self._program.ranks)}
        part = self._program.steps[when[0]].passes[when[1]]
        # A unit whose module is run again stays gathered until backward reaches it, so compare the units
        # that are run again, too.
        again = [part.again_on(rank) if "backward" in kind else () for rank in ways]
        if len(set(zip(ways.values(), again, strict=True))) == 1 or not self._is_silent(when, kind):
            return False
        known: Counter[int] = Counter()
        for way in self._known(when, kind):
            known |= Counter(way)
        return any(Counter(way) - known for way in ways.values())

    def _is_silent(self, when: _When, kind: str) -> bool:
        """Return True if the pass is silent.

        A pass is silent if all known routes have the same units and a pass of this kind can use no other unit.
        """
        used = {frozenset(way) for way in self._known(when, kind)}
        if len(used) != 1:
            return False
        if kind in ("forward", "evaluation"):
            return set(range(UNITS)).difference(self._program.persistent).issubset(*used)
        forwards = {frozenset(way) for way in self._known((when[0], when[1] + 1), "forward")}
        return len(forwards) == 1 and self._foreseen.issubset(*used)

    def _known(self, before: _When, kind: str) -> list[Uses]:
        """Return the routes that all ranks know: those of the pass that was learned, and those before the last step."""
        taken = self._taken[self._name(before, kind)]
        first = min((when for when, _ in taken), default=before)
        return [way for when, way in taken if when < before and (when[0] < before[0] or when == first)]

    def _way(self, rank: int, when: _When, kind: str) -> Uses:
        """Return the units that a rank gathers in a pass, in order."""
        step = self._program.steps[when[0]]
        if kind == "evaluation":
            assert step.evaluation is not None
            way = step.evaluation[rank]
        else:
            part = step.passes[when[1]]
            way = part.forward[rank] if kind == "forward" else part.back_on(rank, self._frozen(when[0])[-1])
        return tuple(unit for unit in way if unit not in self._program.persistent)

    def _name(self, when: _When, kind: str) -> str:
        """Return a name for the kind of pass, as ranks distinguish kinds: by the set of trained parameters.

        A new set of trained parameters makes ranks learn forwards again, so the number of sets is in a forward's name.
        """
        frozen = self._frozen(when[0])
        if kind == "forward":
            return f"{kind}, {len(set(frozen))}"
        return kind if kind == "evaluation" else f"{kind}, {sorted(frozen[-1])}"

    def _frozen(self, step: int) -> list[frozenset[int]]:
        """Return the sets of frozen units up to a step. The last set is the current one."""
        steps = self._program.steps[: step + 1]
        return [frozenset(), *(frozenset(each.freezes) for each in steps if each.freezes is not None)]
