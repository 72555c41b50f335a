"""Work that each rank does locally and that fails on all ranks if it fails on one; its threads and its progress bar.

A :class:`Task` runs in its own thread and finishes even if the program's main thread ends first. :class:`Progress`
counts the bytes that are read or written. Since every transfer calls it, it is also the place that stops the work.
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
    """A function call in a non-daemon thread, which Python waits for before the program ends.

    An executor would not do: executors refuse work once the main thread has ended, when a checkpoint may still be in
    progress and need more threads.

    Args:
        work: the function.
        name: name of the thread.
    """

    def __init__(self, work: Callable[[], _T], name: str) -> None:
        self._results: list[_T] = []
        self._error: BaseException | None = None
        # An event is used because Thread.join() is not safe here: if a signal handler raises inside join(), Python may
        # mark the thread as ended while it still runs.
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
        """Start the thread.

        Raises:
            RuntimeError: the system cannot start another thread.
        """
        self._thread.start()

    @property
    def done(self) -> bool:
        """True if the function has returned or raised."""
        return self._over.is_set()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the function has returned or raised, for at most ``seconds``; None waits without limit."""
        self._over.wait(seconds)

    def result(self) -> _T:
        """Wait for the function and return its result, or raise its error. To be called at most once."""
        self._over.wait()
        # The frames in the error's traceback refer to this task. Keeping the error here would make a reference cycle,
        # which keeps the frames and all their tensors alive.
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._results[0]
        finally:
            del error


def in_threads(count: int, work: Callable[[Iterator[int]], None], most: int) -> None:
    """Divide ``count`` pieces of work among threads, and wait for all threads. An error in one thread stops the others.

    Args:
        count: number of pieces of work.
        work: called once in each thread with an iterator over the numbers of the pieces that the thread is to do.
        most: maximum number of threads.

    Raises:
        Exception: the error of the first thread that failed, in the order in which the threads were started.
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
        # For example KeyboardInterrupt: do not start the remaining pieces.
        stop.set()
        raise
    finally:
        # Wait for pieces in progress also after an error. Otherwise threads would go on writing to files and tensors
        # that the caller closes or reuses.
        for task in tasks:
            task.wait()
    for task in tasks:
        task.result()


AFTER = 2.0
"""Seconds before a progress bar is shown."""


class Progress:
    """A count of the bytes transferred and of the bytes expected, with an optional bar. Its methods are thread-safe.

    Args:
        doing: text in front of the bar.
        shown: True to show a bar; callers pass True on rank 0 only.
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
        """Stop the work: from now on :meth:`add` raises in every thread that calls it."""
        self._stopped = True

    def expect(self, nbytes: int) -> None:
        """Add ``nbytes`` to the number of bytes expected."""
        with self._lock:
            self._total += nbytes

    def add(self, nbytes: int) -> None:
        """Add ``nbytes`` to the number of bytes transferred.

        Raises:
            CheckpointError: :meth:`stop` was called.
        """
        if self._stopped:
            raise CheckpointError("the work was stopped because a rank is lost")
        with self._lock:
            self._done += nbytes
            if not self._shown or time.monotonic() - self._begin < AFTER:
                return
            if self._bar is None:
                self._bar = _new_bar(self._doing, self._done)
                self._shown = self._bar is not None
            self._show()

    def close(self) -> None:
        """Close the bar in its present state; no bar is shown afterwards."""
        with self._lock:
            self._show()
            self._shown = False
            bar = self._bar
            self._bar = None
            if bar is not None:
                with contextlib.suppress(Exception):
                    bar.close()

    def _show(self) -> None:
        """Update the bar, if there is one."""
        if self._bar is None:
            return
        try:
            self._bar.total = self._total
            # Reads are rounded up to whole stretches and blocks, so more bytes may be read than were expected.
            self._bar.update(min(self._done, self._total) - self._bar.n)
        except Exception:
            # The output stream may be closed. That must not make the checkpoint fail.
            self._shown = False
            self._bar = None


