"""One simulated rank: zeropp's own schedule and reductions on units without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.order.world import Agreement, CommStreams, Event, Unlike, World
from zeropp.comm.communicators import History
from zeropp.engine.backward import BackwardUses
from zeropp.order.known_orders import IssueHash, PhaseKey, Reach
from zeropp.order.prefetch import Limits
from zeropp.order.reductions import Reductions
from zeropp.order.schedule import Schedule
from zeropp.params.loss_scale import LossScale, LossScaling
from zeropp.params.unit import UnitState

__all__ = ["ENDLESS", "Rank"]

ENDLESS = Limits(prefetch=100, live=1000, reuse=1000)


@dataclass
class _Message:
    count: int
    nbytes: int = 1
    freed: bool = False


@dataclass
class _Work:
    collective: tuple[object, ...]
    message: _Message | None = None
    read: Event | None = None


@dataclass
class _Gradient:
    """A gradient that counts backwards instead of summing values."""

    unit: int
    delivered: Counter[int]
    trained: tuple[bool, ...] = (True,)
    stray: int = 0
    held: int = 0

    def has_stray(self) -> bool:
        return self.stray > 0

    def has_unsent(self) -> bool:
        return self.stray > 0 or self.held > 0

    def pack(self, scale: float, *, hold: bool) -> _Message | None:
        self.held, self.stray = self.held + self.stray, 0
        if hold:
            return None
        message, self.held = _Message(self.held), 0
        return message

    def prepare_reduce(self, message: _Message, scale: float, *, hold: bool, last: _Work | None) -> _Work:
        if last is not None and last.message is not None:
            assert last.message.freed, f"the reduction of unit {self.unit} begins again while it is in flight"
        self.delivered[self.unit] += message.count
        return _Work(("reduce", self.unit), message)

    def free_message(self, message: _Message) -> None:
        message.freed = True


@dataclass
class _Unit:
    index: int
    numel: int
    gradients: list[_Gradient]
    persistent: bool = False
    users: int = 0
    entered: int = 0
    hooked: bool = True
    version: int = 0
    _event: Event | None = None

    def __post_init__(self) -> None:
        self.state = self.resting

    @property
    def resting(self) -> UnitState:
        """The state of the unit before training and after each step."""
        return UnitState.GATHERED if self.persistent else UnitState.SHARDED

    @property
    def name(self) -> str:
        return f"unit {self.index}"

    @property
    def trained(self) -> tuple[bool, ...]:
        return tuple(trained for gradient in self.gradients for trained in gradient.trained)

    def under_way(self) -> Iterator[tuple[str, Callable[[float], bool]]]:
        if self._event is not None:
            yield "gather", self.wait_for_unshard

    @property
    def gathering(self) -> Event | None:
        return self._event

    def has_arrived(self) -> bool:
        return self._event is None

    def prepare_gather(self, comm_streams: CommStreams) -> tuple[_Work, None]:
        return _Work(("gather", self.index)), None

    def note_gather(self, event: Event) -> None:
        self._event = event
        if self.state is UnitState.SHARDED:
            self.state = UnitState.GATHERED

    def wait_for_unshard(self, timeout: float) -> bool:
        if self._event is not None:
            self._event.wait(timeout)
            self._event = None
        return True

    def unshard(self) -> None:
        assert self.state is not UnitState.SHARDED, f"{self.name} is used, but was not gathered"
        self.state = UnitState.UNSHARDED

    def guard_values(self) -> None:
        self.state = UnitState.GATHERED

    def reshard(self, comm_streams: CommStreams) -> None:
        assert self._event is None, f"{self.name} is released while its gather is in flight"
        self.state = UnitState.SHARDED


@dataclass
class Rank:
    """The engine of one simulated rank.

    Args:
        world: the world of all ranks.
        number: number of this rank.
        sizes: elements of each unit.
        limits: limits of the prefetch plan.
        static: True if all phases of a kind are promised to be alike (``static_graph``).
        persistent: units that are never gathered.
        inside: units of the module that forward calls; all units by default.
        modules: module path -> unit; by default one module per unit.
        delivered: for each unit, the number of gradients that were reduced.
        given: for each unit, the number of gradients that arrived on this rank and were not dropped after an error.
    """

    world: World
    number: int
    sizes: Sequence[int]
    limits: Limits = ENDLESS
    static: bool = False
    persistent: Sequence[int] = ()
    inside: Sequence[int] | None = None
    modules: dict[str, int] | None = None
    delivered: Counter[int] = field(default_factory=Counter)
    given: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        gradients = [_Gradient(index, self.delivered) for index in range(len(self.sizes))]
        self.units: Any = [
            _Unit(index, numel, [gradients[index]], index in self.persistent) for index, numel in enumerate(self.sizes)
        ]
        agreement: Any = Agreement(self.world, self.number)
        comm_streams: Any = CommStreams(self.world, self.number)
        self.agreement, self.issued = agreement, IssueHash(History())
        self.reductions = Reductions(self.units, comm_streams, agreement, self.issued, LossScale(LossScaling(), 1.0))
        self.schedule = Schedule(
            self.units, comm_streams, self.reductions, agreement, self.issued, self.limits,
            self.reach, static=self.static, log_relearning=False,
        )  # fmt: skip
        self.backward_uses = BackwardUses(self.units, self.schedule, self.reductions)
        self.outstanding: list[PhaseKey] = []
        self.since = 0
        self._numbers = {frozenset[int](): 0}  # sets of frozen units -> their numbers
        self._trained_set = 0

    def reach(self, key: PhaseKey) -> Reach:
        """Return the units that a forward may gather, and the modules that use them."""
        inside = range(len(self.sizes)) if self.inside is None else self.inside
        units = frozenset(index for index in inside if index not in self.persistent)
        named = {f"m{index}": index for index in units} if self.modules is None else self.modules
        return Reach(units, frozenset(name for name, index in named.items() if index in units))

    def enter(self, index: int, name: str | None = None) -> None:
        """Begin the forward of a module of a unit."""
        unit = self.units[index]
        unit.users += 1
        unit.entered += 1
        self.schedule.use(unit, (name or f"m{index}") if unit.entered == 1 else None)
        assert unit.state is UnitState.UNSHARDED, f"{unit.name} is used, but is {unit.state}"

    def leave(self, index: int) -> None:
        """End the forward of a module of a unit."""
        unit = self.units[index]
        unit.users -= 1
        unit.entered -= 1
        self.schedule.live_units.release_if_unused(unit)

    def freeze(self, units: Sequence[int]) -> None:
        """Freeze these units and train all others, like :class:`zeropp.access.requires_grad.Trainability`."""
        frozen = frozenset(units)
        self.agreement.exchange_objects(frozen, "changing which parameters are trained")
        for unit in self.units:
            unit.gradients[0].trained = (unit.index not in frozen,)
        if frozen not in self._numbers:
            self._numbers[frozen] = len(self._numbers)
            self.schedule.known.forget_forwards()
        self._trained_set = self._numbers[frozen]
        self.reductions.update_trained()

    def forward(
        self, uses: Sequence[int], *, grad: bool = True, fails: int | None = None, leaves: Sequence[int] = ()
    ) -> bool:
        """Run a forward in which each of ``uses`` is a module that is entered and left.

        Args:
            uses: units in order.
            grad: True if a graph is recorded.
            fails: number of uses after which a user error ends the forward; one more than all uses is its very end.
            leaves: units whose modules record no graph here, so that no backward reaches them.

        Returns:
            True if the forward ended without an error.
        """
        self._begin_forward(grad)
        if fails == 0:
            return self.recover()
        for done, index in enumerate(uses, 1):
            self.enter(index)
            if done == fails:
                return self.recover()
            self.leave(index)
            if grad and index not in leaves:
                self.backward_uses.expect_in_backward([self.units[index]], whole=False)
        if fails is not None:
            return self.recover()
        self.schedule.end_phase()
        self._guard_all()
        return True

    def _guard_all(self) -> None:
        for unit in self.units:
            if unit.state is UnitState.UNSHARDED:
                unit.state = UnitState.GATHERED

    def recover(self) -> bool:
        """Recover from an error in a pass as an engine does, and drop the gradients as a user does. Return False."""
        self.outstanding, self.since = [], 0
        self.backward_uses.drop_uses()
        self.schedule.abort(running=True)
        self.reductions.drop_reductions()
        self._guard_all()
        for unit in self.units:
            for gradient in unit.gradients:
                gradient.stray = gradient.held = 0
        self.given = Counter(self.delivered)
        return False

    def _begin_forward(self, grad: bool) -> None:
        key: PhaseKey = ("forward", "", True, grad)
        outstanding = [*([] if self.since else self.outstanding), key]
        if grad:
            if self.since:
                self.schedule.unrecorded.clear()
            self.since, self.outstanding = 0, outstanding
        self.schedule.begin_phase(key, self._backward_key(outstanding) if grad else None)

    def backward(
        self,
        uses: Sequence[int],
        *,
        last: bool = True,
        no_sync: bool = False,
        late: Collection[int] = (),
        again: Sequence[int] = (),
        fails: int | None = None,
    ) -> bool:
        """Run a backward in which each of ``uses`` is gathered and then receives its gradient.

        A unit that occurs twice receives two gradients.

        Args:
            uses: units in order.
            last: True if a step follows.
            no_sync: True if the backward runs inside ``no_sync``.
            late: units whose gradients come after all uses.
            again: units whose modules run once more, as by checkpointing, when the backward first reaches one of them.
            fails: number of uses after which a user error ends the backward; one more than all uses is its very end.

        Returns:
            True if the backward ended without an error.
        """
        self.reductions.last, self.reductions.no_sync = last, no_sync
        self.schedule.begin_phase(self._backward_key(self.outstanding), None)
        said = self.world.said(self.number)
        for unit in self.units:
            if unit.persistent:
                self.schedule.use(unit)
        self.backward_uses.fetch_known_uses()
        if fails == 0:
            return self.recover()
        first = next((index for index in uses if index in again), None)
        for done, index in enumerate(uses, 1):
            unit = self.units[index]
            if index == first:
                self._run_again(again)
                first = None
            self.backward_uses.come_to(unit.name)
            self.backward_uses.use(unit, unit.name, lasting=not all(unit.trained))
            assert unit.state is UnitState.UNSHARDED, f"{unit.name} is used, but is {unit.state}"
            if done == fails:
                return self.recover()
            if index not in late:
                self._give(unit)
            if not all(unit.trained):
                self.backward_uses.call_ended(unit)
        for index in set(late).intersection(uses):
            self._give(self.units[index])
        if fails is not None:
            return self.recover()
        self.backward_uses.give_up()
        self.schedule.end_phase()
        self._guard_all()
        if self.world.said(self.number) > said:
            strays = [unit.name for unit in self.units if unit.gradients[0].has_stray()]
            assert not strays, f"a backward with an exchange left gradients of {strays} to the step sync"
        self.since += 1
        return True

    def _run_again(self, indices: Sequence[int]) -> None:
        """Run forwards inside a backward, which uses these units next."""
        for index in indices:
            self.backward_uses.come_to(self.units[index].name)
            self.enter(index)
            self.schedule.expect_again([self.units[index]])
            self.leave(index)

    def _give(self, unit: Any) -> None:
        """Deliver a gradient of the unit if the unit is trained."""
        if not all(unit.trained):
            return
        unit.gradients[0].stray += 1
        self.given[unit.index] += 1
        if self.reductions.count_gradient(unit.index, 0):
            self.reductions.send_complete()
            self.backward_uses.complete.append(unit)

    def _backward_key(self, outstanding: Sequence[PhaseKey]) -> PhaseKey:
        later = (self.since,) if self.since else ()
        return ("backward", self.reductions.holding, self._trained_set, *outstanding, *later)

    def step(self) -> None:
        """Run the step sync, like :class:`zeropp.optimizer.step_sync.StepSync`, and issue refreshes."""
        while late := self._late():
            for index in late:
                self.reductions.send_unsent(index)
        for unit in self.units:
            unit.version += 1
        self.schedule.live_units.release_planned()
        # Every unit is refreshed, as if each had cached weights. No rank waits for these refreshes.
        for unit in self.schedule.in_forward_order():
            self.world.issue(self.number, ("refresh", unit.index))

    def _late(self) -> list[int]:
        unsent = [any(g.has_unsent() for g in unit.gradients) for unit in self.units]
        stray = any(g.has_stray() for unit in self.units for g in unit.gradients)
        account = (self.issued.value, unsent, stray, self.schedule.passed_over)
        rows = self.agreement.exchange_objects(account, "step")
        if len({value for value, *_ in rows}) > 1:
            raise Unlike(f"ranks have issued different things: {self.world.issued}")
        late = [index for index in range(len(self.sizes)) if any(row[1][index] for row in rows)]
        if late:
            self.schedule.postpone(late, held=not any(row[2] for row in rows))
        else:
            self.schedule.note_passed_over(any(row[3] for row in rows))
        return late
