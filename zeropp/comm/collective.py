"""Work that every rank does and any may fail at; and what ranks tell each other before they have groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from zeropp.comm.members import Group, gather_objects, is_fake, to_process_group, whereabouts, world_group
from zeropp.comm.watch import warn_of_waiting

__all__ = ["exchange", "on_all_ranks"]

_T = TypeVar("_T")
_SILENCE = 30.0  # seconds to wait silently for other ranks, where warn_after may not be known yet


def on_all_ranks(group: Group, what: str, work: Callable[[], _T], *, same: bool = False) -> _T:
    """Do local work that may fail, and fail on every rank if it failed on any.

    Args:
        group: ranks that do the work.
        what: for the message.
        work: local; its result must have a telling repr if ``same``.
        same: every rank must come to the same result.

    Raises:
        Exception: this rank's own error, as it was.
        RuntimeError: another rank failed; with its rank and message.
        ValueError: results differ.
    """
    result: _T | None = None
    # Kept until every rank has been told. Raised at once, it would leave the others waiting for this rank.
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    late = f"waiting at {what} for {_SILENCE:g} s; some rank has not come; it is collective: every rank calls it"
    with warn_of_waiting(_SILENCE, f"rank {whereabouts()[0]} has been {late}"):
        # Exceptions travel as text: not every one can be pickled.
        accounts = exchange(group, (error and f"{type(error).__name__}: {error}", repr(result) if same else ""))
    if error is not None:
        raise error
    for rank, (failure, value) in enumerate(accounts):
        if failure is not None:
            raise RuntimeError(f"{what} failed on rank {rank}: {failure}")
        if value != accounts[0][1]:
            raise ValueError(
                f"{what}: ranks 0 and {rank} disagree, {accounts[0][1]} and {value}. Give every rank the same "
                "configuration and the same LOCAL_WORLD_SIZE"
            )
    return result  # type: ignore[return-value]


def exchange(group: Group, account: _T) -> list[_T]:
    """Everyone's account, over the group the user gave; over the world, if what was given is none."""
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
    return gather_objects(account, process_group)
