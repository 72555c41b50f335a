"""When ranks may be refused: where some need what the others do not, and nobody is promised to listen."""

from __future__ import annotations

from collections import Counter, defaultdict

from tests.order.programs import UNITS, Program, Uses

__all__ = ["Refusals"]

_When = tuple[int, int]  # step, and which of its passes


class Refusals:
    """What is promised to the ranks of one program, by what they have done so far.

    Attributes:
        there: of each rank the pass that it is in, and its kind: "forward", "backward", "last backward", "evaluation",
            "attempt" for anything in a step that fails, or "" before the first.
    """

    def __init__(self, program: Program) -> None:
        self.there: list[tuple[_When, str]] = [((0, 0), "")] * program.ranks
        self._program = program
        self._taken: defaultdict[str, list[tuple[_When, Uses]]] = defaultdict(list)
        self._foreseen: set[int] = set()  # units that a backward may come back to

    def enter(self, rank: int, when: _When, kind: str) -> None:
        """A rank begins a pass."""
        self.there[rank] = when, kind
        if kind == "attempt":
            return
        way, taken = self._way(rank, when, kind), self._taken[self._name(when, kind)]
        taken.append((when, way))
        if kind == "forward" and when == taken[0][0]:  # ranks tell of what they learn
            leaves = self._program.leaves
            self._foreseen.update(set(way).difference(leaves[rank] if leaves else ()))

    def have_failed_apart(self) -> bool:
        """Whether ranks have failed at different places so far."""
        steps = self._program.steps[: 1 + max(step for (step, _), _ in self.there)]
        return any(step.fails_apart for step in steps)

    def are_excused(self) -> bool:
        """Whether a deadlock, of which a real job makes an error, is within what is promised."""
        for (step, place), kind in self.there:
            # A rank that failed where others did not waits for their word, and they for what it has not issued; or all
            # have failed and begin again, having come through different numbers of passes.
            again = kind == "attempt" or (place, kind) == (0, "forward")
            if again and self._program.steps[step].fails_apart:
                return True
            if kind not in ("", "attempt") and self._asks_in_vain((step, place), kind):
                return True
        return False

    def _asks_in_vain(self, when: _When, kind: str) -> bool:
        """Whether ranks differ in this pass, one uses a unit once more than ever, and nobody listens.

        Who has used one so before has asked for it, or found it still there and told of it at the step sync.
        """
        ways = {rank: self._way(rank, when, kind) for rank in range(self._program.ranks)}
        part = self._program.steps[when[0]].passes[when[1]]
        # What a rank runs again stays there until its backward comes to it, as often as that may be.
        again = [part.again_on(rank) if "backward" in kind else () for rank in ways]
        if len(set(zip(ways.values(), again, strict=True))) == 1 or not self._is_silent(when, kind):
            return False
        known: Counter[int] = Counter()
        for way in self._known(when, kind):
            known |= Counter(way)
        return any(Counter(way) - known for way in ways.values())

    def _is_silent(self, when: _When, kind: str) -> bool:
        """Whether nobody listens at the end of such a pass: of what it may come to, all ranks have always used all."""
        used = {frozenset(way) for way in self._known(when, kind)}
        if len(used) != 1:
            return False
        if kind in ("forward", "evaluation"):
            return set(range(UNITS)).difference(self._program.persistent).issubset(*used)
        forwards = {frozenset(way) for way in self._known((when[0], when[1] + 1), "forward")}
        return len(forwards) == 1 and self._foreseen.issubset(*used)

    def _known(self, before: _When, kind: str) -> list[Uses]:
        """The ways that were taken, as far as ranks have heard of it: as they learn, and at boundaries."""
        taken = self._taken[self._name(before, kind)]
        first = min((when for when, _ in taken), default=before)
        return [way for when, way in taken if when < before and (when[0] < before[0] or when == first)]

    def _way(self, rank: int, when: _When, kind: str) -> Uses:
        """Units that a rank gathers in a pass, in order."""
        step = self._program.steps[when[0]]
        if kind == "evaluation":
            assert step.evaluation is not None
            way = step.evaluation[rank]
        else:
            part = step.passes[when[1]]
            way = part.forward[rank] if kind == "forward" else part.back_on(rank, self._frozen(when[0])[-1])
        return tuple(unit for unit in way if unit not in self._program.persistent)

    def _name(self, when: _When, kind: str) -> str:
        """A kind of pass as ranks tell it from others: by what is trained, which is forgotten when that is new."""
        frozen = self._frozen(when[0])
        if kind == "forward":
            return f"{kind}, {len(set(frozen))}"
        return kind if kind == "evaluation" else f"{kind}, {sorted(frozen[-1])}"

    def _frozen(self, step: int) -> list[frozenset[int]]:
        """Sets of frozen units up to a step, the last of which holds in it."""
        steps = self._program.steps[: step + 1]
        return [frozenset(), *(frozenset(each.freezes) for each in steps if each.freezes is not None)]
