"""The schedule of one engine: it issues gathers and reductions in the same order on every rank.

`Schedule` decides which gathers are issued, and when. `Transitions` carries them out for one unit. `LiveUnits` keeps
units gathered while no module uses them.

A *phase* is one forward or one backward; a `PhaseKey` names its kind. A *use* is one position of an order: the unit
that all ranks gather there. A *call* is one run of a module, or one touch of a parameter outside of its module.

*Learning.* The first phase of a kind begins with an exchange (a small collective on integers) and goes on in rounds:

1. A rank that needs a unit sends the unit's index in an exchange. A rank that has finished the phase sends -1.
   In backward each rank also sends a few units whose gradients it has; units sent by all ranks are reduced now.
2. All ranks gather the unit with the smallest index sent. This unit is the next use of the order.
3. A rank computes again once its own unit is gathered. Until then it takes part in further rounds.
4. The phase ends with a round in which every rank sends -1.

The learned order is the union of the units that ranks need. It is equal on all ranks, because all ranks see the same
rounds.

*Following.* Later phases of the kind follow the order, and exchange only at forks and, if ranks may differ, at its end.
Before a rank uses the unit at position j, it issues all gathers that the prefetch plan starts at positions up to j, and
all reductions that the order places between them. It also issues gathers of units that only other ranks use.

Ranks may deviate from an order, each in its own way: see [Note: how ranks may diverge].
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from zeropp.comm.agreement import Agreement
from zeropp.comm.streams import CommStreams
from zeropp.order.known_orders import (
    CollectiveOrder,
    IssueHash,
    KnownOrders,
    PhaseKey,
    PhaseState,
    Reach,
    describe_phase,
)
from zeropp.order.prefetch import Limits, Plan, make_plan
from zeropp.order.reductions import Reductions
from zeropp.params.unit import Unit, UnitState

__all__ = ["LiveUnits", "Schedule", "Transitions"]

_log = logging.getLogger("zeropp")
# Kinds of exchange: an unknown phase begins; a learning round; a fork or the end of an order; after an error.
_BEGIN, _ROUND, _FORK, _AGAIN = 1, 2, 3, 4
_NONE = -1  # as a unit: this rank needs none in this phase any more; as a position: this rank has not left the order
_OFFERS = 4  # complete units that a rank offers for reduction in one round; an exchange holds at most 8 integers
# Flags that a rank sends in an exchange at a fork, a position where known orders differ. _STRAYS: the rank has
# gradients that arrived after their unit was reduced. _NOVEL: it ran a module that the order has no calls of.
# _PARTIAL: its backward does not go through all forwards that preceded it.
_STRAYS, _NOVEL, _PARTIAL = 1, 2, 4
_GATHER = 1  # kind of collective in the issue hash
_KEEP = 2**40  # number of owed calls that no rank ever makes: the unit stays gathered until the phase ends


class Transitions:
    """Unshards and reshards one unit. The descriptions of its waits are prepared once.

    Args:
        unit: the unit.
        comm_streams: comm streams of gathers.
        agreement: exchanges between the ranks; watches the waits.
        issued: hash of the issued collectives.
    """

    def __init__(self, unit: Unit, comm_streams: CommStreams, agreement: Agreement, issued: IssueHash) -> None:
        self._unit = unit
        self._comm_streams = comm_streams
        self._agreement = agreement
        self._issued = issued
        name = unit.name
        self._gathering = agreement.issuing("gathering", name, "gather")
        self._releasing = agreement.watching(f"releasing unit {name!r}")
        label = f"zeropp::wait {name}"
        self._waits = {
            kind: agreement.watching(f"waiting for the {kind} of unit {name!r}", timed=(name, kind), label=label)
            for kind in ("step", "refresh", "gather")
        }

    def issue_gather(self) -> None:
        """Issue the gather of the unit. Every rank must call this at the same place of the order."""
        unit = self._unit
        self._issued.add(_GATHER, unit.index, unit.version)
        with self._gathering:
            work, after = unit.prepare_gather(self._comm_streams)
            event = self._comm_streams.run_work(work, after=after)
        unit.note_gather(event)
        self._agreement.queued(event, unit.name, "gather")

    def unshard(self) -> None:
        """Wait for the collectives in flight that write to the unit, then let the model see its values."""
        unit = self._unit
        try:
            arrived = unit.has_arrived()
        except RuntimeError:
            arrived = False  # the device has failed, which a watched wait turns into the common error
        if not arrived:
            for kind, wait in unit.under_way():
                self._agreement.wait_for_event(wait, self._waits[kind])
        unit.unshard()

    def reshard(self) -> None:
        """Free the gathered values. Nothing may use the unit."""
        unit = self._unit
        if unit.gathering is not None:
            # A gather in flight would write to freed memory.
            self._agreement.wait_for_event(unit.wait_for_unshard, self._releasing)
        unit.reshard(self._comm_streams)


class Schedule:
    """The gathers of one engine: which are issued, and when, phase by phase.

    Args:
        units: all units of the model, by index.
        comm_streams: comm streams of gathers.
        reductions: the engine's reductions, which are issued between the gathers.
        agreement: exchanges between the ranks.
        issued: hash of the issued collectives.
        limits: bounds of prefetching, in elements.
        reach: function that returns the units and modules that a kind of forward may use.
        static: True if the user promises that all phases of a kind use the same units (``static_graph``).
        log_relearning: True to log a warning when a known order is given up.
    """

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
        """Start without any known order."""
        self.units = units
        self.reductions = reductions
        self.agreement = agreement
        self.limits = limits
        self.static = static
        self.log_relearning = log_relearning
        self.known = KnownOrders(reach)
        self._transitions = [Transitions(unit, comm_streams, agreement, issued) for unit in units]
        self.live_units = LiveUnits(units, self._transitions, limits.live)
        # (module path, unit) -> number of calls that recorded no graph inside a forward that records one. Checkpointing
        # may run these calls again in the next backward.
        self.unrecorded: Counter[tuple[str, int]] = Counter()
        # True once a backward may reach several calls of one unit; never reset.
        self.repeats = False
        # True once some rank has edited gradients before a step. A gradient that is reduced after an edit misses it.
        self.edits = False
        # True if, since the last step sync, this rank skipped units or ran modules more often than the order expects.
        self.passed_over = False
        # The uses of the last order by which units were sorted, and the sorted units.
        self._sorted_by: tuple[tuple[int, ...] | None, list[Unit]] = None, []
        self._phase = PhaseState((), None)
        self._plans: dict[tuple[object, ...], Plan] = {}
        # True if this rank gave up a phase in which ranks exchange, and has begun no other one since.
        self._failed = False
        # Number of finished phases. Phases that one rank may run alone do not count, so all ranks have the same number.
        self._ended = 0
        # Kind of the last forward that a backward may follow.
        self._forward: PhaseKey | None = None
        # Kinds of the phases since the last step sync.
        self._recent: set[PhaseKey] = set()

    def note_sizes(self) -> None:
        """Read the sizes of the units again, and drop plans made for other sizes."""
        self.live_units.note_sizes()
        self._plans.clear()

    def begin_phase(self, key: PhaseKey, then: PhaseKey | None) -> None:
        """Begin a phase.

        Args:
            key: kind of the phase.
            then: kind of the phase expected next; the plan fetches units for it ahead. None if unknown.
        """
        before = Counter(self.unrecorded) if self.unrecorded else Counter()
        phase = self._phase = PhaseState(key, then, before)
        name = describe_phase(key)
        # Messages carry the code of the phase. Without it, ranks in different phases could take each other's messages
        # for answers, because the messages may look alike.
        self.agreement.enter(name, self._phase_code(key))
        phase.silent = self.known.note_local(key)
        # Not silent forwards, which one rank may run alone: refreshes follow the order of this forward on all ranks.
        if then is not None and not phase.silent:
            self._forward = key
        if not phase.silent:
            self._go_on(name)
        # No exchange takes place here. If this rank reported that an error stopped it in such a pass, it takes the
        # report back now, because it may be running the pass again.
        elif self.needs_others and not self._failed:
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
        """Begin a step; return its code in messages, equal on all ranks and different from that of any phase."""
        self._go_on("a step", met=True)
        return self._phase_code("step")

    def _go_on(self, what: str, *, met: bool = False) -> None:
        """Begin a phase or step that takes all ranks; with an exchange if this rank's last pass has failed."""
        if self._failed:
            self.agreement.exchange(_AGAIN, [], f"starting {what} after an error")
            self._failed = False
        else:
            self.agreement.go_on(met=met)

    def _phase_code(self, of: object) -> int:
        return zlib.crc32(repr((self._ended, of)).encode())

    def use(self, unit: Unit, call: str | None = None) -> None:
        """Make a unit usable: issue all collectives up to its place in the order, and wait for its gather.

        Args:
            unit: unit that is needed. The caller has increased ``unit.users`` before.
            call: path of the running module, unless a module around it uses the unit; "" for the first touch of a
                parameter outside of its module; None for later touches, in backward, and inside a module of the unit.
        """
        phase = self._phase
        if unit.persistent:
            return self._transitions[unit.index].unshard()
        index = unit.index
        if call is None:
            phase.nested = True
        else:
            count = phase.called[call] = phase.called.get(call, 0) + 1
            if phase.counted and phase.order is not None:
                # An unusual call exceeds the calls of its module in the order. Perhaps this rank skips the module
                # around it, and more modules inside the skipped one follow: keep the unit until the phase ends.
                usual = count <= phase.order.called[call]
                self.live_units.owed[index] += -1 if usual else _KEEP
                self.passed_over |= not usual  # so later phases of this kind end with an exchange
            elif phase.order is not None:
                phase.novel |= call not in phase.order.called
            elif unit.state is not UnitState.SHARDED and index in phase.places:
                phase.calls[phase.places[index]] += 1
        once_more = index in phase.own and unit.users == 1
        phase.own.add(index)
        # A module inside another one of the unit. It is no use of its own in an order that is learned.
        if unit.users > 1 and unit.state is not UnitState.SHARDED:
            return self._transitions[unit.index].unshard()
        if index in self.live_units.retained:
            if phase.order is None or phase.order.find(index, phase.position) is not None:
                del self.live_units.retained[index]
            else:  # no gather of it is left, so it stays; a second use may need an exchange in the next such phase
                self.passed_over |= once_more
            return self._transitions[unit.index].unshard()
        while phase.order is not None:  # go past forks; go to the end if the order lacks this use
            position = phase.order.find(index, phase.position)
            stop = phase.forks[0] if phase.forks else len(phase.order.uses)
            if position is None:
                # It is still gathered, so no other rank is needed. The next such phase may have released it by now.
                if unit.state is not UnitState.SHARDED:
                    self.passed_over |= unit.users == 1
                    return self._transitions[unit.index].unshard()
                self._leave(unit, call)
            elif position < stop:
                stop = position + 1
            while phase.position < stop:
                for each in self._reach_use():
                    self._transitions[each].issue_gather()
                self._pass_use(stop, own=index)
            if position == stop - 1:  # the last use passed is this one
                return self._transitions[unit.index].unshard()
            self._ask_at_fork(unit)
        gathered = unit.state is UnitState.SHARDED
        self._agree_on(unit)
        if call is not None and gathered:
            phase.calls[phase.places[index]] += 1
        return self._transitions[unit.index].unshard()

    def note_unrecorded(self, path: str, units: Sequence[Unit]) -> None:
        """Count a call that recorded no graph inside a forward that records one.

        Checkpointing may run the call again in backward.
        """
        for unit in units:
            if unit.entered == 1 and not unit.persistent:
                self.unrecorded[path, unit.index] += 1

    @property
    def needs_others(self) -> bool:
        """True unless the phase is a forward without gradients that gathers nothing; other ranks need not run that."""
        return not self._phase.silent or self._phase.key[-1] is not False

    @property
    def key(self) -> PhaseKey:
        """The kind of the running forward or backward; between passes, the kind of the last one."""
        return self._phase.key

    @property
    def learning(self) -> bool:
        """True if the order of the running phase is being learned."""
        return self._phase.order is None

    def expect_reached(self, calls: dict[int, int], *, partial: bool) -> None:
        """Note how many calls of each unit the backward that begins will reach, as autograd tells.

        Args:
            calls: unit -> number of calls, for units with hooked calls.
            partial: True if this backward may leave out a forward before it.
        """
        phase = self._phase
        phase.partial = partial
        if phase.counted and phase.order is not None:
            if calls:
                uses = Counter(phase.order.uses)
                self.live_units.due.update({index: count - uses[index] for index, count in calls.items()})
            # Calls that checkpointing may run again on this rank, beyond the most of any rank in learned forwards.
            more = self.unrecorded - self.known.unrecorded(phase.key) if self.unrecorded else self.unrecorded
            for (_, index), count in more.items():
                self.live_units.owed[index] += count
                self.passed_over = True  # so later backwards of this kind end with an exchange

    def note_reached(self, unit: Unit) -> None:
        """Note that backward has reached one of the calls that were given to :meth:`expect_reached`."""
        if unit.index in self.live_units.due:
            self.live_units.due[unit.index] -= 1

    def _leave(self, unit: Unit, call: str | None) -> None:
        """Note that the order lacks a unit that this rank needs. Raise if the user promised ``static_graph``."""
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

    def expect_in_backward(self, units: Sequence[Unit]) -> None:
        """Note units of the running forward that the next backward may use."""
        for unit in units:
            if not unit.persistent:
                self._phase.in_backward.add(unit.index)

    def expect_again(self, units: Sequence[Unit]) -> None:
        """Retain units that the running phase will use again, if the rest of its order does not gather them."""
        for unit in units:
            order = None if unit.persistent else self._phase.order
            if order is not None and order.find(unit.index, self._phase.position) is None:
                self._retain(unit.index)

    def in_forward_order(self) -> list[Unit]:
        """Return all units by first use in the next forward; units without hooks, which any module may use, first."""
        order = self.known.expected(self._forward)
        uses = order.uses if order is not None else ()
        if uses is not self._sorted_by[0]:
            # Reversed, because the first use counts.
            places = {index: place for place, index in reversed(list(enumerate(uses)))}
            found = sorted(self.units, key=lambda unit: (unit.hooked, places.get(unit.index, len(places))))
            self._sorted_by = uses, found
        return self._sorted_by[1]

    def end_phase(self) -> None:
        """Finish the phase: issue the rest of the order, and exchange at its end if ranks may differ."""
        phase = self._phase
        self._stop_counting()
        while phase.order is not None:
            fork = bool(phase.forks)
            stop = phase.forks[0] if fork else len(phase.order.uses)
            while phase.position < stop:
                for each in self._reach_use():
                    self._transitions[each].issue_gather()
                self._pass_use(stop, own=None)
            if not (fork or self._may_be_asked()) or self._ask_at_fork(None):
                break
        if phase.order is None:
            self._agree_on(None)
            self._remember_learned()
        else:
            # A rank that skips units may need them at other places than the other ranks in the next such phase.
            self.passed_over |= not phase.own.issuperset(phase.order.uses)
            self.reductions.end_reductions()
            self.known.remember(phase.key, phase.order)
        if not phase.silent:
            self._recent.add(phase.key)
            self._ended += 1
        self.live_units.release_retained()
        self.agreement.leave()

    def _may_be_asked(self) -> bool:
        """Return True if ranks exchange at the end of the order that is followed."""
        phase = self._phase
        if phase.order is None or self.static or phase.silent:
            return False
        return phase.brings_more or self.known.may_vary(phase.key, phase.order)

    def note_passed_over(self, anywhere: bool) -> None:
        """Mark the kinds of phases since the last step sync as varying, if a rank passed over units in them.

        Args:
            anywhere: True if any rank has passed over units since the last step sync.
        """
        # All kinds are marked: the vector of the step sync has one flag, which does not name the phase.
        for key in self._recent if anywhere else ():
            self.known.note_variation(key)
        self._recent.clear()
        self.passed_over = False

    def postpone(self, units: list[int], *, held: bool) -> None:
        """Expect gradients of these units at the end of backwards, because the step sync had to reduce them.

        ``held`` is True if all of these gradients were held (by ``no_sync`` or the accumulation window), and none was
        stray. Then only the orders of backwards that hold no gradients are changed.
        """
        trained = self.reductions.trained(units)
        for key in self._recent:
            # key[1] is True for a backward that holds its gradients, False for one that reduces them, and None for one
            # that accumulates none.
            if key[0] == "backward" and key[1] is not None and not (held and key[1]):
                self.known.postpone(key, trained)

    def _remember_learned(self) -> None:
        """Exchange the data of the learned phase between the ranks, and store its order."""
        phase = self._phase
        order = CollectiveOrder(tuple(phase.learned))
        if phase.key[0] == "backward":
            order = CollectiveOrder(order.uses, *self.reductions.end_learning(len(order.uses)))
        else:
            # A unit that is used twice may receive a second gradient: see `Reductions.count_gradient`.
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
        # The maximum over ranks: ranks that run modules in different orders may count a call at different uses.
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
        """Give up the running phase after an error, if a phase was ``running``, and release all units.

        The next phase begins with an exchange. If only this rank has failed, the other ranks still wait for an older
        message, and gloo ends the process if this rank sends one of another size.
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
        """Follow an order from a position on, with a prefetch plan for the rest of it."""
        phase = self._phase
        lookahead = None if phase.silent else self.known.expected(phase.then)
        uses = order.uses[position:]
        ahead = lookahead.uses if lookahead else ()
        # Units fetched for an expected phase that has not come are released, unless this phase or the next uses them.
        if not phase.silent:
            self.live_units.drop(self.live_units.planned.difference(uses, ahead))
        live = frozenset(self.live_units.planned)
        key = (uses, ahead, live)
        if key not in self._plans:
            if len(self._plans) > 64:  # bounds memory where orders do not repeat
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

    def _reach_use(self) -> tuple[int, ...]:
        """Come to the next use: issue the reductions before it. Return the units whose gathers are to be issued now."""
        phase = self._phase
        assert phase.plan is not None and phase.order is not None
        place = phase.position - phase.base
        used, dropped = phase.order.uses[phase.position], phase.plan.drop[place]
        if dropped and (len(dropped) > 1 or dropped[0] != used):  # makes room for the gathers
            self.live_units.drop([index for index in dropped if index != used])
        self.reductions.before_use(phase.position)
        return phase.plan.issue[place]

    def _pass_use(self, stop: int, own: int | None) -> None:
        """Pass the use of :meth:`_reach_use`, once its gathers are issued; this rank uses ``own`` at ``stop - 1``."""
        phase, position = self._phase, self._phase.position
        assert phase.plan is not None and phase.order is not None
        place, used = position - phase.base, phase.order.uses[position]
        ends = used in phase.plan.drop[place]
        self.live_units.planned.update(phase.plan.issue[place])
        phase.position += 1
        self.reductions.after_use(phase.position)
        if ends:
            self.live_units.planned.discard(used)  # before _retain, which gives up no planned unit
        # Uses of other ranks are retained: all but the last use, if that is this rank's own. None is retained at the
        # end of a phase.
        if own is not None and (used != own or phase.position < stop):
            self._retain(used)
        if phase.counted:
            self.live_units.owed[used] += phase.order.calls[position]
            if used in self.live_units.due:
                self.live_units.due[used] += 1
        if ends and self.units[used].users == 0:
            self.live_units.release_if_unused(self.units[used])

    def _retain(self, index: int) -> None:
        """Keep a unit that was gathered for other ranks, because this rank may still use it.

        ``stage3_max_live_parameters`` limits such units only if this rank can ask for them again: while learning, after
        leaving the order, or in a phase that ends with an exchange. In other phases there is no limit.
        """
        asks = self._phase.order is None or self._phase.left != _NONE or self._may_be_asked()
        self.live_units.retain(index, bounded=asks)

    # Exchanges at forks and at the end of orders.

    def _asking(self, unit: Unit | None) -> str:
        """Describe this rank's exchange, for errors."""
        return f"asking for unit {unit.name!r}" if unit is not None else f"at the end of {self.agreement.where}"

    def _ask_at_fork(self, unit: Unit | None) -> bool:
        """Exchange the units that ranks need next, and continue with an order that has them.

        See [Note: how ranks may diverge].

        Args:
            unit: unit that this rank needs next; None if it needs none in this phase any more.

        Returns:
            True if the phase is over.
        """
        phase = self._phase
        assert phase.order is not None
        order = phase.order
        place = phase.position
        self.reductions.before_use(place)
        # Sent only by a rank that needs no unit any more. If ranks learn from here on, `end_learning` sends strays.
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
        # If ranks take different ways, as through experts, there are as many orders as combinations. If the units of
        # the order and the wanted ones together are within ``stage3_max_live_parameters``, ranks go on with the order,
        # and the units that they need at its end are appended to it.
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
        phase.forks = [fork for fork in self.known.forks(phase.key, branch) if fork > place]  # forks still ahead
        return False

    def _postpone_strays(self) -> None:
        """Reduce stray gradients on all ranks, and expect them at the end of such backwards from now on."""
        phase = self._phase
        assert phase.order is not None
        strays = self.reductions.send_strays()
        self.known.postpone(phase.key, strays)
        phase.order = phase.order.postpone(strays)  # `end_phase` stores this order again

    def _learn_on(self, place: int, left: set[int], doing: str, *, union: bool) -> None:
        """Learn a new order, because no known order goes on from ``place`` with the units that ranks need.

        Args:
            place: position of this exchange in the order.
            left: positions at which ranks left the order; -1 for a rank that has not.
            doing: description of this rank's exchange, for the log.
            union: True if the units of the order and the wanted ones are within ``stage3_max_live_parameters``.
        """
        phase = self._phase
        assert phase.order is not None
        if self.log_relearning:
            _log.warning(
                "%s: no known order of %s has the units needed at use %d; ranks learn the order anew",
                doing,
                self.agreement.where,
                phase.position,
            )
        # If all ranks left the order at one position, no rank used the units behind it, and the new order omits them.
        since = min(left) if len(left) == 1 and left != {_NONE} else place
        phase.learned = list(phase.order.uses[:since])
        phase.calls = [0] * since
        phase.places = {unit: place for place, unit in enumerate(phase.learned)}
        # Some ranks left the order early, and others used the units up to here. In the union, the units wanted early
        # come last, and a rank that wants them early retains all units before them. If these are more than
        # ``stage3_max_live_parameters``, the position where ranks left is stored as a fork instead.
        apart = {each for each in left if _NONE < each < place} if since == place and not union else set()
        phase.new_fork = phase.order.uses[: min(apart)] if apart else None
        self.known.note_variation(phase.key)  # even if the learned order is one that is known already
        self.reductions.forget_sent(since)
        self._stop_following()
        # Release units that were gathered in vain, so that a use of them from here on enters the new order.
        if since < place:
            self.live_units.release_retained()

    # Learning.

    def _stop_following(self) -> None:
        """Learn the order of this phase from here on."""
        phase = self._phase
        phase.silent = False  # a silent forward that touches weights outside of its module needs all ranks
        self._stop_counting()
        phase.order = None
        phase.plan = None
        phase.forks = []
        phase.left = _NONE
        self.live_units.release_planned()
        self.reductions.change(None)

    def _agree_on(self, unit: Unit | None) -> None:
        """Take part in learning rounds until this rank's unit is gathered; with None, until no rank needs a unit."""
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
            self._transitions[target].issue_gather()
            phase.places[target] = len(phase.learned)
            phase.learned.append(target)
            phase.calls.append(0)
            if target == want:
                return
            if unit is None:
                self.live_units.release_if_unused(self.units[target])  # gathered for other ranks only
            else:
                self._retain(target)


