"""Hops: what moves between two levels, over which process group, and how many bytes it costs.

Gathers and reductions travel over process groups of their own, made eagerly, so that neither waits until the other has
been transferred. All calls here block the calling thread or stream; overlap is the business of the streams they run on.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp._compat import all_gather_single, new_group
from zeropp.codecs import PlainCodec
from zeropp.members import Members, gather_objects
from zeropp.placement import HopSpec, Placement
from zeropp.topology import Chain

_T = TypeVar("_T")

__all__ = [
    "Comm",
    "GatherPath",
    "Ledger",
    "LedgerRow",
    "ReducePath",
    "make_comm",
]


@dataclass(frozen=True)
class LedgerRow:
    """Traffic of one unit over one hop, as this rank sent it."""

    unit: str
    kind: str  # "gather", "refresh" (of weights that are kept), "reduce" or "control"
    hop: str  # "outer->inner" levels in the direction of travel
    link: str  # "local" or "cross"
    calls: int
    bytes: int  # sent by this rank to others


@dataclass
class Ledger:
    """Counts bytes this rank sends to others, per unit, hop and link class.

    Counted is the payload each peer has to receive once: (n-1) messages of a gather, (n-1)/n of an exchange.
    """

    _calls: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    _bytes: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, unit: str, kind: str, hop: str, link: str, nbytes: int) -> None:
        """Count one call."""
        key = (unit, kind, hop, link)
        with self._lock:
            self._calls[key] += 1
            self._bytes[key] += nbytes

    @property
    def rows(self) -> list[LedgerRow]:
        """One row per unit and hop, in order of name."""
        with self._lock:
            return [LedgerRow(*key, self._calls[key], self._bytes[key]) for key in sorted(self._calls)]

    @property
    def total_bytes(self) -> int:
        """Bytes this rank sent."""
        return sum(row.bytes for row in self.rows)

    def bytes_by_link(self) -> dict[str, int]:
        """Bytes this rank sent, for each class of link."""
        totals: Counter[str] = Counter()
        for row in self.rows:
            totals[row.link] += row.bytes
        return dict(totals)

    def __str__(self) -> str:
        lines = [f"{'unit':32}{'kind':8}{'hop':10}{'link':7}{'calls':>8}{'bytes sent':>18}"]
        lines += [f"{r.unit:32}{r.kind:8}{r.hop:10}{r.link:7}{r.calls:>8}{r.bytes:>18,}" for r in self.rows]
        return "\n".join([*lines, f"{'total':65}{self.total_bytes:>18,}"])

    def reset(self) -> None:
        """Forget everything counted so far."""
        with self._lock:
            self._calls.clear()
            self._bytes.clear()


class _Hop:
    """One hop bound to a process group.

    On gloo both collectives are sends and receives between members, straight to and from where the data lies: its own
    all-gather and all-to-all copy through buffers of their own and take a third longer. Elsewhere the backend's
    collectives run.
    """

    def __init__(
        self, spec: HopSpec, group: dist.ProcessGroup, backend: str, rank: int, ledger: Ledger, kind: str
    ) -> None:
        self.spec = spec
        self.kind = kind  # in the ledger
        self.group = group
        self.pairwise = backend == "gloo"
        self.ledger = ledger
        self.size = len(spec.ranks)
        self.index = spec.ranks.index(rank)

    def all_gather(self, out: Tensor, piece: Tensor, unit: str) -> None:
        """``out`` becomes the members' pieces in order; ``piece`` is this rank's own part of ``out``."""
        name = f"{self.spec.outer}->{self.spec.inner}"
        self.ledger.add(unit, self.kind, name, self.spec.link, (self.size - 1) * piece.nbytes)
        if self.pairwise:
            self._swap(list(out.view(self.size, -1).unbind()), [piece] * self.size)
        else:
            all_gather_single(out, piece, group=self.group)

    def exchange(self, message: Tensor, unit: str) -> list[Tensor]:
        """Part i of ``message`` goes to member i; returns the parts meant for this rank, in order of members."""
        name = f"{self.spec.inner}->{self.spec.outer}"
        sent = message.nbytes // self.size * (self.size - 1)
        self.ledger.add(unit, self.kind, name, self.spec.link, sent)
        parts = list(message.view(self.size, -1).unbind())
        if self.pairwise:
            received = [torch.empty_like(part) for part in parts]
            received[self.index] = parts[self.index]
            self._swap(received, parts)
            return received
        whole = torch.empty_like(message)
        dist.all_to_all_single(whole, message, group=self.group)
        return list(whole.view(self.size, -1).unbind())

    def _swap(self, into: list[Tensor], out_of: list[Tensor]) -> None:
        """Send ``out_of[i]`` to member i and receive ``into[i]`` from it; this rank's own entries stay untouched."""
        works = []
        for step in range(1, self.size):
            source, target = (self.index - step) % self.size, (self.index + step) % self.size
            works.append(dist.irecv(into[source], group=self.group, group_src=source))
            works.append(dist.isend(out_of[target], group=self.group, group_dst=target))
        for work in works:
            assert work is not None  # None is for ranks outside the group
            work.wait()


