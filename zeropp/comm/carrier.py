"""Carries bytes between the ranks of a group before there is an engine, with lanes and a ledger, for it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp._compat import all_gather_single, backends, storage_uses
from zeropp.comm.collective import exchange, naming_absence
from zeropp.comm.process_groups import HOST, CollectiveError, Group, group_size, host_group, to_process_group
from zeropp.comm.threads import warn_of_waiting

__all__ = ["Carrier"]

_T = TypeVar("_T")
_SILENCE = 30.0  # seconds to wait silently for other ranks
_LETTING_GO = 1.0  # seconds to wait for threads that have nothing left to do


class Carrier:
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
        self.rank, self.device = 0, device
        self.ranks: tuple[int, ...] = (0,)
        self._group, self._seconds = group, seconds
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
        """What every rank says, picklable, in the order of the group; see :func:`zeropp.comm.collective.exchange`."""
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
            raise CollectiveError.of(error) from error.__cause__
