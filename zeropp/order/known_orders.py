"""The agreed orders of phases, and the hash of the collectives that were issued.

A phase is one forward of the model or one backward. Phases of the same kind usually issue the same collectives in the
same order; that order is learned once, by all ranks together, and followed afterwards without a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from zeropp.comm.communicators import History

__all__ = ["CollectiveOrder", "IssueHash", "KnownOrders", "Phase", "PhaseKey", "Reach", "describe_phase"]

PhaseKey = tuple[object, ...]
"""What tells kinds of phases apart; equal on every rank, made of plain values."""


class Phase(Enum):
    """The activity of the model."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


def describe_phase(key: PhaseKey) -> str:
    """A kind of phase in words, for errors."""
    if key[0] == "backward":
        # Mostly there is one; where ranks have run others, which nobody has taken to a backward, their numbers tell,
        # and their order where they are of parts of the model.
        paths = [part[1] for part in key if isinstance(part, tuple)]
        kind = "a backward" if key[1] is not None else "a backward that accumulates no gradients"
        if any(paths):
            return f"{kind} after forwards of {', '.join(repr(path) if path else 'the model' for path in paths)}"
        return kind if len(paths) < 2 else f"{kind} after {len(paths)} forwards with gradients"
    # ("forward", path of the module that was called, training, grad mode): see Engine._begin_forward.
    _, path, training, grad = key
    where = f" of {path!r}" if path else ""
    return f"a forward{where} {'with' if grad else 'without'} gradients{'' if training else ', in eval mode'}"


_VARIANTS = 8  # orders remembered for one kind of phase, most recent first


class Reach(NamedTuple):
    """The units that a kind of forward may use.

    Attributes:
        units: those that are gathered.
        modules: paths of those that use such a unit, and are inside no other module that uses it, too.
    """

    units: frozenset[int]
    modules: frozenset[str]


@dataclass
class CollectiveOrder:
    """One learned phase; the same object contents on every rank.

    Attributes:
        uses: units in the order of need; a unit that is released in between comes again.
        reductions: (unit, uses before it) in the order gradients are sent: after the gathers of that many uses, and
            before those of the next. Gathers and reductions so have one order, whatever runs beside what.
        fires: for each unit reduced, how often each of its parameters receives a gradient in this phase.
        calls: for each of ``uses``, how many calls it serves: see [Note: how ranks may diverge]. Empty if ranks differ.
        called: of these calls, how many each module had; the most that any rank had.
    """

    uses: tuple[int, ...] = ()
    reductions: tuple[tuple[int, int], ...] = ()
    fires: dict[int, tuple[int, ...]] = field(default_factory=dict)
    calls: tuple[int, ...] = ()
    called: Counter[str] = field(default_factory=Counter)

    def postpone(self, units: dict[int, tuple[bool, ...]]) -> CollectiveOrder:
        """The same order with reductions of ``units`` at the end, when each trained parameter has had a gradient.

        Args:
            units: index -> which of its parameters are trained.
        """
        others = [(unit, uses) for unit, uses in self.reductions if unit not in units]
        last = [(unit, len(self.uses)) for unit in units]
        fires = dict(self.fires)
        for unit, trained in units.items():
            # True counts as 1: each trained parameter is waited for once at least, or as often as before.
            fires[unit] = tuple(map(max, fires.get(unit, (0,) * len(trained)), trained))
        return replace(self, reductions=(*others, *last), fires=fires)

    def find(self, unit: int, start: int) -> int | None:
        """First position of a unit at or after ``start``."""
        try:
            return self.uses.index(unit, start)
        except ValueError:
            return None


