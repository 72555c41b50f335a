"""Turns uses of units into gathers that every rank issues in the same order.

While a phase is being *learned*, each need is a round of agreement: ranks say which unit they want, all of them gather
the first of those in the model, and a rank goes on when its own has come. The units so gathered are the order of the
phase, the union over ranks. While an order is *followed*, nothing is said: a rank that uses the unit at position j
first issues what the plan starts at positions up to j, also for units only others need, and the reductions that lie
between. `Schedule` decides on gathers; `LiveUnits` keeps units gathered while nothing uses them, and releases them.

[Note: how ranks may diverge] A rank may pass over units of the order or come to them in another: what it gathers for
others it retains. Where known orders of a kind part, there is a *fork*: every rank says what it wants next, and all go
on with the same order, or learn on from there. Where a rank needs a unit that is not to come, it goes through the rest
of the order as the others do and asks at the end, and that place is a fork from then on. The others hear it there in
phases that have varied or may (`KnownOrders.may_vary`). If all ranks have left at one place, what they learn behind the
end is known from that place on, as if they had said so there. Nothing of this depends on a clock: where ranks meet
follows from what they have agreed on.

In phases that have not varied nobody listens at the end, so a rank must not need to ask there as long as it makes no
more calls than are known. One gather may serve several calls: those inside a module around them, in a touched
parameter's hold, or in a backward that waits for the last gradient. A rank that leaves out what is around them makes
fewer calls, and may need more gathers. Therefore each use of an order knows the number of calls that it served when
all ranks learned it. A rank counts: plus the calls of each use that it passes, minus each call that it makes itself.
It lets a unit go only where that count is not above zero. So whenever it does not have a unit, the uses that are left
serve at least as many calls as it may still make, and the next call finds one. A module that is mostly run inside
another one of its unit is not counted then; where a rank runs it outside, it keeps the unit until the phase ends. The
calls that a backward is going to come to are not counted, either: autograd tells them. Where such a backward has left
out one of several forwards before it, ranks listen at the end of the next ones, which may come to it and bring more
gradients. A rank that alone runs a module more often than any rank ever did is an error; but if ranks have branched in
forwards of the same module in another mode, as in evaluation, the most that any rank ran there is listened for, too.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from zeropp.comm.agreement import Agreement
from zeropp.comm.streams import CommStreams, span
from zeropp.order.known_orders import CollectiveOrder, IssueHash, KnownOrders, PhaseKey, Reach, describe_phase
from zeropp.order.prefetch import Limits, Plan, make_plan
from zeropp.order.reductions import Reductions
from zeropp.params.unit import Unit, UnitState

__all__ = ["LiveUnits", "Schedule"]

_log = logging.getLogger("zeropp")
_BEGIN, _ROUND, _FORK, _AGAIN = 1, 2, 3, 4  # kinds of exchange
_NONE = -1  # "I want nothing more in this phase"; "I have not left the order"
_OFFERS = 4  # finished units a rank offers for reduction in one round; with its want they must fit an exchange
# Told in an exchange at a fork: gradients of this rank that nothing sends, modules it never ran, a forward before this
# backward that it leaves out.
_STRAYS, _NOVEL, _PARTIAL = 1, 2, 4
_GATHER = 1  # kind in the issue hash
_KEEP = 2**40  # calls that are never made: the unit stays until the phase ends


@dataclass(slots=True)
class PhaseState:
    """The running phase, on this rank. A phase is a forward or a backward; each begins with a new state.

    Attributes:
        key: its kind.
        then: the kind of the phase expected after it.
        before: calls without a graph in forwards before this one; see :attr:`Schedule.unrecorded`.
        silent: it is a forward that gathers nothing.
        order: the order that is followed; None while one is learned.
        forks: positions of the order, still to come, at which known orders part.
        plan: of prefetching, for the order.
        base: the position in the order where the plan starts.
        position: the position of the next use.
        left: the position at which this rank needed what the order did not have; -1 if it has not.
        learned: uses of the order that is being learned.
        calls: calls of this rank that each of these has served.
        places: the place of each unit's last use among these.
        counted: calls are counted: an order is followed, and nobody listens at its end.
        called: calls of each module.
        nested: this rank has run a module inside another one that uses its unit.
        novel: this rank has called a module that the order does not have.
        brings_more: it is a backward that may bring a parameter its first gradient after an edit of others.
        partial: it is a backward that leaves out one of the forwards before it.
        new_fork: uses up to a fork to remember in place of what is being learned.
        own: units that this rank has used.
        in_backward: units that this rank's next backward may use, by this forward.
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
    left: int = _NONE
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


