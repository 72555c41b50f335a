"""Reductions of gradients: issued in the order that all ranks agreed on, each as early as possible.

A reduction is issued when this rank has all gradients of the unit and every earlier collective of the order has been
issued. The rank issues it at the latest before the next gathers of the order, even if gradients are missing.

[Note: one order] Every rank issues the same gathers and reductions in one common order. If two ranks ran the same
collectives in different orders, each could wait for ever for a collective that the other has not started. So the order
of a phase contains reductions, too: each has a place between two uses of units.

[Note: stray gradients] Before a rank gathers units for the next use, it issues all reductions that the order places
before that use. If gradients of such a unit are still missing, the rank sends zeros for them. A gradient that arrives
later is *stray*: it stays in ``.grad``. Ranks find strays at the end of a phase that ends with an exchange, or else in
the step sync. Then all ranks reduce that unit once more, and later phases of this kind expect the unit at their end.

[Note: one hook a unit] Autograd calls a hook for each gradient. A unit is reduced when its last gradient has arrived.
So one hook is enough while the order of a unit's gradients repeats: that of the parameter whose gradient comes last.
The other hooks are set aside: they are kept, but not called. When the one hook is called, ``.grad`` of every trained
parameter must be there and must be of this backward. It is of this backward, because a reduction takes all ``.grad``,
and because the end of each backward looks for gradients that no reduction has taken. If a gradient is missing, all
hooks are put back, and report the gradients that are still to come. All hooks are also put back

- while an order is learned;
- when an order expects gradients of the unit, but not exactly one of each trained parameter;
- when the one hook is called although the unit expects no gradient, or no further one;
- when the unit is reduced before its last gradient has come;
- at the end of a backward, if gradients are left in ``.grad``;
- when the set of trained parameters changes.

A reduction takes the gradients, so the hooks run behind those that users have registered on the same parameters.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeropp._compat import profiler_enabled, put_hook_back, put_hook_last, set_hook_aside, unguarded
from zeropp.comm.agreement import Agreement
from zeropp.comm.streams import DONE, CommStreams, Event, span
from zeropp.order.known_orders import CollectiveOrder, IssueHash
from zeropp.params.gradient import Gradient, ReduceWork
from zeropp.params.loss_scale import LossScale
from zeropp.params.unit import Unit

__all__ = ["Arrivals", "Reductions"]

# Limit on the bytes of gradient messages in flight: 64 MiB, or the largest message if that is larger. One more message
# may start below the limit, so one slow rank does not stall the link. Memory is bounded by the limit plus one message.
_SMALL = 2**26
_HOLD, _REDUCE = 0, 2  # kinds of collectives in the issue hash
_MOST_PATIENCE = 64  # most repeats of a unit's last gradient until one hook stands for all


class Arrivals:
    """Counts the gradients of one engine's parameters, backward by backward.

    Args:
        units: all units of the model, by index.

    Attributes:
        trained: for each unit, one flag per trainable parameter: True if it is trained.
        counts: for each unit, the number of gradients of each trainable parameter in this phase.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._hooks = [_UnitHooks() for _ in units]
        self.trained: list[tuple[bool, ...]] = []
        self.counts: list[list[int]] = []
        # Number of gradients that each parameter of a unit receives in the order that is followed. None while an order
        # is learned: then one gradient of each trained parameter is expected.
        self._fires: dict[int, tuple[int, ...]] | None = None
        self._expected: list[tuple[int, ...]] = []
        self._missing: list[int] = []
        self.update_trained()

    def update_trained(self) -> None:
        """Read again which parameters are trained. Called between passes."""
        self.trained = [unit.trained for unit in self._units]
        self.counts = [[0] * len(trained) for trained in self.trained]
        self._once = [tuple(map(int, trained)) for trained in self.trained]
        self._never = [(0,) * len(trained) for trained in self.trained]
        self._expected = list(self._once)
        self._missing = [sum(trained) for trained in self.trained]
        for hooks in self._hooks:
            hooks.watch_all()

    def watch(
        self, index: int, parameters: Sequence[nn.Parameter], ready: Callable[[int], Callable[..., None]]
    ) -> None:
        """Register hooks on a unit's trainable parameters, except those that have hooks already.

        Args:
            index: index of the unit.
            parameters: all trainable parameters of the unit.
            ready: function that returns the hook of the parameter at a position.
        """
        self._hooks[index].watch(parameters, ready)

    def remove_hooks(self) -> None:
        """Remove all hooks."""
        for hooks in self._hooks:
            hooks.remove()

    def begin(self) -> None:
        """Begin a phase without any gradient."""
        for counts, never in zip(self.counts, self._never, strict=True):
            counts[:] = never

    def run_last(self) -> None:
        """Move the hooks behind those that users have registered since the last call."""
        with unguarded():
            for hooks in self._hooks:
                for position in range(len(hooks.handles)) if hooks.only < 0 else (hooks.only,):
                    put_hook_last(hooks.parameters[position], hooks.handles[position])

    def runs_last(self, index: int, position: int) -> bool:
        """Return True if no hook of the user runs behind the one that has just been called; otherwise move it there.

        A hook behind it was registered during this backward. It must find the gradients, so no reduction may take them
        before the next event.
        """
        hooks = self._hooks[index]
        with unguarded():
            return put_hook_last(hooks.parameters[position], hooks.handles[position])

    def expect(self, fires: dict[int, tuple[int, ...]] | None) -> None:
        """Expect the gradients of an order from now on.

        Args:
            fires: unit -> number of gradients of each parameter. None if an order is learned: one of each trained
                parameter.
        """
        self._fires = fires
        for index, once in enumerate(self._once):
            never = self._never[index]
            expected = once if fires is None else fires.get(index, never)
            # One hook stands for one gradient of each trained parameter. While an order is learned, or if other numbers
            # are expected, each gradient must be counted when it comes.
            if fires is None or (expected != once and expected != never):
                self.recount(index)
            self._expected[index] = expected
            counts = self.counts[index]
            # Count each parameter by itself: a second gradient of one does not replace the first of another.
            if counts == list(never):
                self._missing[index] = sum(expected)
            else:
                self._missing[index] = sum([max(e - c, 0) for e, c in zip(expected, counts, strict=True)])

    @property
    def learning(self) -> bool:
        """True if an order is learned, so that the number of gradients to come is unknown."""
        return self._fires is None

    def count(self, index: int, position: int) -> bool:
        """Count a gradient that a hook reports; return True if it is the unit's last expected one.

        Args:
            index: index of the unit.
            position: position of the parameter among the unit's trainable ones.
        """
        hooks = self._hooks[index]
        if hooks.only < 0:
            return self._count(index, position)
        # One hook stands for all gradients of the unit: see [Note: one hook a unit]. It does not if the unit expects no
        # gradient, or no further one, or if another gradient is still to come.
        if self._missing[index] == 0 or not hooks.all_arrived():
            return self.recount(index)
        self.counts[index][:] = self._once[index]
        self._missing[index] = 0
        return True

    def _count(self, index: int, position: int) -> bool:
        counts = self.counts[index]
        counts[position] += 1
        expected = self._expected[index]
        if counts[position] > expected[position]:
            return False  # more gradients than expected; a stray one if the unit has been reduced
        self._missing[index] -= 1
        if self._missing[index] > 0:
            return False
        if self._fires is not None and expected == self._once[index]:
            self._hooks[index].note_last(position, self.trained[index])
        return True

    def recount(self, index: int) -> bool:
        """Put all hooks of a unit back, and count the gradients that have come without a hook.

        A second gradient that came without a hook is not counted.

        Returns:
            True if the unit has all its expected gradients now.
        """
        hooks = self._hooks[index]
        if hooks.only < 0:
            return False
        hooks.watch_all()
        counts = self.counts[index]
        complete = False
        for position in hooks.arrived():
            if counts[position] == 0:
                complete |= self._count(index, position)
        return complete

    def end(self) -> None:
        """End a backward: count the gradients that have come without a hook and that no reduction has taken."""
        for index, hooks in enumerate(self._hooks):
            if hooks.only >= 0 and hooks.any_arrived():
                self.recount(index)

    def is_missing(self, index: int) -> bool:
        """Return True if an expected gradient of a unit has not come yet."""
        return self._missing[index] > 0

    def covers_trained(self, index: int) -> bool:
        """Return True if at least one gradient of each trained parameter of a unit is expected."""
        expected = self._expected[index]
        if expected == self._once[index]:
            return True
        return all([count or not trained for count, trained in zip(expected, self.trained[index], strict=True)])


