"""Work that all ranks do together before there is an engine. If the work fails on one rank, all ranks raise an error.

`run_on_all_ranks` runs local work on every rank and raises on all ranks if the work fails on any rank. `exchange`
gathers one value from every rank. `BuildComm` moves tensors between ranks while a model is built, before comm streams
and a ledger exist.
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
_SILENCE = 30.0  # seconds of waiting until a warning, where ``warn_after`` is not known yet
_LETTING_GO = 1.0  # seconds to wait until gloo's threads have released tensors

PATIENCE = 600.0
"""Seconds to wait for other ranks if no configuration has been read yet; the default of ``hang_timeout``."""


def run_on_all_ranks(
    group: Group,
    what: str,
    work: Callable[[], _T],
    *,
    same: bool = False,
    patience: Callable[[_T], float] = lambda result: PATIENCE,
) -> _T:
    """Run local work that may fail on every rank, and raise on every rank if the work fails on any rank.

    Args:
        group: ranks that do the work, as a process group, a one-dimensional mesh, or None for the world.
        what: description of the work for error messages.
        work: local function. If ``same``, the repr of its result must show everything that must be equal.
        same: True if every rank must get the same result.
        patience: function that returns the seconds to wait for other ranks, from this rank's result.

    Returns:
        This rank's result.

    Raises:
        Exception: the error of ``work`` on this rank, unchanged.
        RuntimeError: the work failed on another rank (the message has its rank and error), or another rank did not
            arrive or has ended.
        ValueError: ``same`` is set and the results differ.
    """
    result: _T | None = None
    # The error is kept until every rank has received it. If it were raised at once, the other ranks would wait for this
    # rank.
    error: Exception | None = None
    seconds = PATIENCE
    try:
        result = work()
        seconds = patience(result)
    except Exception as caught:
        error = caught
    late = f"waiting at {what} for {_SILENCE:g} s; some rank has not come; it is collective: every rank calls it"
    with warn_of_waiting(_SILENCE, f"rank {whereabouts()[0]} has been {late}"):
        # Errors are sent as text, because some exceptions cannot be pickled. Results are sent as digests: results that
        # name all ranks are long, and every rank would receive one from each rank.
        told = repr(result) if same else ""
        account = (error and f"{type(error).__name__}: {error}", hashlib.sha256(told.encode()).digest())
        try:
            accounts = exchange(group, account, what, seconds)
        except RuntimeError as absence:
            # This rank's own error is more informative than the error that other ranks are gone.
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
    """Gather a picklable value from every rank of the user's group.

    If ``group`` is of a wrong type, the world is used. If torch.distributed is not initialised, or this rank is not a
    member of the group, the result has this rank's value only.

    Args:
        group: process group, one-dimensional mesh, or None for the world.
        account: this rank's value.
        what: description of the common work for error messages.
        seconds: seconds to wait for the other ranks.

    Returns:
        The values of all ranks, in the order of the group.

    Raises:
        RuntimeError: a rank did not arrive, has ended or has failed, or the ranks are at different calls. All ranks
            raise this error.
    """
    if not dist.is_initialized():
        return [account]
    try:
        process_group = to_process_group(group)
    except TypeError:
        # This rank will soon fail because of the wrong argument. Other ranks may have passed None and wait in the world
        # group, so exchange there.
        process_group = world_group()
    except ValueError:
        # No rank waits for a rank that is not a member.
        return [account]
    size = dist.get_world_size(process_group)
    if size <= 1 or is_fake(process_group):
        return [account]
    # The timeout that the user has set for the group applies if it is shorter.
    chosen = chosen_timeout(process_group, HOST)
    with naming_absence(what):
        limit = seconds if chosen is None else min(seconds, chosen)
        rows = gather_objects((what, account), process_group, limit)
    if not isinstance(account, Failure):
        _refuse_apart(rows, dist.get_process_group_ranks(process_group), what)
    return [each for _, each in rows]


@dataclass(frozen=True)
class Failure:
    """An error text that a failed rank sends in :func:`exchange` in place of its value.

    The other ranks raise an error with this text, even if they are at another call.

    Attributes:
        text: text of the error.
    """

    text: str


def _refuse_apart(rows: Sequence[tuple[str, object]], ranks: Sequence[int], what: str) -> None:
    """Raise an error if a rank has sent a `Failure`, or if ranks are at different calls.

    Args:
        rows: (description of the call, value) of each rank.
        ranks: global rank of each row.
        what: description of this rank's call.
    """
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
    """Turn a backend's error in the body into an error that says that some rank is missing.

    Args:
        what: description of the body for the error message.

    Raises:
        RuntimeError: a collective in the body timed out or lost a connection.
    """
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
    """Blocking collectives of a group, each with a time limit, for building a model. Creating one is collective.

    Attributes:
        rank: this process's rank in the group.
        world: number of ranks in the group.
        ranks: global rank of each member.
        device: device of the tensors that are sent and received.
    """

    def __init__(self, group: Group, device: torch.device, seconds: float) -> None:
        """Connect the ranks.

        Args:
            group: process group, one-dimensional mesh, or None for the world.
            device: device to send from, if the group can send from there; otherwise tensors are sent from host memory.
            seconds: time limit for each collective.

        Raises:
            ValueError: this rank is not a member of the group.
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
        # gloo can neither scatter nor gather tensors on a card.
        direct = device.type != "cpu" and backends(given).get(device.type) not in (None, "gloo")
        self.device = device if direct else HOST
        self._process_group = given if direct else host_group(given, seconds)

    def exchange(self, account: _T, doing: str) -> list[_T]:
        """Gather a picklable value from every rank, in the order of the group; see :func:`exchange`.

        Args:
            account: this rank's value.
            doing: description for error messages.
        """
        late = f"waiting at {doing} for {_SILENCE:g} s; some rank has not come to it"
        with warn_of_waiting(_SILENCE, f"rank {self.ranks[self.rank]} has been {late}"):
            return exchange(self._group, account, doing, self._seconds)

    def scatter(self, own: Tensor, rows: list[Tensor] | None, source: int, doing: str) -> None:
        """Send one row from the source to each rank.

        Args:
            own: uint8 [n] on :attr:`device`; receives this rank's row.
            rows: on the source one uint8 [n] for each rank; None on other ranks.
            source: rank in the group that sends the rows.
            doing: description for error messages.
        """
        if rows is not None and self.world == 1:
            own.copy_(rows[0])
            return
        with naming_absence(doing):
            work = dist.scatter(own, rows, self.ranks[source], self._process_group, async_op=True)
            self._wait(work)

    def broadcast(self, row: Tensor, source: int, doing: str) -> None:
        """Copy a row from one rank to all ranks, in place.

        Args:
            row: uint8 [n] on :attr:`device`.
            source: rank in the group that sends its row.
            doing: description for error messages.
        """
        if self.world == 1:
            return
        with naming_absence(doing):
            self._wait(dist.broadcast(row, self.ranks[source], self._process_group, async_op=True))

    def all_gather(self, out: Tensor, own: Tensor, doing: str) -> None:
        """Gather the rows of all ranks.

        Args:
            out: uint8 [world * n] on :attr:`device`; receives the rows.
            own: uint8 [n] on :attr:`device`; this rank's row.
            doing: description for error messages.
        """
        if self.world == 1:
            out.copy_(own)
            return
        uses = storage_uses(out)
        with naming_absence(doing):
            self._wait(all_gather_single(out, own, group=self._process_group, async_op=True))
        # A gloo thread releases its references to the tensors a little later, when it gets the interpreter's lock.
        # Until then the tensors' storages seem to be aliased, and aliased parameters would not be sharded: see
        # [Note: building in pieces].
        until = time.monotonic() + _LETTING_GO
        while self.device == HOST and storage_uses(out) > uses and time.monotonic() < until:
            time.sleep(1e-4)

    def _wait(self, work: dist.Work | None) -> None:
        """Wait for a collective with the time limit, and raise its error as a `CollectiveError`."""
        assert work is not None  # torch returns None only on ranks that are not in the group
        try:
            work.wait(timedelta(seconds=self._seconds))
        except RuntimeError as error:
            raise CollectiveError.from_backend(error) from error.__cause__
