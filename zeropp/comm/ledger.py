"""Measurements of a run: the bytes that a rank sends, the time that the model waits for them, and profiler ranges.

`Ledger` counts bytes per unit, hop, codec and class of link. `make_stalls` gives it the times: by the host's clock, or
on a GPU by that of the stream that waits. `span` names work of the engine for torch.profiler.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from zeropp._compat import profiler_enabled

__all__ = ["HostStalls", "Ledger", "LedgerRow", "Stalls", "StreamStalls", "TrafficKey", "make_stalls", "span"]

# Bytes.


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


# Times.

Tell = Callable[[str, str, float], None]
"""Takes a unit, the kind of its work that was waited for, and seconds."""


class Stalls(Protocol):
    """Times what happens inside a ``with`` block, and tells it."""

    def timing(self, unit: str, kind: str) -> contextlib.AbstractContextManager[None]:
        """Time a wait, if it ends well."""
        ...

    def collect(self) -> None:
        """Tell what is known by now and was not when its wait was queued."""
        ...


def make_stalls(device: torch.device, tell: Tell) -> Stalls:
    """The timer for the waits of a model on ``device``."""
    return StreamStalls(device, tell) if device.type == "cuda" else HostStalls(tell)


class HostStalls:
    """Times waits of the host itself."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    @contextlib.contextmanager
    def timing(self, unit: str, kind: str) -> Iterator[None]:
        """See :class:`Stalls`."""
        start = time.perf_counter()
        # No ``finally``: a wait that ends in an error says nothing of how long the model waits.
        yield
        self._tell(unit, kind, time.perf_counter() - start)

    def collect(self) -> None:
        """Nothing is told later."""


class StreamStalls:
    """Times waits that the host only queues: by two events around each, read once the device has passed them.

    Nothing here waits for the device. What it has not passed yet is told at a later call.

    Args:
        device: whose current stream waits.
        tell: gets the times.
    """

    def __init__(self, device: torch.device, tell: Tell) -> None:
        self._device = device
        self._tell = tell
        self._open: deque[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def timing(self, unit: str, kind: str) -> Iterator[None]:
        """See :class:`Stalls`."""
        stream = torch.cuda.current_stream(self._device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The host only queues the wait. What stands still is the stream, so its own clock is read.
        start.record(stream)
        yield
        end.record(stream)
        self._open.append((unit, kind, start, end))
        self.collect()

    def collect(self) -> None:
        """See :class:`Stalls`."""
        # Events of one stream are passed in order: behind one that is still ahead, none can have been passed.
        while self._open and self._open[0][3].query():
            unit, kind, start, end = self._open.popleft()
            self._tell(unit, kind, start.elapsed_time(end) / 1000)


# Ranges in a profile.

_NOTHING = contextlib.nullcontext()


def span(what: str, unit: str) -> contextlib.AbstractContextManager[object]:
    """A range ``zeropp::<what> <unit>`` in a profile; it costs nothing while none is being recorded."""
    return torch.profiler.record_function(f"zeropp::{what} {unit}") if profiler_enabled() else _NOTHING
