"""Process groups: the one that a user means, those that zeropp makes, and rows and objects gathered over them.

Owns the members of a run and how they lie on nodes (`find_members`), how groups connect and end (`make_group`,
`free_groups`, `abort_groups`, `hang_up`), and the exchange of what ranks agree on, which goes over gloo between the
hosts' memories (`gather_rows` and what is built on it).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import resource
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp._compat import backends, chosen_timeout, group_timeout, is_registered, new_group, sends_from_host
from zeropp.comm.threads import when_dropped
from zeropp.comm.timers import warn_of_waiting, within
from zeropp.partition.levels import ranks_per_node

__all__ = [
    "HOST",
    "OUTLASTS",
    "CollectiveError",
    "Group",
    "Members",
    "abort_groups",
    "allow_files",
    "find_members",
    "free_groups",
    "gather_objects",
    "gather_pickled",
    "gather_rows",
    "gather_sized",
    "group_size",
    "hang_up",
    "host_group",
    "is_fake",
    "make_group",
    "name_ranks",
    "send_to_all",
    "to_process_group",
    "what_ended",
    "whereabouts",
    "world_group",
]

_T = TypeVar("_T")
Group = dist.ProcessGroup | dist.DeviceMesh | None

HOST = torch.device("cpu")
"""The device of values that ranks agree on, whatever the model's device."""

OUTLASTS = timedelta(seconds=60)
"""Time that NCCL, which ends the process at its timeout, has more than zeropp, whose error comes first."""

_ABORTING = 5.0  # seconds for groups to end
_SILENCE = 30.0  # seconds to connect in silence
_TAG = 0x7A65  # the group may be the user's, who may be about to receive something from the same rank
_NEVER = 0x7A66  # a tag that nothing is sent with
_MANY = 64  # members, to each of which a connection costs little up to here
_OPEN_FILES = "/proc/self/fd"  # one entry for each; on Linux only
_SPARE = 256  # files that others may open: data loaders, checkpoints
_MARGIN = 1.0  # seconds: the group's own timeout says more
_SIZE = 8  # bytes of a size
_SHORT = 248  # bytes of a pickled value that needs no second round
_TIMED_OUT = "timed? ?out"  # in the words of backends
_CLOSED = "connection (was )?(closed|reset|refused)|broken pipe|socket closed|closed by peer|connect to .* failed"
# Of each group that cannot send from the host's memory, the one made for that.
_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


# The members of a run.


@dataclass(frozen=True)
class Members:
    """The ranks that take part in a run."""

    ranks: tuple[int, ...]  # global rank of each member
    local: int  # members per node
    backend: str  # of the engine's groups, which carry weights and gradients
    # Told apart by rank, and so not compared between ranks, which goes by repr.
    device: torch.device = field(default=HOST, repr=False)  # the model's
    shared: dist.ProcessGroup | None = field(default=None, repr=False)  # the user's, where it saves making one
    timeout: float | None = None  # seconds, of the user's own group if that is not torch's default
    limit: float | None = None  # seconds, of the one that is shared, whoever chose them

    def patience(self, hang_timeout: float) -> float:
        """Seconds to wait for others: what the configuration says, or the group's timeout if that is shorter."""
        return hang_timeout if self.timeout is None else min(hang_timeout, self.timeout)