class GatherPath:
    """From slices at one level to slices at a smaller one: encode once, then hop by hop, slowest link first.

    The plain codec's messages are the values themselves, so every hop works in place: a rank encodes its slice where
    it belongs in the result, and each hop fills what is around it.
    """

    def __init__(self, placement: Placement, outer: int, inner: int, hops: list[_Hop], codec: PlainCodec) -> None:
        self.placement = placement
        self.outer = outer
        self.inner = inner
        self.hops = hops
        self.codec = codec

    def views(self, whole: Tensor) -> list[Tensor]:
        """Views of a result, this rank's slice at ``inner``: its own part, then what it has after each hop."""
        views, numel = [], whole.numel() * self.inner
        for level in [self.outer, *(hop.spec.inner for hop in self.hops)]:
            start, stop = self.placement.slice_of(numel, level, self.inner)
            views.append(whole[start:stop])
        return views

    def run(self, own: Tensor, views: list[Tensor], unit: str) -> None:
        """Fill a result from every rank's slice at ``outer``.

        Args:
            own: this rank's.
            views: of the result, from :meth:`views`.
            unit: for the ledger.
        """
        self.codec.encode_(views[0], own)
        for index, hop in enumerate(self.hops):
            hop.all_gather(views[index + 1], views[index], unit)


class ReducePath:
    """From slices at one level to sums at a larger one, fastest link first; each hop is an exchange and a local sum.

    Summing in the accumulation dtype after an exchange costs the same bytes as a ring reduce-scatter, rounds less on a
    16-bit wire, and halves what gloo's own reduce-scatter sends.
    """

    def __init__(self, placement: Placement, outer: int, hops: list[_Hop], codec: PlainCodec) -> None:
        self.placement = placement
        self.outer = outer
        self.hops = hops
        self.codec = codec

    def run(self, message: Tensor, out: Tensor, *, scale: float, accumulate: bool, unit: str) -> None:
        """``out`` becomes, or gains, ``scale`` times the sum of all ranks' parts.

        Args:
            message: this rank's slice at the path's first level, encoded by :attr:`codec`.
            out: float32 or float64, this rank's slice at the last one.
            scale: applied once, in the last sum.
            accumulate: add to ``out``.
            unit: for the ledger.
        """
        codec = self.codec
        for hop in self.hops[:-1]:
            parts = hop.exchange(message, unit)
            partial = torch.empty(parts[0].numel(), dtype=out.dtype, device=out.device)
            headroom = codec.headroom(hop.size)
            codec.decode_sum_(parts, partial, scale=headroom)
            scale /= headroom
            message = codec.empty(partial.numel(), out.device)
            codec.encode_(message, partial)
        parts = self.hops[-1].exchange(message, unit) if self.hops else [message]
        codec.decode_sum_(parts, out, scale=scale, accumulate=accumulate)


