"""Bytes that a rank sends, per unit, hop, codec and class of link; and how long the model stood still for them."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Ledger", "LedgerRow", "TrafficKey"]


class TrafficKey(NamedTuple):
    """Over which hop, and how."""

    unit: str
    kind: str  # "gather", "refresh" (of weights that are cached), "reduce" or "control"
    hop: str  # "outer->inner" levels in the direction of travel
    link: str  # "local" inside a node, "cross" between nodes, "all" for what every rank gets
    ranks: int  # that take part
    codec: str  # "bf16", "int8", "feedback(int4)", "lossless", ...


@dataclass(frozen=True)
class LedgerRow:
    """Traffic of one unit over one hop in one encoding, as this rank sent it."""

    unit: str
    kind: str
    hop: str
    link: str
    ranks: int
    codec: str
    calls: int
    bytes: int  # sent by this rank to others
    exposed: float  # seconds that the model waited for this kind of the unit's, told with its slowest link


@dataclass
class Ledger:
    """Counts what this rank sends to others, waits for, and notes besides.

    Counted is the payload each peer has to receive once: (n-1) messages of a gather, (n-1)/n of an exchange; twice that
    of gloo's own reduce-scatter. Waiting is what the model, on a GPU its stream, stood still for; with ``overlap_comm``
    off that is all of it, codecs included.

    Attributes:
        events: (unit, what) -> how often: how weights that are cached were renewed.
    """

    events: Counter[tuple[str, str]] = field(default_factory=Counter)
    _calls: Counter[TrafficKey] = field(default_factory=Counter)
    _bytes: Counter[TrafficKey] = field(default_factory=Counter)
    _exposed: Counter[tuple[str, str]] = field(default_factory=Counter)
    # Lanes count on their threads, the model's thread counts waits, and reports may come at any time.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, key: TrafficKey, nbytes: int) -> None:
        """Count one call."""
        with self._lock:
            self._calls[key] += 1
            self._bytes[key] += nbytes

    def add_wait(self, unit: str, kind: str, seconds: float) -> None:
        """Count seconds that the model stood still."""
        with self._lock:
            # For the whole work: the model waits for its end, and cannot tell which of its hops took the time.
            self._exposed[unit, kind] += seconds  # type: ignore[assignment]  # a Counter of floats

    def note(self, unit: str, what: str) -> None:
        """Count something else that happened."""
        with self._lock:
            self.events[unit, what] += 1

    @property
    def rows(self) -> list[LedgerRow]:
        """One row per unit, hop and codec: by unit and kind, links between nodes before those inside."""
        with self._lock:
            exposed = dict(self._exposed)
            return [
                # "cross" sorts before "local", and pop gives the time once: to the row of the slowest link.
                LedgerRow(*key, self._calls[key], self._bytes[key], exposed.pop((key.unit, key.kind), 0.0))
                for key in sorted(self._calls, key=lambda key: (key.unit, key.kind, key.link, key))
            ]

    @property
    def total_bytes(self) -> int:
        """Bytes this rank sent."""
        return sum(row.bytes for row in self.rows)

    def bytes_by_link(self) -> dict[str, int]:
        """Bytes this rank sent, for each class of link."""
        totals: Counter[str] = Counter()
        for row in self.rows:
            totals[row.link] += row.bytes
        return dict(totals)

    def bytes_by_hop(self) -> dict[str, int]:
        """Bytes this rank sent of weights and gradients, for each "kind hop codec"."""
        totals: Counter[str] = Counter()
        for row in self.rows:
            if row.kind != "control":
                totals[f"{row.kind} {row.hop} {row.codec}"] += row.bytes
        return dict(totals)

    def __str__(self) -> str:
        columns = f"{'unit':32}{'kind':9}{'hop':10}{'link':7}{'ranks':>5}  {'codec':18}"
        lines = [f"{columns}{'calls':>8}{'bytes sent':>18}{'exposed s':>11}"]
        for r in self.rows:
            name = f"{r.unit:32}{r.kind:9}{r.hop:10}{r.link:7}{r.ranks:>5}  {r.codec:18}"
            lines.append(f"{name}{r.calls:>8}{r.bytes:>18,}" + (f"{r.exposed:>11.3f}" if r.exposed else ""))
        lines.append(f"{'total':89}{self.total_bytes:>18,}")
        totals: Counter[str] = Counter()
        with self._lock:
            for (_, what), times in self.events.items():
                totals[what] += times
        lines += [f"{what}: {times} times" for what, times in sorted(totals.items())]
        return "\n".join(lines)

    def reset(self) -> None:
        """Forget everything counted so far."""
        with self._lock:
            for counter in (self._calls, self._bytes, self._exposed, self.events):
                counter.clear()
