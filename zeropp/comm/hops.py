"""Hops between two levels: the process group of each, and the ledger of bytes sent and time waited for.

Gathers and reductions travel over process groups of their own, made eagerly, so that neither waits until the other has
been transferred. All calls here block the calling thread or stream; overlap is the business of the streams they run on.

`Ledger` counts bytes per unit, hop, codec and class of link. `make_stalls` gives it the times: by the host's clock, or
on a GPU by that of the stream that waits. `span` names work of the engine for torch.profiler.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter, deque
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
    free_groups,
    gather_objects,
    gather_rows,
    gather_sized,
    hang_up,
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
    "HostStalls",
    "Ledger",
    "LedgerRow",
    "Stalls",
    "StreamStalls",
    "TrafficKey",
    "make_comm",
    "make_stalls",
]


# Bytes.


class TrafficKey(NamedTuple):
    """Over which hop, and how."""

    unit: str
    kind: str  # "gather", "refresh" (of weights that are cached), "reduce" or "control"
    hop: str  # "outer->inner" levels in the direction of travel
    link: str  # "local" inside a node, "cross" between nodes, "all" for what every rank gets
    ranks: int  # that take part
    codec: str  # "bf16", "int8", "feedback(int4)", "lossless", ...


@dataclass(frozen=True)
class LedgerRow:
    """Traffic of one unit over one hop in one encoding, as this rank sent it."""

    unit: str
    kind: str
    hop: str
    link: str
    ranks: int
    codec: str
    calls: int
    bytes: int  # sent by this rank to others
    exposed: float  # seconds that the model waited for this kind of the unit's, told with its slowest link


@dataclass
class Ledger:
    """Counts what this rank sends to others, waits for, and notes besides.

    Counted is the payload each peer has to receive once: (n-1) messages of a gather, (n-1)/n of an exchange; twice that
    of gloo's own reduce-scatter. Waiting is what the model, on a GPU its stream, stood still for; with ``overlap_comm``
    off that is all of it, codecs included.

    Attributes:
        events: (unit, what) -> how often: how weights that are cached were renewed.
    """

    events: Counter[tuple[str, str]] = field(default_factory=Counter)
    _calls: Counter[TrafficKey] = field(default_factory=Counter)
    _bytes: Counter[TrafficKey] = field(default_factory=Counter)
    _exposed: Counter[tuple[str, str]] = field(default_factory=Counter)
    # Comm streams count on their threads, the model's thread counts waits, and reports may come at any time.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_call(self, key: TrafficKey, nbytes: int) -> None:
        """Count one call."""
        with self._lock:
            self._calls[key] += 1
            self._bytes[key] += nbytes

    def add_wait(self, unit: str, kind: str, seconds: float) -> None:
        """Count seconds that the model stood still."""
        with self._lock:
            # For the whole work: the model waits for its end, and cannot tell which of its hops took the time.
            self._exposed[unit, kind] += seconds  # type: ignore[assignment]  # a Counter of floats

    def count_event(self, unit: str, what: str) -> None:
        """Count something else that happened."""
        with self._lock:
            self.events[unit, what] += 1

    @property
    def rows(self) -> list[LedgerRow]:
        """One row per unit, hop and codec: by unit and kind, links between nodes before those inside."""
        with self._lock:
            exposed = dict(self._exposed)
            return [
                # "cross" sorts before "local", and pop gives the time once: to the row of the slowest link.
                LedgerRow(*key, self._calls[key], self._bytes[key], exposed.pop((key.unit, key.kind), 0.0))
                for key in sorted(self._calls, key=lambda key: (key.unit, key.kind, key.link, key))
            ]

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

    def bytes_by_hop(self) -> dict[str, int]:
        """Bytes this rank sent of weights and gradients, for each "kind hop codec"."""
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
        """Forget everything counted so far."""
        with self._lock:
            for counter in (self._calls, self._bytes, self._exposed, self.events):
                counter.clear()


# Times.

Tell = Callable[[str, str, float], None]
"""Takes a unit, the kind of its work that was waited for, and seconds."""


class Stalls(Protocol):
    """Times what happens inside a ``with`` block, and tells it."""

    def timing(self, unit: str, kind: str) -> contextlib.AbstractContextManager[None]:
        """Time a wait, if it ends well."""
        ...

    def collect(self) -> None:
        """Tell what is known by now and was not when its wait was queued."""
        ...


def make_stalls(device: torch.device, tell: Tell) -> Stalls:
    """The timer for the waits of a model on ``device``."""
    return StreamStalls(device, tell) if device.type == "cuda" else HostStalls(tell)


class HostStalls:
    """Times waits of the host itself."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    @contextlib.contextmanager
    def timing(self, unit: str, kind: str) -> Iterator[None]:
        """See :class:`Stalls`."""
        start = time.perf_counter()
        # No ``finally``: a wait that ends in an error says nothing of how long the model waits.
        yield
        self._tell(unit, kind, time.perf_counter() - start)

    def collect(self) -> None:
        """Nothing is told later."""


