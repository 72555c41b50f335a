"""Bytes that a rank sends, per unit, hop and class of link."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Ledger", "LedgerRow"]


@dataclass(frozen=True)
class LedgerRow:
    """Traffic of one unit over one hop, as this rank sent it."""

    unit: str
    kind: str  # "gather", "refresh" (of weights that are kept), "reduce" or "control"
    hop: str  # "outer->inner" levels in the direction of travel
    link: str  # "local" or "cross"
    calls: int
    bytes: int  # sent by this rank to others


@dataclass
class Ledger:
    """Counts bytes this rank sends to others, per unit, hop and link class.

    Counted is the payload each peer has to receive once: (n-1) messages of a gather, (n-1)/n of an exchange.
    """

    _calls: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    _bytes: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, unit: str, kind: str, hop: str, link: str, nbytes: int) -> None:
        """Count one call."""
        key = (unit, kind, hop, link)
        with self._lock:
            self._calls[key] += 1
            self._bytes[key] += nbytes

    @property
    def rows(self) -> list[LedgerRow]:
        """One row per unit and hop, in order of name."""
        with self._lock:
            return [LedgerRow(*key, self._calls[key], self._bytes[key]) for key in sorted(self._calls)]

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

    def __str__(self) -> str:
        lines = [f"{'unit':32}{'kind':8}{'hop':10}{'link':7}{'calls':>8}{'bytes sent':>18}"]
        lines += [f"{r.unit:32}{r.kind:8}{r.hop:10}{r.link:7}{r.calls:>8}{r.bytes:>18,}" for r in self.rows]
        return "\n".join([*lines, f"{'total':65}{self.total_bytes:>18,}"])

    def reset(self) -> None:
        """Forget everything counted so far."""
        with self._lock:
            self._calls.clear()
            self._bytes.clear()