def _new_bar(doing: str, done: int) -> Any:
    """Return a tqdm bar, or None if tqdm is not installed."""
    try:
        kind: Any = importlib.import_module("tqdm").tqdm
    except ImportError:
        return None
    # monitor_interval = 0 disables tqdm's monitor thread, which would outlive the bar. A plain thread lock replaces
    # tqdm's default lock, because creating the default one may start a process.
    own = type("Bar", (kind,), {"monitor_interval": 0})
    own.set_lock(threading.RLock())  # type: ignore[attr-defined]  # as tqdm has it
    return own(desc=doing, initial=done, total=done, unit="B", unit_scale=True, mininterval=1.0)


_log = logging.getLogger("zeropp")
_LONGEST = 1.0  # maximum seconds from one heartbeat exchange to the next
Result = tuple[_T | None, BaseException | None, str | None]
"""Outcome of some work: (result, error, error as text to send to other ranks); entries that do not apply are None."""


def absolute(given: object) -> str:
    """Return ``given`` as an absolute path; "" if ``given`` is empty or not a path.

    Ranks exchange these paths, and :func:`path_of_rank_0` then raises on every rank if one is "". If a rank raised
    here, the other ranks would wait for it in the exchange.
    """
    return str(Path(given).absolute()) if isinstance(given, (str, os.PathLike)) and os.fspath(given) else ""


def common_path(engine: Engine, given: object, call: str) -> Path:
    """Return rank 0's path on every rank. Collective. Rank 0 warns if another rank was given a different path.

    Args:
        engine: engine whose ranks compare their paths.
        given: this rank's path.
        call: name of the user's call, for messages.

    Raises:
        ValueError: a rank was given no path; on every rank.
    """
    paths = engine.agreement.exchange_objects(absolute(given), f"comparing paths at {call}")
    return path_of_rank_0(engine, paths, call)


def path_of_rank_0(engine: Engine, paths: Sequence[str], call: str) -> Path:
    """Return rank 0's path from the exchanged paths of all ranks. Rank 0 warns if another rank has a different path.

    Different paths are not an error. A folder name that contains the time of day may differ between ranks, and an error
    at the first save would lose the training done so far.

    Args:
        engine: engine of the ranks.
        paths: path of each rank, as returned by :func:`absolute`.
        call: name of the user's call, for messages.

    Raises:
        ValueError: a rank was given no path.
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
    """Call a function and return its outcome instead of raising its error.

    Exceptions that a signal handler raises are returned, too. If they were raised here, this rank would skip the
    exchange of outcomes, and the other ranks would wait for it.
    """
    try:
        return work(), None, None
    except BaseException as error:
        # The text is sent to other ranks, because some exceptions cannot be pickled.
        return None, error, f"{type(error).__name__}: {error}"


class RankSync:
    """Base class for ranks that each do local work, such as reading or writing files, and exchange the outcomes.

    Args:
        comm: communication of the ranks.
        hang_timeout: seconds without a message from a rank after which the rank counts as lost.
        warn_after: seconds of waiting for slower ranks after which a warning is logged; None for no warnings.
    """

    def __init__(self, comm: Comm, hang_timeout: float, warn_after: float | None) -> None:
        self.rank = comm.rank
        self.world = comm.world
        self.alone = comm.world == 1 or comm.backend == "fake"
        self._hang_timeout = hang_timeout
        self._warn_after = warn_after

    def exchange(self, value: _T, doing: str) -> list[_T]:
        """Return the value of every rank, in rank order. Collective.

        Args:
            value: this rank's value; must be picklable.
            doing: description of the work, for errors.

        Raises:
            RuntimeError: a rank is lost.
        """
        raise NotImplementedError

    def exchange_number(self, number: int, doing: str) -> list[int]:
        """Return the integer of every rank, in rank order. Collective; raises like :meth:`exchange`."""
        raise NotImplementedError

    def do(self, work: Callable[[], _T], doing: str, progress: Progress) -> Result[_T]:
        """Do local work of any duration and wait until all ranks have done theirs. Collective.

        Meanwhile a heartbeat thread exchanges with the other ranks which of them are done. So a slow disk may take any
        time, but a lost rank is noticed within ``hang_timeout``. The work runs in the caller's thread, because it needs
        the caller's device, stream and grad mode, and so that a signal handler can interrupt it.

        Args:
            work: the local work. It must not communicate with other ranks or call user code that might.
            doing: description of the work, for errors.
            progress: progress that the work updates; stopped when a rank is lost.

        Returns:
            This rank's outcome, as :func:`result_or_error` returns it.

        Raises:
            RuntimeError: a rank is lost; raised when this rank's work is over.
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
            # A signal handler raised while this rank waited for the others. Return the error as this rank's outcome, so
            # that the other ranks receive it.
            found = None, error, told
        try:
            heartbeat.result()
        except RuntimeError as lost:
            raise lost from found[1]
        return found

    def _beat(self, over: threading.Event, doing: str, progress: Progress) -> None:
        """Exchange a done flag with the other ranks again and again, until all ranks are done."""
        waiting = _Waiting(self.rank, doing, self._warn_after)
        pause = _LONGEST / 64
        over.wait(pause)
        try:
            while not all(done := self.exchange_number(int(over.is_set()), doing)):
                waiting.note_done(done)
                over.wait(pause)
                # Pause for at most a quarter of hang_timeout, or a rank that pauses could count as lost.
                pause = min(2 * pause, _LONGEST, self._hang_timeout / 4)
        except BaseException:
            progress.stop()
            raise