class LiveUnits:
    """Units that stay gathered while no module uses them.

    Attributes:
        planned: units that the prefetch plan has fetched or keeps; equal on all ranks.
        retained: units gathered for other ranks that this rank may still use, the oldest first; differs between ranks.
        numel: number of elements of each unit.
        owed: for each unit, the calls that the uses passed so far served, minus this rank's calls. The unit stays
            gathered while the number is positive: see [Note: how ranks may diverge].
        due: unit -> the calls that the running backward has yet to reach, minus the uses that are left in the order.
            The unit stays gathered while the number is positive.
    """

    def __init__(self, units: Sequence[Unit], transitions: Sequence[Transitions], live: int) -> None:
        """Start with no unit kept; ``live`` is ``stage3_max_live_parameters``, in elements."""
        self.planned: set[int] = set()
        self.retained: dict[int, None] = {}
        self.numel: list[int] = []
        self.owed = [0] * len(units)
        self.due: dict[int, int] = {}
        self._units = units
        self._transitions = transitions
        self._live = live
        self.note_sizes()

    def note_sizes(self) -> None:
        """Read the sizes of the units again."""
        self.numel = [unit.numel for unit in self._units]

    def fit(self, units: Iterable[int]) -> bool:
        """Return True if these units together have at most ``stage3_max_live_parameters`` elements."""
        return sum(self.numel[index] for index in set(units)) <= self._live

    def retain(self, index: int, *, bounded: bool) -> None:
        """Keep a unit that was gathered for other ranks, because this rank may use it later in the phase.

        Args:
            index: index of the unit.
            bounded: True to release the oldest retained units while planned and retained units exceed
                ``stage3_max_live_parameters``.
        """
        # A dict keeps the order of insertion, so the loop below releases the oldest units first.
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
        """Reshard a unit that nothing needs any more; guard a unit that stays gathered without a user."""
        index = unit.index
        needed = index in self.planned or index in self.retained or unit.users > 0 or unit.persistent
        if not (needed or self.owed[index] > 0 or self.due.get(index, 0) > 0) and unit.state is not UnitState.SHARDED:
            self._transitions[index].reshard()
        elif unit.users == 0 and unit.state is UnitState.UNSHARDED and not unit.persistent:
            # Without the guard, code outside of the unit's modules could use a weight unnoticed, and backward would
            # not gather the unit for it.
            unit.guard_values()

    def drop(self, indices: Iterable[int]) -> None:
        """Take units out of the plan, and release the units that nothing else needs."""
        gone = sorted(indices)
        self.planned.difference_update(gone)
        for index in gone:
            self.release_if_unused(self._units[index])

    def release_planned(self) -> None:
        """Release all units that only the plan keeps; the same units on every rank."""
        self.drop(set(self.planned))

    def forget_owed(self) -> None:
        """Clear the counts of calls, and release the units that only the counts kept."""
        kept = sorted({index for index, calls in enumerate(self.owed) if calls > 0}.union(self.due))
        self.owed[:] = [0] * len(self.owed)
        self.due.clear()
        for index in kept:
            self.release_if_unused(self._units[index])

    def release_retained(self) -> None:
        """Release the units that were gathered for other ranks."""
        gone = sorted(self.retained)
        self.retained.clear()
        for index in gone:
            self.release_if_unused(self._units[index])