def find_members(group: Group, device: torch.device, local_world_size: int | None, hosts: Mapping[int, str]) -> Members:
    """Members of a group, and how they lie on nodes. Local; the same on every rank if all is well.

    Args:
        group: ranks to partition over: a process group, a one-dimensional DeviceMesh, or None for the world (one rank,
            if torch.distributed is not initialised).
        device: where the model lives; decides the backend.
        local_world_size: ranks per node, or None for LOCAL_WORLD_SIZE, or else one node for each host.
        hosts: :func:`whereabouts` of the members. Of one that could not be asked (a fake group) it is this rank's.

    Raises:
        ValueError: mesh of more than one dimension, unknown or uneven nodes, a group this rank does not belong to, or
            that cannot send what is on the device.
        TypeError: something else was given.
    """
    if group is None and not dist.is_initialized():
        # One process, without a launcher: no group is ever made, so the backend has no name.
        return Members((0,), 1, "none", device)
    process_group = to_process_group(group)
    # In group order: levels and pieces count by it, and not by global rank.
    ranks = tuple(dist.get_process_group_ranks(process_group))
    if dist.get_rank() not in ranks:
        raise ValueError(f"process_group has ranks {list(ranks)}, this is rank {dist.get_rank()}; only members wrap")
    # A group may have one backend for each type of device; only the one that carries the weights matters here.
    available = backends(process_group)
    backend = available.get(device.type)
    if device.type != "cpu" and backend in (None, "gloo"):
        # gloo neither sends nor gathers from a card. The engine's groups are its own, and need not be as the user's.
        backend = dist.Backend.default_device_backend_map.get(device.type)
    if backend is None:
        raise ValueError(
            f"the model is on {device}, and the process group has a backend for {sorted(available)} only; make it with "
            'one, as in init_process_group("cpu:gloo,cuda:nccl"), or move the model there'
        )
    _, own = whereabouts()
    local = ranks_per_node(ranks, local_world_size, [hosts.get(rank, own) for rank in ranks])
    shared = process_group if backend == available.get(device.type) not in ("gloo", "fake") else None
    limit = None if shared is None else group_timeout(shared, device)
    return Members(ranks, local, backend, device, shared, chosen_timeout(process_group, device), limit)


def to_process_group(group: Group) -> dist.ProcessGroup:
    """The process group meant by a group, a one-dimensional mesh, or None."""
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"got a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names}; expected one. Give the dimension "
                "to partition over, as in mesh['dp']"
            )
        return group.get_group()
    # What dist.new_group returns to ranks outside of the group: an integer, and no process group.
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise ValueError("process_group is one that this rank is no member of; only its members wrap a model")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group is a {type(group).__name__}; expected a ProcessGroup this rank belongs to, a "
            "one-dimensional DeviceMesh, or None"
        )
    return group or world_group()


def world_group() -> dist.ProcessGroup:
    """The default process group."""
    world = dist.group.WORLD
    assert world is not None  # torch.distributed is initialised
    return world


def group_size(group: Group) -> int:
    """Ranks in a group; 1 if torch.distributed is not initialised."""
    return dist.get_world_size(to_process_group(group)) if dist.is_initialized() else 1


def is_fake(group: dist.ProcessGroup) -> bool:
    """Tell whether a group only pretends: torch's own for trying out large worlds in one process."""
    return "fake" in backends(group).values()


def whereabouts() -> tuple[int, str]:
    """The global rank of this process and the name of its host, as other ranks are told them."""
    return dist.get_rank() if dist.is_initialized() else 0, socket.gethostname()


# Groups: how they connect and end.


def make_group(
    ranks: Sequence[int],
    backend: str,
    timeout: timedelta,
    name: str,
    device: torch.device,
    max_ctas: int | None = None,
    *,
    for_rows: bool = False,
) -> dist.ProcessGroup:
    """A process group whose members connect now; only they call. Arguments as in :func:`zeropp._compat.new_group`.

    With ``for_rows`` it is mainly for :func:`gather_rows`. Of many members only those then connect that this function
    has send to each other: 2 log2(n) connections a rank in place of n. Others do when they first send.

    Raises:
        RuntimeError: they cannot; with what decides which network they take.
    """
    variable = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME"
    chosen = os.environ.get(variable) or "not set: then host names or routes decide"
    remedy = (
        f"{backend} connects {name_ranks(ranks)} over the network interface that {variable} names (it is {chosen}). "
        "Set it on every node to one that reaches the others; docs/multinode.md says how to find it"
    )
    lazily = for_rows and backend == "gloo" and len(ranks) > _MANY

    def make() -> dist.ProcessGroup:
        group = new_group(ranks, backend, timeout, name, device, max_ctas, lazily=lazily)
        if lazily:
            # An unusable network is to be heard of here, where the error says what to do.
            gather_rows(torch.zeros(1, device=HOST), group, timeout)
        return group

    if backend == "gloo":
        allow_files(len(ranks))
    try:
        with warn_of_waiting(_SILENCE, f"still making process group {name!r} after {_SILENCE:g} s. {remedy}"):
            # Members find each other through the store, which may not answer: see zeropp.comm.watch.
            return within(timeout.total_seconds() + _MARGIN, make, "connecting ranks")
    except (RuntimeError, TimeoutError) as error:
        raise RuntimeError(
            f"process group {name!r} could not be made: {error}. A rank has ended or stands still, and the ranks are "
            f"no longer in step; or the network is the wrong one: {remedy}"
        ) from error


