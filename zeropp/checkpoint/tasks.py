"""Work in threads of its own, also when the program's main thread has ended and waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["Task", "in_threads"]

_T = TypeVar("_T")
_TO_START = 1.0  # seconds at most that a thread takes to come to be


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
        """Begin. After an error of a signal's handler here, :meth:`came_to_be` says whether it has."""
        self._thread.start()

    def came_to_be(self) -> bool:
        """Tell whether the thread is there, or was."""
        # It may be on its way; and it may end between two looks.
        alive = self._thread.is_alive()
        return alive or self._over.wait(_TO_START) or self._thread.is_alive()

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
    tasks = [Task(guarded, "zeropp disk") for _ in range(min(most, count))]
    try:
        for task in tasks:
            task.start()
        for task in tasks:
            task.wait()
    except BaseException:
        # A signal's: what is left of the work would keep its sender waiting. What is under way is not left behind: it
        # writes to files and tensors that others are about to use.
        stop.set()
        _wait_for_all(tasks)
        raise
    for task in tasks:
        task.result()


def _wait_for_all(tasks: list[Task[None]]) -> None:
    """Until those that came to be are over, whatever further signals raise."""
    left = list(tasks)
    while left:
        try:
            if left[0].came_to_be():
                left[0].wait()
            del left[0]
        except BaseException:
            continue
