"""Vector clocks of streams and of the host's threads, and the rules by which accesses to memory must be ordered.

A *timeline* is a stream, or a thread of the host; it counts its operations. It also knows of every other timeline how
many operations of that one have ended before its own next one begins. An operation of a stream begins after all that
the stream was given before, and after all that the launching thread has done or waited for.
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
Span = tuple[int, int]  # first byte, and one behind the last
Now = dict[int, int]  # number of a timeline -> operations of it that have ended
_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(eq=False)
class Timeline:
    """A stream or a thread.

    Attributes:
        name: for reports.
        number: of this timeline.
        is_host: whether it is a thread of the host.
        now: operations of each timeline that have ended before the next one here begins.
    """

    name: str
    number: int
    is_host: bool
    now: Now = field(default_factory=dict)

    def join(self, other: Now) -> None:
        """Wait for all that ``other`` counts."""
        for number, count in other.items():
            if count > self.now.get(number, 0):
                self.now[number] = count

    def tick(self) -> int:
        """Begin an operation."""
        count = self.now.get(self.number, 0) + 1
        self.now[self.number] = count
        return count


@dataclass
class _Access:
    span: Span
    writes: bool
    by: Timeline
    count: int  # of that timeline
    where: str
    counted: bool  # torch's allocator of pinned memory knows of it


@dataclass(eq=False)
class Memory:
    """One storage.

    Attributes:
        kind: whose memory it is.
        nbytes: how many there are.
        home: the stream it was allocated on.
        accesses: those that a later one may have to be ordered after.
        named: streams that ``record_stream`` has told the allocator of.
    """

    kind: str
    nbytes: int
    home: Timeline | None = None
    accesses: list[_Access] = field(default_factory=list)
    named: set[Timeline] = field(default_factory=set)


class Clocks:
    """All timelines of one pretended card.

    Attributes:
        races: a sentence for each pair of accesses that nothing orders.
        tell: called with each.
        model: the stream on which every thread begins.
    """

    def __init__(self) -> None:
        self.races: dict[str, None] = {}
        self.tell: Callable[[str], object] = str
        # Reentrant: Python may free a tensor in the middle of anything.
        self.lock = threading.RLock()
        self._count = 0
        self._threads = threading.local()
        self.model = self.timeline("the model's stream")

    def timeline(self, name: str, *, is_host: bool = False) -> Timeline:
        """A new one."""
        with self.lock:
            self._count += 1
            return Timeline(f"{name} ({self._count})", self._count, is_host)

    @property
    def host(self) -> Timeline:
        """The running thread's."""
        found: Timeline | None = getattr(self._threads, "host", None)
        if found is None:
            found = self._threads.host = self.timeline(threading.current_thread().name, is_host=True)
        return found

    @property
    def stream(self) -> Timeline:
        """The running thread's current stream."""
        return getattr(self._threads, "stream", self.model)

    @stream.setter
    def stream(self, stream: Timeline) -> None:
        self._threads.stream = stream

    def begin(self, by: Timeline) -> int:
        """Begin an operation, launched by the running thread."""
        if not by.is_host:
            by.join(self.host.now)
        return by.tick()

    def access(
        self, memory: Memory, span: Span, *, writes: bool, by: Timeline, what: str, counted: bool = False
    ) -> None:
        """Note that the operation last begun on a timeline reads or writes bytes, and check what came before it."""
        new = _Access(span, writes, by, by.now[by.number], f"{what} at {_place()}", counted)
        kept = []
        for old in memory.accesses:
            apart = old.span[1] <= span[0] or span[1] <= old.span[0]
            inside = span[0] <= old.span[0] and old.span[1] <= span[1]
            if not apart and (writes or old.writes) and by.now.get(old.by.number, 0) < old.count:
                self.report(f"{_say(new)} does not wait for {_say(old)}")
            # What comes after a write of all its bytes comes after the access itself.
            covered = inside and (writes or (not old.writes and old.by is by and old.counted == counted))
            if not covered:
                kept.append(old)
        memory.accesses = [*kept, new]

    def allocate(self, memory: Memory) -> None:
        """Memory for a storage that has none; until now it may have been another one's, on the same stream."""
        memory.home, memory.named = self.stream, set()
        memory.accesses = []
        if memory.kind == DEVICE:
            # No operation: but another stream must come after what this one has been given so far.
            count = memory.home.now.get(memory.home.number, 0)
            where = f"allocation at {_place()}"
            memory.accesses = [_Access((0, sys.maxsize), True, memory.home, count, where, False)]

    def free(self, memory: Memory) -> None:
        """Nobody refers to a storage any more: what comes next on its stream may be given its memory."""
        with self.lock:
            known = Timeline("", 0, True, dict(self.host.now))
            if memory.kind == DEVICE and memory.home is not None:
                known.join(memory.home.now)
            # The allocator waits for all that these have been given, and so for what that has waited for.
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
        """Note a race."""
        self.races[race] = None
        self.tell(race)


def _say(access: _Access) -> str:
    return f"{'write' if access.writes else 'read'} by {access.by.name}, {access.where}"


def _place() -> str:
    """The innermost lines of zeropp, or of the tests, that the running thread is in."""
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
    """The path of a file in the repository; empty for files outside of it, and those whose lines explain no access."""
    inside = path.removeprefix(f"{_ROOT}/")
    return "" if inside == path or inside.startswith(("tests/streams/", "kernels/")) else inside