def allow_files(count: int) -> None:
    """Let this process have ``count`` more files and sockets open than it has, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not os.path.isdir(_OPEN_FILES) or soft == resource.RLIM_INFINITY:
        return
    wanted = len(os.listdir(_OPEN_FILES)) + count + _SPARE
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    # No further than needed: programs that use select() cannot have many, and some close all that they might have.
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def host_group(group: dist.ProcessGroup, seconds: float) -> dist.ProcessGroup:
    """A group of the same ranks that sends from the host's memory: itself, if it has gloo for that.

    Else one of gloo, made by the members together when they first ask, and kept as long as the group is.

    Args:
        group: any.
        seconds: to connect.
    """
    if sends_from_host(group):
        return group
    made = _host_groups.get(group)
    if made is None:
        # torch gives a group one name on all of its members, and that name once in a job.
        name = f"zeropp host {group.group_name}"
        ranks = dist.get_process_group_ranks(group)
        limit = timedelta(seconds=seconds)
        made = make_group(ranks, "gloo", limit, name, HOST, for_rows=True)
        _host_groups[group] = made
        # torch keeps every group until it is destroyed. gloo's may be at any time: its members do not meet for it.
        when_dropped(group, free_groups, [made])
    return made


def free_groups(groups: list[dist.ProcessGroup]) -> None:
    """Destroy groups, once."""
    while groups:
        group = groups.pop()
        # The user may have ended torch.distributed before, and all groups with it.
        if dist.is_initialized() and is_registered(group):
            # Or ends it now: this may be a thread's, which had the engine's last reference. Then torch finds nothing
            # left to forget.
            with contextlib.suppress(KeyError, ValueError):
                dist.destroy_process_group(group)


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort groups, in a limited time."""
    ending = [threading.Thread(target=_abort, args=(group,), name="zeropp abort", daemon=True) for group in groups]
    # Side by side: each may wait for the device, which another one's kernel holds up.
    for thread in ending:
        thread.start()
    until = time.monotonic() + _ABORTING
    for thread in ending:
        thread.join(max(until - time.monotonic(), 0.0))


def _abort(group: dist.ProcessGroup) -> None:
    # The group may be ending by itself, or its backend has no abort.
    with contextlib.suppress(RuntimeError, NotImplementedError):
        group.abort()


def hang_up(group: dist.ProcessGroup, *, exchanges: bool = False) -> None:
    """Close this rank's connections in a group with gloo for the CPU: who waits for it there hears so at once.

    And this rank, if it waits there on another thread.

    Args:
        group: to hang up in.
        exchanges: each member sends to each. Otherwise the connections are those of :func:`gather_rows`, and of gloo's
            own rings and trees: to ranks whose distance is a power of two.
    """
    rank = group.rank()
    world = group.size()
    distances = range(1, world) if exchanges else [1 << power for power in range((world - 1).bit_length())]
    into = [torch.empty(1, device=HOST)]
    for peer in {(rank + sign * distance) % world for distance in distances for sign in (1, -1)}:
        # gloo's ``abort`` leaves them open; a wait that is in vain closes one.
        with contextlib.suppress(RuntimeError):
            group.recv(into, peer, _NEVER).wait(timedelta(milliseconds=1))


# Rows and objects of all members.


def gather_rows(own: Tensor, group: dist.ProcessGroup, timeout: timedelta) -> Tensor:
    """Every member's row, in group order, over gloo, whose own all-gather is a ring of n - 1 hops.

    By doubling what is known it takes log2(n), and each of them has a limit, whatever the group's timeout is. Source:
    Bruck et al., IEEE TPDS 1997.

    Args:
        own: of this rank, [width] on CPU; of one width and dtype on all.
        group: with gloo for the CPU.
        timeout: of each hop.

    Returns:
        [members, width].
    """
    rank = group.rank()
    world = group.size()
    known = 1
    # This rank's own row is the first, then those of the ranks behind it.
    rows = own.new_empty(world, own.numel())
    rows[0] = own
    while known < world:
        more = min(known, world - known)
        # The group's own calls, which work while somebody holds it: a thread may still write a checkpoint when the user
        # has ended torch.distributed.
        try:
            received = group.recv([rows[known : known + more]], (rank + known) % world, _TAG)
            sent = group.send([rows[:more]], (rank - known) % world, _TAG)
            sent.wait(timeout)
            received.wait(timeout)
        except RuntimeError as error:
            raise CollectiveError.from_backend(error) from error.__cause__
        known += more
    return rows.roll(rank, 0)


