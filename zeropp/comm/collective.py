"""Work that all ranks do together before there is an engine: any of them may fail, and then all of them raise.

`run_on_all_ranks` runs local work on every rank, and raises on all of them if it fails on any. `exchange` tells every
rank what each has to say. `BuildComm` moves tensors while a model is built, before there are comm streams and a ledger
for that.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp._compat import all_gather_single, backends, chosen_timeout, storage_uses
from zeropp.comm.process_groups import (
    HOST,
    CollectiveError,
    Group,
    gather_objects,
    group_size,
    host_group,
    is_fake,
    name_ranks,
    to_process_group,
    what_ended,
    whereabouts,
    world_group,
)
from zeropp.comm.timers import warn_of_waiting

__all__ = ["PATIENCE", "BuildComm", "Failure", "exchange", "naming_absence", "run_on_all_ranks"]

_T = TypeVar("_T")
_SILENCE = 30.0  # seconds to wait silently for other ranks, where warn_after may not be known yet
_LETTING_GO = 1.0  # seconds to wait for threads that have nothing left to do

PATIENCE = 600.0
"""Seconds to wait for other ranks where no configuration has been read: the default of ``hang_timeout``."""


def run_on_all_ranks(
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


@dataclass(frozen=True)
class Failure:
    """The words of a rank that has failed, which it says in place of an account, wherever the others are."""

    text: str


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


class BuildComm:
    """Collectives of a group, one at a time, each with a limit. Making one is collective.

    Attributes:
        rank: of this process in the group.
        world: ranks in it.
        ranks: the global rank of each.
        device: where what is sent and received lies.
    """

    def __init__(self, group: Group, device: torch.device, seconds: float) -> None:
        """Connect.

        Args:
            group: as users give it.
            device: to send from, if the group can send from there; else the host's memory.
            seconds: to wait for other ranks.
        """
        self.world = group_size(group)
        self.rank = 0
        self.device = device
        self.ranks: tuple[int, ...] = (0,)
        self._group = group
        self._seconds = seconds
        if self.world == 1:
            return
        given = to_process_group(group)
        self.ranks = tuple(dist.get_process_group_ranks(given))
        if (rank := dist.get_rank()) not in self.ranks:
            raise ValueError(f"the process group has ranks {list(self.ranks)}, and this is rank {rank}")
        self.rank = self.ranks.index(rank)
        # gloo neither scatters nor gathers from a card.
        direct = device.type != "cpu" and backends(given).get(device.type) not in (None, "gloo")
        self.device = device if direct else HOST
        self._process_group = given if direct else host_group(given, seconds)

    def exchange(self, account: _T, doing: str) -> list[_T]:
        """The picklable accounts of all ranks, in the order of the group; see :func:`exchange`."""
        late = f"waiting at {doing} for {_SILENCE:g} s; some rank has not come to it"
        with warn_of_waiting(_SILENCE, f"rank {self.ranks[self.rank]} has been {late}"):
            return exchange(self._group, account, doing, self._seconds)

    def scatter(self, own: Tensor, rows: list[Tensor] | None, source: int, doing: str) -> None:
        """Each rank gets its row.

        Args:
            own: uint8 [n] on :attr:`device`, filled.
            rows: on the source one for each rank, uint8 [n]; None elsewhere.
            source: whose rows they are, counted in the group.
            doing: for errors.
        """
        if rows is not None and self.world == 1:
            own.copy_(rows[0])
            return
        with naming_absence(doing):
            work = dist.scatter(own, rows, self.ranks[source], self._process_group, async_op=True)
            self._wait(work)

    def broadcast(self, row: Tensor, source: int, doing: str) -> None:
        """Every rank gets the source's uint8 [n], in place."""
        if self.world == 1:
            return
        with naming_absence(doing):
            self._wait(dist.broadcast(row, self.ranks[source], self._process_group, async_op=True))

    def all_gather(self, out: Tensor, own: Tensor, doing: str) -> None:
        """Rows of all ranks, uint8 [world * n], from this rank's uint8 [n]."""
        if self.world == 1:
            out.copy_(own)
            return
        uses = storage_uses(out)
        with naming_absence(doing):
            self._wait(all_gather_single(out, own, group=self._process_group, async_op=True))
        # A thread of gloo lets go of the tensors a little later, when it gets the interpreter's lock. Until then they
        # seem to be aliased, and would stay whole for that: see [Note: building in pieces].
        until = time.monotonic() + _LETTING_GO
        while self.device == HOST and storage_uses(out) > uses and time.monotonic() < until:
            time.sleep(1e-4)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None  # None is for those who are not in the group
        try:
            work.wait(timedelta(seconds=self._seconds))
        except RuntimeError as error:
            raise CollectiveError.from_backend(error) from error.__cause__