class _UnitHooks:
    """The hooks on the trainable parameters of one unit.

    Attributes:
        parameters: all trainable parameters of the unit, also those that are frozen at the moment.
        handles: handle of the hook of each parameter.
        only: position of the only parameter whose hook is called; -1 if no hook is set aside.
    """

    __slots__ = ("_aside", "_last", "_patience", "_repeats", "_trained", "handles", "only", "parameters")

    def __init__(self) -> None:
        self.parameters: tuple[nn.Parameter, ...] = ()
        self.handles: list[RemovableHandle] = []
        self._aside: dict[int, Callable[..., None]] = {}  # hooks that are not called now, by position
        self._trained: dict[int, nn.Parameter] = {}  # parameters that ``only`` stands for, by position
        self.only = -1
        self._last = -1  # position of the parameter whose gradient came last
        self._repeats = 0  # how many times in a row it was the same one again
        # Number of repeats until only one hook is called. It doubles whenever all hooks are put back, because that
        # costs more than calling them.
        self._patience = 1

    def watch(self, parameters: Sequence[nn.Parameter], ready: Callable[[int], Callable[..., None]]) -> None:
        """Register hooks on the parameters that have none; see :meth:`Arrivals.watch`."""
        self.parameters = tuple(parameters)
        for position in range(len(self.handles), len(parameters)):
            with unguarded():
                # A hook on the tensor itself would run before the gradient is in .grad, where ``Gradient.pack`` takes
                # it.
                handle = parameters[position].register_post_accumulate_grad_hook(ready(position))
            self.handles.append(handle)

    def watch_all(self) -> None:
        """Put back all hooks that are set aside."""
        if self.only < 0:
            return
        self.only = -1
        self._repeats = 0
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        with unguarded():
            for position, hook in self._aside.items():
                put_hook_back(self.parameters[position], self.handles[position], hook)
        self._aside.clear()

    def note_last(self, position: int, trained: Sequence[bool]) -> None:
        """Note the parameter whose gradient came last; set all other hooks aside once it has repeated often enough."""
        self._repeats = self._repeats + 1 if position == self._last else 0
        self._last = position
        if self._repeats < self._patience:
            return
        self.only = position
        self._trained = {at: each for at, each in enumerate(self.parameters) if trained[at]}
        for other, handle in enumerate(self.handles):
            if other != position:
                self._aside[other] = set_hook_aside(self.parameters[other], handle)

    def all_arrived(self) -> bool:
        """Return True if every trained parameter has a ``.grad``."""
        with unguarded():
            for parameter in self._trained.values():
                if parameter.grad is None:
                    return False
        return True

    def any_arrived(self) -> bool:
        """Return True if some trained parameter has a ``.grad``."""
        with unguarded():
            for parameter in self._trained.values():
                if parameter.grad is not None:
                    return True
        return False

    def arrived(self) -> list[int]:
        """Return the positions of the trained parameters that have a ``.grad``."""
        with unguarded():
            return [position for position, parameter in self._trained.items() if parameter.grad is not None]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._aside.clear()


