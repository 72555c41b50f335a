"""Turns uses of units into gathers that every rank issues in the same order.

While a phase is being *learned*, each need is a round of agreement: ranks say which unit they want, all of them gather
the first one wanted, and a rank goes on when its own has come. The units so gathered are the phase's sequence, the
union over ranks. While a sequence is *followed*, nothing is said: a rank that uses the unit at position j first issues
what the plan starts at positions up to j, also for units only others need, and the reductions that lie between.

[Note: how ranks may diverge] A rank may pass over units of the order or come to them in another: what it gathers for
others it retains. Where it needs a unit that is not to come, it goes through the whole order first, as the others do,
and asks at the end. They wait for it there in phases that have varied or may (`KnownOrders.vary`); in others nobody
would hear, and the error names both places. Ranks that come to one new place together leave the order there.
"""

from __future__ import annotations

import functools
import logging
import operator
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

_BEGIN, _ROUND, _LEAVE, _AGAIN = 1, 2, 3, 4  # kinds of exchange
_DONE = -1  # "I want nothing more in this phase"; less one or both of the following
_APART = 1  # "and I have left the known order alone"
_LATE = 2  # "and I have gradients of units that have been sent"
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
        log_relearning: bool,
    ) -> None:
        self.units = units
        self.lanes = lanes
        self.reductions = reductions
        self.agreement = agreement
        self.issued = issued
        self.limits = limits
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
        self._plan: Plan | None = None
        self._base = 0  # position in the sequence where the plan starts
        self._position = 0  # next use expected
        self._learned: list[int] = []
        self._own: set[int] = set()  # units this rank has used in the running phase
        self._foreseen: set[int] = set()  # units this rank's next backward may use, by the running forward
        self._apart = False  # whether this rank has left the known order of the running phase alone
        self._leaves = 0  # how often ranks have left a known order, so far
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
        self._learned, self._own, self._foreseen, self._apart = [], set(), set(), False
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
        elif self._sequence is None:
            self._agree_on(unit)
        else:
            position = self._sequence.find(index, self._position)
            if position is not None:
                self._advance(position + 1, own=index)
            elif unit.state is UnitState.SHARDED:
                self._leave_order(unit)
        self._show(unit)

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
        if self._sequence is not None:
            self._advance(len(self._sequence.uses), own=None)
        if self._sequence is None or self.sequences.vary(self.key, self._sequence):
            self._wait_for_others()
        if self._sequence is None:
            self._remember_learned()
        else:
            self.differed |= not self._own.issuperset(self._sequence.uses)
            self.reductions.end()
            self.sequences.remember(self.key, self._sequence)
        self._recent.add(self.key)
        self._release_retained()
        self.agreement.phase = ""

    def note_differences(self, differed: bool) -> None:
        """At the boundary: whether any rank has passed over units since the last one."""
        for key in self._recent if differed else ():
            self.sequences.note_variation(key)
        self._recent.clear()
        self.differed = False

    def _wait_for_others(self) -> None:
        """Join what ranks still need that learn, or that have left the known order alone."""
        if self._sequence is not None:
            self.reductions.before_use(len(self._sequence.uses))
            self._learned = list(self._sequence.uses)
        said = self._agree_on(None)
        if said & _APART:
            self._leaves += 1
            self._stop_following()
        elif said & _LATE and self._sequence is not None:
            late = self.reductions.send_late()
            self.sequences.postpone(self.key, late)
            self._sequence = self._sequence.postpone(late)

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
        self.sequences.remember(self.key, sequence, mixed=any(own != accounts[0][0] for own, _ in accounts))
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
        self.reductions.after_use(position)

    def _advance(self, stop: int, own: int | None, *, eager: bool = True) -> None:
        """Go through the uses before position ``stop``: gathers that the plan starts there, and reductions among them.

        Args:
            stop: where to end.
            own: the unit this rank uses at the last position; None at the end of a phase, where it uses no more.
            eager: send complete units as soon as their place has come, and not only what is due.
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
            if eager:
                self.reductions.after_use(self._position)
            self.planned.add(used)
            if own is not None and (used != own or self._position < stop):
                self._retain(used)
            self._drop([index for index in dropped if index == used])

    def _retain(self, index: int) -> None:
        """Hold what was gathered for others: this rank may still come to use it, if it runs in another order.

        What it has come back for before is kept whatever the limit; everything else only within it. Where phases have
        not been seen to vary, everything is kept: no rank would hear that it is wanted again.
        """
        self._retained[index] = None
        if self._sequence is not None and not self.sequences.vary(self.key, self._sequence):
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

    # Learning.

    def _stop_following(self) -> None:
        """Go on as if this phase were not known."""
        self._sequence, self._plan = None, None
        self._release_all(self.planned)
        self.reductions.change(None)

    def _agree_on(self, unit: Unit | None) -> int:
        """Take rounds until this rank's unit is gathered, or, with None, until no rank wants anything.

        Returns:
            With None, what ranks added to that: _APART and _LATE.
        """
        if unit is not None and unit.state is not UnitState.SHARDED:
            return 0
        late = self.key[0] == "backward" and self.reductions.has_late()
        want = unit.index if unit is not None else _DONE - _APART * self._apart - _LATE * late
        doing = f"asking for unit {unit.name!r}" if unit is not None else f"at the end of {self.agreement.phase}"
        while True:
            offers = self.reductions.offers(_OFFERS)
            rows = self.agreement.exchange(_ROUND, [want, *offers, *[_DONE] * (_OFFERS - len(offers))], doing)
            self.reductions.issue_common([row[1:] for row in rows], len(self._learned))
            wanted = [row[0] for row in rows if row[0] >= 0]
            if not wanted:
                return functools.reduce(operator.or_, (_DONE - row[0] for row in rows))
            target = min(wanted)
            self._issue(target)
            self.planned.discard(target)
            self._learned.append(target)
            if target == want:
                return 0
            if want < 0:
                self.release_if_unused(self.units[target])  # gathered for others only
            else:
                self._retain(target)

    def _leave_order(self, unit: Unit) -> None:
        """The followed sequence does not hold this use: find another that does, with all ranks, or learn on."""
        assert self._sequence is not None
        if not self.agreement.all_come(self._leaves):
            return self._diverge(unit)
        self._leaves += 1
        doing = f"asking for unit {unit.name!r} out of the known order"
        code = zlib.crc32(repr((self.key, self._sequence)).encode())
        rows = self.agreement.exchange(_LEAVE, [code, self._position, unit.index], doing)
        if any(row[0] != code for row in rows):
            raise self.agreement.failure(doing)
        current = self._sequence
        reached = max(row[1] for row in rows)
        self._advance(reached, own=unit.index, eager=False)  # others do not send yet what is not due
        counts = self.agreement.exchange(_LEAVE, [self.reductions.issued_count], doing)
        self.reductions.catch_up(max(row[0] for row in counts))
        prefix = current.uses[:reached]
        for other in self.sequences.variants(self.key):
            if other.uses[:reached] == prefix and all(other.find(row[2], reached) is not None for row in rows):
                self.reductions.change(other)
                self._follow(other, reached)
                return self.use(unit)
        if self.log_relearning:
            _log.warning("%s of %s, use %d: learning it anew", doing, self.agreement.phase, self._position)
        self._learned = list(prefix)
        self._stop_following()
        self._agree_on(unit)

    def _diverge(self, unit: Unit) -> None:
        """Others still follow: take part in everything they will issue, and ask for more where they wait at the end.

        Gradients that come after their place are sent again there, too.
        """
        assert self._sequence is not None
        self._learned = list(self._sequence.uses)
        self._advance(len(self._learned), own=unit.index)
        self.reductions.before_use(len(self._learned))
        self._apart = True
        self._returns.add(unit.index)
        self._stop_following()
        self._agree_on(unit)

    def _release_all(self, indices: set[int]) -> None:
        gone = sorted(indices)
        indices.clear()
        for index in gone:
            self.release_if_unused(self.units[index])

    def _release_retained(self) -> None:
        gone = set(self._retained)
        self._retained.clear()
        self._release_all(gone)
