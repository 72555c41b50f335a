"""Uses of units outside of a single forward of their modules: in backward, by other code, and over several forwards.

[Note: backwards that accumulate nothing] ``torch.autograd.grad`` and ``backward(inputs=...)`` may run through the model
and bring no gradient to any trained parameter, for a gradient penalty or an adversarial attack on inputs, for example.
Such a backward is a kind of pass of its own. It is no micro-batch, and a later backward may still go through the same
forwards. It reduces nothing, so gradients that earlier backwards hold stay held.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator, Sequence, Set
from itertools import chain

from torch import Tensor, nn

from zeropp._compat import leaves_out, unguarded
from zeropp.engine.hooks import BackwardCall
from zeropp.order.known_orders import PhaseKey
from zeropp.order.reductions import Reductions
from zeropp.order.schedule import Schedule
from zeropp.params.unit import Unit

__all__ = ["MAX_FORWARDS_IN_KEY", "BackwardUses", "OutOfModuleUses", "PinnedUnits"]


# Limit in the PhaseKey of a backward: the key lists the last 8 forwards that the backward may go through, and counts
# earlier backwards through these forwards up to 8.
MAX_FORWARDS_IN_KEY = 8


class BackwardUses:
    """The units that the running backward uses.

    Backward needs a unit until its gradients have come and, if some of its parameters are frozen, until the inputs of
    every call of its modules have their gradients. A call may read weights even after their last gradient: weights
    that its forward detached, or weights for a recomputation by checkpointing inside the module. So the unit stays
    gathered until backward reaches a module outside of the one that used the unit.

    Attributes:
        complete: units in use whose gradients have come.
        fresh: unit index -> calls that checkpointing has made in this backward and that backward has yet to reach.
        last_gradient: unit index, and position among its trainable parameters, of the gradient that completed a unit
            last.
    """

    def __init__(self, units: Sequence[Unit], schedule: Schedule, reductions: Reductions) -> None:
        self._units = units
        self._schedule = schedule
        self._reductions = reductions
        # Index of a unit in use -> number of calls with frozen parameters that backward has reached and not left. An
        # entry of zero means that the unit is in use until its gradients have come.
        self._calls: dict[int, int] = {}
        # Index of a unit in use -> path prefixes. A module whose path starts with one of them runs inside the call that
        # uses the unit. The called module gives the first prefix ("" for the root, which contains all modules).
        self._inside: dict[int, tuple[str, ...]] = {}
        self.complete: list[Unit] = []
        self._whole: dict[int, None] = {}  # units that stay gathered during the whole next backward
        self._made: dict[int, list[weakref.ref[BackwardCall]]] = {}  # unit index -> calls that a backward may reach
        self.fresh: dict[int, weakref.WeakSet[BackwardCall]] = {}
        # For each forward since the last backward, its last call; None if its calls were not noted.
        self._forwards: deque[weakref.ref[BackwardCall] | None] = deque(maxlen=MAX_FORWARDS_IN_KEY)
        self._last_call: weakref.ref[BackwardCall] | None = None
        self.last_gradient = 0, 0

    def accumulates(self) -> bool:
        """Return True if the running backward brings gradients to trained parameters."""
        # The parameter with the last gradient is checked first: usually it has the next one, too, and ends the search.
        index, position = self.last_gradient
        first = _trainable(self._units[index])[position : position + 1]
        others = (parameter for unit in self._units for parameter in _trainable(unit))
        with unguarded():
            return not leaves_out(p for p in chain(first, others) if p.requires_grad)

    def expect_in_backward(self, units: Sequence[Unit], *, whole: bool) -> None:
        """Note units that the next backward may use.

        Args:
            units: units that the running forward has used.
            whole: True to keep them gathered for the whole backward, because no hook will signal when it needs them.
        """
        self._schedule.expect_in_backward(units)
        if whole:
            # No output of the call could be hooked, so no hook will run when backward reaches the call.
            self._whole.update(dict.fromkeys([unit.index for unit in units]))

    def expect_call(self, call: BackwardCall, outputs: list[Tensor]) -> None:
        """Note a call with hooked outputs, which a backward may reach."""
        call.note_outputs(outputs)
        self._last_call = weakref.ref(call)
        for unit in call.hooked.units:
            if not unit.persistent:
                self._made.setdefault(unit.index, []).append(weakref.ref(call))

    def forward_ended(self, *, first: bool) -> None:
        """Note the end of a forward with a graph; ``first`` is True for the first one since a backward."""
        if first:
            self._forwards.clear()
        self._forwards.append(self._last_call)
        self._last_call = None

    def _is_partial(self) -> bool:
        """Return True if the running backward may leave out one of several forwards before it."""
        if len(self._forwards) < 2:
            return False
        calls = [ref() if ref is not None else None for ref in self._forwards]
        return None in self._forwards or any(call is not None and not call.is_to_come() for call in calls)

    def expect_fresh_call(self, call: BackwardCall) -> None:
        """Note a call that checkpointing has made in this backward. Backward may reach the call while it exists."""
        for unit in call.hooked.units:
            if not unit.persistent:
                self.fresh.setdefault(unit.index, weakref.WeakSet()).add(call)

    def note_reached(self, call: BackwardCall) -> None:
        """Note that backward has reached a call."""
        for unit in call.hooked.units:
            if call.expected:
                self._schedule.note_reached(unit)
            if unit.index in self.fresh:
                self.fresh[unit.index].discard(call)

    def forget_graphs(self) -> None:
        """Forget all calls made so far, because no backward may go through their graphs any more."""
        self._whole.clear()
        self._made.clear()
        self._forwards.clear()

    def fetch_known_uses(self) -> None:
        """Count the calls to come, and gather the units that the whole backward needs."""
        # Ask autograd now. Inside a nested backward, as of checkpointing, autograd would answer for the nested one.
        to_come: dict[int, int] = {}
        for index, made in self._made.items():
            there = []
            coming = 0
            for ref in made:
                if (call := ref()) is not None:
                    there.append(ref)
                    coming += call.is_to_come()
            self._made[index] = there
            to_come[index] = coming
        self._schedule.expect_reached(to_come, partial=self._is_partial())
        # Highest index first: the true order is unknown, and backward usually goes through the model from its end.
        for index in sorted(self._whole, reverse=True):
            self.use(self._units[index])

    def use(self, unit: Unit, path: str = "", run_by: Set[str] = frozenset(), *, lasting: bool = False) -> None:
        """Use a unit in this backward: gather it if it is not in use yet.

        Args:
            unit: unit to use.
            path: path of the module whose call needs the unit.
            run_by: path prefixes of modules that ran this one. The caller has passed them to :meth:`come_to` before.
            lasting: True if the call needs the unit until the gradients of its inputs have come. If the inputs need no
                gradient, the unit stays in use until backward ends.
        """
        # The backward counts as one user of the unit, whatever the number of calls and outputs that need it.
        if unit.index not in self._calls:
            self._calls[unit.index] = 0
            unit.users += 1
            self._schedule.use(unit)
        self._calls[unit.index] += lasting
        # For a module inside another module of the unit, the prefix of the outer one stays.
        if not self._is_inside(unit, path, run_by):
            self._inside[unit.index] = (path and f"{path}.",)

    def call_ended(self, unit: Unit) -> None:
        """Note that the inputs of a call have their gradients."""
        # Backward may leave a call twice: two autograd.grad inside one forward count as one backward.
        if self._calls.get(unit.index, 0) > 0:
            self._calls[unit.index] -= 1
        self.end_use(unit)

    def come_to(self, path: str, run_by: Set[str] = frozenset()) -> None:
        """Note that backward reaches a module: end the uses of complete units by modules that do not contain it.

        Args:
            path: path of the module.
            run_by: path prefixes of other modules that ran it: see :class:`zeropp.engine.hooks.HookedModule`.
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
        """Return True if the module at ``path`` runs inside the module whose call uses this unit."""
        around = self._inside.get(unit.index, (".",))  # no path begins with a dot, so (".",) matches none
        return path.startswith(around) or not run_by.isdisjoint(around)

    def end_use(self, unit: Unit) -> None:
        """End the use of a unit if this backward needs it no longer."""
        index = unit.index
        # No gradient marks the end of a frozen weight's use: backward reads the weight until the inputs of its module
        # have their gradients. FSDP2 hooks the inputs of all sharded modules, zeropp only those with frozen weights.
        if index not in self._whole and self._calls.get(index) == 0 and self._reductions.complete(index):
            # Checkpointing has just made calls of this unit that backward has yet to reach. Retain the unit, unless the
            # rest of the order gathers it again.
            if self.fresh.get(index):
                self._schedule.expect_again([unit])
            # Removed before the release, so that a later use of the unit counts as a new one.
            del self._calls[index]
            self._inside.pop(index, None)
            self._release(unit)

    def give_up(self) -> bool:
        """End all remaining uses of units at the end of a backward; return True if there were any.

        A use remains if the unit was gathered for the whole backward, if backward reached no module outside of the one
        that used the unit, or if backward did not compute the gradient of a parameter or of the module's inputs.
        """
        left = [self._units[index] for index in self._calls]
        self._calls.clear()
        self._inside.clear()
        self.complete.clear()
        self.fresh.clear()
        for unit in left:
            self._release(unit)
        return bool(left)

    def drop_uses(self) -> None:
        """Forget all uses after a failed pass. The caller releases the units."""
        self._calls.clear()
        self._inside.clear()
        self.complete.clear()
        self.fresh.clear()
        self.forget_graphs()

    def _release(self, unit: Unit) -> None:
        """Take back this backward's use of a unit, and release the unit if nothing else needs it."""
        unit.users -= 1
        self._schedule.live_units.release_if_unused(unit)