@dataclass(slots=True)
class _Sent:
    """A gradient message in flight.

    Attributes:
        reducer: the gradient, and the description of the wait.
        nbytes: bytes of memory that the message holds now.
        message: the message, until the hops over the first class of links have read it; then None.
        onward: bytes that go on over further classes of links (between nodes, or to the host); 0 if there are none.
        read: end of the work over the first class of links.
        end: end of the whole work.
    """

    reducer: _Reducer
    nbytes: int
    message: Tensor | None
    onward: int
    read: Event
    end: Event


class _Reducer:
    """The gradient of one buffer, with its work and the descriptions of its waits, which are prepared once.

    Attributes:
        gradient: the gradient.
        work: reduction of the gradient that may run again; None before the first one.
        in_flight: number of reductions of the gradient that have not been waited for.
        issuing: context in which the reduction is issued.
        waiting: context in which its end is waited for.
    """

    __slots__ = ("gradient", "in_flight", "issuing", "waiting", "work")

    def __init__(self, unit: str, gradient: Gradient, agreement: Agreement) -> None:
        self.gradient = gradient
        self.work: ReduceWork | None = None
        self.in_flight = 0
        self.issuing = agreement.issuing("reducing", unit, "reduce")
        self.waiting = agreement.watching("waiting for a gradient to be reduced", timed=(unit, "reduce"))


