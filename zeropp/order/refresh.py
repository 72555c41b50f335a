"""Renewing what is cached between uses, once main weights have changed.

[Note: cached weights] What is cached carries the version of the main weights it was made of. A step, a load and an edit
make a new version; `Refresh.start_refresh` then queues the renewal of every unit in the order of the next forward, and
returns. A gather from a secondary shard waits for its unit's refresh on the comm stream, a first use of a persistent
unit on the host; and whoever would use an older version is refused (`Unit._check_cached`), since no rank could tell it
from the values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from zeropp.comm.agreement import Agreement
from zeropp.comm.streams import CommStreams, Event, EventGroup, span
from zeropp.order.known_orders import IssueHash
from zeropp.order.schedule import Schedule
from zeropp.params.unit import FlatBuffer, Unit
from zeropp.params.wire_copy import WireCopy

__all__ = ["Refresh", "chunk_of"]

_REFRESH, _DIFFERENCES = 3, 4  # kinds in the issue hash


def chunk_of(position: int) -> int:
    """The number of a unit's chunk: one unit, one, two, four, ... are stepped and renewed at a time.

    Args:
        position: among trainable units, in the order of the next forward.
    """
    return position.bit_length()


class Refresh:
    """Issues refreshes in the order of the next forward; each first use waits for its own.

    Where what is cached can serve as a base, only differences to it are sent. Sizes of messages that differ are agreed
    on first, all at once; a unit whose differences would take more bytes than its weights is renewed by these.

    Attributes:
        is_put_off: something is stale, and waits for the next step or forward.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        comm_streams: CommStreams,
        schedule: Schedule,
        agreement: Agreement,
        issued: IssueHash,
        take_largest: Callable[[Tensor], None],
        note: Callable[[str, str], None],
    ) -> None:
        """Nothing is renewed yet.

        Args:
            units: the model's.
            comm_streams: for refreshes.
            schedule: knows the order of the next forward.
            agreement: for waits.
            issued: takes in what is issued.
            take_largest: takes the maximum over all ranks, in place; called on a comm stream.
            note: counts what happened to a unit, for the report.
        """
        self.comm_streams = comm_streams
        self._units = units
        self._schedule = schedule
        self._agreement = agreement
        self._issued = issued
        self._take_largest = take_largest
        self._note = note
        self.is_put_off = False

    def put_off(self) -> None:
        """Main weights have changed and may yet change once more: start with the next forward."""
        self.is_put_off = True
        for source in self._sources():
            source.expect_edits()

    def start_put_off(self) -> None:
        """Start what was put off."""
        if self.is_put_off:
            for source in self._sources():
                source.take_edits()
            self.start_refresh()

    def _sources(self) -> Iterator[WireCopy]:
        for unit in self._units:
            yield from (buffer.wire_copy for buffer in unit.trainable_buffers if buffer.wire_copy is not None)

    def start_refresh(self) -> None:
        """Start renewing all that is stale, chunk by chunk; so a rank may start several at once, and others not."""
        self.is_put_off = False
        # Chunks double, so that the first units travel at once and the last cost few agreements.
        position = 0
        stale = []
        # Counted over all trainable units, stale or not: so these are the chunks of a step, too.
        for unit in self._schedule.in_forward_order():
            if unit.stale:
                stale.append((chunk_of(position), unit))
            position += bool(unit.trainable_buffers)
        for _, numbered in groupby(stale, lambda each: each[0]):
            self._start([unit for _, unit in numbered])

    def _start(self, stale: Sequence[Unit]) -> None:
        buffers = [buffer for unit in stale for buffer in unit.buffers if buffer.stale]
        # Before anything is queued: that notes the new version as cached, as if it were there.
        based = {buffer for buffer in buffers if buffer.has_base}
        sends_differences = self._choose(buffers, based, EventGroup.from_events([unit.stepping for unit in stale]))
        for unit in stale:
            kind = _DIFFERENCES if based.intersection(unit.buffers) else _REFRESH
            self._issued.add(kind, unit.index, unit.version)
            with self._agreement.issuing("refreshing", unit.name, "refresh"), span("refresh", unit.name):
                event = unit.refresh(self.comm_streams, sends_differences)
            self._agreement.queued(event, unit.name, "refresh")

    def _choose(
        self, buffers: Sequence[FlatBuffer], based: set[FlatBuffer], stepped: Event | None
    ) -> Callable[[FlatBuffer], bool]:
        """Queue the agreement on what is sent; returns a function that tells whether a buffer sends differences."""
        # Their messages differ in size from step to step, and ranks must give collectives the same sizes.
        counted = [buffer for buffer in buffers if buffer.counts_escapes and buffer in based]
        # Filled on one comm stream and read on others, only after ``agreed``.
        crowded: set[FlatBuffer] = set()
        agreed: Event | None = None
        if counted:

            def agree() -> None:
                most = torch.stack([buffer.count_escapes() for buffer in counted])
                self._take_largest(most)
                crowded.update(b for b, room in zip(counted, most.tolist(), strict=True) if not b.take_room(*room))

            with self._agreement.watching("agreeing on the sizes of refreshes"):
                # On the comm stream: the host goes on, and refreshes behind it on other comm streams wait for the
                # event.
                agreed = self.comm_streams.stream("cross").run(agree, after=stepped)

        def sends_differences(buffer: FlatBuffer) -> bool:
            if agreed is not None:
                agreed.wait(threading.TIMEOUT_MAX)  # whoever waits for the refresh has a shorter patience
            by_differences = buffer in based and buffer not in crowded
            if buffer.paths.differences is not None:
                why = "differences" if by_differences else "whole, too much has changed"
                self._note(buffer.unit, f"refresh: {why if buffer in based else 'whole'}")
            return by_differences

        return sends_differences

    def invalidate(self) -> None:
        """Ranks that cache the same weights have other bits: renew them from main weights alone, at the next chance."""
        for unit in self._units:
            for buffer in unit.buffers:
                if buffer.paths.differences is not None:
                    buffer.invalidate_cache()
        self.put_off()

    def wait_for_step(self) -> None:
        """Wait until no step is under way: for its gradients, or for weights and states."""
        for unit in self._units:
            if unit.stepping is not None:
                name, wait = unit.name, unit.wait_for_step
                self._agreement.wait_for_event(wait, f"waiting for the step of unit {name!r}", (name, "step"))

    def wait_for_all(self) -> None:
        """Wait until no step writes and no refresh reads the main weights any more, before they are used here."""
        self.wait_for_step()
        for unit in self._units:
            if unit.refreshing:
                name, wait = unit.name, unit.wait_for_refresh
                self._agreement.wait_for_event(wait, f"waiting for the refresh of unit {name!r}", (name, "refresh"))
