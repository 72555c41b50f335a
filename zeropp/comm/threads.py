"""Threads that gather, step, read and write: told to end before Python ends, and refused in a forked child.

Also calls with a limit: `within` runs a call on a thread, and leaves it behind when its time is over; `warn_of_waiting`
logs a warning while a call takes long.

[Note: forked children] A forked child, such as a worker of a data loader, has none of its parent's threads, and perhaps
locks that one of them held. Work for such a thread, and waits for it, would never end, so they raise
:class:`ForkedError`. Threads that the child starts itself are its own, and work.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

__all__ = ["ForkedError", "Patrol", "Threads", "generation", "require_same_process", "warn_of_waiting", "within"]

_T = TypeVar("_T")
_log = logging.getLogger("zeropp")
_CLOSING = 5.0  # seconds to wait for threads to end
_YIELDING = 0.1  # seconds at the end of the program in which other threads may have the interpreter
# Not the process's number, which the system may be asked for a thousand times a step, and may use again.
_generation = 0
# Threads that have not ended, each with the function that tells it to, for the end of the program.
_running: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


class ForkedError(RuntimeError):
    """A forked child used an object that needs threads of its parent."""


def generation() -> int:
    """The number of forks between this process and the one that first imported this."""
    return _generation


def require_same_process(began: int) -> None:
    """Refuse an object that needs the threads of another process.

    Args:
        began: :func:`generation` where the object was made.

    Raises:
        ForkedError: this process is a forked child of that one.
    """
    if began != _generation:
        raise ForkedError(
            f"process {os.getpid()} was forked from one that zeropp works in, and has none of its threads, which "
            "gather, step, read and write; use the model in the process that wrapped it, and hand copies to this one"
        )


class Threads:
    """Daemon threads of one owner, told to end when this object is dropped or stopped, and when the program ends.

    Args:
        stop: tells the threads to end; called at most once. It refers to no owner, which it would keep alive.
        at_exit: called for each thread in place of ``stop`` when the program ends.
    """

    def __init__(self, stop: Callable[[], object], at_exit: Callable[[], object] | None = None) -> None:
        self._threads: list[threading.Thread] = []
        self._at_exit = at_exit or stop
        self._generation = _generation
        self._stop = weakref.finalize(self, _stop, stop, _generation)
        # The end of the program has a function of its own, below.
        self._stop.atexit = False

    def start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        """Start a thread that calls ``target`` with ``arguments``."""
        # A daemon, or Python would wait for it before atexit could tell it to end.
        thread = threading.Thread(target=target, args=arguments, name=f"zeropp {name}", daemon=True)
        thread.start()
        self._threads.append(thread)
        _running[thread] = self._at_exit

    def require_here(self) -> None:
        """Refuse work in a forked child.

        Raises:
            ForkedError: the threads are in the parent.
        """
        require_same_process(self._generation)

    def stop(self) -> None:
        """Tell them to end; twice does no harm, and in a forked child it does nothing."""
        self._stop()

    def join(self) -> None:
        """Wait a while for their end: work that hangs must not hang this."""
        _join(self._threads)


def _stop(stop: Callable[[], object], began: int) -> None:
    # See [Note: forked children]: ``stop`` may take a lock that is held for ever.
    if began == _generation:
        stop()


def _join(threads: Iterable[threading.Thread]) -> None:
    # One limit for all of them together, so that many that hang do not add up.
    until = time.monotonic() + _CLOSING
    for thread in threads:
        thread.join(timeout=max(until - time.monotonic(), 0.0))


def _end_all() -> None:
    """End threads before Python does: one that it stops inside a collective takes the process down with it."""
    # A copy: threads that end meanwhile leave the dictionary. All are told before the first is waited for.
    running = dict(_running)
    for at_exit in running.values():
        at_exit()
    _join(running)
    if running or torch.distributed.is_initialized():
        # gloo's own threads drop the tensors of finished collectives, for which they need the interpreter's lock.
        time.sleep(_YIELDING)


def _begin_as_child() -> None:
    global _generation
    _generation += 1
    _running.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_begin_as_child)


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


# Calls with a limit.


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