class OutOfModuleUses:
    """Units whose parameters this pass has used outside of their modules. They stay gathered until the pass ends."""

    def __init__(self, units: Sequence[Unit], schedule: Schedule) -> None:
        self._units = units
        self._schedule = schedule
        self._now: set[int] = set()
        self._seen: dict[PhaseKey, set[int]] = {}

    def use(self, unit: Unit) -> None:
        """Use a unit for the rest of the pass."""
        # A persistent unit needs no user, because it is never released. But it may have to be unsharded.
        if unit.index not in self._now and not unit.persistent:
            self._now.add(unit.index)
            unit.users += 1
            self._schedule.use(unit, "")
        else:
            self._schedule.use(unit)

    def expected(self) -> list[Unit]:
        """Return the units touched in this kind of pass, now or before.

        A unit stays in the list for good: the next time it may be gathered already, and the touch goes unnoticed.
        """
        # Units are stored by kind of pass: touches in evaluation do not predict those in training.
        seen = self._seen.setdefault(self._schedule.key, set())
        seen |= self._now
        return [self._units[index] for index in sorted(seen)]

    def let_go(self) -> None:
        """End all uses at the end of the pass, and release units that nothing else needs."""
        for index in sorted(self._now):
            self._units[index].users -= 1
            self._schedule.live_units.release_if_unused(self._units[index])
        self._now.clear()

    def drop_uses(self) -> None:
        """Forget all uses after a failed pass. The caller releases the units."""
        self._now.clear()


