"""Work of all ranks that fails on all if it fails on one; threads for it, and its progress bar.

A :class:`Task` runs in a thread of its own, also when the program's main thread has ended and waits for it.
:class:`Progress` is told of every byte that is moved, so it is also where work is stopped.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from zeropp.checkpoint.boxes import CheckpointError
from zeropp.comm.agreement import AT_WORK
from zeropp.comm.hops import Comm
from zeropp.comm.process_groups import name_ranks
from zeropp.config.base import warn_user
from zeropp.engine.engine import Engine

__all__ = [
    "AFTER",
    "EngineSync",
    "ErrorContext",
    "Progress",
    "RankSync",
    "Result",
    "Task",
    "absolute",
    "common_path",
    "in_threads",
    "path_of_rank_0",
    "reraise_as",
    "result_or_error",
    "run_between_passes",
]

_T = TypeVar("_T")


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
    numbers = iter(range(count))
    lock = threading.Lock()
    stop = threading.Event()

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


AFTER = 2.0
"""Seconds that something may take without a bar."""


class Progress:
    """Bytes that are done, of those that are to be done; any thread may tell of them.

    Args:
        doing: what is shown in front of the bar.
        shown: whether there may be one, which is so on the first rank unless the user does without.
    """

    def __init__(self, doing: str = "", shown: bool = False) -> None:
        self._doing = doing
        self._shown = shown
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._done = self._total = 0
        self._bar: Any = None
        self._stopped = False

    def stop(self) -> None:
        """There is no use in the rest: whoever tells of more, on any thread, gets an error and leaves it."""
        self._stopped = True

    def expect(self, nbytes: int) -> None:
        """So many more are to be done."""
        with self._lock:
            self._total += nbytes

    def add(self, nbytes: int) -> None:
        """So many more are done.

        Raises:
            CheckpointError: it was stopped.
        """
        if self._stopped:
            raise CheckpointError("it was stopped, since a rank is lost")
        with self._lock:
            self._done += nbytes
            if not self._shown or time.monotonic() - self._begin < AFTER:
                return
            if self._bar is None:
                self._bar = _new_bar(self._doing, self._done)
                self._shown = self._bar is not None
            self._show()

    def close(self) -> None:
        """Leave the bar as it is, and begin no other."""
        with self._lock:
            self._show()
            self._shown = False
            bar = self._bar
            self._bar = None
            if bar is not None:
                with contextlib.suppress(Exception):
                    bar.close()

    def _show(self) -> None:
        if self._bar is None:
            return
        try:
            self._bar.total = self._total
            # Reads are rounded to whole stretches, of which nobody was told.
            self._bar.update(min(self._done, self._total) - self._bar.n)
        except Exception:
            # Where it would be shown may be closed, and that is no reason to lose a checkpoint.
            self._shown = False
            self._bar = None


def _new_bar(doing: str, done: int) -> Any:
    """A bar, or None without tqdm."""
    try:
        kind: Any = importlib.import_module("tqdm").tqdm
    except ImportError:
        return None
    # Without tqdm's thread, which would stay, and a lock of its own, which may start a process.
    own = type("Bar", (kind,), {"monitor_interval": 0})
    own.set_lock(threading.RLock())  # type: ignore[attr-defined]  # as tqdm has it
    return own(desc=doing, initial=done, total=done, unit="B", unit_scale=True, mininterval=1.0)


_log = logging.getLogger("zeropp")
_LONGEST = 1.0  # seconds from one exchange of a heartbeat to the next
Result = tuple[_T | None, BaseException | None, str | None]
"""The end of some work: its result, its error, and the error in words, for ranks that are told of it."""


def absolute(given: object) -> str:
    """An absolute path; "" if nothing was given, or no path.

    Ranks exchange it, and :func:`path_of_rank_0` refuses "" on every rank. A rank that raised alone would leave the
    others waiting.
    """
    return str(Path(given).absolute()) if isinstance(given, (str, os.PathLike)) and os.fspath(given) else ""


def common_path(engine: Engine, given: object, call: str) -> Path:
    """The path that rank 0 was given, on every rank; with a warning where others were given another. Collective.

    Raises:
        ValueError: a rank was given none.
    """
    paths = engine.agreement.exchange_objects(absolute(given), f"comparing paths at {call}")
    return path_of_rank_0(engine, paths, call)


def path_of_rank_0(engine: Engine, paths: Sequence[str], call: str) -> Path:
    """:func:`common_path`, where every rank has every rank's path already.

    A run that names its folder by the time of day has another name on each rank. It would be too late to refuse that:
    what was trained until now would be lost.

    Args:
        engine: whose ranks compare.
        paths: of every rank, as :func:`absolute` has them.
        call: the user's.

    Raises:
        ValueError: a rank was given none.
    """
    without = [rank for rank, path in enumerate(paths) if not path]
    if without:
        raise ValueError(f"{call} got an empty path, or none, on ranks {without}; give one that all ranks see")
    other = next((rank for rank, path in enumerate(paths) if path != paths[0]), None)
    if other is not None and engine.comm.rank == 0:
        warn_user(
            f"ranks gave {call} different paths: rank 0 {paths[0]!r}, and rank {other} {paths[other]!r}; every rank "
            "uses rank 0's. Give the same one on every rank: a name with the time of day is made on rank 0, and shared "
            "by torch.distributed.broadcast_object_list"
        )
    return Path(paths[0])


def result_or_error(work: Callable[[], _T]) -> Result[_T]:
    """Do work, and return its result or its error.

    Also what a handler of a signal raises: others would wait for a rank that is about to end.
    """
    try:
        return work(), None, None
    except BaseException as error:
        # As text: not every error can be pickled.
        return None, error, f"{type(error).__name__}: {error}"


class RankSync:
    """Ranks that each do work of their own, such as reading or writing files, and tell each other how it went.

    Args:
        comm: of the ranks.
        hang_timeout: seconds for which ranks wait for one that is not heard of.
        warn_after: seconds for which some ranks wait for others before it is logged, or None.
    """

    def __init__(self, comm: Comm, hang_timeout: float, warn_after: float | None) -> None:
        self.rank = comm.rank
        self.world = comm.world
        self.alone = comm.world == 1 or comm.backend == "fake"
        self._hang_timeout = hang_timeout
        self._warn_after = warn_after

    def exchange(self, value: _T, doing: str) -> list[_T]:
        """Every rank's value.

        Raises:
            RuntimeError: a rank is lost.
        """
        raise NotImplementedError

    def exchange_number(self, number: int, doing: str) -> list[int]:
        """:meth:`exchange`, of a number."""
        raise NotImplementedError

    def do(self, work: Callable[[], _T], doing: str, progress: Progress) -> Result[_T]:
        """:func:`result_or_error`, of work that may take one rank any time longer than another; returns when all are
        done.

        Meanwhile a thread exchanges with the other ranks whether each is done. A disk may be as slow as it likes, and a
        rank that is lost is noticed within ``hang_timeout``. The work stays on the thread of the caller, which has the
        caller's device, stream and grad mode, and where a signal's handler may end it.

        Args:
            work: exchanges nothing with other ranks, and calls nobody's code that might.
            doing: for errors.
            progress: that work tells of what it does; stopped when a rank is lost.

        Raises:
            RuntimeError: a rank is lost; when the work of this one is over.
        """
        if self.alone:
            return result_or_error(work)
        over = threading.Event()
        heartbeat = Task(lambda: self._beat(over, doing, progress), "zeropp heartbeat")
        heartbeat.start()
        try:
            found = result_or_error(work)
        finally:
            over.set()
        _, error, told = result_or_error(heartbeat.wait)
        if error is not None:
            # A signal's, while the others were still at work: they hear of it, too.
            found = None, error, told
        try:
            heartbeat.result()
        except RuntimeError as lost:
            raise lost from found[1]
        return found

    def _beat(self, over: threading.Event, doing: str, progress: Progress) -> None:
        """Exchange with the other ranks whether each is done, until all are."""
        waiting = _Waiting(self.rank, doing, self._warn_after)
        pause = _LONGEST / 64
        over.wait(pause)
        try:
            while not all(done := self.exchange_number(int(over.is_set()), doing)):
                waiting.note_done(done)
                over.wait(pause)
                # Several exchanges within hang_timeout, after which a silent rank counts as lost.
                pause = min(2 * pause, _LONGEST, self._hang_timeout / 4)
        except BaseException:
            progress.stop()
            raise


class _Waiting:
    """The log of ranks that others wait for: after ``warn_after`` seconds, and each time that has doubled."""

    def __init__(self, rank: int, doing: str, warn_after: float | None) -> None:
        self._rank = rank
        self._doing = doing
        self._warn_after = warn_after
        self._since: float | None = None  # when the first rank was done

    def note_done(self, done: list[int]) -> None:
        """Take every rank's number, 1 if it is done; the first of those that wait logs which are not."""
        now = time.monotonic()
        if self._warn_after is None or not any(done):
            return
        self._since = self._since or now
        if now - self._since < self._warn_after:
            return
        if done.index(1) == self._rank:
            busy = [rank for rank, value in enumerate(done) if not value]
            verb = "is" if len(busy) == 1 else "are"
            _log.warning(
                "rank %d has been waiting for %g s: %s %s still at %s",
                self._rank,
                now - self._since,
                name_ranks(busy),
                verb,
                self._doing,
            )
        self._warn_after += now - self._since


