"""Work that every rank does by itself and that fails on all ranks if it fails on one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.progress import Progress
from zeropp.checkpoint.rounds import Rounds
from zeropp.checkpoint.tasks import Task
from zeropp.comm.agreement import AT_WORK
from zeropp.config.base import notify
from zeropp.engine.engine import Engine

__all__ = [
    "Left",
    "Tried",
    "absolute",
    "common_path",
    "path_of_rank_0",
    "telling",
    "together",
    "tried",
    "tried_in_rounds",
]

_T = TypeVar("_T")
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


def tried_in_rounds(engine: Engine, work: Callable[[], _T], doing: str, progress: Progress) -> Tried[_T]:
    """:func:`tried`, of work that may take one rank any time longer than another, as a disk does.

    Returns once all ranks are done with theirs. Meanwhile a thread goes through rounds in which ranks tell that they
    are still there. It is the rounds that have a thread, and not the work: a signal's handler raises where the work is
    then, and nothing is written to any more when that has left this function.

    Args:
        engine: whose ranks do it.
        work: exchanges nothing with other ranks, and calls nobody's code that might.
        doing: for errors.
        progress: that work tells of what it does; stopped when a rank is lost.

    Raises:
        RuntimeError: a rank is lost, or somewhere else, for ``hang_timeout``; when this one's work is over.
    """
    comm, agreement = engine.comm, engine.agreement
    if comm.world == 1 or comm.backend == "fake":
        return tried(work)

    def exchange(done: int) -> list[int]:
        try:
            return [row[0] for row in agreement.exchange(AT_WORK, [done], doing)]
        except RuntimeError:
            progress.stop()
            raise

    rounds = Rounds(comm.rank, doing, exchange, agreement.hang_timeout, agreement.warn_after)
    state, finished = _State(), threading.Event()
    going = Task(lambda: rounds.run(lambda: state.done, finished.wait), "zeropp rounds")

    def begin() -> _T:
        going.start()
        return work()

    try:
        found = tried(begin)
    finally:
        # Whatever a signal raises between the lines, its thread must not go on telling that this rank is at work.
        # Python looks for signals at calls, and so not before this is stored.
        state.done = True
        finished.set()
    _, error, told = tried(lambda: going.wait() if going.came_to_be() else rounds.run(lambda: True, finished.wait))
    if error is not None and not isinstance(error, RuntimeError):
        # A signal's, while the others were still at work: they hear of it, too.
        found = None, error, told
    try:
        if going.came_to_be():
            going.result()
        elif error is not None:
            raise error
    except RuntimeError as lost:
        raise lost from found[1]
    return found


class _State:
    done = False


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
        at_disk: what work tells of its progress, if it may take ranks any time; see :func:`tried_in_rounds`. Otherwise
            they wait for ``hang_timeout`` at most.

    Raises:
        Exception: this rank's own error, as it was.
        CheckpointError: another rank's, with its rank.
    """
    result, error, told = tried(work) if at_disk is None else tried_in_rounds(engine, work, doing, at_disk)
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
