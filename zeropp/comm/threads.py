"""Threads that end before Python ends, and the handlers for forks of the process and for the end of the program.

[Note: forked children] A forked child, such as a worker of a data loader, has none of its parent's threads, and may
have copies of locks that those threads held at the fork. Work queued for such a thread would never run, and a wait for
it would never end, so both raise :class:`ForkedError`. Threads that the child itself starts work as usual.

[Note: end of the program] At the end of the program Python first waits for all non-daemon threads, such as those that
write a checkpoint. Then the functions registered by `at_exit` run in the order of their registration. Then the threads
of every `Threads` object are asked to end, and the main thread waits for them. Functions registered by `when_dropped`
do not run at the end of the program: threads may still use the resources that these functions free, and the operating
system frees them anyway.
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

_CLOSING = 5.0  # seconds that all threads together get to end
_YIELDING = 0.1  # seconds that the exit handler sleeps, so that gloo's threads can get the interpreter's lock
# Live threads, each with the function that asks the thread to end. The exit handler reads this dictionary.
_running: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()
# Pairs (call, forget) from `at_exit`: ``call`` runs at the end of the program, ``forget`` runs in a forked child.
_at_exit: list[tuple[Callable[[], object], Callable[[], object]]] = []


class _Process:
    """A counter that identifies the current process among forked processes.

    Attributes:
        forks: number of forks between the process that first imported this module and the current process. This counter
            is used instead of the process id because the system may reuse an id, and because getpid() is a system call
            that would run about a thousand times per step.
    """

    forks = 0


PROCESS = _Process()


class ForkedError(RuntimeError):
    """Error raised in a forked child when it uses an object that depends on threads of its parent process."""


def require_same_process(made_in: int) -> None:
    """Raise an error if an object was made in another process, before a fork, and needs threads of that process.

    Args:
        made_in: value of ``PROCESS.forks`` when the object was made.

    Raises:
        ForkedError: the current process is a forked child of the process that made the object.
    """
    if made_in != PROCESS.forks:
        raise ForkedError(
            f"process {os.getpid()} was forked from the process that wrapped the model and has none of zeropp's "
            "threads (for gathers, steps and files); use the model in the process that wrapped it, and pass copies of "
            "tensors to the forked process"
        )


def at_exit(call: Callable[[], object], *, forget: Callable[[], object]) -> None:
    """Register a function that runs at the end of the program: see [Note: end of the program].

    Args:
        call: function to run at the end of the program.
        forget: function that runs in a forked child. It discards the parent's pending work, so that ``call`` does
            nothing in the child.
    """
    _at_exit.append((call, forget))


def when_dropped(owner: object, call: Callable[..., object], *arguments: object) -> weakref.finalize[..., object]:
    """Call ``call(*arguments)`` when ``owner`` is collected as garbage, but not at the end of the program.

    Returns:
        The finalizer. Its ``detach()`` cancels the call, and calling it runs ``call`` at once.
    """
    finalizer = weakref.finalize(owner, call, *arguments)
    finalizer.atexit = False
    return finalizer


class Threads:
    """Daemon threads of one owner, which are asked to end when this object is dropped or stopped or the program ends.

    Args:
        stop: function that asks all the threads to end. It is called at most once when this object is dropped or
            stopped. It must not refer to the owner, because this object's finalizer would keep the owner alive.
        at_exit: function called at the end of the program, once for each live thread; ``stop`` by default.

    Attributes:
        made_in: value of ``PROCESS.forks`` in the process that created this object and runs the threads.
    """

    def __init__(self, stop: Callable[[], object], at_exit: Callable[[], object] | None = None) -> None:
        self._threads: list[threading.Thread] = []
        self._at_exit = at_exit or stop
        self.made_in = PROCESS.forks
        self._stop = when_dropped(self, _stop, stop, self.made_in)

    def start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        """Start a daemon thread that calls ``target`` with ``arguments``.

        Args:
            name: name of the thread, without the prefix "zeropp".
            target: function to run.
            *arguments: arguments for ``target``.
        """
        # At exit Python waits for non-daemon threads before it runs exit handlers, so a non-daemon thread would never
        # be asked to end.
        thread = threading.Thread(target=target, args=arguments, name=f"zeropp {name}", daemon=True)
        thread.start()
        self._threads.append(thread)
        _running[thread] = self._at_exit

    def require_here(self) -> None:
        """Raise an error in a forked child, where these threads do not exist.

        Raises:
            ForkedError: the threads belong to a parent process.
        """
        require_same_process(self.made_in)

    def stop(self) -> None:
        """Ask the threads to end. A second call, or a call in a forked child, does nothing."""
        self._stop()

    def join(self) -> None:
        """Wait for the threads to end, at most 5 seconds in all, so that hanging work does not hang the caller."""
        _join(self._threads)


def _stop(stop: Callable[[], object], made_in: int) -> None:
    # In a forked child ``stop`` could block for ever on a lock that a thread of the parent held at the fork. See
    # [Note: forked children].
    if made_in == PROCESS.forks:
        stop()


def _join(threads: Iterable[threading.Thread]) -> None:
    # All threads share one time limit, so that the waits for many hanging threads do not add up.
    until = time.monotonic() + _CLOSING
    for thread in threads:
        thread.join(timeout=max(until - time.monotonic(), 0.0))


def _end_all() -> None:
    """End all threads before Python does: a thread that Python stops inside a collective crashes the process."""
    # Iterate over a copy, because threads that end meanwhile leave the dictionary. All threads are asked to end before
    # the first join, so that they end in parallel.
    running = dict(_running)
    for tell in running.values():
        tell()
    _join(running)
    if running or torch.distributed.is_initialized():
        # gloo's own threads need the interpreter's lock to drop the tensors of finished collectives.
        time.sleep(_YIELDING)


def _end_program() -> None:
    # The exit stack runs its callbacks in reverse order, hence ``reversed``, and runs all of them even if one raises.
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
