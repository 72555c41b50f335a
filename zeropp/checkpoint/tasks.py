"""Work in threads of its own, also when the program's main thread has ended and waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["Task", "in_threads"]



class Task(Generic[_T]):
    """Work for a thread that a program which ends waits for; begun by :meth:`start`.

    Not an executor's: those take no more work once the main thread has ended, and a checkpoint may still be written.
    """

    def __init__(self, work: Callable[[], _T], name: str) -> None:
        self._results: list[_T] = []
        self._error: BaseException | None = None
        # And not Thread.join(): in which an error of a signal's handler makes Python take the thread for ended.
        self._over = threading.Event()

        def run() -> None:
            try:
                self._results.append(work())
            except BaseException as error:
                self._error = error
            finally:
                self._over.set()

        self._thread = threading.Thread(target=run, name=name)

    def start(self) -> None:
        """Begin.

        Raises:
            RuntimeError: the system has no more threads.
        """
        self._thread.start()

    @property
    def done(self) -> bool:
        """True if the task is over, well or not."""
        return self._over.is_set()

    def wait(self, seconds: float | None = None) -> None:
        """Until it is over, or ``seconds`` have passed."""
        self._over.wait(seconds)

    def result(self) -> _T:
        """The result of a task that is over; its error is raised. Asked for once."""
        self._over.wait()
        # Its traceback has frames that hold this: kept here, it would be a cycle, and stay with all that they hold.
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._results[0]
        finally:
            del error


def in_threads(count: int, work: Callable[[Iterator[int]], None], most: int) -> None:
    """Let threads share the numbers below ``count``; the first error of one ends all.

    Args:
        count: pieces of work.
        work: takes numbers from an iterator until there are none.
        most: threads.
    """
    numbers, lock, stop = iter(range(count)), threading.Lock(), threading.Event()

    def some() -> Iterator[int]:
        while not stop.is_set():
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            yield number

    def guarded() -> None:
        try:
            work(some())
        except BaseException:
            stop.set()
            raise

    if count <= 1:
        return guarded()
    tasks: list[Task[None]] = []
    try:
        for _ in range(min(most, count)):
            task = Task(guarded, "zeropp disk")
            task.start()
            tasks.append(task)
        for task in tasks:
            task.wait()
    except BaseException:
        # Ctrl-C: whoever pressed it does not wait for the rest of the work.
        stop.set()
        raise
    finally:
        # What is under way is not left behind: it writes to files and tensors that others are about to use.
        for task in tasks:
            task.wait()
    for task in tasks:
        task.result()
