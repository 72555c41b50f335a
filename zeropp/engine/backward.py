"""Uses of units that no forward of their modules brackets: by a backward, by code outside, by forwards that repeat."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator, Sequence, Set
from itertools import chain

from torch import Tensor, nn

from zeropp._compat import leaves_out
from zeropp.engine.hooks import BackwardCall
from zeropp.order.known_orders import PhaseKey
from zeropp.order.reductions import Reductions
from zeropp.order.schedule import Schedule
from zeropp.params.unit import Unit

__all__ = ["TOLD_APART", "BackwardUses", "OutOfModuleUses", "PinnedUnits"]


# Uses of units.

TOLD_APART = 8  # forwards before a backward, and backwards after them, by which kinds of backwards are told apart


class BackwardUses:
    """Units in use by the running backward.

    A unit is done with when its gradients have come and, if some of it is frozen, the inputs of every call theirs. The
    call may still read weights after their last gradient: those that its forward detached, or those that checkpointing
    inside the module computes with once more. So the unit stays until backward comes to a module outside of this one.

    Attributes:
        complete: units in use whose gradients have come.
        fresh: for each unit, calls that checkpointing has made in this backward, and that it has not come to yet.
        last_gradient: of the parameter that had a gradient last, its unit and its position among the trainable ones.
    """

    def __init__(self, units: Sequence[Unit], schedule: Schedule, reductions: Reductions) -> None:
        self._units = units
        self._schedule = schedule
        self._reductions = reductions
        # Unit in use -> calls of frozen modules that backward has reached and not left. Zero is an entry, too: the unit
        # stays until its gradients have come.
        self._calls: dict[int, int] = {}
        # Unit in use -> how paths begin inside the module whose call backward has reached, "" inside the root; and
        # inside modules that this one runs.
        self._inside: dict[int, tuple[str, ...]] = {}
        self.complete: list[Unit] = []
        self._whole: dict[int, None] = {}
        self._made: dict[int, list[weakref.ref[BackwardCall]]] = {}  # of each unit, calls that a backward may come to
        self.fresh: dict[int, weakref.WeakSet[BackwardCall]] = {}
        # The last call of each forward since the last backward; None if its calls were not noted.
        self._forwards: deque[weakref.ref[BackwardCall] | None] = deque(maxlen=TOLD_APART)
        self._last_call: weakref.ref[BackwardCall] | None = None
        self.last_gradient = 0, 0

    def accumulates(self) -> bool:
        """Tell whether the running backward is to bring gradients to parameters."""
        # The parameter that had the last gradient mostly has the next one, too, and then no other is looked at.
        index, position = self.last_gradient
        first = _trainable(self._units[index])[position : position + 1]
        others = (parameter for unit in self._units for parameter in _trainable(unit))
        return not leaves_out(p for p in chain(first, others) if p.requires_grad)

    def expect_in_backward(self, units: Sequence[Unit], *, whole: bool) -> None:
        """The next backward may use these.

        Args:
            units: used by the running forward.
            whole: fetch them for all of it: nothing will tell when they are needed or done with.
        """
        indices = [unit.index for unit in units]
        self._schedule.expect_in_backward(indices)
        if whole:
            # A call whose outputs nobody could hook: no event of backward will name it.
            self._whole.update(dict.fromkeys(indices))

    def expect_call(self, call: BackwardCall, outputs: list[Tensor]) -> None:
        """A backward may come to this call, and perhaps to others of the same units."""
        call.note_outputs(outputs)
        self._last_call = weakref.ref(call)
        for unit in call.hooked.units:
            if not unit.persistent:
                self._made.setdefault(unit.index, []).append(weakref.ref(call))

    def forward_ended(self, *, first: bool) -> None:
        """A forward with a graph is over; ``first`` if it is the first one since a backward."""
        if first:
            self._forwards.clear()
        self._forwards.append(self._last_call)
        self._last_call = None

    def _is_partial(self) -> bool:
        """Tell whether the running backward may leave out one of several forwards before it."""
        if len(self._forwards) < 2:
            return False
        calls = [ref() if ref is not None else None for ref in self._forwards]
        return None in self._forwards or any(call is not None and not call.is_to_come() for call in calls)

    def expect_fresh_call(self, call: BackwardCall) -> None:
        """Checkpointing has run a module again in this backward, and may come to this call while it lives."""
        for unit in call.hooked.units:
            if not unit.persistent:
                self.fresh.setdefault(unit.index, weakref.WeakSet()).add(call)

    def note_reached(self, call: BackwardCall) -> None:
        """Backward comes to a call."""
        for unit in call.hooked.units:
            if call.expected:
                self._schedule.note_reached(unit)
            if unit.index in self.fresh:
                self.fresh[unit.index].discard(call)

    def forget_graphs(self) -> None:
        """No backward of what has run so far is to come."""
        self._whole.clear()
        self._made.clear()
        self._forwards.clear()

    def fetch_known_uses(self) -> None:
        """Fetch what is needed for the whole backward, last things first."""
        # Now: inside a backward that checkpointing runs in this one, autograd would answer for that.
        to_come: dict[int, int] = {}
        for index, made in self._made.items():
            self._made[index] = [ref for ref in made if ref() is not None]
            to_come[index] = sum(call.is_to_come() for ref in made if (call := ref()) is not None)
        self._schedule.expect_reached(to_come, partial=self._is_partial())
        # Nothing tells the true order, and backward usually goes through the model from its end.
        for index in sorted(self._whole, reverse=True):
            self.use(self._units[index])

    def use(self, unit: Unit, path: str = "", run_by: Set[str] = frozenset(), *, lasting: bool = False) -> None:
        """Have a unit for this backward.

        Args:
            unit: to have.
            path: of the module whose call needs it.
            run_by: as in :meth:`come_to`, which is called first.
            lasting: the call needs it until the gradients of its inputs have come. If those need no gradient, nothing
                signals that it is done before backward ends.
        """
        # One user for the whole backward, however many calls and outputs ask for the unit; calls are counted apart.
        if unit.index not in self._calls:
            self._calls[unit.index] = 0
            unit.users += 1
            self._schedule.use(unit)
        self._calls[unit.index] += lasting
        # A module inside of another one of the same unit leaves the outer one's path.
        if not self._is_inside(unit, path, run_by):
            self._inside[unit.index] = (path and f"{path}.",)

    def call_ended(self, unit: Unit) -> None:
        """The inputs of a call have their gradients."""
        # A call may be left twice: two autograd.grad inside one forward count as one backward here.
        if self._calls.get(unit.index, 0) > 0:
            self._calls[unit.index] -= 1
        self.end_use(unit)

    def come_to(self, path: str, run_by: Set[str] = frozenset()) -> None:
        """Backward comes to a module: calls of modules that are not around it are over, and their units are let go.

        Args:
            path: of the module.
            run_by: see :class:`zeropp.engine.hooks.HookedModule`.
        """
        if self.complete:
            complete = self.complete
            self.complete = []
            for unit in complete:
                if self._is_inside(unit, path, run_by):
                    self.complete.append(unit)
                else:
                    self.end_use(unit)
        if run_by:
            for index, around in self._inside.items():
                if not run_by.isdisjoint(around) and f"{path}." not in around:
                    self._inside[index] = (*around, f"{path}.")

    def _is_inside(self, unit: Unit, path: str, run_by: Set[str]) -> bool:
        """Tell whether a module is run inside the one whose call has a unit in use."""
        around = self._inside.get(unit.index, (".",))  # no path begins with a dot
        return path.startswith(around) or not run_by.isdisjoint(around)

    def end_use(self, unit: Unit) -> None:
        """Let go of a unit if this backward is done with it."""
        index = unit.index
        # Gradients alone do not tell for a frozen weight: it is read until the inputs of its module have theirs. FSDP2
        # watches the inputs of all that it shards; here they are asked only where something is frozen.
        if index not in self._whole and self._calls.get(index) == 0 and self._reductions.complete(index):
            # Its gradients have come, though this backward has yet to come to calls that it has just made.
            if self.fresh.get(index):
                self._schedule.expect_again([unit])
            # Before the release, so that a further use of the unit begins anew.
            del self._calls[index]
            self._inside.pop(index, None)
            self._release(unit)

    def give_up(self) -> bool:
        """Let go of what is left; returns whether anything was."""
        # Units that were fetched for the whole backward, and units of which a gradient or an input's never came, since
        # it is not in this graph.
        left = [self._units[index] for index in self._calls]
        self._calls.clear()
        self._inside.clear()
        self.complete.clear()
        self.fresh.clear()
        for unit in left:
            self._release(unit)
        return bool(left)

    def drop_uses(self) -> None:
        """A pass failed, and everything is released elsewhere."""
        self._calls.clear()
        self._inside.clear()
        self.complete.clear()
        self.fresh.clear()
        self.forget_graphs()

    def _release(self, unit: Unit) -> None:
        unit.users -= 1
        self._schedule.live_units.release_if_unused(unit)


class OutOfModuleUses:
    """Units that code outside of their modules has touched in the running pass; they stay gathered until it ends."""

    def __init__(self, units: Sequence[Unit], schedule: Schedule) -> None:
        self._units = units
        self._schedule = schedule
        self._now: set[int] = set()
        self._seen: dict[PhaseKey, set[int]] = {}

    def use(self, unit: Unit) -> None:
        """Have a unit for the rest of the pass."""
        # A persistent unit is never released, and needs no user; it may have to be unsharded, though.
        if unit.index not in self._now and not unit.persistent:
            self._now.add(unit.index)
            unit.users += 1
            self._schedule.use(unit, "")
        else:
            self._schedule.use(unit)

    def expected(self) -> list[Unit]:
        """Units touched in this kind of pass, now or before.

        Once seen, always expected: the next time the unit may happen to be present, and no touch be noticed.
        """
        # By kind: what evaluation touches says nothing of training.
        seen = self._seen.setdefault(self._schedule.key, set())
        seen |= self._now
        return [self._units[index] for index in sorted(seen)]

    def let_go(self) -> None:
        """The pass is over."""
        for index in sorted(self._now):
            self._units[index].users -= 1
            self._schedule.live_units.release_if_unused(self._units[index])
        self._now.clear()

    def drop_uses(self) -> None:
        """The pass failed, and everything is released elsewhere."""
        self._now.clear()


class PinnedUnits:
    """Units in use from a first forward of a module inside :meth:`until_left` to its end, however many come.

    So are those of a stage through which all micro-batches go; see [Note: layer-major].
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._now: dict[int, Unit] | None = None

    def has(self, unit: Unit) -> bool:
        """Tell whether a unit is kept, so that a module's use need not ask for it."""
        # Nor may it: the order would take it for a use that lies ahead, as that of a tied head, and all between be
        # gathered for it.
        return self._now is not None and unit.index in self._now

    def keeps(self, unit: Unit) -> bool:
        """Keep a unit whose module's use is over; returns whether the use goes on from here."""
        if self._now is None or unit.index in self._now:
            return False
        self._now[unit.index] = unit
        return True

    @contextlib.contextmanager
    def until_left(self) -> Iterator[None]:
        """Keep what is used inside; not after an error, which ends the pass and all uses with it."""
        self._now = {}
        try:
            yield
            for unit in self._now.values():
                unit.users -= 1
                self._schedule.live_units.release_if_unused(unit)
        finally:
            self._now = None


def _trainable(unit: Unit) -> list[nn.Parameter]:
    return [parameter for buffer in unit.trainable_buffers for parameter in buffer.parameters]


# Gradients that wait for the optimizer.
