"""Events, ends of pieces of work to wait for; and what a stream of work promises."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["DONE", "Event", "Launch", "Stream", "Together"]


class Event(Protocol):
    """Completion of one piece of work."""

    def wait(self, timeout: float) -> bool:
        """Let the caller's later work see the result; False when the host waited ``timeout`` seconds in vain."""
        ...

    def done(self) -> bool:
        """Whether it has happened, and well; no host waits for this."""
        ...


class Stream(Protocol):
    """A queue of work."""

    def run(self, *works: Callable[[], object], after: Event | None = None) -> Event:
        """Queue ``works``, in order, behind earlier ones, what the caller has issued, and what ends ``after``.

        Returns:
            Completion of the last.
        """
        ...

    def allocate(self, work: Callable[[], None]) -> None:
        """Allocate memory for work that will be queued."""
        ...

    def free(self, work: Callable[[], None]) -> None:
        """Free such memory, once what the caller has issued no longer reads it."""
        ...

    def abandon(self) -> None:
        """Wait for nothing from here on: the ranks have lost each other, and what is queued may never end."""
        ...

    def close(self) -> None:
        """Finish; nothing may be queued afterwards."""
        ...


class Done:
    """An event that has happened."""

    def wait(self, timeout: float) -> bool:
        """See :class:`Event`."""
        return True

    def done(self) -> bool:
        """See :class:`Event`."""
        return True


DONE = Done()


class Launch:
    """The end of work that is being launched.

    Attributes:
        end: of the work, once it has been launched.
    """

    def __init__(self) -> None:
        self.end: Event | None = None

    def wait(self, timeout: float) -> bool:
        """See :class:`Event`; nobody waits for the launch itself."""
        return self.end is not None and self.end.wait(timeout)

    def done(self) -> bool:
        """See :class:`Event`."""
        return self.end is not None and self.end.done()


class Together:
    """Several events as one."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    @staticmethod
    def of(events: Sequence[Event | None]) -> Event | None:
        """The events that there are, as one; None if there is none."""
        there = [event for event in events if event is not None]
        # A single one as it is: most units have one buffer.
        return Together(there) if len(there) > 1 else (there[0] if there else None)

    def wait(self, timeout: float) -> bool:
        """See :class:`Event`."""
        # One after another is as long as the last of them takes.
        until = time.monotonic() + timeout
        return all(event.wait(max(until - time.monotonic(), 0.0)) for event in self._events)

    def done(self) -> bool:
        """See :class:`Event`."""
        return all(event.done() for event in self._events)
