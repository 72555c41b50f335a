"""Work that every rank does by itself and that fails on all ranks if it fails on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zeropp.checkpoint.errors import CheckpointError
from zeropp.engine.engine import Engine

__all__ = ["together", "tried"]

_T = TypeVar("_T")


def tried(work: Callable[[], _T]) -> tuple[_T | None, Exception | None, str | None]:
    """What work comes to: its result, or its error and that in words, for ranks that are told of it."""
    try:
        return work(), None, None
    except Exception as error:
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