def gather_objects(value: _T, group: dist.ProcessGroup, seconds: float) -> list[_T]:
    """Every member's picklable value, in group order; ranks may come ``seconds`` apart.

    Unlike torch's own, it works where NumPy is not installed, and never goes over a device: before the model has been
    looked at, nobody knows which.
    """
    return gather_pickled(value, host_group(group, seconds), seconds)


def gather_pickled(value: _T, group: dist.ProcessGroup, seconds: float) -> list[_T]:
    """:func:`gather_objects` of a group that has gloo for the host's memory; it need not be torch's any more."""
    data = pickle.dumps(value)
    timeout = timedelta(seconds=seconds)
    # The first round carries every size and, where it fits, the whole value; mostly it does.
    first = bytearray(_SIZE + _SHORT)
    first[:_SIZE] = len(data).to_bytes(_SIZE, "little")
    first[_SIZE:] = data[:_SHORT].ljust(_SHORT, b"\0")
    rows = _rows_as_bytes(gather_rows(torch.frombuffer(first, dtype=torch.uint8), group, timeout))
    sizes = [int.from_bytes(row[:_SIZE], "little") for row in rows]
    if max(sizes) > _SHORT:
        return gather_sized(data, sizes, group, seconds)
    return [pickle.loads(row[_SIZE : _SIZE + size]) for row, size in zip(rows, sizes, strict=True)]


def gather_sized(data: bytes, sizes: list[int], group: dist.ProcessGroup, seconds: float) -> list[Any]:
    """The values that members have pickled, in group order; all of them know the sizes in bytes."""
    # A bytearray: torch warns of memory that it may not write to. Rows are of one length: that of the longest.
    own = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    rows = _rows_as_bytes(gather_rows(own, group, timedelta(seconds=seconds)))
    return [pickle.loads(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def send_to_all(value: _T, source: int, group: dist.ProcessGroup, seconds: float) -> _T:
    """The picklable value of member ``source``, on every member of a group with gloo for the host's memory."""
    options = dist.BroadcastOptions()
    options.rootRank = source
    options.timeout = timedelta(seconds=seconds)
    data = pickle.dumps(value) if group.rank() == source else b""
    try:
        size = torch.tensor([len(data)], device=HOST)
        group.broadcast([size], options).wait(options.timeout)
        row = torch.frombuffer(bytearray(data.ljust(int(size), b"\0")), dtype=torch.uint8)
        group.broadcast([row], options).wait(options.timeout)
    except RuntimeError as error:
        raise CollectiveError.from_backend(error) from error.__cause__
    received: _T = pickle.loads(_as_bytes(row))
    return received


def _rows_as_bytes(rows: Tensor) -> list[memoryview]:
    """The rows of a contiguous uint8 matrix."""
    data = memoryview(_as_bytes(rows))
    width = rows.shape[1]
    return [data[start : start + width] for start in range(0, len(data), width)]


def _as_bytes(tensor: Tensor) -> bytes:
    # Not numpy(), which PyTorch does not require; tolist() would make an object of 8 bytes and more for every byte.
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


# Errors of collectives, and ranks in words.


class CollectiveError(RuntimeError):
    """An error of a collective over gloo, which raises plain RuntimeErrors; other backends have types of their own."""

    @staticmethod
    def from_backend(error: RuntimeError) -> RuntimeError:
        """The error to raise for one that the backend's call has raised; the same if it has a type, or a cause."""
        return CollectiveError(str(error)) if type(error) is RuntimeError and error.__cause__ is None else error


def what_ended(error: BaseException) -> str | None:
    """The reason why a collective ended: "time ran out", "a connection to another rank was closed", or None.

    None, too, for an error that is not a collective's, whatever its message says.
    """
    if not isinstance(error, (CollectiveError, dist.DistError)):
        return None
    if re.search(_TIMED_OUT, str(error), re.IGNORECASE):  # the backend's own words say less
        return "time ran out"
    return "a connection to another rank was closed" if re.search(_CLOSED, str(error), re.IGNORECASE) else None


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 3" or "ranks 0, 1 and 2"; of many the first eight."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        return f"ranks {', '.join(map(str, numbers[:8]))} and {len(numbers) - 8} more"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
