"""Turns uses of units into gathers that every rank issues in the same order.

While a phase is being *learned*, each need is a round of agreement: ranks say which unit they want, all of them gather
the first one wanted, and a rank goes on when its own has come. The units so gathered are the order of the phase, the
union over ranks. While an order is *followed*, nothing is said: a rank that uses the unit at position j first issues
what the plan starts at positions up to j, also for units only others need, and the reductions that lie between.

[Note: how ranks may diverge] A rank may pass over units of the order or come to them in another: what it gathers for
others it retains. Where known orders of a kind part, there is a *fork*: every rank says what it wants next, and all go
on with the same order, or learn on from there. Where a rank needs a unit that is not to come, it goes through the rest
of the order as the others do and asks at the end, and that place is a fork from then on. The others hear it there in
phases that have varied or may (`KnownOrders.vary`); in others nobody would, and the error names both places. If all
ranks have left at one place, what they learn behind the end is known from that place on, as if they had said so there.
Nothing of this depends on a clock: where ranks meet follows from what they have agreed on.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

from zeropp.comm.accounts import describe_phase
from zeropp.comm.agreement import Agreement
from zeropp.comm.spans import span
from zeropp.comm.streams import Lanes
from zeropp.order.orders import CollectiveOrder, IssueHash, KnownOrders, PhaseKey
from zeropp.order.prefetch import Limits, Plan, make_plan
from zeropp.order.reductions import Reductions
from zeropp.params.unit import Unit, UnitState

__all__ = ["Schedule"]

_log = logging.getLogger("zeropp")

_BEGIN, _ROUND, _MEET, _AGAIN = 1, 2, 3, 4  # kinds of exchange
_NONE = -1  # "I want nothing more in this phase"; "I have not left the order"
_OFFERS = 4  # finished units a rank offers for reduction in one round
_GATHER = 1  # kind in the issue hash


class Schedule:
    """Gathers of one engine, phase by phase."""

    def __init__(
        self,
        units: Sequence[Unit],
        lanes: Lanes,
        reductions: Reductions,
        agreement: Agreement,
        issued: IssueHash,
        limits: Limits,
        reach: Callable[[PhaseKey], frozenset[int]],
        *,
        static: bool,
        log_relearning: bool,
    ) -> None:
        """Know no order yet; ``reach`` as in `KnownOrders`, ``static`` if phases of a kind are promised to be equal."""
        self.units = units
        self.lanes = lanes
        self.reductions = reductions
        self.agreement = agreement
        self.issued = issued
        self.limits = limits
        self.static = static
        self.log_relearning = log_relearning
        self.sequences = KnownOrders(reach)
        self._silent = all(unit.persistent for unit in units)  # whether forwards gather nothing
        self._failed = False  # whether this rank has given up a phase in which ranks talk to each other
        self.planned: set[int] = set()  # by the plan's will; equal on every rank
        self._retained: dict[int, None] = {}  # gathered for others, oldest first; this rank's own affair
        self._returns: set[int] = set()  # units this rank has used after passing them over
        self._numel: list[int] = []
        self._plans: dict[tuple[object, ...], Plan] = {}
        self.note_sizes()
        self.key: PhaseKey = ()  # kind of the running phase
        self._then: PhaseKey | None = None
        self._forward: PhaseKey | None = None  # kind of the last forward that a backward may follow
        self._sequence: CollectiveOrder | None = None  # followed; None while learning
        self._forks: list[int] = []  # of its positions, those to come at which known orders part
        self._plan: Plan | None = None
        self._base = 0  # position in the sequence where the plan starts
        self._position = 0  # next use expected
        self._left = _NONE  # position at which this rank needed what the order did not have
        self._learned: list[int] = []
        self._kept_out: tuple[int, ...] | None = None  # a fork to remember in place of what is being learned
        self._own: set[int] = set()  # units this rank has used in the running phase
        self._foreseen: set[int] = set()  # units this rank's next backward may use, by the running forward
        self._recent: set[PhaseKey] = set()  # kinds of phases since the last boundary
        self.differed = False  # whether this rank has passed over units in one of them

    def note_sizes(self) -> None:
        """Look at the sizes of units, on which plans rest."""
        self._numel = [unit.numel for unit in self.units]
        self._plans.clear()

    def begin(self, key: PhaseKey, then: PhaseKey | None) -> None:
        """Start a phase.

        Args:
            key: its kind.
            then: kind of the phase expected after it, whose uses the plan may look ahead to.
        """
        self.key, self._then = key, then
        self.agreement.phase = phase = describe_phase(key)
        if then is not None:
            self._forward = key
        self._learned, self._own, self._foreseen, self._kept_out = [], set(), set(), None
        if self._silent and key[0] == "forward":
            self.sequences.note_silent(key)
        elif self._failed:
            self.agreement.exchange(_AGAIN, [], f"starting {phase} after an error")
            self._failed = False
        expected = self.sequences.expected(key)
        self.reductions.begin(expected)
        if expected is None:
            self._stop_following()
            code = zlib.crc32(repr(key).encode())
            rows = self.agreement.exchange(_BEGIN, [code], f"starting {phase}")
            if any(row != [code] for row in rows):
                raise self.agreement.failure(f"starting {phase}")
        else:
            self._follow(expected, 0)
            self._forks = [] if self.static else self.sequences.forks(key, expected)

    def use(self, unit: Unit) -> None:
        """Have the unit gathered, and what the plan wants fetched with it. The caller holds the unit already."""
        index = unit.index
        if unit.persistent:
            return self._show(unit)
        self._own.add(index)
        if index in self._retained and unit.state is not UnitState.SHARDED:
            self._returns.add(index)
            if self._sequence is None or self._sequence.find(index, self._position) is not None:
                del self._retained[index]  # else it may be needed once more, and no gather of it is to come
        else:
            self._come_to(unit)
        self._show(unit)

    def _come_to(self, unit: Unit) -> None:
        """Go on in the order until the unit is gathered: past forks, and beyond its end if it does not hold the use."""
        while self._sequence is not None:
            position = self._sequence.find(unit.index, self._position)
            stop = self._forks[0] if self._forks else len(self._sequence.uses)
            if position is not None and position < stop:
                return self._advance(position + 1, own=unit.index)
            if position is None:
                if unit.state is not UnitState.SHARDED:
                    return None
                self._leave(unit)
            self._advance(stop, own=unit.index)
            self._meet(unit)
        return self._agree_on(unit)

    def _leave(self, unit: Unit) -> None:
        """The order does not hold this use."""
        if self._left != _NONE:
            return
        self._left = self._position
        self._returns.add(unit.index)
        if self.static:
            raise self.agreement.failure(
                f"asking for unit {unit.name!r}, which passes of this kind have not used before, though "
                '{"zeropp": {"static_graph": true}} promises that they are alike'
            )

    def _show(self, unit: Unit) -> None:
        with span("wait", unit.name):
            name = unit.name
            if unit.refreshing:  # told apart from the gather behind it: it takes other links
                self.agreement.wait(unit.wait_refreshed, f"waiting for the refresh of unit {name!r}", (name, "refresh"))
            if unit.gathering:
                self.agreement.wait(unit.wait_gathered, f"waiting for the gather of unit {name!r}", (name, "gather"))
        unit.expose()

    def expect_in_backward(self, indices: Sequence[int]) -> None:
        """The next backward may use what the running forward has used."""
        self._foreseen.update(index for index in indices if not self.units[index].persistent)

    def expect_again(self, units: Sequence[Unit]) -> None:
        """The running phase will come back to these; where its known order does not, they stay to its end."""
        for unit in units:
            sequence = None if unit.persistent else self._sequence
            if sequence is not None and sequence.find(unit.index, self._position) is None:
                self._retain(unit.index)

    def in_forward_order(self) -> list[Unit]:
        """All units as the next forward will want them: those used anywhere, then in the order of the last one."""
        sequence = self.sequences.expected(self._forward)
        places: dict[int, int] = {}
        for place, index in enumerate(sequence.uses if sequence is not None else ()):
            places.setdefault(index, place)
        return sorted(self.units, key=lambda unit: (unit.announced, places.get(unit.index, len(places))))

    def release_if_unused(self, unit: Unit) -> None:
        """Release a unit that nothing holds any more."""
        kept = unit.index in self.planned or unit.index in self._retained or unit.users > 0 or unit.persistent
        if not kept and unit.state is not UnitState.SHARDED:
            self.agreement.wait(unit.wait_gathered, f"releasing unit {unit.name!r}")
            unit.release(self.lanes)

    def end(self) -> None:
        """Finish a phase: join what only others needed."""
        while self._sequence is not None:
            fork = bool(self._forks)
            self._advance(self._forks[0] if fork else len(self._sequence.uses), own=None)
            if not fork and not self._may_be_asked():
                break
            if self._meet(None):
                break
        if self._sequence is None:
            self._agree_on(None)
            self._remember_learned()
        else:
            self.differed |= not self._own.issuperset(self._sequence.uses)
            self.reductions.end()
            self.sequences.remember(self.key, self._sequence)
        self._recent.add(self.key)
        self._release_retained()
        self.agreement.phase = ""

    def _may_be_asked(self) -> bool:
        """Whether a rank may ask for more at the end of the order that is followed."""
        return self._sequence is not None and not self.static and self.sequences.vary(self.key, self._sequence)

    def note_differences(self, differed: bool) -> None:
        """At the boundary: whether any rank has passed over units since the last one."""
        for key in self._recent if differed else ():
            self.sequences.note_variation(key)
        self._recent.clear()
        self.differed = False

    def postpone(self, units: list[int], *, held: bool) -> None:
        """At the boundary: gradients of these units came after they had been sent; or were all ``held`` until then.

        Held ones were due with the last backward, which from now on sends them at its end.
        """
        late = self.reductions.parameter_counts(units)
        for key in self._recent:
            if key[0] == "backward" and not (held and key[1]):
                self.sequences.postpone(key, late)

    def _remember_learned(self) -> None:
        sequence = CollectiveOrder(tuple(self._learned))
        if self.key[0] == "backward":
            sequence = CollectiveOrder(sequence.uses, *self.reductions.end_learning(len(sequence.uses)))
        else:
            self.reductions.reused.update(unit for unit, uses in Counter(self._learned).items() if uses > 1)
        accounts = self.agreement.exchange_objects((self._own, self._foreseen), f"at the end of {self.agreement.phase}")
        mixed = any(own != accounts[0][0] for own, _ in accounts)
        self.sequences.remember(self.key, sequence, mixed=mixed, fork=self._kept_out)
        for _, foreseen in accounts:
            self.sequences.expect_in_backward(foreseen)

    def abort(self, *, running: bool) -> None:
        """Forget a phase that failed, if one was ``running``; nothing stays gathered.

        The next one begins with a word from every rank. If only this one has failed, what it sends must not meet what
        the others are waiting for: gloo ends the process over messages of different sizes.
        """
        self._failed |= running and (self.key[0] == "backward" or not self._silent)
        self._sequence, self._plan, self._learned = None, None, []
        self.agreement.phase = ""
        for unit in self.units:
            unit.users = 0
        self._release_all(self.planned)
        self._release_retained()
        for unit in self.units:
            self.release_if_unused(unit)

    def release_planned(self) -> None:
        """Release what is only kept for reuse; the same on every rank, between phases."""
        self._release_all(self.planned)

    # Following.

    def _follow(self, sequence: CollectiveOrder, position: int) -> None:
        lookahead = self.sequences.expected(self._then)
        uses, ahead = sequence.uses[position:], lookahead.uses if lookahead else ()
        unwanted = self.planned.difference(uses, ahead)  # kept for a phase that did not come
        self.planned -= unwanted
        self._release_all(unwanted)
        live = frozenset(self.planned)
        key = (uses, ahead, live)
        if key not in self._plans:
            if len(self._plans) > 64:
                self._plans.clear()
            self._plans[key] = make_plan(uses, ahead, live, self._numel, self.limits)
        self._sequence, self._plan = sequence, self._plans[key]
        self._base = self._position = position
        self._left = _NONE
        self.reductions.after_use(position)

    def _advance(self, stop: int, own: int | None) -> None:
        """Go through the uses before position ``stop``: gathers that the plan starts there, and reductions among them.

        Args:
            stop: where to end.
            own: the unit this rank uses next, perhaps at the last position; None if it uses no more.
        """
        assert self._plan is not None and self._sequence is not None
        while self._position < stop:
            position = self._position
            used = self._sequence.uses[position]
            dropped = self._plan.drop[position - self._base]
            self._drop([index for index in dropped if index != used])  # before what they make room for
            self.reductions.before_use(position)
            for index in self._plan.issue[position - self._base]:
                self._issue(index)
            self._position += 1
            self.reductions.after_use(self._position)
            self.planned.add(used)
            if own is not None and (used != own or self._position < stop):
                self._retain(used)
            self._drop([index for index in dropped if index == used])

    def _retain(self, index: int) -> None:
        """Hold what was gathered for others: this rank may still come to use it, if it runs in another order.

        What it has come back for before is kept whatever the limit; everything else only within it. Where phases have
        not been seen to vary, everything is kept: no rank would hear that it is wanted again. A rank that has left will ask
        in any case.
        """
        self._retained[index] = None
        if self._left == _NONE and not self._may_be_asked():
            return
        live = self.planned.union(self._retained)
        excess = sum(self._numel[other] for other in live) - self.limits.live
        for other in [other for other in self._retained if other not in self._returns]:
            if excess <= 0:
                break
            del self._retained[other]
            excess -= self._numel[other] if other not in self.planned else 0
            self.release_if_unused(self.units[other])

    def _drop(self, indices: list[int]) -> None:
        self.planned.difference_update(indices)
        for index in indices:
            self.release_if_unused(self.units[index])

    def _issue(self, index: int) -> None:
        unit = self.units[index]
        self.issued.add(_GATHER, index, unit.version)
        with self.agreement.issuing("gathering", unit.name, "gather"), span("gather", unit.name):
            unit.note_gather(self.lanes.run(unit.prepare_gather(self.lanes)))
        self.planned.add(index)

    # Where known orders part or end.

    def _meet(self, unit: Unit | None) -> bool:
        """Say what this rank wants next, None for nothing more, and go on as all ranks want: see the note above.

        Returns:
            Whether the phase is over.
        """
        assert self._sequence is not None
        order, place = self._sequence, self._position
        self.reductions.before_use(place)
        late = unit is None and self.key[0] == "backward" and self.reductions.has_late()
        doing = f"asking for unit {unit.name!r}" if unit is not None else f"at the end of {self.agreement.phase}"
        rows = self.agreement.exchange(_MEET, [_NONE if unit is None else unit.index, self._left, late], doing)
        wants = {row[0] for row in rows} - {_NONE}
        branch = self.sequences.branch(self.key, order, place, wants)
        if branch is None:
            self._learn_on(place, {row[1] for row in rows}, doing)
            return False
        if branch is not order:
            self.reductions.change(branch)
            self._follow(branch, place)
        self._left = _NONE
        self._forks = [fork for fork in self.sequences.forks(self.key, branch) if fork > place]
        if not wants and any(row[2] for row in rows):
            self._postpone_late()
        return not wants

    def _postpone_late(self) -> None:
        assert self._sequence is not None
        late = self.reductions.send_late()
        self.sequences.postpone(self.key, late)
        self._sequence = self._sequence.postpone(late)

    def _learn_on(self, place: int, left: set[int], doing: str) -> None:
        """No known order goes on from ``place`` as ranks want, of whom some have ``left`` it before."""
        assert self._sequence is not None
        if self.log_relearning:
            _log.warning("%s of %s, use %d: learning it anew", doing, self.agreement.phase, self._position)
        since = min(left) if len(left) == 1 and left != {_NONE} else place
        self._learned = list(self._sequence.uses[:since])
        # Ranks that have not left may have used what lies between: the union would have the rest of the phase in the
        # wrong place. Next time they say there what they want.
        apart = left - {_NONE} if since == place else set()
        self._kept_out = self._sequence.uses[: min(apart)] if apart else None
        self.reductions.forget_sent(since)
        self._stop_following()
        if since < place:
            self._release_retained()  # gathered in vain; what of it is used now is to have its place in the new order

    # Learning.

    def _stop_following(self) -> None:
        """Go on as if this phase were not known."""
        self._sequence, self._plan, self._forks = None, None, []
        self._left = _NONE
        self._release_all(self.planned)
        self.reductions.change(None)

    def _agree_on(self, unit: Unit | None) -> None:
        """Take rounds until this rank's unit is gathered, or, with None, until no rank wants anything."""
        if unit is not None and unit.state is not UnitState.SHARDED:
            return
        want = unit.index if unit is not None else _NONE
        doing = f"asking for unit {unit.name!r}" if unit is not None else f"at the end of {self.agreement.phase}"
        while True:
            offers = self.reductions.offers(_OFFERS)
            rows = self.agreement.exchange(_ROUND, [want, *offers, *[_NONE] * (_OFFERS - len(offers))], doing)
            self.reductions.issue_common([row[1:] for row in rows], len(self._learned))
            wanted = [row[0] for row in rows if row[0] != _NONE]
            if not wanted:
                return
            target = min(wanted)
            self._issue(target)
            self.planned.discard(target)
            self._learned.append(target)
            if target == want:
                return
            if unit is None:
                self.release_if_unused(self.units[target])  # gathered for others only
            else:
                self._retain(target)

    def _release_all(self, indices: set[int]) -> None:
        gone = sorted(indices)
        indices.clear()
        for index in gone:
            self.release_if_unused(self.units[index])

    def _release_retained(self) -> None:
        gone = set(self._retained)
        self._retained.clear()
        self._release_all(gone)