class Schedule:
    """Gathers of one engine, phase by phase."""

    def __init__(
        self,
        units: Sequence[Unit],
        comm_streams: CommStreams,
        reductions: Reductions,
        agreement: Agreement,
        issued: IssueHash,
        limits: Limits,
        reach: Callable[[PhaseKey], Reach],
        *,
        static: bool,
        log_relearning: bool,
    ) -> None:
        """Know no order yet; ``reach`` as in `KnownOrders`, ``static`` if phases of a kind are promised to be equal."""
        self.units = units
        self.comm_streams = comm_streams
        self.reductions = reductions
        self.agreement = agreement
        self.issued = issued
        self.limits = limits
        self.static = static
        self.log_relearning = log_relearning
        self.known = KnownOrders(reach)
        self.live_units = LiveUnits(units, comm_streams, agreement, limits.live)
        # Calls without a graph in forwards with one, which a backward to come may run again: (path, unit) -> how many.
        self.unrecorded: Counter[tuple[str, int]] = Counter()
        # A backward may come to several calls of a unit; for good, once it may.
        self.repeats = False
        # Some rank has edited gradients before a step: what is sent after an edit would miss it.
        self.edits = False
        # This rank has passed over units since the last step sync, or run modules that are not known to be run there.
        self.passed_over = False
        self._phase = PhaseState((), None)
        self._plans: dict[tuple[object, ...], Plan] = {}
        # This rank has given up a phase in which ranks talk to each other.
        self._failed = False
        # Phases that have come to their end; not those that a rank may run alone.
        self._ended = 0
        # Kind of the last forward that a backward may follow.
        self._forward: PhaseKey | None = None
        # Kinds of phases since the last step sync.
        self._recent: set[PhaseKey] = set()

    def note_sizes(self) -> None:
        """Look at the sizes of units, on which plans rest."""
        self.live_units.note_sizes()
        self._plans.clear()

    def begin_phase(self, key: PhaseKey, then: PhaseKey | None) -> None:
        """Start a phase.

        Args:
            key: its kind.
            then: kind of the phase expected after it, whose uses the plan may look ahead to.
        """
        before = Counter(self.unrecorded) if self.unrecorded else Counter()
        phase = self._phase = PhaseState(key, then, before)
        name = describe_phase(key)
        # What ranks say in one phase must not be taken for what others say in another, which may look alike.
        self.agreement.enter(name, self._phase_code(key))
        phase.silent = self.known.note_silent(key)
        if then is not None and not phase.silent:  # of all ranks: by it they order what they refresh
            self._forward = key
        if not phase.silent:
            self._go_on(name)
        elif self.needs_others and not self._failed:  # it may run the pass that has stopped it once more
            self.agreement.go_on()
        expected = self.known.expected(key)
        self.reductions.begin_reductions(expected)
        if expected is None:
            self._stop_following()
            self.agreement.exchange(_BEGIN, [], f"starting {name}")
        else:
            self._follow(expected, 0)
            phase.forks = [] if self.static else self.known.forks(key, expected)

    def begin_step(self) -> int:
        """Begin a step; returns a number for its place, which no pass has, the same on every rank."""
        self._go_on("a step", met=True)
        return self._phase_code("step")

    def _go_on(self, what: str, *, met: bool = False) -> None:
        """Begin something that ranks do together: with an exchange, if this rank's last pass has failed."""
        if self._failed:
            self.agreement.exchange(_AGAIN, [], f"starting {what} after an error")
            self._failed = False
        else:
            self.agreement.go_on(met=met)

    def _phase_code(self, of: object) -> int:
        return zlib.crc32(repr((self._ended, of)).encode())

    def use(self, unit: Unit, call: str | None = None) -> None:
        """Gather the unit, and what the plan fetches with it. The caller has counted itself among its users.

        Args:
            unit: to gather.
            call: path of the module that is run, if it is inside no other that uses the unit; "" for a touched
                parameter. Backward, which comes back to calls, gives none.
        """
        phase = self._phase
        if unit.persistent:
            return self._wait_and_unshard(unit)
        index = unit.index
        if call is None:
            phase.nested = True
        else:
            count = phase.called[call] = phase.called.get(call, 0) + 1
            if phase.counted and phase.order is not None:
                # Perhaps what is usually around this module is left out, and more that is usually inside follows.
                usual = count <= phase.order.called[call]
                self.live_units.owed[index] += -1 if usual else _KEEP
                self.passed_over |= not usual  # such passes are to be learned anew
            elif phase.order is not None:
                phase.novel |= call not in phase.order.called
            elif unit.state is not UnitState.SHARDED and index in phase.places:
                phase.calls[phase.places[index]] += 1
        once_more = index in phase.own and unit.users == 1
        phase.own.add(index)
        # Inside another use, which while learning is no use of its own.
        if unit.users > 1 and unit.state is not UnitState.SHARDED:
            return self._wait_and_unshard(unit)
        if index in self.live_units.retained:
            if phase.order is None or phase.order.find(index, phase.position) is not None:
                del self.live_units.retained[index]
            else:  # it stays, since no gather of it is to come, and the next time ranks may have to be asked
                self.passed_over |= once_more
            return self._wait_and_unshard(unit)
        while phase.order is not None:  # past forks, and to its end if it does not have this use
            position = phase.order.find(index, phase.position)
            stop = phase.forks[0] if phase.forks else len(phase.order.uses)
            if position is None:
                if unit.state is not UnitState.SHARDED:  # nobody need be asked; but the plan may not leave it again
                    self.passed_over |= unit.users == 1
                    return self._wait_and_unshard(unit)
                self._leave(unit, call)
            elif position < stop:
                stop = position + 1
            for each in self._advance(stop, own=index):
                self._issue(each)
            if position == stop - 1:  # it is this use that was come to
                return self._wait_and_unshard(unit)
            self._ask_at_fork(unit)
        gathered = unit.state is UnitState.SHARDED
        self._agree_on(unit)
        if call is not None and gathered:
            phase.calls[phase.places[index]] += 1
        return self._wait_and_unshard(unit)

    def note_unrecorded(self, path: str, units: Sequence[Unit]) -> None:
        """A module is left that recorded no graph in a forward with one: checkpointing may run it again in backward."""
        for unit in units:
            if unit.entered == 1 and not unit.persistent:
                self.unrecorded[path, unit.index] += 1

    @property
    def needs_others(self) -> bool:
        """True but in an evaluation that sends nothing, which one rank alone may run."""
        return not self._phase.silent or self._phase.key[-1] is not False

    @property
    def key(self) -> PhaseKey:
        """The kind of the running phase, or of the last one."""
        return self._phase.key

    @property
    def learning(self) -> bool:
        """True if the order of the running phase is being learned."""
        return self._phase.order is None

    def expect_reached(self, calls: dict[int, int], *, partial: bool) -> None:
        """The backward that begins will come to so many calls of each of these units.

        Args:
            calls: how many, for each unit of which that is known.
            partial: whether it may leave out a forward before it.
        """
        phase = self._phase
        phase.partial = partial
        if phase.counted and phase.order is not None:
            if calls:
                uses = Counter(phase.order.uses)
                self.live_units.due.update({index: count - uses[index] for index, count in calls.items()})
            # What may be run again on this rank, and is not known of any.
            more = self.unrecorded - self.known.unrecorded(phase.key) if self.unrecorded else self.unrecorded
            for (_, index), count in more.items():
                self.live_units.owed[index] += count
                self.passed_over = True  # such backwards are to be learned anew

    def note_reached(self, unit: Unit) -> None:
        """Backward comes to one of them."""
        if unit.index in self.live_units.due:
            self.live_units.due[unit.index] -= 1

    def _leave(self, unit: Unit, call: str | None) -> None:
        """The order does not have this use; ``call`` as in :meth:`use`."""
        phase = self._phase
        phase.left = phase.position
        if self.static:
            raise self.agreement.failure(
                f"asking for unit {unit.name!r}, a use that the order of this kind of pass does not have, though "
                '{"zeropp": {"static_graph": true}} promises that they are alike'
            )
        if phase.counted and phase.order is not None:
            often = phase.called[call or ""]
            known = phase.order.called[call or ""]
            if call and often > known:
                what = f"runs module {call!r}, of unit {unit.name!r}, {often} time{'s' * (often > 1)}"
                most = f"no rank ever ran it more than {known} time{'s' * (known > 1)}"
                if not known:
                    most = "no rank ever ran it by itself, only as a part of a module that contains it"
                self.agreement.beyond = f"{what} in {self.agreement.where}; {most}"
            else:
                what = f"needs weights of unit {unit.name!r}{', outside of their module,' if call == '' else ''}"
                self.agreement.beyond = f"{what} more often in {self.agreement.where} than any rank ever did"

    def _wait_and_unshard(self, unit: Unit) -> None:
        with span("wait", unit.name):
            for kind, wait in unit.under_way():
                self.agreement.wait_for_event(wait, f"waiting for the {kind} of unit {unit.name!r}", (unit.name, kind))
        unit.unshard()

    def expect_in_backward(self, indices: Sequence[int]) -> None:
        """The next backward may use what the running forward has used."""
        self._phase.in_backward.update(index for index in indices if not self.units[index].persistent)

    def expect_again(self, units: Sequence[Unit]) -> None:
        """The running phase will come back to these: those that its order does not use again stay until it ends."""
        for unit in units:
            order = None if unit.persistent else self._phase.order
            if order is not None and order.find(unit.index, self._phase.position) is None:
                self._retain(unit.index)

    def in_forward_order(self) -> list[Unit]:
        """All units as the next forward will want them: those used anywhere, then in the order expected of it."""
        order = self.known.expected(self._forward)
        uses = order.uses if order is not None else ()
        places = {index: place for place, index in reversed(list(enumerate(uses)))}  # of the first use
        return sorted(self.units, key=lambda unit: (unit.hooked, places.get(unit.index, len(places))))

    def end_phase(self) -> None:
        """Finish a phase: join what only others needed."""
        phase = self._phase
        self._stop_counting()
        while phase.order is not None:
            fork = bool(phase.forks)
            for each in self._advance(phase.forks[0] if fork else len(phase.order.uses), own=None):
                self._issue(each)
            if not (fork or self._may_be_asked()) or self._ask_at_fork(None):
                break
        if phase.order is None:
            self._agree_on(None)
            self._remember_learned()
        else:
            self.passed_over |= not phase.own.issuperset(phase.order.uses)  # one may need them alone the next time
            self.reductions.end_reductions()
            self.known.remember(phase.key, phase.order)
        if not phase.silent:
            self._recent.add(phase.key)
            self._ended += 1
        self.live_units.release_retained()
        self.agreement.leave()

    def _may_be_asked(self) -> bool:
        """Tell whether a rank may ask for more at the end of the order that is followed."""
        phase = self._phase
        if phase.order is None or self.static or phase.silent:
            return False
        return phase.brings_more or self.known.may_vary(phase.key, phase.order)

    def note_passed_over(self, anywhere: bool) -> None:
        """At the step sync: whether any rank has passed over units since the last one."""
        # All of them: the vector of the step sync has one flag, and says not in which phase it was.
        for key in self._recent if anywhere else ():
            self.known.note_variation(key)
        self._recent.clear()
        self.passed_over = False

    def postpone(self, units: list[int], *, held: bool) -> None:
        """At the step sync: gradients of these units came after they had been sent; or were all ``held`` until then.

        Held ones were due with the last backward, which from now on sends them at its end.
        """
        trained = self.reductions.trained(units)
        for key in self._recent:
            # key[1] tells backwards that hold: for those to hold gradients until now is as it should be. It is None
            # for those that bring none.
            if key[0] == "backward" and key[1] is not None and not (held and key[1]):
                self.known.postpone(key, trained)

    def _remember_learned(self) -> None:
        phase = self._phase
        order = CollectiveOrder(tuple(phase.learned))
        if phase.key[0] == "backward":
            order = CollectiveOrder(order.uses, *self.reductions.end_learning(len(order.uses)))
        else:
            # A second use may bring a second gradient: see `Reductions.count_gradient`.
            self.reductions.reused.update(unit for unit, uses in Counter(phase.learned).items() if uses > 1)
        repeats = phase.key[0] == "forward" and (phase.nested or len(phase.own) < sum(phase.calls))
        unrecorded = self.unrecorded - phase.before
        used = (
            phase.in_backward,
            unrecorded,
            repeats,
            (phase.own, phase.calls, phase.called),
            phase.partial,
        )
        accounts = self.agreement.exchange_objects(used, f"at the end of {self.agreement.where}")
        own, _, paths = accounts[0][3]
        mixed = any((own, paths) != (each[0], each[2]) for *_, each, _ in accounts)
        # The most that any rank had: ranks that run alike in another order may share them out otherwise.
        calls = tuple(map(max, zip(*(each[1] for *_, each, _ in accounts), strict=True)))
        called: Counter[str] = Counter()
        for units, counts, repeats, (_, _, paths), _ in accounts:
            called |= paths
            self.known.expect_in_backward(units)
            unrecorded |= counts
            if repeats:
                self.repeats = True
        order = replace(order, calls=() if mixed else calls, called=called)
        self.known.remember(phase.key, order, mixed=mixed, fork=phase.new_fork, unrecorded=unrecorded)
        if phase.key[0] == "backward":
            self.known.note_partial(phase.key, any(each[-1] for each in accounts))

    def abort(self, *, running: bool) -> None:
        """Forget a phase that failed, if one was ``running``; nothing stays gathered.

        The next one begins with an exchange. If only this rank has failed, what it sends must not meet what the others
        are waiting for: gloo ends the process over messages of different sizes.
        """
        phase = self._phase
        self._failed |= running and not phase.silent
        self._stop_counting()
        phase.order = None
        phase.plan = None
        phase.learned = []
        self.agreement.leave()
        for unit in self.units:
            unit.users = unit.entered = 0
        self.live_units.release_planned()
        self.live_units.release_retained()
        for unit in self.units:
            self.live_units.release_if_unused(unit)

    # Following.

    def _follow(self, order: CollectiveOrder, position: int) -> None:
        phase = self._phase
        lookahead = None if phase.silent else self.known.expected(phase.then)
        uses = order.uses[position:]
        ahead = lookahead.uses if lookahead else ()
        if not phase.silent:  # planned for a phase that did not come, and does not come after this one
            self.live_units.drop(self.live_units.planned.difference(uses, ahead))
        live = frozenset(self.live_units.planned)
        key = (uses, ahead, live)
        if key not in self._plans:
            if len(self._plans) > 64:  # or orders that never come again would fill the memory
                self._plans.clear()
            self._plans[key] = make_plan(uses, ahead, live, self.live_units.numel, self.limits)
        phase.order = order
        phase.plan = self._plans[key]
        phase.base = phase.position = position
        phase.left = _NONE
        phase.brings_more = self.edits and phase.key[0] == "backward" and self.reductions.may_bring_more(order)
        phase.counted = position == 0 and len(order.calls) == len(order.uses) and not self._may_be_asked()
        self.reductions.after_use(position)

    def _stop_counting(self) -> None:
        if self._phase.counted:
            self._phase.counted = False
            self.live_units.forget_owed()

    def _advance(self, stop: int, own: int | None) -> Iterator[int]:
        """Go through the uses before position ``stop``; yields units to gather, and sends gradients between them.

        Args:
            stop: where to end.
            own: the unit this rank uses next, perhaps at the last position; None if it uses no more.
        """
        phase = self._phase
        assert phase.plan is not None and phase.order is not None
        while phase.position < stop:
            position = phase.position
            used = phase.order.uses[position]
            dropped = phase.plan.drop[position - phase.base]
            self.live_units.drop(index for index in dropped if index != used)  # before what they make room for
            self.reductions.before_use(position)
            for index in phase.plan.issue[position - phase.base]:
                yield index
                self.live_units.planned.add(index)
            phase.position += 1
            self.reductions.after_use(phase.position)
            gone = [index for index in dropped if index == used]
            self.live_units.planned.difference_update(gone)  # first: what is retained is counted once
            # Uses of other ranks: all but the last, if that is this rank's own. At the end of a phase none is retained.
            if own is not None and (used != own or phase.position < stop):
                self._retain(used)
            if phase.counted:
                self.live_units.owed[used] += phase.order.calls[position]
                if used in self.live_units.due:
                    self.live_units.due[used] += 1
            self.live_units.drop(gone)

    def _retain(self, index: int) -> None:
        """Retain what was gathered for others.

        Without a bound where phases have not been seen to vary: no rank would hear that it is wanted again. One that
        has left the order asks in any case, and so does one that learns.
        """
        asks = self._phase.order is None or self._phase.left != _NONE or self._may_be_asked()
        self.live_units.retain(index, bounded=asks)

    def _issue(self, index: int) -> None:
        unit = self.units[index]
        self.issued.add(_GATHER, index, unit.version)
        with self.agreement.issuing("gathering", unit.name, "gather"), span("gather", unit.name):
            event = self.comm_streams.run_work(unit.prepare_gather(self.comm_streams))[-1]
        unit.note_gather(event)
        self.agreement.queued(event, unit.name, "gather")

    # Where known orders part or end.

    def _asking(self, unit: Unit | None) -> str:
        return f"asking for unit {unit.name!r}" if unit is not None else f"at the end of {self.agreement.where}"

    def _ask_at_fork(self, unit: Unit | None) -> bool:
        """Say what this rank wants next, None for nothing more, and go on as all ranks want.

        See [Note: how ranks may diverge].

        Returns:
            Whether the phase is over.
        """
        phase = self._phase
        assert phase.order is not None
        order = phase.order
        place = phase.position
        self.reductions.before_use(place)
        # Told with the last word alone: if ranks learn on from here instead, that sends strays at its end.
        strays = unit is None and phase.key[0] == "backward" and self.reductions.has_stray()
        more = strays * _STRAYS | phase.novel * _NOVEL | phase.partial * _PARTIAL
        doing = self._asking(unit)
        rows = self.agreement.exchange(_FORK, [_NONE if unit is None else unit.index, phase.left, more], doing)
        if any(row[2] & _NOVEL for row in rows):
            self.known.note_variation(phase.key)
        wants = {row[0] for row in rows} - {_NONE}
        if not wants and place == len(order.uses):
            if any(row[2] & _STRAYS for row in rows):
                self._postpone_strays()
            if phase.key[0] == "backward":
                self.known.note_partial(phase.key, any(row[2] & _PARTIAL for row in rows))
            return True
        branch = self.known.branch(phase.key, order, place, wants)
        # Where each rank goes its own way, as through experts, there are as many orders as combinations. If their union
        # may be gathered as a whole, it serves all: they go on, and what they ask for at the end is added to it.
        union = self.live_units.fit(wants.union(order.uses))
        if branch is None and union and place < len(order.uses) and len({row[0] for row in rows}) > 1:
            branch = order
        if branch is None:
            self._learn_on(place, {row[1] for row in rows}, doing, union=union)
            return False
        if branch is not order:
            self.reductions.change(branch)
            self._follow(branch, place)
        phase.left = _NONE
        phase.forks = [fork for fork in self.known.forks(phase.key, branch) if fork > place]  # the others are behind
        return False

    def _postpone_strays(self) -> None:
        phase = self._phase
        assert phase.order is not None
        strays = self.reductions.send_strays()
        self.known.postpone(phase.key, strays)
        phase.order = phase.order.postpone(strays)  # what `end_phase` remembers is the changed order

    def _learn_on(self, place: int, left: set[int], doing: str, *, union: bool) -> None:
        """No known order goes on from ``place`` as ranks want: learn one, from there or from where all have ``left``.

        With ``union`` the order and what ranks want may be gathered as a whole; ``doing`` is for the log.
        """
        phase = self._phase
        assert phase.order is not None
        if self.log_relearning:
            _log.warning("%s of %s, use %d: learning it anew", doing, self.agreement.where, phase.position)
        # If all have left at one place, no rank has used what lies behind it.
        since = min(left) if len(left) == 1 and left != {_NONE} else place
        phase.learned = list(phase.order.uses[:since])
        phase.calls = [0] * since
        phase.places = {unit: place for place, unit in enumerate(phase.learned)}
        # Some ranks have left, and others used what lies between. In the union, what was wanted there comes last, and a
        # rank that wants it early retains all between. Where that is too much, that place becomes a fork instead.
        apart = {each for each in left if _NONE < each < place} if since == place and not union else set()
        phase.new_fork = phase.order.uses[: min(apart)] if apart else None
        self.known.note_variation(phase.key)  # also if what is learned turns out to be known
        self.reductions.forget_sent(since)
        self._stop_following()
        if since < place:  # gathered in vain; what of it is used now is to have its place in the new order
            self.live_units.release_retained()

    # Learning.

    def _stop_following(self) -> None:
        """Go on as if this phase were not known."""
        phase = self._phase
        phase.silent = False  # a forward has touched weights outside of its module: all ranks are asked
        self._stop_counting()
        phase.order = None
        phase.plan = None
        phase.forks = []
        phase.left = _NONE
        self.live_units.release_planned()
        self.reductions.change(None)

    def _agree_on(self, unit: Unit | None) -> None:
        """Take rounds until this rank's unit is gathered, or, with None, until no rank wants anything."""
        phase = self._phase
        if unit is not None and unit.state is not UnitState.SHARDED:
            return
        want = unit.index if unit is not None else _NONE
        doing = self._asking(unit)
        while True:
            offers = self.reductions.offers(_OFFERS)
            rows = self.agreement.exchange(_ROUND, [want, *offers, *[_NONE] * (_OFFERS - len(offers))], doing)
            self.reductions.issue_common([row[1:] for row in rows], len(phase.learned))
            wanted = [row[0] for row in rows if row[0] != _NONE]
            if not wanted:
                return
            target = min(wanted)
            self._issue(target)
            phase.places[target] = len(phase.learned)
            phase.learned.append(target)
            phase.calls.append(0)
            if target == want:
                return
            if unit is None:
                self.live_units.release_if_unused(self.units[target])  # gathered for others only
            else:
                self._retain(target)


