"""Hops between levels, the process groups that carry them, and a ledger of bytes sent and seconds waited.

Gathers and reductions use separate process groups, which are created during wrapping, so that neither kind of traffic
waits for the other. All calls here block the calling thread or stream; overlap comes from the streams that run them.

`Ledger` counts bytes per unit, hop, codec and class of link, and the seconds that the model waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp._compat import all_gather_single, is_registered, reduce_scatter_single
from zeropp.comm.communicators import (
    WORLD,
    Communicator,
    Ctas,
    History,
    Key,
    Sharing,
    destroy_unused,
    forget,
    held_here,
    history_here,
    join_history,
    kind_of,
    least,
    obtain,
    release,
)
from zeropp.comm.process_groups import (
    HOST,
    OUTLASTS,
    CollectiveError,
    Members,
    abort_groups,
    close_connections,
    free_groups,
    gather_objects,
    gather_rows,
    gather_sized,
    make_group,
    send_to_all,
)
from zeropp.comm.streams import DONE, Event, Launch, issued_here
from zeropp.comm.threads import when_dropped
from zeropp.partition.levels import Chain, HopSpec

__all__ = [
    "Comm",
    "GroupKey",
    "Groups",
    "Hop",
    "Ledger",
    "LedgerRow",
    "TrafficKey",
    "make_comm",
]


# The ledger.


class TrafficKey(NamedTuple):
    """The key under which the ledger counts calls and bytes: unit, kind of traffic, hop, link, ranks and codec."""

    unit: str
    kind: str  # "gather", "refresh" (of cached weights), "reduce" or "control"
    hop: str  # "outer->inner" levels in the direction of travel
    link: str  # "local" inside a node, "cross" between nodes, "all" for collectives of all ranks
    ranks: int  # number of ranks in the hop's process group
    codec: str  # "bf16", "int8", "feedback(int4)", "lossless", ...


@dataclass(frozen=True)
class LedgerRow:
    """The traffic that this rank has sent for one unit over one hop with one codec; fields as in TrafficKey."""

    unit: str
    kind: str
    hop: str
    link: str
    ranks: int
    codec: str
    calls: int
    bytes: int  # number of bytes that this rank has sent to other ranks
    exposed: float  # seconds that the model waited for (unit, kind); 0 in all but the slowest link's row


@dataclass
class Ledger:
    """Counters of the bytes that this rank sends, the seconds that its model waits, and other events.

    Bytes are the payload that this rank sends: ``n - 1`` messages for a gather over n ranks, and ``(n - 1) / n`` of the
    message for an exchange. gloo's own reduce-scatter counts twice the bytes of an exchange. Seconds are the time that
    the model (on a GPU its stream) stood still. With ``overlap_comm`` off, that is the whole time of the work,
    including codecs.

    Attributes:
        events: number of times each event happened, by (unit, name of the event), such as ways of refreshing cached
            weights.
    """

    events: Counter[tuple[str, str]] = field(default_factory=Counter)
    _calls: Counter[TrafficKey] = field(default_factory=Counter)
    _bytes: Counter[TrafficKey] = field(default_factory=Counter)
    _exposed: Counter[tuple[str, str]] = field(default_factory=Counter)
    # Threads of comm streams count bytes, the model's thread counts waits, and any thread may ask for a report.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_call(self, key: TrafficKey, nbytes: int) -> None:
        """Count one call of a collective and the bytes that this rank sends in the call."""
        with self._lock:
            self._calls[key] += 1
            self._bytes[key] += nbytes

    def add_wait(self, unit: str, kind: str, seconds: float) -> None:
        """Add seconds that the model waited for one kind of a unit's work."""
        with self._lock:
            # The time is counted for all hops of the work together: the model waits for the end of the work, and the
            # share of each hop is not measured.
            self._exposed[unit, kind] += seconds  # type: ignore[assignment]  # a Counter of floats

    def count_event(self, unit: str, what: str) -> None:
        """Count one event of a unit, such as a way in which cached weights were refreshed."""
        with self._lock:
            self.events[unit, what] += 1

    @property
    def rows(self) -> list[LedgerRow]:
        """Rows per unit, hop and codec, sorted by unit and kind; links between nodes come before links inside one."""
        with self._lock:
            exposed = dict(self._exposed)
            return [
                # Rows of "cross" links come before rows of "local" links. ``pop`` returns the time only once, so the
                # row of the slowest link gets it.
                LedgerRow(*key, self._calls[key], self._bytes[key], exposed.pop((key.unit, key.kind), 0.0))
                for key in sorted(self._calls, key=lambda key: (key.unit, key.kind, key.link, key))
            ]

    @property
    def total_bytes(self) -> int:
        """Number of bytes that this rank has sent."""
        return sum(row.bytes for row in self.rows)

    def bytes_by_link(self) -> dict[str, int]:
        """Return the bytes that this rank has sent, by class of link."""
        totals: Counter[str] = Counter()
        for row in self.rows:
            totals[row.link] += row.bytes
        return dict(totals)

    def bytes_by_hop(self) -> dict[str, int]:
        """Return the bytes of weights and gradients that this rank has sent, by "kind hop codec"."""
        totals: Counter[str] = Counter()
        for row in self.rows:
            if row.kind != "control":
                totals[f"{row.kind} {row.hop} {row.codec}"] += row.bytes
        return dict(totals)

    def __str__(self) -> str:
        columns = f"{'unit':32}{'kind':9}{'hop':10}{'link':7}{'ranks':>5}  {'codec':18}"
        lines = [f"{columns}{'calls':>8}{'bytes sent':>18}{'exposed s':>11}"]
        for r in self.rows:
            name = f"{r.unit:32}{r.kind:9}{r.hop:10}{r.link:7}{r.ranks:>5}  {r.codec:18}"
            lines.append(f"{name}{r.calls:>8}{r.bytes:>18,}" + (f"{r.exposed:>11.3f}" if r.exposed else ""))
        lines.append(f"{'total':89}{self.total_bytes:>18,}")
        totals: Counter[str] = Counter()
        with self._lock:
            for (_, what), times in self.events.items():
                totals[what] += times
        lines += [f"{what}: {times} times" for what, times in sorted(totals.items())]
        return "\n".join(lines)

    def reset(self) -> None:
        """Set all counters to zero."""
        with self._lock:
            for counter in (self._calls, self._bytes, self._exposed, self.events):
                counter.clear()


