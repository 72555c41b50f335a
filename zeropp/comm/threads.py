"""Threads, which end before Python ends, and the one place that knows of forks of the process and of its end.

[Note: forked children] A forked child, such as a worker of a data loader, has none of its parent's threads, and perhaps
locks that one of them held. Work for such a thread, and waits for it, would never end, so they raise
:class:`ForkedError`. Threads that the child starts itself are its own, and work.

[Note: end of the program] Python first waits for threads that are no daemons, as those that write a checkpoint. Then
calls registered by `at_exit` run in their order, then the threads of every `Threads` are told to end and waited for.
What `when_dropped` registers does not run then: threads may still use it, and the system takes it away itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable

import torch

__all__ = ["PROCESS", "ForkedError", "Threads", "at_exit", "require_same_process", "when_dropped"]

_CLOSING = 5.0  # seconds to wait for threads to end
_YIELDING = 0.1  # seconds at the end of the program in which other threads may have the interpreter
# Threads that have not ended, each with the function that tells it to, for the end of the program.
_running: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()
# What owners do at the end of the program, and what they do in a forked child in order to forget it.
_at_exit: list[tuple[Callable[[], object], Callable[[], object]]] = []


class _Process:
    """The process that runs this.

    Attributes:
        forks: how many forks lie between the process that first imported this and this one. Not the number that the
            system has for it, since the system may use that again, and would be asked a thousand times a step.
    """

    forks = 0


PROCESS = _Process()


class ForkedError(RuntimeError):
    """A forked child used an object that needs threads of its parent."""


def require_same_process(made_in: int) -> None:
    """Refuse an object that needs the threads of another process.

    Args:
        made_in: ``PROCESS.forks`` where the object was made.

    Raises:
        ForkedError: this process is a forked child of that one.
    """
    if made_in != PROCESS.forks:
        raise ForkedError(
            f"process {os.getpid()} was forked from one that zeropp works in, and has none of its threads, which "
            "gather, step, read and write; use the model in the process that wrapped it, and hand copies to this one"
        )


def at_exit(call: Callable[[], object], *, forget: Callable[[], object]) -> None:
    """Register the work of an owner for the end of the program: see [Note: end of the program].

    Args:
        call: does the work.
        forget: called in a forked child, where that work is not to be done.
    """
    _at_exit.append((call, forget))


def when_dropped(owner: object, call: Callable[..., object], *arguments: object) -> weakref.finalize[..., object]:
    """Call ``call(*arguments)`` once ``owner`` is gone, but not at the end of the program."""
    finalizer = weakref.finalize(owner, call, *arguments)
    finalizer.atexit = False
    return finalizer


class Threads:
    """Daemon threads of one owner, told to end when this object is dropped or stopped, and when the program ends.

    Args:
        stop: tells the threads to end; called at most once. It refers to no owner, which it would keep alive.
        at_exit: called for each thread in place of ``stop`` when the program ends.

    Attributes:
        made_in: ``PROCESS.forks`` of the process that has the threads.
    """

    def __init__(self, stop: Callable[[], object], at_exit: Callable[[], object] | None = None) -> None:
        self._threads: list[threading.Thread] = []
        self._at_exit = at_exit or stop
        self.made_in = PROCESS.forks
        self._stop = when_dropped(self, _stop, stop, self.made_in)

    def start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        """Start a thread that calls ``target`` with ``arguments``."""
        # A daemon, or Python would wait for it before it could be told to end.
        thread = threading.Thread(target=target, args=arguments, name=f"zeropp {name}", daemon=True)
        thread.start()
        self._threads.append(thread)
        _running[thread] = self._at_exit

    def require_here(self) -> None:
        """Refuse work in a forked child.

        Raises:
            ForkedError: the threads are in the parent.
        """
        require_same_process(self.made_in)

    def stop(self) -> None:
        """Tell them to end; twice does no harm, and in a forked child it does nothing."""
        self._stop()

    def join(self) -> None:
        """Wait a while for their end: work that hangs must not hang this."""
        _join(self._threads)


def _stop(stop: Callable[[], object], made_in: int) -> None:
    # See [Note: forked children]: ``stop`` may take a lock that is held for ever.
    if made_in == PROCESS.forks:
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
    for tell in running.values():
        tell()
    _join(running)
    if running or torch.distributed.is_initialized():
        # gloo's own threads drop the tensors of finished collectives, for which they need the interpreter's lock.
        time.sleep(_YIELDING)


def _end_program() -> None:
    # A stack calls the last first, and all of them, also after one that raises.
    with contextlib.ExitStack() as calls:
        calls.callback(_end_all)
        for call, _ in reversed(_at_exit):
            calls.callback(call)


def _begin_as_child() -> None:
    PROCESS.forks += 1
    _running.clear()
    for _, forget in _at_exit:
        forget()


atexit.register(_end_program)
os.register_at_fork(after_in_child=_begin_as_child)
