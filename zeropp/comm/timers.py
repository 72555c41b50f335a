"""Calls that are timed: one that is given up after a while, one that logs a warning meanwhile, one that is repeated."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import TypeVar

from zeropp.comm.threads import Threads

__all__ = ["Patrol", "warn_of_waiting", "within"]

_T = TypeVar("_T")
_log = logging.getLogger("zeropp")


class Patrol:
    """A thread that calls a method again and again, and does not keep the object of the method alive.

    Args:
        name: of the thread.
        look: the method.
        end: a method of the same object, called once when the patrol is stopped.

    Attributes:
        stopped: set to end the patrol.
        started: True once the thread exists.
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
        """Call ``look`` every ``period`` seconds from here on; the first call decides."""
        with self._starting:  # several threads may be the first
            if not self.started:
                self.started = True
                self._threads.start(self._name, _patrol, self._name, self._look, self._end, self.stopped, period)


def _patrol(
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
            # An error of a kernel or of the store comes up in the user's own call, too, and must not end the job here.
            _log.debug("the thread %r could not look: %s", name, error)
        if ends:
            return
        # The name would keep the object alive until the next look.
        del call


def within(seconds: float, call: Callable[[], _T], doing: str) -> _T:
    """Run ``call`` on a thread of its own and return or raise what it does; one that takes longer is left behind.

    For calls that have no limit of their own, such as those of torch's key-value store.

    Raises:
        TimeoutError: it did not return within ``seconds`` of ``doing`` this.
    """
    answers: SimpleQueue[tuple[_T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    # A daemon: a call that never returns must not keep the program from ending.
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
    """Log ``words`` if what is inside takes longer than ``after`` seconds; where ranks have no common store yet."""
    timer = threading.Timer(after, _log.warning, args=("%s", words))
    # What is inside may fail, and the program must then be able to end before the timer does.
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