@dataclass
class _Variants:
    """Known orders of one kind of phase, and which of them tends to follow which.

    Attributes:
        varies: whether such phases have been seen to differ, between ranks or from one time to the next.
        unseen: whether any rank's data may call for modules that no rank had run in one when it was learned; or for
            more runs of one, as in another mode of the model, in which ranks have branched.
        partial: whether such a backward has left out one of several forwards before it; then the next one may come to
            it.
        unrecorded: calls without a graph in a forward with one, the most that any rank had: (path, unit) -> how many.
        forks: uses up to where a rank once needed what no known order had; the oldest first.
    """

    varies: bool = False
    unseen: bool = False
    partial: bool = False
    unrecorded: Counter[tuple[str, int]] = field(default_factory=Counter)
    known: list[CollectiveOrder] = field(default_factory=list)
    forks: list[tuple[int, ...]] = field(default_factory=list)
    last: CollectiveOrder | None = None
    successors: list[tuple[CollectiveOrder, CollectiveOrder]] = field(default_factory=list)

    def expected(self) -> CollectiveOrder | None:
        """The order that followed the last one when that occurred before, by which alternating graphs are predicted."""
        # By identity, which is enough: ``add`` puts the known object in place of an equal one.
        return next((after for before, after in self.successors if before is self.last), self.last)

    def replace(self, change: Callable[[CollectiveOrder], CollectiveOrder]) -> None:
        """Change every known order; such phases vary."""
        changed = {id(order): change(order) for order in self.known}
        self.known = [changed[id(order)] for order in self.known]
        # Successors and ``last`` may be orders that ``known``, which is bounded, has already dropped.
        self.successors = [
            (changed[id(before)], changed[id(after)])
            for before, after in self.successors
            if id(before) in changed and id(after) in changed
        ]
        self.last = changed.get(id(self.last), self.known[0]) if self.known else None
        self.varies = True

    def add_fork(self, uses: tuple[int, ...]) -> None:
        """Have ranks say behind these uses what they want next; the followed order stays what comes next."""
        self.varies = True
        self.forks = [*(fork for fork in self.forks if fork != uses), uses][-_VARIANTS:]

    def add(self, order: CollectiveOrder) -> None:
        order = next((other for other in self.known if other == order), order)
        # A second order of one kind: the third may be yet another.
        self.varies |= bool(self.known) and order not in self.known
        self.known = [order, *(other for other in self.known if other is not order)][:_VARIANTS]
        # One successor each: what came after it the last time is the best guess there is.
        if self.last is not None:
            others = [pair for pair in self.successors if pair[0] is not self.last and pair[0] in self.known]
            self.successors = [*others, (self.last, order)]
        self.last = order


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The number of uses that two orders begin with alike."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class KnownOrders:
    """Known orders for each kind of phase; the same on every rank."""

    def __init__(self, reach: Callable[[PhaseKey], Reach]) -> None:
        """Know nothing yet; ``reach`` tells what a kind of forward may use at all."""
        self._reach = reach
        self._known: dict[PhaseKey, _Variants] = {}
        # Forward or backward -> units ever used in one, or foreseen. These only grow: parameters that are frozen now
        # may be trained again, and the round that it costs is cheaper than a rank that nobody hears.
        self._units: dict[object, set[int]] = {}
        # Path of a module -> the most often that any rank has run each module in a forward of it in which ranks
        # branched.
        self._branched: dict[object, Counter[str]] = {}

    def expected(self, key: PhaseKey | None) -> CollectiveOrder | None:
        """The order that the next phase of this kind is most likely to have."""
        return self._known[key].expected() if key is not None and key in self._known else None

    def forks(self, key: PhaseKey, order: CollectiveOrder) -> list[int]:
        """Positions of ``order``, ascending, at which another known order parts from it or a rank once left it."""
        variants = self._known[key]
        # An order that only goes on where this one ends is found at the end, as in all phases that vary.
        places = {_common(order.uses, other.uses) for other in variants.known if other is not order}
        places |= {len(fork) for fork in variants.forks if order.uses[: len(fork)] == fork}
        return sorted(place for place in places if place < len(order.uses))

    def branch(self, key: PhaseKey, order: CollectiveOrder, place: int, wants: set[int]) -> CollectiveOrder | None:
        """The known order that goes on from ``place`` of ``order`` with all that ranks want next, soonest.

        Args:
            wants: units; none if the phase is to end there.
        """
        # The followed order first, then the most recent: the first one wins where several have all wants equally soon.
        found = [order, *(other for other in self._known[key].known if other is not order)]
        found = [each for each in found if each.uses[:place] == order.uses[:place]]
        if not wants:
            return next((each for each in found if len(each.uses) == place), None)
        # How far each order goes until it has had every wanted unit; one that lacks a unit does not count.
        reaches = [[each.find(unit, place) for unit in wants] for each in found]
        far = [(max(at for at in reach if at is not None), n) for n, reach in enumerate(reaches) if None not in reach]
        return found[min(far)[1]] if far else None

    def may_vary(self, key: PhaseKey, order: CollectiveOrder) -> bool:
        """Tell whether a rank that follows ``order`` may need a unit that the others do not.

        Phases of this kind have been seen to differ, or forwards before this backward, or others of forward or backward
        to use more units; or there are modules that have not been run yet, and any rank's data may call for them; or a
        backward may come to a part of the forwards before it.
        """
        # See [Note: how ranks may diverge].
        known = self._known[key]
        if known.varies or known.unseen or known.partial or not self._units[key[0]].issubset(order.uses):
            return True
        if key[0] == "forward":
            return not self._reach(key).units.issubset(order.uses)
        # The key of a backward contains those of the forwards before it.
        if any(self._known[part].varies for part in key if part in self._known):
            return True
        return self._may_run_more_again(key, order)

    def unrecorded(self, key: PhaseKey) -> Counter[tuple[str, int]]:
        """Calls without a graph in the forwards before a backward, the most that any rank had."""
        return sum((self._known[part].unrecorded for part in key if part in self._known), Counter[tuple[str, int]]())

    def _may_run_more_again(self, key: PhaseKey, order: CollectiveOrder) -> bool:
        """Tell whether a backward may run modules again that did not run again when ``order`` was learned."""
        unrecorded = self.unrecorded(key)
        if not unrecorded:
            return False
        calls: Counter[int] = Counter()
        for unit, count in zip(order.uses, order.calls, strict=bool(order.calls)):
            calls[unit] += count
        again: Counter[int] = Counter()
        for (_, unit), count in unrecorded.items():
            again[unit] += count
        # Of units that such a backward needs: others may be run without a graph and without a backward.
        return any(again[unit] > calls[unit] for unit in set(order.uses))

    def note_silent(self, key: PhaseKey) -> bool:
        """Tell whether this kind of phase gathers nothing: there is no order to learn, and a rank may run it alone."""
        # A module's forward may also touch weights outside of it, which an order tells of, once there is one.
        known = self._known[key].known if key in self._known else []
        # A backward that accumulates no gradients sends nothing, either; where it goes does not say what it may use.
        within = key if key[0] == "forward" else ("forward", "")
        sends = key[0] == "backward" and key[1] is not None
        if sends or self._reach(within).units or any(order.uses for order in known):
            return False
        # Remembered as empty, it is followed from the first time on, and following says nothing.
        if key not in self._known:
            self.remember(key, CollectiveOrder())
        return True

    def forget_backwards(self) -> None:
        """Forget all orders of backwards, which were learned for other trained parameters."""
        self._known = {key: variants for key, variants in self._known.items() if key[0] != "backward"}

    def forget_forwards(self) -> None:
        """Forget forwards that a backward may follow: with other parameters trained it may come to other units."""
        # The last entry of a forward's key is its grad mode: without a graph no backward follows.
        self._known = {key: each for key, each in self._known.items() if not (key[0] == "forward" and key[-1])}

    def note_variation(self, key: PhaseKey) -> None:
        """Note that ranks differed in a phase of this kind, or may when there is one."""
        self._known.setdefault(key, _Variants()).varies = True

    def note_partial(self, key: PhaseKey, partial: bool) -> None:
        """Note whether a backward of this kind has left out one of the forwards before it, on any rank."""
        self._known[key].partial = partial

    def expect_in_backward(self, units: Iterable[int]) -> None:
        """Note that the backward of some rank may use these: which of a forward's outputs it starts at is its own."""
        self._units.setdefault("backward", set()).update(units)

    def remember(
        self,
        key: PhaseKey,
        order: CollectiveOrder,
        *,
        mixed: bool = False,
        fork: tuple[int, ...] | None = None,
        unrecorded: Counter[tuple[str, int]] | None = None,
    ) -> None:
        """Note that a phase had this order.

        Args:
            mixed: whether ranks used different units in it, or ran different modules.
            unrecorded: see `_Variants`; given if the order was learned in it.
            fork: uses up to where some ranks left alone; known from now on in place of the order, of which the rest
                is not where they wanted it.
        """
        variants = self._known.setdefault(key, _Variants())
        if fork is None:
            variants.add(order)
        else:
            variants.add_fork(fork)
        variants.varies |= mixed
        if unrecorded is not None and key[0] == "forward":
            variants.unrecorded |= unrecorded
            if mixed:
                self._branched[key[1]] = self._branched.get(key[1], Counter[str]()) | order.called
            self._note_unseen(key[1])
        self._units.setdefault(key[0], set()).update(order.uses)

    def _note_unseen(self, path: object) -> None:
        """Look again which kinds of forwards of a module may run more than was known when they were learned."""
        branched = self._branched.get(path, Counter[str]())
        for key, variants in self._known.items():
            if key[:2] == ("forward", path) and variants.known:
                called = variants.known[0].called
                variants.unseen = not self._reach(key).modules.issubset(called) or not branched <= called

    def postpone(self, key: PhaseKey, units: dict[int, tuple[bool, ...]]) -> None:
        """``units`` (with which parameters are trained) had stray gradients: expect them at the end, from now on."""
        # See [Note: stray gradients].
        if key in self._known:
            self._known[key].replace(lambda order: order.postpone(units))


class IssueHash:
    """Running hash of (engine, kind, unit, version) of everything issued.

    It has 24 bits, so that sums over thousands of ranks of it and of each half of its square are exact in float64.
    """

    _PRIME = (1 << 24) - 3

    def __init__(self, history: History) -> None:
        """Go on with a history, as the next engine that has it."""
        self._history = history
        self._engine = history.engines * 8191  # a prime far above the number of most models' units
        history.engines += 1

    @property
    def value(self) -> int:
        """The hash, of all engines that share communicators."""
        return self._history.value

    def add(self, kind: int, unit: int, version: int) -> None:
        """Take in one issued collective."""
        # The factors spread small numbers over the bits; there are five kinds.
        history = self._history
        history.value = (history.value * 65599 + ((self._engine + unit) * 131 + version) * 8 + kind) % self._PRIME