# Hops.


_T = TypeVar("_T")


GroupKey = tuple[str, int, int]
"""The kind of work of a process group, and the two levels (outer, inner) between which its hops move data."""


class Hop:
    """One hop in one process group: the collectives that move one unit's data between two levels.

    On gloo the all-gather and the all-to-all are sends and receives between members that read and write the tensors
    directly: gloo's own collectives copy through internal buffers and take a third longer. On other backends the
    backend's collectives run.
    """

    def __init__(
        self, spec: HopSpec, group: dist.ProcessGroup | None, backend: str, rank: int, ledger: Ledger, kind: str
    ) -> None:
        self.spec = spec
        self.kind = kind  # kind of traffic, for the ledger
        self.group = group  # None in a memory plan, which sends nothing
        self.backend = backend
        # The backend decides and not the device, because another backend than gloo may also carry CPU tensors.
        self.pairwise = backend == "gloo"
        self.ledger = ledger
        self.size = len(spec.ranks)
        self.index = spec.ranks.index(rank)

    def gather_key(self, unit: str, codec: str) -> TrafficKey:
        """Return the ledger's key for gathers of a unit with a codec."""
        return TrafficKey(unit, self.kind, f"{self.spec.outer}->{self.spec.inner}", self.spec.link, self.size, codec)

    def reduce_key(self, unit: str, codec: str) -> TrafficKey:
        """Return the ledger's key for reductions of a unit with a codec."""
        return TrafficKey(unit, self.kind, f"{self.spec.inner}->{self.spec.outer}", self.spec.link, self.size, codec)

    def all_gather(self, out: Tensor, own: Tensor, key: TrafficKey) -> None:
        """Fill ``out`` with the members' slices, in the order of the group.

        Args:
            out: result, ``[size * own.numel()]``.
            own: this rank's slice, a view into its place in ``out`` that is already filled.
            key: key for the ledger, from :meth:`gather_key`.
        """
        # Count before the call, so that a report after a failure includes the collective that failed.
        self.ledger.count_call(key, (self.size - 1) * own.nbytes)
        if self.pairwise:
            # ``_swap`` skips this rank's row of ``out``, which is already filled.
            swap = self._swap(list(out.view(self.size, -1).unbind()), [own] * self.size)
            try:
                for work in dist.batch_isend_irecv(swap):
                    work.wait()
            except RuntimeError as error:
                raise CollectiveError.from_backend(error) from error.__cause__
        else:
            try:
                all_gather_single(out, own, group=self.group)
            except RuntimeError as error:
                raise CollectiveError.from_backend(error) from error.__cause__

    def all_to_all(self, message: Tensor, key: TrafficKey, *, apart: bool = True) -> Tensor | list[Tensor]:
        """Send part i of ``message`` to member i, and return the parts that the members sent to this rank.

        Args:
            message: ``size`` equal parts, one for each member.
            key: key for the ledger, from :meth:`reduce_key`.
            apart: True if the returned parts may lie in separate tensors.

        Returns:
            The parts in the order of the members: one tensor [members, part], or a list of tensors.
        """
        self.ledger.count_call(key, message.nbytes // self.size * (self.size - 1))
        if not self.pairwise:
            whole = torch.empty_like(message)
            try:
                dist.all_to_all_single(whole, message, group=self.group)
            except RuntimeError as error:
                raise CollectiveError.from_backend(error) from error.__cause__
            # Return one tensor, not a list of views, because creating a thousand views takes the host milliseconds.
            return whole.view(self.size, -1)
        parts = list(message.view(self.size, -1).unbind())
        rows = None
        if apart:
            received = [torch.empty_like(part) for part in parts]
            # This rank's own part is not copied: the sum reads it in ``message``, which the caller keeps alive until
            # then.
            received[self.index] = parts[self.index]
        else:
            # Some kernels need all parts, including this rank's own part, in one contiguous tensor.
            rows = torch.empty_like(message).view(self.size, -1)
            received = list(rows.unbind())
            received[self.index].copy_(parts[self.index])
        try:
            for work in dist.batch_isend_irecv(self._swap(received, parts)):
                work.wait()
        except RuntimeError as error:
            raise CollectiveError.from_backend(error) from error.__cause__
        return received if rows is None else rows

    def reduce_scatter(self, message: Tensor, key: TrafficKey) -> Tensor:
        """Sum the members' messages by the backend, in their dtype, and return this rank's part of the sum.

        Args:
            message: ``size`` equal parts of plain values, one for each member.
            key: key for the ledger, from :meth:`reduce_key`.
        """
        part = torch.empty(message.numel() // self.size, dtype=message.dtype, device=message.device)
        # gloo runs a ring all-reduce on the whole messages and keeps this rank's part, so it sends twice the bytes.
        times = 2 if self.pairwise else 1
        self.ledger.count_call(key, times * part.nbytes * (self.size - 1))
        try:
            reduce_scatter_single(part, message, group=self.group)
        except RuntimeError as error:
            raise CollectiveError.from_backend(error) from error.__cause__
        return part

    def _swap(self, into: list[Tensor], out_of: list[Tensor]) -> list[dist.P2POp]:
        """Return operations that send ``out_of[i]`` to each other member i and receive ``into[i]`` from that member."""
        swap = []
        # In each step every rank sends to a different member, so that no member gets all messages at once. The receive
        # is posted first, so that its memory is ready when the message arrives.
        for step in range(1, self.size):
            source = (self.index - step) % self.size
            target = (self.index + step) % self.size
            swap.append(dist.P2POp(dist.irecv, into[source], group=self.group, group_peer=source))
            swap.append(dist.P2POp(dist.isend, out_of[target], group=self.group, group_peer=target))
        return swap


class Groups(Protocol):
    """The interface of objects that provide hops and their process groups, such as `Comm`."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        ...

    def hop(self, kind: str, spec: HopSpec) -> Hop:
        """Return a hop in the process group for one kind of work."""
        ...

    def all_ranks(self, kind: str) -> object:
        """Return the process group of all ranks for one kind of traffic, such as "refresh"."""
        ...


class Comm:
    """The process groups of one engine.

    Attributes:
        communicators: communicators of this engine that carry weights and gradients; empty over gloo.
        rehearsed: number of these communicators whose collectives have each run once before training.
        history: hash of the collectives issued by this engine and by the engines that share its communicators.
    """

    def __init__(
        self, members: Members, chain: Chain, rank: int, timeout: timedelta, job: str, sharing: Sharing, ctas: Ctas
    ) -> None:
        """Create the groups of all ranks; collective over the members. The groups of hops are created by :meth:`hop`.

        Args:
            members: ranks and backend of the run.
            chain: levels of the run.
            rank: this rank in the group.
            timeout: time after which waiting for other ranks is an error.
            job: unique prefix of the groups' names, equal on every member.
            sharing: kinds of work and engines that share communicators.
            ctas: upper limits on the thread blocks of NCCL's kernels.
        """
        self.job = job
        self.chain = chain
        self.world = chain.world
        self.rank = rank
        self.ranks = ranks = members.ranks
        self.local = members.local
        self.backend = backend = members.backend
        self.device = members.device
        self.timeout = timeout
        self.ledger = Ledger()
        self.lost_at: float | None = None  # time.monotonic() when the ranks lost each other
        self.world_group: dist.ProcessGroup | None = None
        self.communicators: list[Communicator] = []
        self.rehearsed = 0
        self.history = History()
        self._sharing = sharing
        self._ctas = ctas
        self._groups: dict[GroupKey, dist.ProcessGroup] = {}
        self._made: list[dist.ProcessGroup] = []  # groups that only this engine uses
        self._held: dict[int, dict[str, bool]] = {}  # during wrapping: held_here() of each global rank
        self._told: weakref.WeakMethod[Callable[[str], None]] | None = None
        self._issued: weakref.WeakMethod[Callable[[Event, str], None]] | None = None
        when_dropped(self, free_groups, self._made)
        _engines.add(self)
        # Creating a group connects its members, so the groups are created here, where all ranks are at the same place.
        if chain.world > 1:
            # Ranks agree on integers in host memory; over NCCL the integers would have to be copied to the device.
            self.control_group = self._make(ranks, "gloo" if backend != "fake" else "fake", "control")
            if self.communicates:
                own = held_here()
                alike = (ranks, timeout)
                before = history_here(alike)
                rows = self.all_gather_objects((own, None if before is None else before.state, ctas))
                self._held = {rank: held for rank, (held, _, _) in zip(ranks, rows, strict=True)}
                # Cards may differ, but NCCL needs the same number of channels on all ranks.
                self._ctas = least([each for _, _, each in rows])
                destroy_unused(self._held, own)
                if sharing.engines:
                    self.history = join_history(alike, [state for _, state, _ in rows])
            # Small collectives of all ranks use the user's group if possible, since a communicator takes memory on the
            # card. Not on gloo, where a collective ends at its group's timeout instead of at ``hang_timeout``.
            self.world_group = self._shared(members) or self._obtain(ranks, WORLD, self._widest, WORLD)

    @property
    def communicates(self) -> bool:
        """True if weights and gradients use communicators that ranks create and destroy together (not over gloo)."""
        return self.world > 1 and self.backend not in ("gloo", "fake")

    @property
    def uses_users_group(self) -> bool:
        """True if small sums over all ranks use a process group that the user has made."""
        return self.communicates and all(each.group is not self.world_group for each in self.communicators)

    @property
    def _widest(self) -> str:
        """The class of links that connects all ranks."""
        return "local" if self.local >= self.world else "cross"

    def hop(self, kind: str, spec: HopSpec) -> Hop:
        """Return a hop in the process group for one kind of work; collective over the members at the first call."""
        # Where threads launch collectives, each kind of work has its own groups, so that one thread issues all
        # collectives of a group, in one order: see [Note: communicators]. Sums that return to replicas share the groups
        # of reductions, because they run on the same comm streams.
        key = (kind, spec.outer, spec.inner)
        if key not in self._groups:
            # The ranks are in piece order, which may not be ascending. new_group keeps the order, so member i has part
            # i.
            members = tuple(self.ranks[rank] for rank in spec.ranks)
            self._groups[key] = self._obtain(members, kind, spec.link, f"{kind} {spec.outer}->{spec.inner}")
        return Hop(spec, self._groups[key], self.backend, self.rank, self.ledger, kind)

    def broadcast(self, tensor: Tensor, source: int | None = None) -> None:
        """Copy a tensor from one rank to all ranks, in place.

        Args:
            tensor: values to send on the source; filled on other ranks.
            source: global rank of the source; None for the first rank of the group.
        """
        source = self.ranks[0] if source is None else source
        if self.world > 1:
            sends = self.ranks[self.rank] == source
            self._note_control("<broadcast>", (self.world - 1) * tensor.nbytes if sends else 0)
            # torch expects the source as a global rank, whatever the group is.
            try:
                with self.launching("a broadcast"):
                    dist.broadcast(tensor, source, group=self.world_group)
            except RuntimeError as error:
                raise CollectiveError.from_backend(error) from error.__cause__

    def sum(self, tensor: Tensor) -> None:
        """Sum a small tensor over all ranks, in place."""
        if self.world > 1:
            self._all_reduce(tensor, dist.ReduceOp.SUM, self.world_group, "<boundary>")

    def largest(self, tensor: Tensor, kind: str) -> None:
        """Replace a tensor by its element-wise maximum over all ranks, in place, in the group for one kind of work."""
        if self.world > 1:
            self._all_reduce(tensor, dist.ReduceOp.MAX, self.all_ranks(kind), f"<{kind}>")

    def _all_reduce(
        self, tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None, unit: str
    ) -> None:
        # A ring all-reduce, as gloo's, sends (n-1)/n of the tensor while summing and (n-1)/n while distributing the
        # sums.
        nbytes = 2 * (self.world - 1) * tensor.nbytes // self.world
        self.ledger.count_call(TrafficKey(unit, "control", "all", "all", self.world, "-"), nbytes)
        try:
            with self.launching("a sum over all ranks"):
                dist.all_reduce(tensor, op, group=group)
        except RuntimeError as error:
            raise CollectiveError.from_backend(error) from error.__cause__

    def all_ranks(self, kind: str) -> dist.ProcessGroup:
        """Return the group of all ranks for a kind of work. The first call for a kind is collective."""
        if self._sharing.kinds:
            assert self.world_group is not None  # there are other ranks
            return self.world_group
        # 0 is not a level, so this key differs from all keys of hops. The group is separate from ``world_group``
        # because another thread uses it.
        key = (kind, self.world, 0)
        if key not in self._groups:
            self._groups[key] = self._obtain(self.ranks, kind, self._widest, f"{kind} all")
        return self._groups[key]

    def host_group(self, kind: str) -> dist.ProcessGroup:
        """Return a gloo group of all ranks that only one thread uses; the first call for a kind is collective."""
        key = (kind, self.world, -1)
        if key not in self._groups:
            self._groups[key] = self._make(self.ranks, "gloo", f"{kind} host")
        return self._groups[key]

    def set_launch_callback(self, told: Callable[[Event, str], None]) -> None:
        """Register a method, referenced weakly, that :meth:`launching` calls with an event and a description."""
        self._issued = weakref.WeakMethod(told)

    @contextlib.contextmanager
    def launching(self, doing: str) -> Iterator[None]:
        """Report the collectives in the body to the monitor before they are launched.

        The launch itself can hang, because NCCL connects the ranks in the first launch of each kind of collective.

        Args:
            doing: description of the collectives, for error messages.
        """
        told = None if self._issued is None else self._issued()
        if told is None:
            yield
            return
        launch = Launch()
        told(launch, doing)
        try:
            yield
            launch.end = issued_here(self.device)
        finally:
            # If the launch raised an error, mark the work as done, so that the monitor does not wait for it.
            launch.end = launch.end or DONE

    def _note_control(self, unit: str, nbytes: int) -> None:
        self.ledger.count_call(TrafficKey(unit, "control", "all", "all", self.world, "-"), nbytes)

    def all_gather_ints(self, values: list[int], seconds: float | None = None) -> list[list[int]]:
        """Gather one row of integers from every rank over gloo. Blocks the host.

        Args:
            values: this rank's row; equal lengths on all ranks.
            seconds: time limit of each round of messages; None for the timeout of this object.
        """
        if self.world == 1 or self.backend == "fake":
            return [values] * self.world
        self._note_control("<agreement>", (self.world - 1) * 8 * len(values))
        own = torch.tensor(values, dtype=torch.int64, device="cpu")
        limit = self.timeout if seconds is None else timedelta(seconds=seconds)
        table: list[list[int]] = gather_rows(own, self.control_group, limit).tolist()
        return table

    def all_gather_objects(self, value: _T, seconds: float | None = None) -> list[_T]:
        """Gather one picklable value from every rank over gloo. Blocks the host.

        Args:
            value: this rank's value.
            seconds: time limit of each round of messages; None for the timeout of this object.
        """
        if self.world == 1 or self.backend == "fake":
            return [value] * self.world
        return gather_objects(value, self.control_group, self.timeout.total_seconds() if seconds is None else seconds)

    def all_gather_sized(self, data: bytes, sizes: list[int]) -> list[Any]:
        """Gather one pickled value from every rank and return the values; ``sizes`` has each rank's number of bytes."""
        return gather_sized(data, sizes, self.control_group, self.timeout.total_seconds())

    def send_to_all(self, value: _T, source: int) -> _T:
        """Broadcast a picklable value from group rank ``source``. Blocks the host; needs at least two ranks."""
        return send_to_all(value, source, self.control_group, self.timeout.total_seconds())

    def free_host_group(self, kind: str) -> None:
        """Destroy the group that :meth:`host_group` returned for a kind, when its thread no longer uses it."""
        group = self._groups.pop((kind, self.world, -1), None)
        if group is not None:
            self._made.remove(group)
            free_groups([group])

    @property
    def has_groups(self) -> bool:
        """True if torch.distributed still has the groups registered."""
        return dist.is_initialized() and is_registered(self.control_group)

    def end_of_wrap(self) -> None:
        """Stop taking over communicators of other engines: from now on other ranks may destroy them."""
        self._held = {}

    @property
    def unused_after(self) -> list[str]:
        """Names of the communicators that no other engine of this process uses."""
        return [each.name for each in self.communicators if set(each.users) <= {self}]

    def close(self, unused: dict[int, list[str]] | None) -> None:
        """Release this engine's groups, and destroy the groups that no other engine uses.

        Args:
            unused: :attr:`unused_after` of each global rank; None if other ranks do not close now. Then this rank
                aborts its communicators, because destroying one would wait for the other ranks.
        """
        # Existing hops still refer to the groups but must not use them any more.
        self._groups = {}
        _engines.discard(self)
        ended = release(self.communicators, self)
        if unused is None:
            abort_groups([each.group for each in ended if not each.aborted])
        else:
            # Destroy only the communicators that no rank uses any more. On some rank an engine that this rank has
            # dropped may still exist. ``destroy_unused`` destroys the remaining communicators when the next model is
            # wrapped.
            ended = [e for e in ended if e.aborted or all(e.name in unused.get(rank, []) for rank in e.key.ranks)]
        forget(ended)
        # Sorted, because ``destroy`` waits for other ranks: all ranks must destroy the groups in the same order.
        free_groups([each.group for each in sorted(ended, key=lambda each: each.name, reverse=True)])
        self.communicators = []
        free_groups(self._made)

    def abort(self) -> None:
        """Abort the communicators after the ranks lost each other, which ends their running collectives.

        This includes the user's own group if it is shared, because a hanging collective in that group would block the
        host. gloo groups are not aborted; gloo's waits have time limits.
        """
        self.lost_at = time.monotonic()
        for each in self.communicators:
            each.aborted = True
        abort_groups(self._carriers())

    def set_loss_callback(self, told: Callable[[str], None]) -> None:
        """Register a method, referenced weakly, to call when another engine aborts a group that this engine uses."""
        self._told = weakref.WeakMethod(told)

    def tell_sharers(self, reason: str) -> None:
        """Call the methods registered by the engines of this process that use a group which this engine has aborted."""
        aborted = set(self._carriers())
        for engine in list(_engines):
            told = engine._told() if engine._told is not None else None
            if engine is not self and told is not None and aborted.intersection(engine._carriers()):
                told(reason)

    def _carriers(self) -> list[dist.ProcessGroup]:
        """Return the groups that other engines may use, too; empty over gloo."""
        if not self.communicates:
            return []
        groups = [each.group for each in self.communicators]
        return groups if self.world_group is None else list(dict.fromkeys([*groups, self.world_group]))

    def close_connections(self, *, hops: bool = False) -> None:
        """Close gloo connections: waits on this rank, and waits of other ranks for this rank, end with an error.

        Threads of comm streams may stay blocked in their collectives, but the model's thread no longer waits for them.

        Args:
            hops: True to close the connections of the groups of hops, too, and not only those for small exchanges.
        """
        if self.world > 1 and self.backend != "fake":
            for group in self._groups.values() if hops and self.backend == "gloo" else ():
                close_connections(group, exchanges=True)
            close_connections(self.control_group)
            if self.backend == "gloo" and self.world_group is not None:
                close_connections(self.world_group)

    def _shared(self, members: Members) -> dist.ProcessGroup | None:
        """Return the user's group if NCCL's timeout in it comes after zeropp's own error; None otherwise."""
        enough = members.limit is None or members.limit >= (self.timeout + OUTLASTS).total_seconds()
        return members.shared if enough else None

    def _obtain(self, ranks: tuple[int, ...], kind: str, link: str, description: str) -> dist.ProcessGroup:
        """Return the group for a kind of work over a class of links. Collective over ``ranks`` if the group is new."""
        if not self.communicates:
            return self._make(ranks, self.backend, description)
        owner = "" if self._sharing.engines else self.job
        timeout = self.timeout + OUTLASTS
        kind = kind_of(kind, self._sharing)
        limit = self._ctas.for_link(link)
        key = Key(kind, owner, ranks, self.backend, self.device, timeout, limit)
        found = next((each for each in self.communicators if each.key == key), None)
        if found is None:
            found = obtain(key, self, self._held, self._name(ranks, description))
            self.communicators.append(found)
        return found.group

    def _make(self, ranks: tuple[int, ...], backend: str, description: str) -> dist.ProcessGroup:
        """Create a group that only this engine uses."""
        device = HOST if backend == "gloo" else self.device
        group = make_group(ranks, backend, self.timeout, self._name(ranks, description), device, for_rows=True)
        self._made.append(group)
        return group

    def _name(self, ranks: tuple[int, ...], description: str) -> str:
        # Groups with the same description have no common member, so the first member's number makes the name unique.
        return f"{self.job} {description} {self.ranks.index(ranks[0])}"


_engines: weakref.WeakSet[Comm] = weakref.WeakSet()  # engines of this process that are not closed


def make_comm(
    members: Members,
    chain: Chain,
    hang_timeout: float,
    job: str,
    sharing: Sharing = Sharing(),  # noqa: B008  # immutable
    ctas: Ctas = Ctas(),  # noqa: B008  # immutable
) -> Comm:
    """Create the process groups of a run. Collective over the members.

    Args:
        members: result of :func:`find_members`.
        chain: levels of the run.
        hang_timeout: seconds after which an unfinished collective is an error.
        job: unique name, equal on every member.
        sharing: kinds of work and engines that share communicators.
        ctas: upper limits on the thread blocks of NCCL's kernels.
    """
    rank = members.ranks.index(dist.get_rank()) if dist.is_initialized() else 0
    return Comm(members, chain, rank, timedelta(seconds=hang_timeout), job, sharing, ctas)
