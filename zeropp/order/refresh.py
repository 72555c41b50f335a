"""Refreshes: renewal of cached weights after the main weights have changed.

[Note: cached weights] Cached weights carry the version of the main weights that they were made from. A step, a load and
an edit make a new version. `Refresh.start_refresh` then queues the refreshes of all units in the order of the next
forward, and returns. A gather from a secondary shard waits on its comm stream for the refresh of its unit. The model's
first use of a persistent unit waits for the refresh, too. A use of an older version raises an error
(`Unit._check_cached`), because wrong values would look like right ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from zeropp.comm.agreement import Agreement, Watched
from zeropp.comm.streams import CommStreams, Event, EventGroup
from zeropp.order.known_orders import IssueHash
from zeropp.order.schedule import Schedule
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.unit import Unit
from zeropp.params.wire_copy import WireCopy

__all__ = ["Refresh", "chunk_of"]

_REFRESH, _DIFFERENCES = 3, 4  # kinds of collectives in the issue hash


def chunk_of(position: int) -> int:
    """Return the number of the chunk in which a unit is stepped and refreshed.

    Chunks have 1, 1, 2, 4, ... units.

    Args:
        position: position of the unit among the trainable units, in the order of the next forward.
    """
    return position.bit_length()


class Refresh:
    """Issues refreshes of cached weights in the order of the next forward.

    With a codec of differences (``weight_codec`` "delta4" or "lossless"), a refresh sends only the differences to the
    cached weights if all ranks cache the same ones. The size of a "lossless" message depends on the values, so ranks
    first agree on the sizes for a chunk of units. A buffer whose "lossless" differences would take at least as many
    bytes as its weights is refreshed with whole weights.

    Attributes:
        is_put_off: True if cached weights are old and their refresh waits for the next step or forward.
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
        """Start with nothing to refresh.

        Args:
            units: all units of the model.
            comm_streams: comm streams of refreshes.
            schedule: gives the order of the next forward.
            agreement: watches waits and launches.
            issued: hash of the issued collectives.
            take_largest: replaces an integer tensor by its maximum over all ranks; called on a comm stream.
            note: counts an event of a unit for the ledger.
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
        """Delay the refresh of cached weights to the next step or forward: main weights may change again before it."""
        self.is_put_off = True
        for source in self._sources():
            source.expect_edits()

    def start_put_off(self) -> None:
        """Start the delayed refreshes, if there are any."""
        if self.is_put_off:
            for source in self._sources():
                source.take_edits()
            self.start_refresh()

    def _sources(self) -> Iterator[WireCopy]:
        """Yield the offloaded copies of trainable buffers that refreshes read."""
        for unit in self._units:
            yield from (buffer.wire_copy for buffer in unit.trainable_buffers if buffer.wire_copy is not None)

    def start_refresh(self) -> None:
        """Queue the refreshes of all old cached weights, chunk by chunk."""
        self.is_put_off = False
        # Chunks grow, so that the first units are sent at once and the number of agreements on sizes stays small.
        position = 0
        stale = []
        # Count all trainable units, old or not. So the chunks are those of a step, and a rank that refreshes several
        # chunks in one call issues the same agreements as a rank that refreshes one chunk in each call.
        for unit in self._schedule.in_forward_order():
            if unit.stale:
                stale.append((chunk_of(position), unit))
            position += bool(unit.trainable_buffers)
        for _, numbered in groupby(stale, lambda each: each[0]):
            self._start([unit for _, unit in numbered])

    def _start(self, stale: Sequence[Unit]) -> None:
        """Queue the refreshes of one chunk of units."""
        buffers = [buffer for unit in stale for buffer in unit.buffers if buffer.stale]
        # Find the buffers with a base first: queueing a refresh marks its buffer as up to date.
        based = {buffer for buffer in buffers if buffer.has_base}
        sends_differences = self._choose(buffers, based, EventGroup.from_events([unit.stepping for unit in stale]))
        for unit in stale:
            kind = _DIFFERENCES if based.intersection(unit.buffers) else _REFRESH
            self._issued.add(kind, unit.index, unit.version)
            with self._agreement.issuing("refreshing", unit.name, "refresh"):
                event = unit.refresh(self.comm_streams, sends_differences)
            self._agreement.queued(event, unit.name, "refresh")

    def _choose(
        self, buffers: Sequence[FlatBuffer], based: set[FlatBuffer], stepped: Event | None
    ) -> Callable[[FlatBuffer], bool]:
        """Queue the agreement on message sizes; return a function: True if a buffer is refreshed by differences."""
        # The sizes of these messages differ from step to step, but a collective needs the same sizes on all ranks.
        counted = [buffer for buffer in buffers if buffer.counts_escapes and buffer in based]
        # Buffers whose differences would be too large. ``agree`` fills the set. Readers first wait for ``agreed``.
        crowded: set[FlatBuffer] = set()
        agreed: Event | None = None
        if counted:

            def agree() -> None:
                most = torch.stack([buffer.count_escapes() for buffer in counted])
                self._take_largest(most)
                crowded.update(b for b, room in zip(counted, most.tolist(), strict=True) if not b.set_capacity(*room))

            with self._agreement.watching("agreeing on the sizes of refreshes"):
                # On a comm stream. The host goes on if that stream has a thread; otherwise it waits in ``tolist``.
                # Refreshes on other comm streams wait for the event.
                agreed = self.comm_streams["cross"].run(agree, after=stepped)

        def sends_differences(buffer: FlatBuffer) -> bool:
            if agreed is not None:
                agreed.wait(threading.TIMEOUT_MAX)  # no limit needed: the wait for the refresh itself has one
            by_differences = buffer in based and buffer not in crowded
            if buffer.paths.differences is not None:
                why = "differences" if by_differences else "whole, too much has changed"
                self._note(buffer.unit, f"refresh: {why if buffer in based else 'whole'}")
            return by_differences

        return sends_differences

    def invalidate(self) -> None:
        """Refresh all cached weights from main weights at the next step or forward, without differences.

        Called when ranks that cache the same weights have different bits of them.
        """
        for unit in self._units:
            for buffer in unit.buffers:
                if buffer.paths.differences is not None:
                    buffer.invalidate_cache()
        self.put_off()

    def wait_for_step(self) -> None:
        """Wait until no step on the host is in flight. Such a step reads gradients and writes weights and states."""
        for unit in self._units:
            if unit.stepping is not None:
                self._agreement.wait_for_event(unit.wait_for_step, self._watched(unit, "step"))

    def wait_for_all(self) -> None:
        """Wait until no step writes and no refresh reads the main weights."""
        self.wait_for_step()
        for unit in self._units:
            if unit.refreshing is not None:
                self._agreement.wait_for_event(unit.wait_for_refresh, self._watched(unit, "refresh"))

    def _watched(self, unit: Unit, kind: str) -> Watched:
        doing = f"waiting for the {kind} of unit {unit.name!r}"
        return self._agreement.watching(doing, timed=(unit.name, kind))