class _Waiting:
    """Logger of slow ranks: warns after ``warn_after`` seconds of waiting, and again whenever that time has doubled."""

    def __init__(self, rank: int, doing: str, warn_after: float | None) -> None:
        self._rank = rank
        self._doing = doing
        self._warn_after = warn_after
        self._since: float | None = None  # when the first rank was done

    def note_done(self, done: list[int]) -> None:
        """Log a warning if it is due. Only the first rank that is done logs.

        Args:
            done: 1 for each rank that is done, 0 for the others.
        """
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
    """A :class:`RankSync` over the engine's own process group, for calls between passes."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.comm, engine.agreement.hang_timeout, engine.agreement.warn_after)
        self._agreement = engine.agreement

    def exchange(self, value: _T, doing: str) -> list[_T]:
        """Return the value of every rank, in rank order. Collective."""
        return self._agreement.exchange_objects(value, doing)

    def exchange_number(self, number: int, doing: str) -> list[int]:
        """Return the integer of every rank, in rank order. Collective."""
        return [row[0] for row in self._agreement.exchange(AT_WORK, [number], doing)]


class ErrorContext:
    """A mutable text for error messages that says which state an error at this point leaves behind.

    Attributes:
        text: the present text. Errors on all ranks use rank 0's text.
    """

    def __init__(self, text: str) -> None:
        self.text = text


def run_between_passes(
    engine: Engine, doing: str, work: Callable[[], _T], left: str | ErrorContext, *, at_disk: Progress | None = None
) -> _T:
    """Do local work between passes on all ranks; if it fails on one rank, raise on all. Collective.

    Args:
        engine: engine whose ranks do the work.
        doing: description of the work for errors, such as "loading ...".
        work: the local work; may raise.
        left: text for errors that says which state an error leaves behind.
        at_disk: progress of work that may take any time; the work then runs in :meth:`RankSync.do`. With None, the
            other ranks wait for at most ``hang_timeout``.

    Returns:
        This rank's result of ``work``.

    Raises:
        CheckpointError: ``work`` raised a CheckpointError on this rank, or any error on another rank.
        Exception: ``work`` raised another error on this rank; raised unchanged.
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
    """Context manager for calls of user code: an error inside is raised as a CheckpointError that names the object.

    Args:
        what: description of the method that is called, such as "load_state_dict of the optimizer".
        target: the object whose class the message names.

    Raises:
        CheckpointError: the code inside raised; its error is the cause.
    """
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{what}, of class {type(target).__qualname__}, raised {type(error).__name__}: {error}"
        ) from error