class LiveUnits:
    """Gathered units of one engine beside those in use: the plan says so, or another rank has needed them.

    Attributes:
        planned: because the plan says so; equal on every rank.
        retained: gathered for others, the oldest first; this rank's own affair.
        numel: elements of each unit.
        owed: for each unit, calls that the uses passed so far serve, less those that this rank has made. While it has
            some left it keeps the unit: see [Note: how ranks may diverge].
        due: for units of which several calls are in the running backward, those that it has yet to come to, less the
            uses that are left. While there are more calls it keeps the unit, too.
    """

    def __init__(self, units: Sequence[Unit], comm_streams: CommStreams, agreement: Agreement, live: int) -> None:
        """Keep nothing yet; ``live`` bounds the elements of what is planned, and retained where ranks may ask again."""
        self.planned: set[int] = set()
        self.retained: dict[int, None] = {}
        self.numel: list[int] = []
        self.owed = [0] * len(units)
        self.due: dict[int, int] = {}
        self._units = units
        self._comm_streams = comm_streams
        self._agreement = agreement
        self._live = live
        self.note_sizes()

    def note_sizes(self) -> None:
        """Look at the sizes of units."""
        self.numel = [unit.numel for unit in self._units]

    def fit(self, units: Iterable[int]) -> bool:
        """Tell whether these may be gathered at once."""
        return sum(self.numel[index] for index in set(units)) <= self._live

    def retain(self, index: int, *, bounded: bool) -> None:
        """Keep what was gathered for others: this rank may still come to use it, if it runs in another order.

        Args:
            index: the unit.
            bounded: whether the limit holds; what was retained first gives way.
        """
        # A dict, whose order is that of entry: the newest comes last, and so is the last to give way below.
        self.retained[index] = None
        if not bounded:
            return
        excess = sum(self.numel[other] for other in self.planned.union(self.retained)) - self._live
        for other in [other for other in self.retained if other not in self.planned]:
            if excess <= 0:
                break
            del self.retained[other]
            excess -= self.numel[other]
            self.release_if_unused(self._units[other])

    def release_if_unused(self, unit: Unit) -> None:
        """Release a unit that nothing needs any more; guard one that is to stay and that no module uses now."""
        index = unit.index
        needed = index in self.planned or index in self.retained or unit.users > 0 or unit.persistent
        if not (needed or self.owed[index] > 0 or self.due.get(index, 0) > 0) and unit.state is not UnitState.SHARDED:
            # A gather that is still under way would write to memory that is no longer there.
            self._agreement.wait_for_event(unit.wait_for_unshard, f"releasing unit {unit.name!r}")
            unit.reshard(self._comm_streams)
        elif unit.users == 0 and unit.state is UnitState.UNSHARDED and not unit.persistent:
            # Or nobody would notice that code outside of its module uses a weight, which backward then has to fetch.
            unit.guard_values()

    def drop(self, indices: Iterable[int]) -> None:
        """Release units that the plan wants no longer, unless something else needs them."""
        gone = sorted(indices)
        self.planned.difference_update(gone)
        for index in gone:
            self.release_if_unused(self._units[index])

    def release_planned(self) -> None:
        """Release what is only planned to be used again; the same on every rank."""
        self.drop(set(self.planned))

    def forget_owed(self) -> None:
        """Owe nothing: this rank makes no more calls that it could make, or asks for them from here on."""
        kept = sorted({index for index, calls in enumerate(self.owed) if calls > 0}.union(self.due))
        self.owed[:] = [0] * len(self.owed)
        self.due.clear()
        for index in kept:
            self.release_if_unused(self._units[index])

    def release_retained(self) -> None:
        """Release what was gathered for others."""
        gone = sorted(self.retained)
        self.retained.clear()
        for index in gone:
            self.release_if_unused(self._units[index])
