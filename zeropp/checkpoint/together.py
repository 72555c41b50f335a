"""Work that every rank does by itself and that fails on all ranks if it fails on one."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.progress import Progress
from zeropp.checkpoint.tasks import Task
from zeropp.comm.agreement import AT_WORK
from zeropp.comm.hops import Comm
from zeropp.comm.process_groups import name_ranks
from zeropp.config.base import notify
from zeropp.engine.engine import Engine

__all__ = [
    "EngineMeeting",
    "Left",
    "Meeting",
    "Tried",
    "absolute",
    "common_path",
    "path_of_rank_0",
    "telling",
    "together",
    "tried",
]

_T = TypeVar("_T")
_log = logging.getLogger("zeropp")
_LONGEST = 1.0  # seconds from one exchange of a heartbeat to the next
Tried = tuple[_T | None, BaseException | None, str | None]
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
        notify(
            f"ranks gave {call} different paths: rank 0 {paths[0]!r}, and rank {other} {paths[other]!r}; every rank "
            "uses rank 0's. Give the same one on every rank: a name with the time of day is made on rank 0, and shared "
            "by torch.distributed.broadcast_object_list"
        )
    return Path(paths[0])


def tried(work: Callable[[], _T]) -> Tried[_T]:
    """Do work, and return its result or its error.

    Also what a handler of a signal raises: others would wait for a rank that is about to end.
    """
    try:
        return work(), None, None
    except BaseException as error:
        # As text: not every error can be pickled.
        return None, error, f"{type(error).__name__}: {error}"


class Meeting:
    """Ranks that each do work of their own, such as reading or writing files, and tell each other how it went.

    Args:
        comm: of the ranks.
        hang_timeout: seconds for which ranks wait for one that is not heard of.
        warn_after: seconds for which some ranks wait for others before it is logged, or None.
    """

    def __init__(self, comm: Comm, hang_timeout: float, warn_after: float | None) -> None:
        self.rank, self.world = comm.rank, comm.world
        self.alone = comm.world == 1 or comm.backend == "fake"
        self._hang_timeout, self._warn_after = hang_timeout, warn_after

    def exchange(self, value: _T, doing: str) -> list[_T]:
        """Every rank's value.

        Raises:
            RuntimeError: a rank is lost.
        """
        raise NotImplementedError

    def exchange_number(self, number: int, doing: str) -> list[int]:
        """:meth:`exchange`, of a number."""
        raise NotImplementedError

    def do(self, work: Callable[[], _T], doing: str, progress: Progress) -> Tried[_T]:
        """:func:`tried`, of work that may take one rank any time longer than another; returns when all are done.

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
            return tried(work)
        over = threading.Event()
        heartbeat = Task(lambda: self._beat(over, doing, progress), "zeropp heartbeat")
        heartbeat.start()
        try:
            found = tried(work)
        finally:
            over.set()
        _, error, told = tried(heartbeat.wait)
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
        waiting, pause = _Waiting(self.rank, doing, self._warn_after), _LONGEST / 64
        over.wait(pause)
        try:
            while not all(done := self.exchange_number(int(over.is_set()), doing)):
                waiting.note(done)
                over.wait(pause)
                # Several exchanges within hang_timeout, after which a silent rank counts as lost.
                pause = min(2 * pause, _LONGEST, self._hang_timeout / 4)
        except BaseException:
            progress.stop()
            raise


class _Waiting:
    """The log of ranks that others wait for: after ``warn_after`` seconds, and each time that has doubled."""

    def __init__(self, rank: int, doing: str, warn_after: float | None) -> None:
        self._rank, self._doing, self._warn_after = rank, doing, warn_after
        self._since: float | None = None  # when the first rank was done

    def note(self, done: list[int]) -> None:
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
                self._rank, now - self._since, name_ranks(busy), verb, self._doing,
            )  # fmt: skip
        self._warn_after += now - self._since


class EngineMeeting(Meeting):
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


class Left:
    """The state of things after an error, which changes on the way.

    Attributes:
        text: as it is now; the first rank's counts.
    """

    def __init__(self, text: str) -> None:
        self.text = text


def together(
    engine: Engine, doing: str, work: Callable[[], _T], left: str | Left, *, at_disk: Progress | None = None
) -> _T:
    """Do local work between passes.

    Args:
        engine: whose ranks do it.
        doing: for errors, "loading ..." for one.
        work: may raise.
        left: how things are after an error.
        at_disk: what work tells of its progress, if it may take ranks any time; see :meth:`Meeting.do`. Otherwise they
            wait for ``hang_timeout`` at most.

    Raises:
        Exception: this rank's own error, as it was.
        CheckpointError: another rank's, with its rank.
    """
    result, error, told = tried(work) if at_disk is None else EngineMeeting(engine).do(work, doing, at_disk)
    accounts = engine.agreement.exchange_objects((told, left.text if isinstance(left, Left) else left), doing)
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
def telling(what: str, target: object) -> Iterator[None]:
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