class Comm:
    """The process groups of one engine."""

    def __init__(
        self, chain: Chain, rank: int, ranks: tuple[int, ...], local: int, backend: str, timeout: timedelta, job: str
    ) -> None:
        """Make the groups of all ranks; collective over the members. Those of hops come with their paths.

        Args:
            chain: levels of the run.
            rank: this rank in the group.
            ranks: global rank of each member.
            local: members per node.
            backend: of the groups that carry weights and gradients.
            timeout: after which waiting for other ranks is an error.
            job: unique prefix of the groups' names, the same on every member.
        """
        self.job = job
        self.chain = chain
        self.rank = rank
        self.ranks = ranks
        self.local = local
        self.backend = backend
        self.timeout = timeout
        self.ledger = Ledger()
        self.world_group: dist.ProcessGroup | None = None
        self._groups: dict[tuple[str, int, int], dist.ProcessGroup] = {}
        if chain.world > 1:
            self.world_group = self._make(ranks, backend, "world")
            control = "gloo" if backend != "fake" else "fake"
            self.control_group = self._make(ranks, control, "control")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.chain.world

    def gather_path(
        self, placement: Placement, outer: int, inner: int, codec: PlainCodec, stream: str = "gather"
    ) -> GatherPath:
        """The hops between two levels, on groups that belong to a stream. Collective over the members."""
        hops = [self._hop(stream, spec) for spec in placement.gather_path(outer, inner)]
        return GatherPath(placement, outer, inner, hops, codec)

    def reduce_path(self, placement: Placement, inner: int, outer: int, codec: PlainCodec) -> ReducePath:
        """The hops between two levels, on groups of the stream of reductions. Collective over the members."""
        hops = [self._hop("reduce", spec) for spec in placement.reduce_path(inner, outer)]
        return ReducePath(placement, outer, hops, codec)

    def _hop(self, stream: str, spec: HopSpec) -> _Hop:
        key = (stream, spec.outer, spec.inner)
        if key not in self._groups:
            members = tuple(self.ranks[rank] for rank in spec.ranks)
            self._groups[key] = self._make(members, self.backend, f"{stream} {spec.outer}->{spec.inner}")
        return _Hop(spec, self._groups[key], self.backend, self.rank, self.ledger, stream)

    def broadcast(self, tensor: Tensor) -> None:
        """Everyone gets rank 0's values."""
        if self.world > 1:
            dist.broadcast(tensor, self.ranks[0], group=self.world_group)

    def sum(self, tensor: Tensor) -> None:
        """Sum a small tensor over all ranks, in place."""
        if self.world > 1:
            self.ledger.add("<boundary>", "control", "all", "all", 2 * (self.world - 1) * tensor.nbytes // self.world)
            dist.all_reduce(tensor, group=self.world_group)

    def all_gather_ints(self, values: list[int]) -> list[list[int]]:
        """Every rank's row of integers; blocks the host. For agreement outside the steady state."""
        if self.world == 1 or self.backend == "fake":
            return [values] * self.world
        row = torch.tensor(values, dtype=torch.int64)
        rows = torch.empty(self.world * len(values), dtype=torch.int64)
        self.ledger.add("<agreement>", "control", "all", "all", (self.world - 1) * row.nbytes)
        all_gather_single(rows, row, group=self.control_group)
        table: list[list[int]] = rows.view(self.world, -1).tolist()
        return table

    def all_gather_objects(self, value: _T) -> list[_T]:
        """Every rank's picklable value; blocks the host. For checks while wrapping and for error reports."""
        if self.world == 1 or self.backend == "fake":
            return [value] * self.world
        return gather_objects(value, self.control_group)

    def close(self) -> None:
        """Destroy the groups. They are not used again."""
        groups = [*self._groups.values()]
        if self.chain.world > 1:
            groups += [self.world_group, self.control_group]  # type: ignore[list-item]
        self._groups = {}
        if dist.is_initialized():
            for group in groups:
                dist.destroy_process_group(group)

    def _make(self, ranks: tuple[int, ...], backend: str, description: str) -> dist.ProcessGroup:
        first = self.ranks.index(ranks[0])  # several groups of one kind exist side by side
        # NCCL kills the process at its timeout; the error that names what every rank waits for must come before.
        timeout = self.timeout if backend == "gloo" else 2 * self.timeout
        return new_group(ranks, backend, timeout, f"{self.job} {description} {first}")


def make_comm(members: Members, chain: Chain, hang_timeout: float, job: str) -> Comm:
    """Make the process groups of a run. Collective over the members.

    Args:
        members: from :func:`find_members`.
        chain: levels of the run.
        hang_timeout: seconds after which a collective that does not finish is an error.
        job: unique name, the same on every member.
    """
    rank = members.ranks.index(dist.get_rank()) if dist.is_initialized() else 0
    return Comm(chain, rank, members.ranks, members.local, members.backend, timedelta(seconds=hang_timeout), job)
