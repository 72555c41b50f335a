"""The end of a wait that no line of Python can limit: on a card, the host only queues work and goes on.

If another rank is missing, a collective on the card never ends, and neither does what is queued behind it. The host
notices where it reads a number, or when the queue is full and a launch does not return. So a thread watches what has
been queued. When none of it has finished for ``hang_timeout``, or when another rank says that it has failed, the thread
declares the ranks lost and aborts the communicators, and the launch returns.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from zeropp.comm.streams import Event
from zeropp.comm.threads import Patrol

__all__ = ["BLIND", "Monitor", "make_monitor"]

BLIND = frozenset({"cuda"})
"""Types of devices whose work the host does not wait for."""


class GiveUp(Protocol):
    """A method that ends the waiting."""

    def __call__(self, doing: str, /, *, waited: bool) -> object:
        """See :class:`Monitor`."""
        ...


_ASKING = 5.0  # seconds of waiting after which the others are asked, and between two questions
_LOOKS = 8  # in ``hang_timeout``, at least
_PERIOD = 1.0  # seconds at most between looks: events of finished work are kept until then


class Monitor:
    """Knows what one rank has queued for the links between ranks.

    Args:
        hang_timeout: seconds without progress that are too many.
        give_up: called once, on the monitor's thread, with the name of what is waited for, and whether ``hang_timeout``
            was reached.
        device: whose work that is.
        failed: tells whether another rank has failed; asked now and then while this one waits.
    """

    def __init__(
        self,
        hang_timeout: float,
        give_up: GiveUp,
        device: torch.device,
        failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._device = device
        self._hang_timeout = hang_timeout
        self._give_up = weakref.WeakMethod(give_up)  # it is a method of what owns this
        self._queued: deque[tuple[Event, str, float]] = deque()  # its own thread takes them out
        self._failed = failed
        self._asked = 0.0  # when the others were last asked
        self._progress = 0.0  # when work was last seen to be finished
        self._patrol = Patrol("monitor", self._look)

    def note(self, event: Event, doing: str) -> None:
        """Work was queued that ends with ``event``; ``doing`` says what it is, after "waiting for"."""
        if not self._patrol.started:  # at the first: a rank that sends nothing needs no thread
            self._patrol.start(min(self._hang_timeout / _LOOKS, _PERIOD))
        self._queued.append((event, doing, time.monotonic()))

    def _look(self) -> None:
        if self._device.type == "cuda":
            # A thread begins on the first card, and asking an event would make a context there, of half a gigabyte.
            torch.cuda.set_device(self._device)
        self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Forget what is finished; give up if the oldest of the rest has been at the head for too long."""
        while self._queued and self._queued[0][0].done():
            self._queued.popleft()
            self._progress = now
        if not self._queued or self._patrol.stopped.is_set():
            return
        _, doing, since = self._queued[0]
        # A long queue is no hang: each piece of work has the time from the end of the one before it.
        waited = now - max(since, self._progress)
        late = waited >= self._hang_timeout
        if late or self._is_in_vain(waited, now):
            self._patrol.stopped.set()
            give_up = self._give_up()
            if give_up is not None:
                give_up(doing, waited=late)

    def _is_in_vain(self, waited: float, now: float) -> bool:
        """Tell, every few seconds of a wait, whether another rank has failed."""
        if waited < _ASKING or now - self._asked < _ASKING:
            return False
        self._asked = now
        # A store that does not answer is the business of whoever waits for it.
        with contextlib.suppress(RuntimeError, TimeoutError):
            return self._failed()
        return False

    def close(self) -> None:
        """Stop looking."""
        self._patrol.stopped.set()


def make_monitor(
    device: torch.device, hang_timeout: float, give_up: GiveUp, failed: Callable[[], bool] = lambda: False
) -> Monitor | None:
    """A monitor where the device needs one; arguments as for :class:`Monitor`."""
    return Monitor(hang_timeout, give_up, device, failed) if device.type in BLIND else None
