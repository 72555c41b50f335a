"""The learned orders of all kinds of phases, and a hash of the issued collectives.

A phase is one forward or one backward. Phases of one kind usually issue the same collectives in the same order. All
ranks learn that order together in the first phase of the kind, and follow it afterwards, with exchanges only where
ranks may differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from zeropp.comm.communicators import History
from zeropp.order.prefetch import Plan

__all__ = ["CollectiveOrder", "IssueHash", "KnownOrders", "Phase", "PhaseKey", "PhaseState", "Reach", "describe_phase"]

PhaseKey = tuple[object, ...]
"""The kind of a phase: a tuple of plain values, equal on every rank."""


class Phase(Enum):
    """The pass that the model is in."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


def describe_phase(key: PhaseKey) -> str:
    """Describe a kind of phase in words, for errors and logs."""
    if key[0] == "backward":
        # Usually the key has one forward. If a rank ran further forwards without a backward, their paths or their
        # number show in an error that the ranks are in different backwards.
        paths = [part[1] for part in key if isinstance(part, tuple)]
        kind = "a backward" if key[1] is not None else "a backward that accumulates no gradients"
        if any(paths):
            return f"{kind} after forwards of {', '.join(repr(path) if path else 'the model' for path in paths)}"
        return kind if len(paths) < 2 else f"{kind} after {len(paths)} forwards with gradients"
    # The key is ("forward", path of the called module, training, grad mode): see Engine._begin_forward.
    _, path, training, grad = key
    where = f" of {path!r}" if path else ""
    return f"a forward{where} {'with' if grad else 'without'} gradients{'' if training else ', in eval mode'}"


_VARIANTS = 8  # largest number of orders, and of forks, stored for one kind of phase; the oldest are dropped


class Reach(NamedTuple):
    """The units and modules that one kind of forward may use.

    Attributes:
        units: indices of the units that are gathered.
        modules: paths of the modules that use such a unit and are inside no other module that uses it.
    """

    units: frozenset[int]
    modules: frozenset[str]


@dataclass
class CollectiveOrder:
    """The order of collectives in one kind of phase, equal on every rank.

    Attributes:
        uses: units in the order in which they are gathered. A unit that is released and gathered again occurs again.
        reductions: pairs (unit, n) in the order of issue: the unit is reduced after the gathers that are issued at the
            first n uses and before those issued at the next use. So gathers and reductions have one order on every
            rank.
        fires: unit -> number of gradients that each of its trainable parameters receives in this phase.
        calls: for each entry of ``uses``, the number of calls that its gather served when the order was learned: see
            [Note: how ranks may diverge]. Empty if ranks used different units or modules.
        called: module path -> number of its calls, the maximum over ranks.
    """

    uses: tuple[int, ...] = ()
    reductions: tuple[tuple[int, int], ...] = ()
    fires: dict[int, tuple[int, ...]] = field(default_factory=dict)
    calls: tuple[int, ...] = ()
    called: Counter[str] = field(default_factory=Counter)

    def postpone(self, units: dict[int, tuple[bool, ...]]) -> CollectiveOrder:
        """Return this order with the reductions of some units moved to its end.

        There at least one gradient of each trained parameter of these units is expected.

        Args:
            units: unit -> for each of its parameters, True if it is trained.
        """
        others = [(unit, uses) for unit, uses in self.reductions if unit not in units]
        last = [(unit, len(self.uses)) for unit in units]
        fires = dict(self.fires)
        for unit, trained in units.items():
            # True counts as 1: at least one gradient of each trained parameter is waited for.
            fires[unit] = tuple(map(max, fires.get(unit, (0,) * len(trained)), trained))
        return replace(self, reductions=(*others, *last), fires=fires)

    def find(self, unit: int, start: int) -> int | None:
        """Return the first position of a unit at or after ``start``; None if there is none."""
        try:
            return self.uses.index(unit, start)
        except ValueError:
            return None


