"""Whole engines on simulated ranks, and a record of the collectives that each rank gives its communicators.

Each rank is a thread with its own model and engine. Exchanges of integers and the sums of a step run in
:mod:`tests.order.world`. Every other collective returns the rank's own values, and its group records the call. A call
is recorded when it is launched, as on a GPU, where the host launches work on comm streams.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.order.world import World
from zeropp.comm import hops
from zeropp.comm.agreement import Agreement
from zeropp.comm.hops import Comm

__all__ = ["Call", "Log", "run_engines"]

Call = tuple[str, str, int, torch.dtype]  # kind of communicator, operation, bytes, dtype
_ROOM = 1024  # differences of 8 bits, and of 16 bits, that a lossless message has room for


@dataclass
class Log:
    """The calls of one rank.

    Attributes:
        calls: calls on all communicators, in order.
        by_group: calls on each communicator, keyed by its kind and its ranks.
    """

    calls: list[Call] = field(default_factory=list)
    by_group: dict[tuple[str, tuple[int, ...]], list[Call]] = field(default_factory=dict)


@dataclass(eq=False)
class _Group:
    """The replacement of a process group."""

    kind: str
    ranks: tuple[int, ...]
    number: int  # number of this rank
    log: Log

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.number)

    def note(self, operation: str, tensor: Tensor) -> None:
        call = self.kind, operation, tensor.nbytes, tensor.dtype
        self.log.calls.append(call)
        self.log.by_group.setdefault((self.kind, self.ranks), []).append(call)


class _Ranks:
    """The replacement of torch.distributed and of zeropp's process groups."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.logs = [Log() for _ in range(world.size)]
        self.here = threading.local()

    def exchange(self, kind: str, value: Any) -> list[Any]:
        # Pickle the values, because a rank may change its objects after the exchange.
        return [pickle.loads(each) for each in self.world.exchange(self.here.rank, kind, pickle.dumps(value))]

    def make_group(
        self, ranks: Sequence[int], backend: str, timeout: object, name: str, device: object, **more: object
    ) -> _Group:
        # The name of a group begins with the job's name and ends with the group's number.
        kind = " ".join(name.split()[1:-1])
        return _Group(kind, tuple(ranks), self.here.rank, self.logs[self.here.rank])

    def all_gather(self, out: Tensor, own: Tensor, group: _Group) -> None:
        group.note("all_gather", out)
        out.view(-1, own.numel()).copy_(own.view(1, -1).clone())

    def all_to_all(self, out: Tensor, message: Tensor, group: _Group) -> None:
        group.note("all_to_all", message)
        out.view(group.size(), -1).copy_(message.view(group.size(), -1)[group.rank()])

    def reduce_scatter(self, part: Tensor, message: Tensor, group: _Group) -> None:
        group.note("reduce_scatter", message)
        part.copy_(message.view(group.size(), -1)[group.rank()]).mul_(group.size())

    def all_reduce(self, tensor: Tensor, op: Any, group: _Group) -> None:
        group.note("all_reduce", tensor)
        if not hasattr(self.here, "rank"):  # a comm stream's thread cannot wait for its turn
            tensor.fill_(_ROOM)
            return
        rows = torch.stack(self.exchange(f"all_reduce of {group.kind}", tensor))
        tensor.copy_(rows.sum(0) if op == dist.ReduceOp.SUM else rows.amax(0))

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        yield dist, "get_rank", lambda group=None: getattr(self.here, "rank", 0)
        yield hops, "make_group", self.make_group
        yield hops, "free_groups", lambda groups: None
        yield hops, "all_gather_single", self.all_gather
        yield hops, "reduce_scatter_single", self.reduce_scatter
        yield dist, "all_to_all_single", self.all_to_all
        yield dist, "all_reduce", self.all_reduce
        yield dist, "broadcast", lambda tensor, source, group: group.note("broadcast", tensor)
        yield Comm, "all_gather_ints", lambda comm, values, seconds=None: self.exchange("numbers", values)
        yield Comm, "all_gather_objects", lambda comm, value: self.exchange("objects", value)
        # For a fake group the real method would take all ranks to be like this one.
        yield Agreement, "exchange_objects", lambda agreement, value, doing: self.exchange(doing, value)


def run_engines(size: int, program: Callable[[int], object]) -> list[Log]:
    """Run a program that creates engines on each of ``size`` ranks, and return each rank's calls."""
    ranks = _Ranks(World(size))

    def run(number: int) -> None:
        ranks.here.rank = number
        program(number)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with contextlib.ExitStack() as stack:
            for owner, name, value in ranks.patches():
                stack.enter_context(mock.patch.object(owner, name, value))
            ranks.world.run(run)
    finally:
        dist.destroy_process_group()
    return ranks.logs