class StreamStalls:
    """Times waits that the host only queues: by two events around each, read once the device has passed them.

    Nothing here waits for the device. What it has not passed yet is told at a later call.

    Args:
        device: whose current stream waits.
        tell: gets the times.
    """

    def __init__(self, device: torch.device, tell: Tell) -> None:
        self._device = device
        self._tell = tell
        self._open: deque[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def timing(self, unit: str, kind: str) -> Iterator[None]:
        """See :class:`Stalls`."""
        stream = torch.cuda.current_stream(self._device)
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        # The host only queues the wait. What stands still is the stream, so its own clock is read.
        start.record(stream)
        yield
        end.record(stream)
        self._open.append((unit, kind, start, end))
        self.collect()

    def collect(self) -> None:
        """See :class:`Stalls`."""
        # Events of one stream are passed in order: behind one that is still ahead, none can have been passed.
        while self._open and self._open[0][3].query():
            unit, kind, start, end = self._open.popleft()
            self._tell(unit, kind, start.elapsed_time(end) / 1000)


# Ranges in a profile.


_T = TypeVar("_T")


GroupKey = tuple[str, int, int]
"""What a process group of hops is for: a kind of work, and the levels that data moves between."""


class Hop:
    """One hop bound to a process group.

    On gloo both collectives are sends and receives between members, straight to and from where the data lies: its own
    all-gather and all-to-all copy through buffers of their own and take a third longer. Elsewhere the backend's
    collectives run.
    """

    def __init__(
        self, spec: HopSpec, group: dist.ProcessGroup | None, backend: str, rank: int, ledger: Ledger, kind: str
    ) -> None:
        self.spec = spec
        self.kind = kind  # in the ledger
        self.group = group  # None in a plan, which sends nothing
        self.backend = backend
        # The backend of the group decides, and not the device: a backend of collectives may serve CPU tensors, too.
        self.pairwise = backend == "gloo"
        self.ledger = ledger
        self.size = len(spec.ranks)
        self.index = spec.ranks.index(rank)

    def all_gather(self, out: Tensor, own: Tensor, unit: str, codec: str) -> None:
        """``out`` becomes the members' slices in order; ``own`` is this rank's, and lies in ``out`` already."""
        self._note(f"{self.spec.outer}->{self.spec.inner}", unit, codec, (self.size - 1) * own.nbytes)
        if self.pairwise:
            # This rank's row of ``out`` is neither sent nor received: it is there.
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

    def all_to_all(self, message: Tensor, unit: str, codec: str, *, apart: bool = True) -> Tensor | list[Tensor]:
        """Part i of ``message`` goes to member i; returns the parts meant for this rank, in order of members.

        They are the rows of one tensor, [members, part], or several tensors where they lie apart.

        Args:
            message: one part for each member.
            unit: for the ledger, like ``codec``.
            codec: what the message is encoded in.
            apart: the parts returned need not follow each other in memory.
        """
        sent = message.nbytes // self.size * (self.size - 1)
        self._note(f"{self.spec.inner}->{self.spec.outer}", unit, codec, sent)
        if not self.pairwise:
            whole = torch.empty_like(message)
            try:
                dist.all_to_all_single(whole, message, group=self.group)
            except RuntimeError as error:
                raise CollectiveError.from_backend(error) from error.__cause__
            # Without a view of each part: a thousand of them take the host ten milliseconds.
            return whole.view(self.size, -1)
        parts = list(message.view(self.size, -1).unbind())
        rows = None
        if apart:
            received = [torch.empty_like(part) for part in parts]
            # Not copied: the sum reads it where it lies, in the message, which the caller keeps until then.
            received[self.index] = parts[self.index]
        else:
            # For kernels that want all parts in one stretch, this rank's own among them.
            rows = torch.empty_like(message).view(self.size, -1)
            received = list(rows.unbind())
            received[self.index].copy_(parts[self.index])
        try:
            for work in dist.batch_isend_irecv(self._swap(received, parts)):
                work.wait()
        except RuntimeError as error:
            raise CollectiveError.from_backend(error) from error.__cause__
        return received if rows is None else rows

    def reduce_scatter(self, message: Tensor, unit: str, codec: str) -> Tensor:
        """The members' messages, summed by the backend in their dtype: the part for this rank.

        Args:
            message: plain values, one part for each member.
            unit: for the ledger, like ``codec``.
            codec: what the message is encoded in.
        """
        part = torch.empty(message.numel() // self.size, dtype=message.dtype, device=message.device)
        # gloo sums whole messages in a ring, everywhere, of which each rank then keeps its part.
        times = 2 if self.pairwise else 1
        self._note(f"{self.spec.inner}->{self.spec.outer}", unit, codec, times * part.nbytes * (self.size - 1))
        try:
            reduce_scatter_single(part, message, group=self.group)
        except RuntimeError as error:
            raise CollectiveError.from_backend(error) from error.__cause__
        return part

    def _note(self, direction: str, unit: str, codec: str, nbytes: int) -> None:
        # Counted before the call, so that a report after a failure has what was under way.
        self.ledger.count_call(TrafficKey(unit, self.kind, direction, self.spec.link, self.size, codec), nbytes)

    def _swap(self, into: list[Tensor], out_of: list[Tensor]) -> list[dist.P2POp]:
        """Messages that send ``out_of[i]`` to member i and receive ``into[i]`` from it; none for this rank itself."""
        swap = []
        # In each step a rank sends to another member, so that no rank is the first target of all. Receives first: a
        # send then finds its memory waiting.
        for step in range(1, self.size):
            source = (self.index - step) % self.size
            target = (self.index + step) % self.size
            swap.append(dist.P2POp(dist.irecv, into[source], group=self.group, group_peer=source))
            swap.append(dist.P2POp(dist.isend, out_of[target], group=self.group, group_peer=target))
        return swap


class Groups(Protocol):
    """The source of the hops' process groups."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        ...

    def hop(self, kind: str, spec: HopSpec) -> Hop:
        """A hop, on a group of one kind of work."""
        ...

    def all_ranks(self, kind: str) -> object:
        """The group of all ranks for a kind of work."""
        ...


class Comm:
    """The process groups of one engine.

    Attributes:
        communicators: those that carry weights and gradients, where engines may share them.
        rehearsed: how many of them have run each of their collectives once.
        history: of the collectives of this engine, and of those that it shares communicators with.
    """

    def __init__(
        self, members: Members, chain: Chain, rank: int, timeout: timedelta, job: str, sharing: Sharing, ctas: Ctas
    ) -> None:
        """Make the groups of all ranks; collective over the members. Those of hops come with their paths.

        Args:
            members: who takes part, and over which backend weights and gradients go.
            chain: levels of the run.
            rank: this rank in the group.
            timeout: after which waiting for other ranks is an error.
            job: unique prefix of the groups' names, the same on every member.
            sharing: which kinds of work and which engines have communicators in common.
            ctas: limits of their kernels.
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
        self.lost_at: float | None = None  # when the ranks lost each other, by time.monotonic()
        self.world_group: dist.ProcessGroup | None = None
        self.communicators: list[Communicator] = []
        self.rehearsed = 0
        self.history = History()
        self._sharing = sharing
        self._ctas = ctas
        self._groups: dict[GroupKey, dist.ProcessGroup] = {}
        self._made: list[dist.ProcessGroup] = []  # groups of this engine alone, which end without waiting for others
        self._held: dict[int, dict[str, bool]] = {}  # while wrapping: communicators of each global rank
        self._told: weakref.WeakMethod[Callable[[str], None]] | None = None
        self._issued: weakref.WeakMethod[Callable[[Event, str], None]] | None = None
        when_dropped(self, free_groups, self._made)
        _engines.add(self)
        # Here, where all ranks are at the same place: the members connect while a group is made.
        if chain.world > 1:
            # Agreement is about numbers on the host; over NCCL they would have to go through the device.
            self.control_group = self._make(ranks, "gloo" if backend != "fake" else "fake", "control")
            if self.communicates:
                own = held_here()
                alike = (ranks, timeout)
                before = history_here(alike)
                rows = self.all_gather_objects((own, None if before is None else before.state, ctas))
                self._held = {rank: held for rank, (held, _, _) in zip(ranks, rows, strict=True)}
                # Cards may differ, and NCCL wants one number of channels.
                self._ctas = least([each for _, _, each in rows])
                destroy_unused(self._held, own)
                if sharing.engines:
                    self.history = join_history(alike, [state for _, state, _ in rows])
            # What is small and for all goes over the user's group where that serves, since a communicator costs memory
            # on a card. Not on gloo, where a collective ends with its group's timeout, and not with ``hang_timeout``.
            self.world_group = self._shared(members) or self._obtain(ranks, WORLD, self._widest, WORLD)

    @property
    def communicates(self) -> bool:
        """True if weights and gradients travel over communicators that ranks make and destroy together."""
        return self.world > 1 and self.backend not in ("gloo", "fake")

    @property
    def uses_users_group(self) -> bool:
        """True if small sums go over a group that the user has made."""
        return self.communicates and all(each.group is not self.world_group for each in self.communicators)

    @property
    def _widest(self) -> str:
        """The class of links between all ranks."""
        return "local" if self.local >= self.world else "cross"

    def hop(self, kind: str, spec: HopSpec) -> Hop:
        """A hop, on a group of one kind of work. Collective over the members."""
        # Where threads launch, each kind of work has groups of its own, so that one thread gives a group its
        # collectives, in one order: see [Note: communicators]. Sums that go back to replicas share the groups of
        # reductions: they run on the same comm streams.
        key = (kind, spec.outer, spec.inner)
        if key not in self._groups:
            # In piece order, which need not ascend. new_group keeps it, so that member i of the group has part i.
            members = tuple(self.ranks[rank] for rank in spec.ranks)
            self._groups[key] = self._obtain(members, kind, spec.link, f"{kind} {spec.outer}->{spec.inner}")
        return Hop(spec, self._groups[key], self.backend, self.rank, self.ledger, kind)

    def broadcast(self, tensor: Tensor, source: int | None = None) -> None:
        """Give everyone the values of one rank: of global rank ``source``, or of the group's first."""
        source = self.ranks[0] if source is None else source
        if self.world > 1:
            sends = self.ranks[self.rank] == source
            self._note_control("<broadcast>", (self.world - 1) * tensor.nbytes if sends else 0)
            # The source is a global rank, as torch wants it, whatever group carries it.
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
        """Take the maximum over all ranks, element by element and in place, on a group of one kind of work."""
        if self.world > 1:
            self._all_reduce(tensor, dist.ReduceOp.MAX, self.all_ranks(kind), f"<{kind}>")

    def _all_reduce(
        self, tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None, unit: str
    ) -> None:
        # As a ring sends it, gloo's too: n-1 parts of n while they are summed, and n-1 while sums are handed on.
        nbytes = 2 * (self.world - 1) * tensor.nbytes // self.world
        self.ledger.count_call(TrafficKey(unit, "control", "all", "all", self.world, "-"), nbytes)
        try:
            with self.launching("a sum over all ranks"):
                dist.all_reduce(tensor, op, group=group)
        except RuntimeError as error:
            raise CollectiveError.from_backend(error) from error.__cause__

    def all_ranks(self, kind: str) -> dist.ProcessGroup:
        """The group of all ranks for a kind of work. Collective over the members when first asked for."""
        if self._sharing.kinds:
            assert self.world_group is not None  # there are other ranks
            return self.world_group
        # 0 is no level, so this meets no hop's key; the group differs from the world's own in whose thread uses it.
        key = (kind, self.world, 0)
        if key not in self._groups:
            self._groups[key] = self._obtain(self.ranks, kind, self._widest, f"{kind} all")
        return self._groups[key]

    def host_group(self, kind: str) -> dist.ProcessGroup:
        """The group of all ranks for what a thread of its own agrees on. Collective when first asked for."""
        key = (kind, self.world, -1)
        if key not in self._groups:
            self._groups[key] = self._make(self.ranks, "gloo", f"{kind} host")
        return self._groups[key]

    def tell_issued(self, told: Callable[[Event, str], None]) -> None:
        """Call a method, which is not kept alive, with the end of each collective of all ranks, and its name."""
        self._issued = weakref.WeakMethod(told)

    @contextlib.contextmanager
    def launching(self, doing: str) -> Iterator[None]:
        """Have the monitor watch the collectives inside, from their launch on: NCCL connects the ranks in its first."""
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
            # After an error there is nothing to wait for.
            launch.end = launch.end or DONE

    def _note_control(self, unit: str, nbytes: int) -> None:
        self.ledger.count_call(TrafficKey(unit, "control", "all", "all", self.world, "-"), nbytes)

    def all_gather_ints(self, values: list[int], seconds: float | None = None) -> list[list[int]]:
        """Every rank's row of integers; blocks the host. For agreement outside the steady state.

        Args:
            values: this rank's; as many on all.
            seconds: limit of each step; None for the usual one.
        """
        if self.world == 1 or self.backend == "fake":
            return [values] * self.world
        self._note_control("<agreement>", (self.world - 1) * 8 * len(values))
        own = torch.tensor(values, dtype=torch.int64, device="cpu")
        limit = self.timeout if seconds is None else timedelta(seconds=seconds)
        table: list[list[int]] = gather_rows(own, self.control_group, limit).tolist()
        return table

    def all_gather_objects(self, value: _T, seconds: float | None = None) -> list[_T]:
        """Every rank's picklable value; blocks the host. For checks while wrapping and for error reports.

        Args:
            value: this rank's.
            seconds: limit of each step; None for the usual one.
        """
        if self.world == 1 or self.backend == "fake":
            return [value] * self.world
        return gather_objects(value, self.control_group, self.timeout.total_seconds() if seconds is None else seconds)

    def all_gather_sized(self, data: bytes, sizes: list[int]) -> list[Any]:
        """The pickled bytes of every rank, whose sizes all of them know."""
        return gather_sized(data, sizes, self.control_group, self.timeout.total_seconds())

    def send_to_all(self, value: _T, source: int) -> _T:
        """The picklable value of one rank of the group, on every rank of a world of several; blocks the host."""
        return send_to_all(value, source, self.control_group, self.timeout.total_seconds())

    def free_host_group(self, kind: str) -> None:
        """Destroy the group of a thread that is not going to use it again."""
        group = self._groups.pop((kind, self.world, -1), None)
        if group is not None:
            self._made.remove(group)
            free_groups([group])

    @property
    def has_groups(self) -> bool:
        """True while torch still knows the groups."""
        return dist.is_initialized() and is_registered(self.control_group)

    def end_of_wrap(self) -> None:
        """Share no communicator from here on that this engine does not use yet: other ranks may have closed it."""
        self._held = {}

    @property
    def unused_after(self) -> list[str]:
        """Names of the communicators that nothing in this process uses once this engine is closed."""
        return [each.name for each in self.communicators if set(each.users) <= {self}]

    def close(self, unused: dict[int, list[str]] | None) -> None:
        """Destroy the groups that no other engine uses. They are not used again.

        Args:
            unused: names of the communicators that each global rank uses no more; None if this rank is alone, which
                aborts them.
        """
        # Hops keep their groups, which are of no use from here on.
        self._groups = {}
        _engines.discard(self)
        ended = release(self.communicators, self)
        if unused is None:
            abort_groups([each.group for each in ended if not each.aborted])
        else:
            # Others end when a model is wrapped after that: a rank still has an engine that was dropped on this one, or
            # the other way round. See `destroy_unused`.
            ended = [e for e in ended if e.aborted or all(e.name in unused.get(rank, []) for rank in e.key.ranks)]
        forget(ended)
        # Sorted: ranks wait for each other, one group after another.
        free_groups([each.group for each in sorted(ended, key=lambda each: each.name, reverse=True)])
        self.communicators = []
        free_groups(self._made)

    def abort(self) -> None:
        """End what is under way, here and on the others: the ranks have lost each other.

        The user's own group, too, where it was shared: what hangs on it would keep the host. Not gloo's, whose waits
        have limits of their own.
        """
        self.lost_at = time.monotonic()
        for each in self.communicators:
            each.aborted = True
        abort_groups(self._carriers())

    def on_lost_elsewhere(self, told: Callable[[str], None]) -> None:
        """Call a method, which is not kept alive, when another engine has aborted a group that this one uses."""
        self._told = weakref.WeakMethod(told)

    def tell_sharers(self, reason: str) -> None:
        """Tell the engines of this process that use an aborted group of this one."""
        aborted = set(self._carriers())
        for engine in list(_engines):
            told = engine._told() if engine._told is not None else None
            if engine is not self and told is not None and aborted.intersection(engine._carriers()):
                told(reason)

    def _carriers(self) -> list[dist.ProcessGroup]:
        """Groups that other engines may use."""
        if not self.communicates:
            return []
        groups = [each.group for each in self.communicators]
        return groups if self.world_group is None else list(dict.fromkeys([*groups, self.world_group]))

    def hang_up(self, *, hops: bool = False) -> None:
        """End exchanges of numbers over gloo, here and on ranks that wait for this one; with ``hops`` collectives, too.

        Where comm streams have threads, these are left in their collectives, and the model's thread waits no more.
        """
        if self.world > 1 and self.backend != "fake":
            for group in self._groups.values() if hops and self.backend == "gloo" else ():
                hang_up(group, exchanges=True)
            hang_up(self.control_group)
            if self.backend == "gloo" and self.world_group is not None:
                hang_up(self.world_group)

    def _shared(self, members: Members) -> dist.ProcessGroup | None:
        """The user's group, if its timeout, at which NCCL ends the process, comes after the error that names ranks."""
        enough = members.limit is None or members.limit >= (self.timeout + OUTLASTS).total_seconds()
        return members.shared if enough else None

    def _obtain(self, ranks: tuple[int, ...], kind: str, link: str, description: str) -> dist.ProcessGroup:
        """The group that carries a kind of work over links of a class; collective over ``ranks``."""
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
        """A group of this engine alone."""
        device = HOST if backend == "gloo" else self.device
        group = make_group(ranks, backend, self.timeout, self._name(ranks, description), device, for_rows=True)
        self._made.append(group)
        return group

    def _name(self, ranks: tuple[int, ...], description: str) -> str:
        # Groups of one kind exist side by side and share no member, so the first one tells them apart.
        return f"{self.job} {description} {self.ranks.index(ranks[0])}"


_engines: weakref.WeakSet[Comm] = weakref.WeakSet()  # of this process, that are not closed


def make_comm(
    members: Members,
    chain: Chain,
    hang_timeout: float,
    job: str,
    sharing: Sharing = Sharing(),  # noqa: B008  # immutable
    ctas: Ctas = Ctas(),  # noqa: B008  # immutable
) -> Comm:
    """Make the process groups of a run. Collective over the members.

    Args:
        members: from :func:`find_members`.
        chain: levels of the run.
        hang_timeout: seconds after which a collective that does not finish is an error.
        job: unique name, the same on every member.
        sharing: which kinds of work and which engines have communicators in common.
        ctas: limits of their kernels.
    """
    rank = members.ranks.index(dist.get_rank()) if dist.is_initialized() else 0
    return Comm(members, chain, rank, timedelta(seconds=hang_timeout), job, sharing, ctas)