@dataclass(slots=True)
class PhaseState:
    """State of the running phase on this rank. Each phase begins with a new object.

    Attributes:
        key: kind of the phase.
        then: kind of the phase expected next; None if unknown.
        before: value of :attr:`Schedule.unrecorded` when the phase began.
        silent: True if the phase gathers and reduces nothing, so that one rank may run it alone.
        order: order that this phase follows; None while an order is learned.
        forks: positions of forks in the order that are still ahead, ascending.
        plan: prefetch plan for the order from position ``base`` on; None while an order is learned.
        base: position of the order at which the plan begins.
        position: position of the next use in the order.
        left: position at which this rank needed a unit that the rest of the order lacks; -1 if there was none.
        learned: units of the order that is being learned, one for each use.
        calls: number of this rank's calls that each entry of ``learned`` served.
        places: unit -> index of its last entry in ``learned``.
        counted: True if calls are counted, because an order is followed without an exchange at its end.
        called: module path -> number of this rank's calls in this phase.
        nested: True if a unit was used without a counted call: by a module inside another one of the unit, or again by
            a touched parameter, or by backward.
        novel: True if this rank called a module that the order has no calls of.
        brings_more: True if gradients were edited before some step, and this backward may bring a parameter its first
            gradient.
        partial: True if this backward may leave out one of the forwards before it.
        new_fork: uses up to a fork that is stored in place of the learned order; None to store the order.
        own: units that this rank has used.
        in_backward: units of this forward that this rank's next backward may use.
    """

    key: PhaseKey
    then: PhaseKey | None
    before: Counter[tuple[str, int]] = field(default_factory=Counter)
    silent: bool = False
    order: CollectiveOrder | None = None
    forks: list[int] = field(default_factory=list)
    plan: Plan | None = None
    base: int = 0
    position: int = 0
    left: int = -1
    learned: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    counted: bool = False
    called: Counter[str] = field(default_factory=Counter)
    nested: bool = False
    novel: bool = False
    brings_more: bool = False
    partial: bool = False
    new_fork: tuple[int, ...] | None = None
    own: set[int] = field(default_factory=set)
    in_backward: set[int] = field(default_factory=set)


