"""When gradients are sent: in the agreed order, each as soon as it is complete and its turn has come.

[Note: one order] Every rank issues the same gathers and reductions in one order, or ranks whose devices run them in
another would wait for each other for ever. So a reduction has its place among the uses of units.

[Note: stray gradients] A rank that comes to the next use first sends what is due before it, complete or not. Gradients
that come later stay in ``.grad`` as strays, and are found at the end of a phase that ends with a round, or at the
step sync: all ranks send that unit again, and from then on expect it at the end of such phases.
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

# Bytes. While what is under way takes no more, or no more than the largest message, another message may follow: a link
# need not wait for one slow rank, and a slow network piles up so much and one message, or two messages.
_SMALL = 2**26
_HOLD, _REDUCE = 0, 2  # kinds in the issue hash


@dataclass
class _Sent:
    """A message under way.

    Attributes:
        unit: whose gradients these are.
        nbytes: of memory that it takes.
        message: while it is read, over links of the first class.
        onward: bytes that go on over others.
        ends: of the work over each class.
    """

    unit: str
    nbytes: int
    message: Tensor | None
    onward: int
    ends: list[Event]


class Reductions:
    """Gradients of one engine, backward by backward."""

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
        self.no_sync = False  # inside no_sync: gradients stay on this rank, or within the ranks of the held level
        self.last = True  # gradients of this backward go all the way; or nothing is held
        self.reused: set[int] = set()  # units used more than once in one forward
        self._trained: list[tuple[bool, ...]] = []
        self._counts: list[list[int]] = []
        self._missing: list[int] = []
        self.update_trained()
        # ``fires`` of the order that is followed; None while learning, where each trained parameter is expected once.
        self._expected: dict[int, tuple[int, ...]] | None = None
        self._order: tuple[tuple[int, int], ...] = ()  # see CollectiveOrder.reductions; of these, what is left
        self._turn = 0
        self._uses = 0  # whose gathers have been issued in this phase
        self._ready: list[int] = []  # complete on this rank, not issued
        self._done: dict[int, int] = {}  # issued in this phase, in order -> uses before it
        self._doubtful: set[int] = set()  # of these, those sent for an order that was left
        self._in_flight: deque[_Sent] = deque()
        self._largest = 0  # bytes of the largest message so far

    def update_trained(self) -> None:
        """Look, between passes, which parameters are to have gradients."""
        self._trained = [unit.trained for unit in self.units]
        self._counts = [[0] * len(trained) for trained in self._trained]
        self._missing = [sum(trained) for trained in self._trained]

    def begin_reductions(self, order: CollectiveOrder | None) -> None:
        """Start a phase that follows ``order``, or learns with None."""
        self._uses = 0
        self._ready = []
        self._done = {}
        self._doubtful = set()
        for counts in self._counts:
            counts[:] = [0] * len(counts)
        self.change(order)

    def change(self, order: CollectiveOrder | None) -> None:
        """Follow another order from here on."""
        self._expected = order.fires if order is not None else None
        reductions = order.reductions if order is not None else ()
        # What was sent under the order before stays sent: a second message would count it twice. What was not comes
        # behind the uses so far, which is its place in an order that is learned from here on, too.
        self._order = tuple((unit, max(uses, self._uses)) for unit, uses in reductions if unit not in self._done)
        self._turn = 0
        for index, counts in enumerate(self._counts):
            expected = self._expect(index)
            # For each parameter alone: a second gradient of one does not make up for another's first.
            self._missing[index] = sum([max(e - c, 0) for e, c in zip(expected, counts, strict=True)])

    def count_gradient(self, index: int, position: int) -> bool:
        """Note that a parameter received its gradient; True when that completes the unit."""
        counts = self._counts[index]
        counts[position] += 1
        if counts[position] > self._expect(index)[position]:
            return False  # more than expected: if the unit has been sent, a stray
        self._missing[index] -= 1
        if self._missing[index] > 0:
            return False
        # A unit that forward used twice may have a second gradient to come. While learning nobody knows how many;
        # at the end of this backward it will be known.
        if self._expected is None and index in self.reused:
            return True
        self._ready.append(index)
        return True

    @property
    def holding(self) -> bool:
        """True if this backward's gradients are held, to be sent with a later one."""
        return self.no_sync or not self.last

    def complete(self, index: int) -> bool:
        """Tell whether a unit is done with in this phase: all expected and all trained parameters' gradients have come.

        A parameter that was not used when the order was learned may be used now, and backward still need its weight.
        When frozen ones are done with, the inputs of modules tell.
        """
        if self._missing[index] > 0:
            return False
        return all(e or not t for e, t in zip(self._expect(index), self._trained[index], strict=True))

    def send_complete(self) -> None:
        """Send what is next in the order, as long as it is complete on this rank, and its place has come."""
        while self._turn < len(self._order):
            index, uses = self._order[self._turn]
            if uses > self._uses or index not in self._ready:
                return
            self._turn += 1
            self._ready.remove(index)
            self._issue(index, uses)

    def before_use(self, uses: float) -> None:
        """The gathers of one more use than ``uses`` come next: send what is due before them, complete or not."""
        while self._turn < len(self._order) and self._order[self._turn][1] <= uses:
            index, place = self._order[self._turn]
            self._turn += 1
            if index in self._ready:
                self._ready.remove(index)
            self._issue(index, place)

    def after_use(self, uses: int) -> None:
        """The gathers of ``uses`` uses are issued: complete units whose place has come may be sent."""
        self._uses = uses
        self.send_complete()

    def forget_sent(self, uses: int) -> None:
        """What was sent behind ``uses`` uses has its place there in the order learned from here on, or none.

        None if no rank has had a gradient of it: then it was sent for the order before alone.
        """
        self._doubtful = {unit for unit, place in self._done.items() if place > uses}
        self._done = {unit: min(place, uses) for unit, place in self._done.items()}

    def end_reductions(self) -> None:
        """Send what is left, in order, with zeros where this rank has nothing."""
        self.before_use(math.inf)  # no use comes any more
        self.wait_for_reductions(0)

    def offers(self, count: int) -> list[int]:
        """First units that this rank could send, while a phase is learned."""
        return self._ready[:count]

    def issue_common(self, offers: list[list[int]], uses: int) -> None:
        """Send the units that every rank offers, while a phase is learned, after the gathers of ``uses`` uses."""
        # In the order of the group's first rank: any would do that all know.
        for index in offers[0]:
            if index >= 0 and all(index in offered for offered in offers):
                self._ready.remove(index)
                self._issue(index, uses)

    def end_learning(self, uses: int) -> tuple[tuple[tuple[int, int], ...], dict[int, tuple[int, ...]]]:
        """Agree on what is left after ``uses`` uses and send it; this phase's order, and how often parameters fired."""
        fired = {index: tuple(counts) for index, counts in enumerate(self._counts) if any(counts)}
        doing = "agreeing on the gradients left at the end of a backward"
        self.wait_for_reductions(0)  # before that, what is held may seem unsent though a message under way carries it
        accounts = self.agreement.exchange_objects((self.holding, [*self._ready, *self._left()], fired), doing)
        if len({hold for hold, _, _ in accounts}) > 1:
            raise self.agreement.failure("in a backward that some ranks run inside no_sync() and others outside")
        fires: dict[int, tuple[int, ...]] = {}
        # The most that any rank had: one with fewer sends when its turn comes at the latest, see `before_use`.
        for _, _, counts in accounts:
            for index, count in counts.items():
                fires[index] = tuple(map(max, count, fires.get(index, count)))
        # Whatever any rank has left, in the order of ranks; the others send zeros.
        for index in dict.fromkeys(index for _, left, _ in accounts for index in left):
            self._issue(index, uses)
        self.wait_for_reductions(0)
        # Units that were sent only for the order that ranks have left, and of which none had a gradient.
        vain = self._doubtful.difference(fires)
        return tuple((unit, place) for unit, place in self._done.items() if unit not in vain), fires

    def may_bring_more(self, order: CollectiveOrder) -> bool:
        """Tell whether trained parameters that had no gradient in this kind of backward may have one now."""
        fires = ((trained, order.fires.get(index, (0,) * len(trained))) for index, trained in enumerate(self._trained))
        return any(t and not f for trained, fired in fires for t, f in zip(trained, fired, strict=True))

    def has_stray(self) -> bool:
        """Tell whether this rank has gradients that nothing in this phase will send."""
        return any(gradient.has_stray() for unit in self.units for gradient in unit.gradients)

    def send_strays(self) -> dict[int, tuple[bool, ...]]:
        """Send again, on every rank, the units of which any rank has strays; returns them as :meth:`trained` does."""
        self.wait_for_reductions(0)  # as in `end_learning`
        lists = self.agreement.exchange_objects(self._left(), "agreeing on gradients that came late")
        # In one order on every rank, that of ranks; a set would have no order.
        strays = list(dict.fromkeys(index for units in lists for index in units))
        for index in strays:
            self._issue(index, self._uses)
        return self.trained(strays)

    def trained(self, units: Sequence[int]) -> dict[int, tuple[bool, ...]]:
        """The trained parameters of each of ``units``."""
        return {index: self._trained[index] for index in units}

    def send_unsent(self, index: int) -> None:
        """Send what a unit still has, held or stray, at the step sync, on every rank."""
        self._issue(index, self._uses, hold=False)
        self.wait_for_reductions(0)

    def wait_for_reductions(self, allowed: int) -> None:
        """Wait until at most ``allowed`` messages are under way."""
        while len(self._in_flight) > allowed:
            self._await(self._in_flight[0].ends[-1], self._in_flight[0].unit)
            self._in_flight.popleft()

    def _await(self, event: Event, unit: str) -> None:
        self.agreement.wait_for_event(event.wait, "waiting for a gradient to be reduced", (unit, "reduce"))

    def _make_room(self) -> None:
        """Wait until one more message may be under way."""
        while sum([sent.nbytes for sent in self._in_flight]) > max(_SMALL, self._largest):
            # Not for its end, if it goes on over slow links: all of it but a part is free when it has been read.
            read = next((sent for sent in self._in_flight if sent.message is not None and sent.onward), None)
            if read is None:
                self.wait_for_reductions(len(self._in_flight) - 1)
            else:
                self._await(read.ends[0], read.unit)
                read.message = None
                read.nbytes = read.onward

    def drop_reductions(self) -> None:
        """Drop a phase that failed; messages under way arrive first, since their shards are used again."""
        self.begin_reductions(None)
        self.wait_for_reductions(0)

    def _left(self) -> list[int]:
        """Units with gradients on this rank that this backward should have sent and has not."""
        hold = self.holding
        # From the last unit to the first, as backward goes: the first wanted by the next forward is sent last.
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
        unit = self.units[index]
        hold = self.holding if hold is None else hold
        # Sent once more, so its place is sure, whatever it was sent for before.
        self._doubtful.discard(index)
        self._done.pop(index, None)  # sent twice while learning: the last place is the one to remember
        self._done[index] = uses
        self.issued.add(_HOLD if hold else _REDUCE, index, unit.version)
        scale = self.loss_scale.factor
        for gradient in unit.gradients:
            # Before the next message is made: its memory is what back-pressure is to bound.
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