class Reductions:
    """The reductions of one engine's gradients, backward by backward.

    Args:
        units: all units of the model, by index.
        comm_streams: comm streams of reductions.
        agreement: exchanges between the ranks, and waits.
        issued: hash of the issued collectives.
        loss_scale: factor that the sums over ranks are multiplied by.

    Attributes:
        no_sync: True inside ``no_sync()``: gradients are held on this rank, or summed only as far as the held level.
        last: True if the running or next backward reduces its gradients to the shards; False if they are held for a
            later backward of the accumulation window.
        reused: units that some forward used more than once.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        comm_streams: CommStreams,
        agreement: Agreement,
        issued: IssueHash,
        loss_scale: LossScale,
    ) -> None:
        self.units = units
        self.comm_streams = comm_streams
        self.agreement = agreement
        self.issued = issued
        self.loss_scale = loss_scale
        self.no_sync = False
        self.last = True
        self.reused: set[int] = set()
        self.arrivals = Arrivals(units)
        self._reducers: list[list[_Reducer]] = []
        self.update_trained()
        self._order: tuple[tuple[int, int], ...] = ()  # reductions of the order, as pairs (unit, uses before it)
        self._turn = 0  # index in ``_order`` of the next reduction to issue
        self._uses = 0  # number of uses whose gathers have been issued in this phase
        self._ready: list[int] = []  # units with all gradients on this rank whose reduction has not been issued
        self._done: dict[int, int] = {}  # unit -> uses before it, for the reductions issued in this phase, in order
        self._doubtful: set[int] = set()  # units of ``_done`` that were reduced only for an order that ranks have left
        self._in_flight: deque[_Sent] = deque()
        self._flying = 0  # bytes of the messages in flight
        self._largest = 0  # bytes of the largest message so far

    def update_trained(self) -> None:
        """Read again which parameters are trained. Called between passes."""
        self.arrivals.update_trained()
        self._reducers = [
            [_Reducer(unit.name, gradient, self.agreement) for gradient in unit.gradients] for unit in self.units
        ]

    def begin_reductions(self, order: CollectiveOrder | None) -> None:
        """Begin a phase that follows ``order``; None if an order is learned."""
        self._uses = 0
        self._ready = []
        self._done = {}
        self._doubtful = set()
        self.arrivals.begin()
        self.change(order)

    def change(self, order: CollectiveOrder | None) -> None:
        """Follow another order for the rest of the phase; None to learn one."""
        self.arrivals.expect(order.fires if order is not None else None)
        reductions = order.reductions if order is not None else ()
        if self._uses > 0 or self._done:
            # Units reduced under the old order are left out, because their gradients have been sent. The other
            # reductions cannot lie before uses that have passed, so their place is at the current use or later.
            reductions = tuple([(unit, max(uses, self._uses)) for unit, uses in reductions if unit not in self._done])
        self._order = reductions
        self._turn = 0

    def count_gradient(self, index: int, position: int) -> bool:
        """Count a gradient of a parameter.

        Args:
            index: index of the unit.
            position: position of the parameter among the unit's trainable ones.

        Returns:
            True if the unit has all its expected gradients now.
        """
        if not self.arrivals.count(index, position):
            return False
        # A unit used twice in forward may receive a second gradient. The order is still being learned, so the number of
        # gradients is unknown until this backward ends.
        if not (self.arrivals.learning and index in self.reused):
            self._ready.append(index)
        return True

    def end_arrivals(self) -> list[list[int]]:
        """End the arrivals of this phase; return the number of gradients of each parameter, for each unit."""
        self.arrivals.end()
        return self.arrivals.counts

    @property
    def holding(self) -> bool:
        """True if the gradients of this backward are held, to be reduced with later ones or in the step sync."""
        return self.no_sync or not self.last

    def complete(self, index: int) -> bool:
        """Return True if backward needs the weights of a unit no longer, as far as gradients show.

        This is so if all expected gradients have come, and at least one of each trained parameter was expected. The
        second condition is needed because a parameter may be used that was not used when the order was learned. For
        frozen parameters, the gradients of module inputs show when backward is done: see `BackwardUses`.
        """
        return not self.arrivals.is_missing(index) and self.arrivals.covers_trained(index)

    def send_complete(self) -> None:
        """Issue the next reductions of the order, while this rank has all their gradients and their place has come."""
        while self._turn < len(self._order):
            index, uses = self._order[self._turn]
            if uses > self._uses or index not in self._ready:
                return
            self._turn += 1
            self._ready.remove(index)
            self._issue(index, uses)

    def before_use(self, uses: float) -> None:
        """Issue all reductions that the order places after at most ``uses`` uses, even if gradients are missing."""
        while self._turn < len(self._order) and self._order[self._turn][1] <= uses:
            index, place = self._order[self._turn]
            self._turn += 1
            if index in self._ready:
                self._ready.remove(index)
            else:
                self.arrivals.recount(index)  # the gradients that have come are taken now, before the last one
            self._issue(index, place)

    def after_use(self, uses: int) -> None:
        """Note that the gathers of the first ``uses`` uses are issued. Issue complete reductions that come next."""
        self._uses = uses
        self.send_complete()

    def forget_sent(self, uses: int) -> None:
        """Correct the places of reductions when ranks leave an order and learn another one behind ``uses`` uses.

        Reductions that were issued later get their place right behind these uses. If it turns out that no rank had a
        gradient of such a unit, the new order omits the reduction: only the old order required it.
        """
        self._doubtful = {unit for unit, place in self._done.items() if place > uses}
        self._done = {unit: min(place, uses) for unit, place in self._done.items()}

    def end_reductions(self) -> None:
        """Issue all remaining reductions in order, with zeros for missing gradients, and wait for them."""
        self.before_use(math.inf)
        self.wait_for_reductions(0)

    def offers(self, count: int) -> list[int]:
        """Return the first ``count`` units that this rank could reduce now, while an order is learned."""
        return self._ready[:count]

    def issue_common(self, offers: list[list[int]], uses: int) -> None:
        """Reduce the units that every rank offers, while an order is learned.

        Args:
            offers: units that each rank offers, from the same exchange.
            uses: number of uses whose gathers have been issued.
        """
        # The sequence of the first rank's offers is used, because all ranks have received the same rows.
        for index in offers[0]:
            if index >= 0 and all(index in offered for offered in offers):
                self._ready.remove(index)
                self._issue(index, uses)

    def end_learning(self, uses: int) -> tuple[tuple[tuple[int, int], ...], dict[int, tuple[int, ...]]]:
        """Agree on the reductions that are left at the end of a learned phase, and issue them.

        Args:
            uses: number of uses in the phase.

        Returns:
            The phase's reductions as pairs (unit, uses before it), and for each unit the number of gradients that each
            of its parameters received, the maximum over ranks.

        Raises:
            RuntimeError: some ranks run this backward inside ``no_sync()`` and others outside.
        """
        fired = {index: tuple(counts) for index, counts in enumerate(self.arrivals.counts) if any(counts)}
        doing = "agreeing on the gradients left at the end of a backward"
        self.wait_for_reductions(0)  # a message in flight may still take held gradients, which would look unsent
        accounts = self.agreement.exchange_objects((self.holding, [*self._ready, *self._left()], fired), doing)
        if len({hold for hold, _, _ in accounts}) > 1:
            raise self.agreement.failure("in a backward that some ranks run inside no_sync() and others outside")
        fires: dict[int, tuple[int, ...]] = {}
        # The maximum over ranks. A rank with fewer gradients issues the reduction no later than `before_use` demands.
        for _, _, counts in accounts:
            for index, count in counts.items():
                fires[index] = tuple(map(max, count, fires.get(index, count)))
        # Reduce all units that any rank still has gradients of, in the sequence of ranks. Other ranks send zeros.
        for index in dict.fromkeys(index for _, left, _ in accounts for index in left):
            self._issue(index, uses)
        self.wait_for_reductions(0)
        # Units that were reduced only because the abandoned order had them: no rank had a gradient.
        vain = self._doubtful.difference(fires)
        return tuple((unit, place) for unit, place in self._done.items() if unit not in vain), fires

    def may_bring_more(self, order: CollectiveOrder) -> bool:
        """Return True if a trained parameter may have a gradient now that had none when ``order`` was learned."""
        every = enumerate(self.arrivals.trained)
        fires = ((trained, order.fires.get(index, (0,) * len(trained))) for index, trained in every)
        return any(t and not f for trained, fired in fires for t, f in zip(trained, fired, strict=True))

    def has_stray(self) -> bool:
        """Return True if this rank has gradients that no reduction of this phase will send."""
        return any(gradient.has_stray() for unit in self.units for gradient in unit.gradients)

    def send_strays(self) -> dict[int, tuple[bool, ...]]:
        """Reduce once more, on all ranks, the units of which any rank has stray gradients.

        Returns:
            A dict: unit -> for each of its parameters, True if it is trained.
        """
        self.wait_for_reductions(0)  # a message in flight may still take held gradients, which would look unsent
        lists = self.agreement.exchange_objects(self._left(), "agreeing on gradients that came late")
        # Ordered by rank, so that all ranks reduce in the same sequence. A set would have no fixed sequence.
        strays = list(dict.fromkeys(index for units in lists for index in units))
        for index in strays:
            self._issue(index, self._uses)
        return self.trained(strays)

    def trained(self, units: Sequence[int]) -> dict[int, tuple[bool, ...]]:
        """Return a dict: unit -> for each of its parameters, True if it is trained."""
        return {index: self.arrivals.trained[index] for index in units}

    def send_unsent(self, index: int) -> None:
        """Reduce the held and stray gradients of a unit in the step sync. Collective."""
        self._issue(index, self._uses, hold=False)
        self.wait_for_reductions(0)

    def wait_for_reductions(self, allowed: int) -> None:
        """Wait until at most ``allowed`` messages are in flight."""
        while len(self._in_flight) > allowed:
            sent = self._in_flight[0]
            self._await(sent, sent.end)
            self._in_flight.popleft()
            sent.reducer.in_flight -= 1
            self._free(sent, 0)

    def _await(self, sent: _Sent, event: Event) -> None:
        self.agreement.wait_for_event(event.wait, sent.reducer.waiting)

    def _free(self, sent: _Sent, left: int) -> None:
        """Free a message that has been read; ``left`` bytes stay in flight."""
        if sent.message is not None:
            sent.reducer.gradient.free_message(sent.message)
            sent.message = None
        self._flying += left - sent.nbytes
        sent.nbytes = left

    def _make_room(self) -> None:
        """Wait until the limit on the bytes in flight allows one more message."""
        while self._flying > max(_SMALL, self._largest):
            # A message that goes on over further links need not be waited for to its end: once the first hops read it,
            # only its smaller continuation takes memory.
            read = next((sent for sent in self._in_flight if sent.message is not None and sent.onward), None)
            if read is None:
                self.wait_for_reductions(len(self._in_flight) - 1)
            else:
                self._await(read, read.read)
                self._free(read, read.onward)

    def drop_reductions(self) -> None:
        """Drop the state of a failed phase, and wait for its messages in flight, which still write to the shards."""
        self.begin_reductions(None)
        self.wait_for_reductions(0)

    def _left(self) -> list[int]:
        """Return the units that have gradients on this rank which this backward should have reduced."""
        hold = self.holding
        # From the last unit to the first, as in backward.
        return [
            unit.index
            for unit in reversed(self.units)
            if any(g.has_stray() if hold else g.has_unsent() for g in unit.gradients)
        ]

    def _issue(self, index: int, uses: int, *, hold: bool | None = None) -> None:
        """Issue the reduction of a unit.

        Args:
            index: index of the unit.
            uses: number of uses before the reduction, to be stored in a learned order.
            hold: True to sum only as far as the held level; None to decide by :attr:`holding`.
        """
        unit = self.units[index]
        hold = self.holding if hold is None else hold
        # A unit that is reduced again has a gradient, so its reduction belongs to the learned order.
        self._doubtful.discard(index)
        self._done.pop(index, None)  # a unit that is reduced twice while learning has its place at the second time
        self._done[index] = uses
        self.issued.add(_HOLD if hold else _REDUCE, index, unit.version)
        scale = self.loss_scale.factor
        for reducer in self._reducers[index]:
            # Wait before the next message is allocated, because the limit bounds the memory of messages.
            if self._flying > max(_SMALL, self._largest):
                self._make_room()
            gradient = reducer.gradient
            message = self._pack(unit, gradient, scale, hold)
            if message is None:
                continue
            with reducer.issuing:
                # Work that is in flight keeps its state between the stages, so it must not begin again.
                last = None if reducer.in_flight else reducer.work
                work = gradient.prepare_reduce(message, scale, hold=hold, last=last)
                end = self.comm_streams.run_work(work)
            if work.message is not None:
                reducer.work = work
            self.agreement.queued(end, unit.name, "reduce")
            if end is DONE:
                gradient.free_message(message)
                continue
            self._largest = max(self._largest, message.nbytes)
            onward = gradient.onward_nbytes if work.read is not end else 0
            self._in_flight.append(_Sent(reducer, message.nbytes, message, onward, work.read, end))
            self._flying += message.nbytes
            reducer.in_flight += 1

    def _pack(self, unit: Unit, gradient: Gradient, scale: float, hold: bool) -> Tensor | None:
        if not profiler_enabled():
            return gradient.pack(scale, hold=hold)
        with span("pack", unit.name):
            return gradient.pack(scale, hold=hold)