class EngineSync(RankSync):
    """The ranks of an engine between passes, as for any other collective call."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.comm, engine.agreement.hang_timeout, engine.agreement.warn_after)
        self._agreement = engine.agreement

    def exchange(self, value: _T, doing: str) -> list[_T]:
        """Every rank's value."""
        return self._agreement.exchange_objects(value, doing)

    def exchange_number(self, number: int, doing: str) -> list[int]:
        """Every rank's number."""
        return [row[0] for row in self._agreement.exchange(AT_WORK, [number], doing)]


class ErrorContext:
    """The state of things after an error, which changes on the way.

    Attributes:
        text: as it is now; the first rank's counts.
    """

    def __init__(self, text: str) -> None:
        self.text = text


def run_between_passes(
    engine: Engine, doing: str, work: Callable[[], _T], left: str | ErrorContext, *, at_disk: Progress | None = None
) -> _T:
    """Do local work between passes.

    Args:
        engine: whose ranks do it.
        doing: for errors, "loading ..." for one.
        work: may raise.
        left: how things are after an error.
        at_disk: what work tells of its progress, if it may take ranks any time; see :meth:`RankSync.do`. Otherwise they
            wait for ``hang_timeout`` at most.

    Raises:
        Exception: this rank's own error, as it was.
        CheckpointError: another rank's, with its rank.
    """
    result, error, told = result_or_error(work) if at_disk is None else EngineSync(engine).do(work, doing, at_disk)
    accounts = engine.agreement.exchange_objects((told, left.text if isinstance(left, ErrorContext) else left), doing)
    _, how = accounts[0]
    if isinstance(error, CheckpointError):
        raise CheckpointError(f"{doing} failed: {error} ({how})") from error
    if error is not None:
        raise error
    for rank, (failure, _) in enumerate(accounts):
        if failure is not None:
            raise CheckpointError(f"{doing} failed on rank {rank}: {failure} ({how})")
    return result  # type: ignore[return-value]


@contextmanager
def reraise_as(what: str, target: object) -> Iterator[None]:
    """Around code that is not ours: its error says whose it is.

    Args:
        what: is called.
        target: whose that is.

    Raises:
        CheckpointError: it raised; with its error as the cause.
    """
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{what}, of class {type(target).__qualname__}, raised {type(error).__name__}: {error}"
        ) from error
