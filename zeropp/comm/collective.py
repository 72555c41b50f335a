"""Work that every rank does and any may fail at; and what ranks tell each other before they have groups."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from zeropp._compat import chosen_timeout
from zeropp.comm.process_groups import (
    HOST,
    Group,
    gather_objects,
    is_fake,
    name_ranks,
    to_process_group,
    what_ended,
    whereabouts,
    world_group,
)
from zeropp.comm.threads import warn_of_waiting

__all__ = ["PATIENCE", "Failure", "exchange", "naming_absence", "on_all_ranks"]

_T = TypeVar("_T")
_SILENCE = 30.0  # seconds to wait silently for other ranks, where warn_after may not be known yet

PATIENCE = 600.0
"""Seconds to wait for other ranks where no configuration has been read: the default of ``hang_timeout``."""


@dataclass(frozen=True)
class Failure:
    """What a rank says instead of an account, wherever the others are: it has failed, and so, in words."""

    text: str


def on_all_ranks(
    group: Group,
    what: str,
    work: Callable[[], _T],
    *,
    same: bool = False,
    patience: Callable[[_T], float] = lambda result: PATIENCE,
) -> _T:
    """Do local work that may fail, and fail on every rank if it failed on any.

    Args:
        group: ranks that do the work.
        what: for the message.
        work: local; its result must have a telling repr if ``same``.
        same: every rank must come to the same result.
        patience: seconds to wait for other ranks, by this rank's result.

    Raises:
        Exception: this rank's own error, as it was.
        RuntimeError: another rank failed; with its rank and message. Or it has not come, or ended.
        ValueError: results differ.
    """
    result: _T | None = None
    # Kept until every rank has been told. Raised at once, it would leave the others waiting for this rank.
    error: Exception | None = None
    seconds = PATIENCE
    try:
        result = work()
        seconds = patience(result)
    except Exception as caught:
        error = caught
    late = f"waiting at {what} for {_SILENCE:g} s; some rank has not come; it is collective: every rank calls it"
    with warn_of_waiting(_SILENCE, f"rank {whereabouts()[0]} has been {late}"):
        # Exceptions travel as text: not every one can be pickled. Of results a digest does: those that name all ranks
        # are long, and every rank would receive as many of them as there are ranks.
        told = repr(result) if same else ""
        account = (error and f"{type(error).__name__}: {error}", hashlib.sha256(told.encode()).digest())
        try:
            accounts = exchange(group, account, what, seconds)
        except RuntimeError as absence:
            # Its own error says more than that others, told or not, have gone.
            raise (absence if error is None else error) from absence.__cause__
    if error is not None:
        raise error
    for rank, (failure, _) in enumerate(accounts):
        if failure is not None:
            raise RuntimeError(f"{what} failed on rank {rank}: {failure}")
    if len({digest for _, digest in accounts}) > 1:
        results = exchange(group, told, what, seconds)
        rank = next(rank for rank, other in enumerate(results) if other != results[0])
        raise ValueError(
            f"{what}: ranks 0 and {rank} disagree, {results[0]} and {results[rank]}. Give every rank the same "
            "configuration and the same LOCAL_WORLD_SIZE"
        )
    return result  # type: ignore[return-value]


def exchange(group: Group, account: _T, what: str, seconds: float) -> list[_T]:
    """Everyone's account, over the group the user gave; over the world, if what was given is none.

    Args:
        group: as given.
        account: of this rank, picklable.
        what: ranks do together, for the error.
        seconds: to wait for the others.

    Raises:
        RuntimeError: some rank has not come, or ended, or failed; or ranks are at different calls. On all alike.
    """
    if not dist.is_initialized():
        return [account]
    try:
        process_group = to_process_group(group)
    except TypeError:
        # This rank is about to fail over what it was given. The others may have given None, and wait in the world.
        process_group = world_group()
    except ValueError:
        # Nobody waits for a rank that is no member.
        return [account]
    size = dist.get_world_size(process_group)
    if size <= 1 or is_fake(process_group):
        return [account]
    # The user's own timeout, where it is shorter.
    chosen = chosen_timeout(process_group, HOST)
    with naming_absence(what):
        limit = seconds if chosen is None else min(seconds, chosen)
        rows = gather_objects((what, account), process_group, limit)
    if not isinstance(account, Failure):
        _refuse_apart(rows, dist.get_process_group_ranks(process_group), what)
    return [each for _, each in rows]


def _refuse_apart(rows: Sequence[tuple[str, object]], ranks: Sequence[int], what: str) -> None:
    """Refuse accounts of ranks that have failed, or that are about something else."""
    for rank, (_, account) in zip(ranks, rows, strict=True):
        if isinstance(account, Failure):
            raise RuntimeError(f"{what} failed on rank {rank}: {account.text}")
    for rank, (other, _) in zip(ranks, rows, strict=True):
        if other != rows[0][0]:
            raise RuntimeError(
                f"ranks are at different calls: rank {ranks[0]} is at {rows[0][0]}, rank {rank} at {other}. Every rank "
                "makes the same calls, in one order"
            )


@contextlib.contextmanager
def naming_absence(what: str) -> Iterator[None]:
    """An error of a backend, inside, means that some rank is not there; say so, and for what it was wanted."""
    try:
        yield
    except RuntimeError as error:
        ended = what_ended(error)
        if ended is None:
            raise
        rank = name_ranks(whereabouts()[:1])
        raise RuntimeError(
            f"some rank has failed, ended or not come to {what}, which is collective: every rank calls it; its own log "
            f"says more. The ranks are no longer in step: {rank} was at {what}, until {ended}"
        ) from error