@dataclass
class _Variants:
    """The known orders of one kind of phase, and the order that followed each of them.

    Attributes:
        varies: True if phases of this kind have differed, between ranks or from one phase to the next.
        unseen: True if the data of a rank may need modules that no rank called when the order was learned, or more
            calls of a module than then, as ranks made in forwards of another mode.
        partial: True if the last backward of this kind left out one of the forwards before it on some rank. The next
            one may reach that forward.
        unrecorded: (module path, unit) -> number of calls that recorded no graph inside a forward that records one;
            the maximum over ranks.
        known: known orders, the most recent first.
        forks: sequences of uses after which a rank needed a unit that no known order had, the oldest first.
        last: order of the last phase.
        successors: pairs (order, order of the phase after it).
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
        """Return the order expected next: the order that last followed ``last``, or ``last`` itself if there is none.

        This predicts graphs that alternate.
        """
        # Comparing identities is enough: ``add`` replaces an order by the known object that is equal to it.
        return next((after for before, after in self.successors if before is self.last), self.last)

    def replace(self, change: Callable[[CollectiveOrder], CollectiveOrder]) -> None:
        """Replace every known order by ``change(order)``, and note that such phases vary."""
        changed = {id(order): change(order) for order in self.known}
        self.known = [changed[id(order)] for order in self.known]
        # ``successors`` and ``last`` may have orders that are no longer in ``known``, whose length is limited.
        self.successors = [
            (changed[id(before)], changed[id(after)])
            for before, after in self.successors
            if id(before) in changed and id(after) in changed
        ]
        self.last = changed.get(id(self.last), self.known[0]) if self.known else None
        self.varies = True

    def add_fork(self, uses: tuple[int, ...]) -> None:
        """Store a position, given by the uses before it, at which ranks exchange the units that they need next."""
        self.varies = True
        self.forks = [*(fork for fork in self.forks if fork != uses), uses][-_VARIANTS:]

    def add(self, order: CollectiveOrder) -> None:
        """Store the order of the last phase."""
        order = next((other for other in self.known if other == order), order)
        # If this kind of phase has had two different orders, a third one is possible.
        self.varies |= bool(self.known) and order not in self.known
        self.known = [order, *(other for other in self.known if other is not order)][:_VARIANTS]
        # Each order has one successor: the most recent one is the best prediction.
        if self.last is not None:
            others = [pair for pair in self.successors if pair[0] is not self.last and pair[0] in self.known]
            self.successors = [*others, (self.last, order)]
        self.last = order


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the number of uses at the beginning that two orders have in common."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class KnownOrders:
    """The known orders of all kinds of phases, equal on every rank.

    Args:
        reach: function that returns the units and modules that a kind of forward may use.
    """

    def __init__(self, reach: Callable[[PhaseKey], Reach]) -> None:
        """Start without any known order."""
        self._reach = reach
        self._known: dict[PhaseKey, _Variants] = {}
        # "forward" or "backward" -> units that any such phase has used, or that a backward may use. The sets only grow:
        # a parameter that is frozen now may be trained again. A superfluous exchange costs less than a missing one.
        self._units: dict[object, set[int]] = {}
        # Path of the module where a forward begins -> the most calls of each module on any rank, over all forwards in
        # which ranks differed.
        self._branched: dict[object, Counter[str]] = {}

    def expected(self, key: PhaseKey | None) -> CollectiveOrder | None:
        """Return the most likely order of the next phase of this kind; None if the kind is unknown."""
        return self._known[key].expected() if key is not None and key in self._known else None

    def forks(self, key: PhaseKey, order: CollectiveOrder) -> list[int]:
        """Return the positions of ``order``, ascending, where another known order parts from it or a rank left it."""
        variants = self._known[key]
        # No position for an order that only continues beyond the end of this one: ranks exchange at that end anyway,
        # because phases with several orders vary.
        places = {_common(order.uses, other.uses) for other in variants.known if other is not order}
        places |= {len(fork) for fork in variants.forks if order.uses[: len(fork)] == fork}
        return sorted(place for place in places if place < len(order.uses))

    def branch(self, key: PhaseKey, order: CollectiveOrder, place: int, wants: set[int]) -> CollectiveOrder | None:
        """Return the known order that has all wanted units soonest from ``place`` on; None if there is none.

        Args:
            key: kind of the phase.
            order: order that is followed. Only orders with the same uses before ``place`` are considered.
            place: position of the exchange.
            wants: units that ranks need next; empty to find an order that ends at ``place``.
        """
        # If several orders have the units equally soon, the first one is taken: the followed order, then recent ones.
        found = [order, *(other for other in self._known[key].known if other is not order)]
        found = [each for each in found if each.uses[:place] == order.uses[:place]]
        if not wants:
            return next((each for each in found if len(each.uses) == place), None)
        # For each order, the position where it has had every wanted unit. An order that lacks one is left out.
        reaches = [[each.find(unit, place) for unit in wants] for each in found]
        far = [(max(at for at in reach if at is not None), n) for n, reach in enumerate(reaches) if None not in reach]
        return found[min(far)[1]] if far else None

    def may_vary(self, key: PhaseKey, order: CollectiveOrder) -> bool:
        """Return True if a rank that follows ``order`` may need a unit that the other ranks do not gather.

        The result is True if

        - phases of this kind have differed between ranks or over time;
        - any forward has used a unit that the order of this forward lacks, or any backward has used or may use a unit
          that the order of this backward lacks;
        - a forward may use units or modules that no rank has used in it yet;
        - the last backward of this kind left out one of the forwards before it;
        - for a backward: a forward before it varies, or checkpointing may run more calls again than ``order`` served.

        See [Note: how ranks may diverge].
        """
        known = self._known[key]
        if known.varies or known.unseen or known.partial or not self._units[key[0]].issubset(order.uses):
            return True
        if key[0] == "forward":
            return not self._reach(key).units.issubset(order.uses)
        # The key of a backward contains the keys of the forwards before it.
        if any(self._known[part].varies for part in key if part in self._known):
            return True
        return self._may_run_more_again(key, order)

    def unrecorded(self, key: PhaseKey) -> Counter[tuple[str, int]]:
        """Return the calls without a graph (maximum over ranks), summed over the forwards in a backward's key."""
        return sum((self._known[part].unrecorded for part in key if part in self._known), Counter[tuple[str, int]]())

    def _may_run_more_again(self, key: PhaseKey, order: CollectiveOrder) -> bool:
        """Return True if checkpointing may run more calls again in this backward than ``order`` served."""
        unrecorded = self.unrecorded(key)
        if not unrecorded:
            return False
        calls: Counter[int] = Counter()
        for unit, count in zip(order.uses, order.calls, strict=bool(order.calls)):
            calls[unit] += count
        again: Counter[int] = Counter()
        for (_, unit), count in unrecorded.items():
            again[unit] += count
        # Only units of the order: modules of other units may have run without a graph and without a backward.
        return any(again[unit] > calls[unit] for unit in set(order.uses))

    def note_local(self, key: PhaseKey) -> bool:
        """Return True if phases of this kind need no collective, so one rank may run them without other ranks.

        If the kind has no known order, an empty one is stored for it.
        """
        # A forward may touch weights outside of its module. Then it has a learned order with uses.
        known = self._known[key].known if key in self._known else []
        # A backward that accumulates no gradients reduces nothing. It may use any unit, so all units are checked.
        within = key if key[0] == "forward" else ("forward", "")
        sends = key[0] == "backward" and key[1] is not None
        if sends or self._reach(within).units or any(order.uses for order in known):
            return False
        # With an empty order the phase is followed from the first time on, without an exchange.
        if key not in self._known:
            self.remember(key, CollectiveOrder())
        return True

    def forget_backwards(self) -> None:
        """Forget all orders of backwards, because other parameters are trained."""
        self._known = {key: variants for key, variants in self._known.items() if key[0] != "backward"}

    def forget_forwards(self) -> None:
        """Forget the orders of forwards with a graph: with other trained parameters, backward may reach other units."""
        # The last entry of a forward's key is its grad mode. No backward follows a forward without a graph.
        self._known = {key: each for key, each in self._known.items() if not (key[0] == "forward" and key[-1])}

    def note_variation(self, key: PhaseKey) -> None:
        """Note that phases of this kind vary."""
        self._known.setdefault(key, _Variants()).varies = True

    def note_partial(self, key: PhaseKey, partial: bool) -> None:
        """Note if the last backward of this kind left out one of the forwards before it, on any rank."""
        self._known[key].partial = partial

    def expect_in_backward(self, units: Iterable[int]) -> None:
        """Note units that a backward of some rank may use. A rank may start backward at any outputs of a forward."""
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
        """Store the order of a finished phase.

        Args:
            key: kind of the phase.
            order: order of the phase.
            mixed: True if ranks used different units or called different modules in it.
            fork: uses before the position where only some ranks left the followed order; stored as a fork in place of
                ``order``, because these ranks needed units at that position which ``order`` has at its end. None to
                store ``order``.
            unrecorded: calls without a graph, as in `_Variants`; None if the phase followed a known order.
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
        """Update ``unseen`` of all forwards that begin at a module."""
        branched = self._branched.get(path, Counter[str]())
        for key, variants in self._known.items():
            if key[:2] == ("forward", path) and variants.known:
                called = variants.known[0].called
                variants.unseen = not self._reach(key).modules.issubset(called) or not branched <= called

    def postpone(self, key: PhaseKey, units: dict[int, tuple[bool, ...]]) -> None:
        """Expect the gradients of ``units`` at the end of such phases: see [Note: stray gradients].

        Args:
            key: kind of the phase.
            units: unit -> for each of its parameters, True if it is trained.
        """
        if key in self._known:
            self._known[key].replace(lambda order: order.postpone(units))


class IssueHash:
    """Running hash of (engine, kind, unit, version) over all issued collectives. Ranks compare it in the step sync.

    The hash has 24 bits. So float64 holds the sums over thousands of ranks exactly, of the hash and of each half of its
    square.
    """

    _PRIME = (1 << 24) - 3

    def __init__(self, history: History) -> None:
        """Continue the hash of a history, which the engines of shared communicators have in common."""
        self._history = history
        self._engine = history.engines * 8191  # a prime above the number of units of most models
        history.engines += 1

    @property
    def value(self) -> int:
        """The hash of the collectives of all engines that share communicators."""
        return self._history.value

    def add(self, kind: int, unit: int, version: int) -> None:
        """Add one issued collective to the hash."""
        # The factors spread small numbers over the bits. ``kind`` needs three bits.
        history = self._history
        history.value = (history.value * 65599 + ((self._engine + unit) * 131 + version) * 8 + kind) % self._PRIME
