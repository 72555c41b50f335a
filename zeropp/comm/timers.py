"""Timers of calls and of waits.

There are a repeated call, a call with a time limit, and a call that logs a warning when it takes long. Stalls measure
how long the model waits for its collectives.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from zeropp.comm.threads import Threads

__all__ = [
    "PeriodicThread",
    "StreamStalls",
    "StreamTimer",
    "warn_of_waiting",
    "within",
]

_T = TypeVar("_T")
_log = logging.getLogger("zeropp")


class PeriodicThread:
    """A thread that calls a method periodically and holds only a weak reference to the method's object.

    The thread ends when the object is collected as garbage, when :attr:`stopped` is set, or when the program ends.

    Args:
        name: name of the thread.
        look: the method to call periodically.
        end: a method of the same object that is called once after :attr:`stopped` is set; None for no such call.

    Attributes:
        stopped: event that ends the thread when it is set.
        started: True once the thread has been started.
    """

    def __init__(self, name: str, look: Callable[[], None], end: Callable[[], None] | None = None) -> None:
        self.stopped = threading.Event()
        self.started = False
        self._name = name
        self._look = weakref.WeakMethod(look)
        self._end = None if end is None else weakref.WeakMethod(end)
        self._threads = Threads(self.stopped.set)
        self._starting = threading.Lock()

    def start(self, period: float) -> None:
        """Start calling ``look`` every ``period`` seconds. Later calls have no effect and do not change the period."""
        # Several threads may call ``start`` at once; only one of them may create the thread.
        with self._starting:
            if not self.started:
                self.started = True
                self._threads.start(self._name, _periodic, self._name, self._look, self._end, self.stopped, period)


def _periodic(
    name: str,
    look: weakref.WeakMethod[Callable[[], None]],
    end: weakref.WeakMethod[Callable[[], None]] | None,
    stopped: threading.Event,
    period: float,
) -> None:
    while True:
        ends = stopped.wait(period)
        method = end if ends else look
        call = None if method is None else method()
        if call is None:
            return
        try:
            call()
        except Exception as error:
            # The main thread raises errors of CUDA kernels and of the store itself. Here such an error must not end
            # this thread, or a later hang would go unnoticed.
            _log.debug("a periodic check of the thread %r failed: %s", name, error)
        if ends:
            return
        # Without this ``del``, the bound method in ``call`` would keep the object alive until the next period ends.
        del call


def within(seconds: float, call: Callable[[], _T], doing: str) -> _T:
    """Run a call on a new thread with a time limit, and return its result or raise its error.

    This is for calls that have no time limit of their own, such as those of torch's key-value store. After a timeout
    the thread keeps running and its result is ignored.

    Args:
        seconds: time limit.
        call: function to run, without arguments.
        doing: description of the call for the error message.

    Raises:
        TimeoutError: ``call`` did not return within ``seconds``.
    """
    answers: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    # The thread is a daemon because a call that never returns must not keep the program from ending.
    threading.Thread(target=work, name="zeropp limited", daemon=True).start()
    try:
        result, error = answers.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"{doing} took longer than {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


@contextlib.contextmanager
def warn_of_waiting(after: float, words: str) -> Iterator[None]:
    """Log a warning if the body of the ``with`` block takes longer than ``after`` seconds.

    This is for the time before the ranks have a common status board; afterwards `Watch` logs such warnings.

    Args:
        after: seconds until the warning.
        words: text of the warning.
    """
    timer = threading.Timer(after, _log.warning, args=("%s", words))
    # The timer thread is a daemon, so that the program can end before the timer fires when the body raises.
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# Timers of waits, for the ledger.

Tell = Callable[[str, str, float], None]
"""Callback for a measured wait; takes a unit, the kind of the work that was waited for, and seconds."""


class StreamStalls:
    """Timers for waits of a CUDA stream, by two CUDA events around each wait.

    The host does not wait for the events. A wait that the device has not finished yet is reported at a later call.

    Args:
        device: device whose current stream waits.
        tell: callback that gets each wait's unit, kind and seconds.
    """

    def __init__(self, device: torch.device, tell: Tell) -> None:
        self._index = device.index
        self._tell = tell
        self._open: deque[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = deque()
        # Events of reported waits, which are recorded again: making an event costs the host more than recording it.
        self._free: list[torch.cuda.Event] = []

    def timer(self, unit: str, kind: str) -> StreamTimer:
        """Return a timer that records an event before and after each wait on the current stream."""
        return StreamTimer(self, unit, kind)

    def record(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        # The host only queues a wait, and the stream stands still, so the time between the stream's events is measured.
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._index))
        return event

    def add(self, unit: str, kind: str, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Add a wait that is to be reported once its end event has happened."""
        self._open.append((unit, kind, start, end))
        self.collect()

    def collect(self) -> None:
        """Report the waits whose end event has happened."""
        # A stream reaches its events in order, so if the first end event has not happened, no later one has.
        while self._open and self._open[0][3].query():
            unit, kind, start, end = self._open.popleft()
            self._tell(unit, kind, start.elapsed_time(end) / 1000)
            self._free += (start, end)


class StreamTimer:
    """A timer for the waits for one kind of a unit's work. It measures one wait after another."""

    __slots__ = ("_kind", "_stalls", "_start", "_unit")

    def __init__(self, stalls: StreamStalls, unit: str, kind: str) -> None:
        self._stalls = stalls
        self._unit = unit
        self._kind = kind
        self._start: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Begin to measure a wait. The measurement is dropped if :meth:`end` is not called before the next one."""
        self._start = self._stalls.record()

    def end(self) -> None:
        """End the wait. Its seconds are reported once the device has passed it."""
        assert self._start is not None
        self._stalls.add(self._unit, self._kind, self._start, self._stalls.record())
        self._start = None
