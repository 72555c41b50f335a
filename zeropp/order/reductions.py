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
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zeropp.comm.agreement import Agreement
from zeropp.comm.streams import CommStreams, Event, span
from zeropp.order.known_orders import CollectiveOrder, IssueHash
from zeropp.params.gradient import LossScale
from zeropp.params.unit import Unit

__all__ = ["Reductions"]

# Limit on the bytes of gradient messages in flight: 64 MiB, or the largest message if that is larger. One more message
# may start below the limit, so one slow rank does not stall the link. Memory is bounded by the limit plus one message.
_SMALL = 2**26
_HOLD, _REDUCE = 0, 2  # kinds of collectives in the issue hash


@dataclass
class _Sent:
    """A gradient message in flight.

    Attributes:
        unit: name of the unit.
        nbytes: bytes of memory that the message holds now.
        message: the message, until the hops over the first class of links have read it; then None.
        onward: bytes that go on over further classes of links (between nodes, or to the host); 0 if there are none.
        ends: events at the end of the work over each class of links.
    """

    unit: str
    nbytes: int
    message: Tensor | None
    onward: int
    ends: list[Event]


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
        self._trained: list[tuple[bool, ...]] = []
        self._counts: list[list[int]] = []
        self._missing: list[int] = []
        self.update_trained()
        # Number of gradients that each parameter of a unit receives in the order that is followed. None while an order
        # is learned: then one gradient of each trained parameter is expected.
        self._expected: dict[int, tuple[int, ...]] | None = None
        self._order: tuple[tuple[int, int], ...] = ()  # reductions of the order, as pairs (unit, uses before it)
        self._turn = 0  # index in ``_order`` of the next reduction to issue
        self._uses = 0  # number of uses whose gathers have been issued in this phase
        self._ready: list[int] = []  # units with all gradients on this rank whose reduction has not been issued
        self._done: dict[int, int] = {}  # unit -> uses before it, for the reductions issued in this phase, in order
        self._doubtful: set[int] = set()  # units of ``_done`` that were reduced only for an order that ranks have left
        self._in_flight: deque[_Sent] = deque()
        self._largest = 0  # bytes of the largest message so far

    def update_trained(self) -> None:
        """Read again which parameters are trained. Called between passes."""
        self._trained = [unit.trained for unit in self.units]
        self._counts = [[0] * len(trained) for trained in self._trained]
        self._missing = [sum(trained) for trained in self._trained]

    def begin_reductions(self, order: CollectiveOrder | None) -> None:
        """Begin a phase that follows ``order``; None if an order is learned."""
        self._uses = 0
        self._ready = []
        self._done = {}
        self._doubtful = set()
        for counts in self._counts:
            counts[:] = [0] * len(counts)
        self.change(order)

    def change(self, order: CollectiveOrder | None) -> None:
        """Follow another order for the rest of the phase; None to learn one."""
        self._expected = order.fires if order is not None else None
        reductions = order.reductions if order is not None else ()
        # Units reduced under the old order are left out, because their gradients have been sent. The other reductions
        # cannot lie before uses that have passed, so their place is at the current use or later.
        self._order = tuple((unit, max(uses, self._uses)) for unit, uses in reductions if unit not in self._done)
        self._turn = 0
        for index, counts in enumerate(self._counts):
            expected = self._expect(index)
            # Count each parameter by itself: a second gradient of one does not replace the first of another.
            self._missing[index] = sum([max(e - c, 0) for e, c in zip(expected, counts, strict=True)])

    def count_gradient(self, index: int, position: int) -> bool:
        """Count a gradient of a parameter.

        Args:
            index: index of the unit.
            position: position of the parameter among the unit's trainable ones.

        Returns:
            True if the unit has all its expected gradients now.
        """
        counts = self._counts[index]
        counts[position] += 1
        if counts[position] > self._expect(index)[position]:
            return False  # more gradients than expected; a stray one if the unit has been reduced
        self._missing[index] -= 1
        if self._missing[index] > 0:
            return False
        # A unit used twice in forward may receive a second gradient. The order is still being learned, so the number of
        # gradients is unknown until this backward ends.
        if self._expected is None and index in self.reused:
            return True
        self._ready.append(index)
        return True

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
        if self._missing[index] > 0:
            return False
        return all(e or not t for e, t in zip(self._expect(index), self._trained[index], strict=True))

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
        fired = {index: tuple(counts) for index, counts in enumerate(self._counts) if any(counts)}
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
        fires = ((trained, order.fires.get(index, (0,) * len(trained))) for index, trained in enumerate(self._trained))
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
        return {index: self._trained[index] for index in units}

    def send_unsent(self, index: int) -> None:
        """Reduce the held and stray gradients of a unit in the step sync. Collective."""
        self._issue(index, self._uses, hold=False)
        self.wait_for_reductions(0)

    def wait_for_reductions(self, allowed: int) -> None:
        """Wait until at most ``allowed`` messages are in flight."""
        while len(self._in_flight) > allowed:
            self._await(self._in_flight[0].ends[-1], self._in_flight[0].unit)
            self._in_flight.popleft()

    def _await(self, event: Event, unit: str) -> None:
        self.agreement.wait_for_event(event.wait, "waiting for a gradient to be reduced", (unit, "reduce"))

    def _make_room(self) -> None:
        """Wait until the limit on the bytes in flight allows one more message."""
        while sum([sent.nbytes for sent in self._in_flight]) > max(_SMALL, self._largest):
            # A message that goes on over further links need not be waited for to its end: once the first hops read it,
            # only its smaller continuation takes memory.
            read = next((sent for sent in self._in_flight if sent.message is not None and sent.onward), None)
            if read is None:
                self.wait_for_reductions(len(self._in_flight) - 1)
            else:
                self._await(read.ends[0], read.unit)
                read.message = None
                read.nbytes = read.onward

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

    def _expect(self, index: int) -> tuple[int, ...]:
        if self._expected is None:
            return tuple(map(int, self._trained[index]))
        return self._expected.get(index, (0,) * len(self._counts[index]))

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
        for gradient in unit.gradients:
            # Wait before the next message is allocated, because the limit bounds the memory of messages.
            self._make_room()
            with span("pack", unit.name):
                message = gradient.pack(scale, hold=hold)
            if message is not None:
                with self.agreement.issuing("reducing", unit.name, "reduce"), span("reduce", unit.name):
                    ends = self.comm_streams.run_work(gradient.prepare_reduce(message, scale, hold=hold))
                self.agreement.queued(ends[-1], unit.name, "reduce")
                self._largest = max(self._largest, message.nbytes)
                onward = gradient.onward_nbytes if len(ends) > 1 else 0
                self._in_flight.append(_Sent(unit.name, message.nbytes, message, onward, ends))
