"""Work that every rank does by itself and that fails on all ranks if it fails on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from zeropp.checkpoint.errors import CheckpointError
from zeropp.engine.engine import Engine

__all__ = ["telling", "together", "tried"]

_T = TypeVar("_T")


def tried(work: Callable[[], _T]) -> tuple[_T | None, BaseException | None, str | None]:
    """What work comes to: its result, or its error and that in words, for ranks that are told of it.

    Also what a handler of a signal raises: others would wait for a rank that is about to end.
    """
    try:
        return work(), None, None
    except BaseException as error:
        # As text: not every error can be pickled.
        return None, error, f"{type(error).__name__}: {error}"


def together(engine: Engine, doing: str, work: Callable[[], _T], left: str) -> _T:
    """Do local work between passes.

    Args:
        engine: whose ranks do it.
        doing: for errors, "loading ..." for one.
        work: may raise.
        left: how things are after an error.

    Raises:
        Exception: this rank's own error, as it was.
        CheckpointError: another rank's, with its rank.
    """
    result, error, told = tried(work)
    accounts = engine.agreement.exchange_objects(told, doing)
    if isinstance(error, CheckpointError):
        raise CheckpointError(f"{doing} failed: {error} ({left})") from error
    if error is not None:
        raise error
    for rank, failure in enumerate(accounts):
        if failure is not None:
            raise CheckpointError(f"{doing} failed on rank {rank}: {failure} ({left})")
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
