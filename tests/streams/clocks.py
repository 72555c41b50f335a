"""Vector clocks of streams and host threads, and the rules that order accesses to memory.

A *timeline* is a stream or a host thread. A timeline counts its operations. A timeline also stores, for every other
timeline, the number of that timeline's operations that end before its own next operation begins. An operation of a
stream begins after all operations that the stream received before, and after everything that the launching thread has
done or waited for.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["DEVICE", "HOST", "PINNED", "Clocks", "Memory", "Timeline"]

DEVICE, PINNED, HOST = "device", "pinned", "host"
Span = tuple[int, int]  # first byte, and the byte after the last
Now = dict[int, int]  # number of a timeline -> number of its operations that have ended
_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(eq=False)
class Timeline:
    """A stream or a host thread.

    Attributes:
        name: name for reports.
        number: number of this timeline.
        is_host: True for a host thread.
        now: operations of each timeline that end before the next operation here begins.
    """

    name: str
    number: int
    is_host: bool
    now: Now = field(default_factory=dict)

    def join(self, other: Now) -> None:
        """Wait for all operations that ``other`` counts."""
        for number, count in other.items():
            if count > self.now.get(number, 0):
                self.now[number] = count

    def tick(self) -> int:
        """Begin an operation, and return its number."""
        count = self.now.get(self.number, 0) + 1
        self.now[self.number] = count
        return count


@dataclass
class _Access:
    span: Span
    writes: bool
    by: Timeline
    count: int  # number of the operation on its timeline
    where: str
    counted: bool  # True if torch's allocator of pinned memory waits for this access


@dataclass(eq=False)
class Memory:
    """One storage.

    Attributes:
        kind: DEVICE, PINNED or HOST.
        nbytes: size in bytes.
        home: the stream that the storage was allocated on.
        accesses: accesses that later ones may have to wait for.
        named: streams named with ``record_stream``.
    """

    kind: str
    nbytes: int
    home: Timeline | None = None
    accesses: list[_Access] = field(default_factory=list)
    named: set[Timeline] = field(default_factory=set)


class Clocks:
    """All timelines of one simulated GPU.

    Attributes:
        races: a description of each unordered pair of accesses.
        tell: called with each description when the race is found.
        model: the stream that is current at first in every thread.
    """

    def __init__(self) -> None:
        self.races: dict[str, None] = {}
        self.tell: Callable[[str], object] = str
        # Reentrant, because garbage collection may free a tensor while this thread holds the lock.
        self.lock = threading.RLock()
        self._count = 0
        self._threads = threading.local()
        self.model = self.timeline("the model's stream")

    def timeline(self, name: str, *, is_host: bool = False) -> Timeline:
        """Return a new timeline."""
        with self.lock:
            self._count += 1
            return Timeline(f"{name} ({self._count})", self._count, is_host)

    @property
    def host(self) -> Timeline:
        """The timeline of the running thread."""
        found: Timeline | None = getattr(self._threads, "host", None)
        if found is None:
            found = self._threads.host = self.timeline(threading.current_thread().name, is_host=True)
        return found

    @property
    def stream(self) -> Timeline:
        """The current stream of the running thread."""
        return getattr(self._threads, "stream", self.model)

    @stream.setter
    def stream(self, stream: Timeline) -> None:
        self._threads.stream = stream

    def begin(self, by: Timeline) -> int:
        """Begin an operation that the running thread launches, and return its number."""
        if not by.is_host:
            by.join(self.host.now)
        return by.tick()

    def access(
        self, memory: Memory, span: Span, *, writes: bool, by: Timeline, what: str, counted: bool = False
    ) -> None:
        """Record an access to bytes by a timeline's last operation, and report accesses that it should wait for."""
        new = _Access(span, writes, by, by.now[by.number], f"{what} at {_place()}", counted)
        kept = []
        for old in memory.accesses:
            apart = old.span[1] <= span[0] or span[1] <= old.span[0]
            inside = span[0] <= old.span[0] and old.span[1] <= span[1]
            if not apart and (writes or old.writes) and by.now.get(old.by.number, 0) < old.count:
                self.report(f"{_say(new)} does not wait for {_say(old)}")
            # Drop an access that the new one covers: whatever waits for the new access also waits for the old one.
            covered = inside and (writes or (not old.writes and old.by is by and old.counted == counted))
            if not covered:
                kept.append(old)
        memory.accesses = [*kept, new]

    def allocate(self, memory: Memory) -> None:
        """Record the allocation of a storage. The memory may have belonged to another storage on the same stream."""
        memory.home, memory.named = self.stream, set()
        memory.accesses = []
        if memory.kind == DEVICE:
            # Count the allocation as a write of the whole storage after all operations that the stream has received, so
            # other streams must wait for these.
            count = memory.home.now.get(memory.home.number, 0)
            where = f"allocation at {_place()}"
            memory.accesses = [_Access((0, sys.maxsize), True, memory.home, count, where, False)]

    def free(self, memory: Memory) -> None:
        """Record that a storage is freed, and report accesses that are not ordered before a reuse on its stream."""
        with self.lock:
            known = Timeline("", 0, True, dict(self.host.now))
            if memory.kind == DEVICE and memory.home is not None:
                known.join(memory.home.now)
            # Before a reuse, the allocator waits for everything that the streams named with record_stream have
            # received.
            for stream in memory.named:
                known.join(stream.now)
            for old in memory.accesses:
                if old.by.is_host or old.counted:
                    continue
                if known.now.get(old.by.number, 0) < old.count:
                    home = "the host" if memory.home is None else memory.home.name
                    self.report(f"memory of {home}, freed at {_place()}, may be reused before {_say(old)}")
            memory.accesses = []

    def report(self, race: str) -> None:
        """Record a race."""
        self.races[race] = None
        self.tell(race)


def _say(access: _Access) -> str:
    return f"{'write' if access.writes else 'read'} by {access.by.name}, {access.where}"


def _place() -> str:
    """Return the innermost lines of zeropp or of the tests that the running thread executes, at most three."""
    frame: types.FrameType | None = sys._getframe(2)
    found = list[str]()
    while frame is not None and len(found) < 3:
        path = _known.get(frame.f_code)
        if path is None:
            path = _known[frame.f_code] = _path(frame.f_code.co_filename)
        if path:
            found.append(f"{path}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "?"


_known: dict[types.CodeType, str] = {}


def _path(path: str) -> str:
    """Return the path of a file in the repository; "" for other files and for files whose lines explain no access."""
    inside = path.removeprefix(f"{_ROOT}/")
    return "" if inside == path or inside.startswith(("tests/streams/", "kernels/")) else inside
