"""Renewing what is kept between uses, once main weights have changed."""

from __future__ import annotations

from collections.abc import Sequence

from zeropp.engine.agreement import Agreement
from zeropp.engine.schedule import Schedule
from zeropp.engine.sequence import IssueHash
from zeropp.engine.spans import span
from zeropp.streams import Stream
from zeropp.unit import Unit

__all__ = ["Refresh"]

_REFRESH = 3  # kind in the issue hash


class Refresh:
    """Issues refreshes in the order of the next forward; each first use waits for its own."""

    def __init__(
        self, units: Sequence[Unit], stream: Stream, schedule: Schedule, agreement: Agreement, issued: IssueHash
    ) -> None:
        self.stream = stream
        self._units = units
        self._schedule = schedule
        self._agreement = agreement
        self._issued = issued
        self._put_off = False

    def put_off(self) -> None:
        """Main weights have changed and may yet change once more: start with the next forward."""
        self._put_off = True

    def start_put_off(self) -> None:
        """Start what was put off."""
        if self._put_off:
            self.start()

    def start(self) -> None:
        """Start renewing all that is stale."""
        self._put_off = False
        for unit in self._schedule.in_forward_order():
            if unit.stale:
                self._issued.add(_REFRESH, unit.index, unit.version)
                with self._agreement.watching("refreshing", unit.name), span("refresh", unit.name):
                    unit.refresh(self.stream)

    def settle(self) -> None:
        """Wait until no refresh reads the main weights any more, before they change."""
        for unit in self._units:
            self._agreement.wait(unit.settle_refresh, f"waiting for the refresh of unit {unit.name!r}")