class PinnedUnits:
    """Units that stay gathered from their first use inside :meth:`until_left` to its end.

    So all micro-batches can go through a stage while its units are gathered once; see [Note: layer-major].

    Attributes:
        open: True inside :meth:`until_left`.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.open = False
        self._now: dict[int, Unit] = {}

    def has(self, unit: Unit) -> bool:
        """Return True if a unit is kept, so that the use by a module needs no call of the schedule."""
        # The schedule would take the use for the next one of the unit in the order (a tied head, for example), and
        # gather all units in between.
        return unit.index in self._now

    def keeps(self, unit: Unit) -> bool:
        """Keep a unit after its first use inside :meth:`until_left`.

        Returns:
            True if the caller must leave ``unit.users`` as it is, because the first use goes on until the context ends.
        """
        if not self.open or unit.index in self._now:
            return False
        self._now[unit.index] = unit
        return True

    @contextlib.contextmanager
    def until_left(self) -> Iterator[None]:
        """Keep the units used inside the context. After an error the failed pass has ended all uses already."""
        self.open = True
        try:
            yield
            for unit in self._now.values():
                unit.users -= 1
                self._schedule.live_units.release_if_unused(unit)
        finally:
            self.open = False
            self._now = {}


def _trainable(unit: Unit) -> list[nn.Parameter]:
    """Return the parameters of a unit's trainable buffers."""
    return [parameter for buffer in unit.trainable_buffers for parameter in buffer.parameters]
