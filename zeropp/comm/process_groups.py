"""Process groups: the user's group, the groups that zeropp makes, and small gathers of rows and objects over them.

`find_members` lists the ranks of a run and how they are placed on nodes. `make_group`, `free_groups`, `abort_groups`
and `close_connections` connect and end groups. `gather_rows`, and the functions built on it, exchange the small values
on which ranks agree. These exchanges use gloo between host memories.
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
    "close_connections",
    "find_members",
    "free_groups",
    "gather_objects",
    "gather_pickled",
    "gather_rows",
    "gather_sized",
    "group_size",
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
"""The device of values on which ranks agree, whatever the model's device is."""

OUTLASTS = timedelta(seconds=60)
"""Time added to NCCL's timeout, at which NCCL ends the process, so that zeropp's own error comes first."""

_ABORTING = 5.0  # seconds that all groups together get to abort
_SILENCE = 30.0  # seconds of connecting after which a warning is logged
# Message tag of ``gather_rows``. The group may be the user's own, and the user may receive another message from the
# same rank.
_TAG = 0x7A65
_NEVER = 0x7A66  # a tag with which no message is ever sent
_MANY = 64  # number of members up to which every pair connects at once
_OPEN_FILES = "/proc/self/fd"  # folder with one entry for each open file; on Linux only
_SPARE = 256  # spare files for other code: data loaders, checkpoints
# Seconds added to the time limit of connecting, so that the group's own timeout comes first: its error is more
# informative.
_MARGIN = 1.0
_SIZE = 8  # bytes of the integer that holds the size of a pickled value
# Bytes of the longest pickled value that fits into the first round of ``gather_pickled``.
_SHORT = 248
_TIMED_OUT = "timed? ?out"  # pattern of the backends' messages for a timeout
_CLOSED = "connection (was )?(closed|reset|refused)|broken pipe|socket closed|closed by peer|connect to .* failed"
# For each group that cannot send from host memory: the gloo group with the same ranks that was made for it.
_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


# Finding the members of a run.


@dataclass(frozen=True)
class Members:
    """The ranks that take part in a run, and the backend that connects them.

    Ranks compare their Members by ``repr``. ``device`` and ``shared`` differ between ranks, so they have
    ``repr=False``.

    Attributes:
        ranks: global rank of each member, in the order of the group.
        local: number of members per node.
        backend: name of the backend of the engine's groups, which carry weights and gradients.
        device: device of the model.
        shared: the user's process group, if the engine may use it instead of making a group; None for gloo and for fake
            groups, or if the engine's backend differs.
        timeout: timeout in seconds of the user's group for ``device``; None if it is torch's default.
        limit: timeout in seconds of ``shared``, even if it is torch's default; None if ``shared`` is None.
    """

    ranks: tuple[int, ...]
    local: int
    backend: str
    device: torch.device = field(default=HOST, repr=False)
    shared: dist.ProcessGroup | None = field(default=None, repr=False)
    timeout: float | None = None
    limit: float | None = None

    def patience(self, hang_timeout: float) -> float:
        """Return the seconds to wait for other ranks: the smaller of ``hang_timeout`` and :attr:`timeout`.

        Args:
            hang_timeout: seconds from the configuration.
        """
        return hang_timeout if self.timeout is None else min(hang_timeout, self.timeout)


def find_members(group: Group, device: torch.device, local_world_size: int | None, hosts: Mapping[int, str]) -> Members:
    """Return the members of a group and their placement on nodes, without communication.

    Args:
        group: ranks to partition over: a process group, a one-dimensional DeviceMesh, or None for the world (one rank,
            if torch.distributed is not initialised).
        device: device of the model, which decides the backend.
        local_world_size: ranks per node; None reads LOCAL_WORLD_SIZE, or counts every host as one node if that is not
            set.
        hosts: host name of each global rank, from :func:`whereabouts`. For a missing rank (in a fake group) this rank's
            host name is used.

    Raises:
        ValueError: the mesh has more than one dimension, nodes are unknown or have different numbers of members, this
            rank is not in the group, or the group has no backend for the device.
        TypeError: ``group`` is an object of another type.
    """
    if group is None and not dist.is_initialized():
        # A single process without a launcher never makes a process group, so the backend needs no real name.
        return Members((0,), 1, "none", device)
    process_group = to_process_group(group)
    # Ranks stay in group order, because levels and pieces are numbered by rank in the group and not by global rank.
    ranks = tuple(dist.get_process_group_ranks(process_group))
    if dist.get_rank() not in ranks:
        raise ValueError(f"process_group has ranks {list(ranks)}, this is rank {dist.get_rank()}; only members wrap")
    # A group may have one backend for each type of device. Only the backend for the device of the weights matters here.
    available = backends(process_group)
    backend = available.get(device.type)
    if device.type != "cpu" and backend in (None, "gloo"):
        # gloo can neither send nor gather tensors on a card. The engine makes its own groups, so their backend may
        # differ from the backend of the user's group.
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
    """Return the process group for a user's argument: a process group, a one-dimensional mesh, or None for the world.

    Raises:
        ValueError: the mesh has several dimensions, or this rank is not a member of the group.
        TypeError: the argument is an object of another type.
    """
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"got a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names}; expected one. Give the dimension "
                "to partition over, as in mesh['dp']"
            )
        return group.get_group()
    # dist.new_group returns this integer, and no process group, to ranks that are not members.
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise ValueError("process_group is one that this rank is no member of; only its members wrap a model")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group is a {type(group).__name__}; expected a ProcessGroup this rank belongs to, a "
            "one-dimensional DeviceMesh, or None"
        )
    return group or world_group()


def world_group() -> dist.ProcessGroup:
    """Return the default process group. torch.distributed must be initialised."""
    world = dist.group.WORLD
    assert world is not None  # torch.distributed is initialised
    return world


def group_size(group: Group) -> int:
    """Return the number of ranks in a group; 1 if torch.distributed is not initialised."""
    return dist.get_world_size(to_process_group(group)) if dist.is_initialized() else 1


def is_fake(group: dist.ProcessGroup) -> bool:
    """Return True for a group of torch's "fake" backend, which simulates many ranks in one process."""
    return "fake" in backends(group).values()


def whereabouts() -> tuple[int, str]:
    """Return the global rank of this process and the name of its host."""
    return dist.get_rank() if dist.is_initialized() else 0, socket.gethostname()


# Creating and ending process groups.


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
    """Create a process group and connect its members. Only the members call this function.

    Args:
        ranks: global ranks of the members, in the order of the group.
        backend: name of the backend, as in ``dist.new_group``.
        timeout: time limit of the group's collectives and of connecting.
        name: name of the group, equal on all members and never used before in this job.
        device: device of the tensors that the group will carry.
        max_ctas: upper limit on the thread blocks of NCCL's kernels; None leaves the choice to NCCL.
        for_rows: True if the group is mainly for :func:`gather_rows`. With gloo and more than 64 members, only the
            pairs that exchange messages in ``gather_rows`` connect now: about ``2 * log2(n)`` connections per rank
            instead of ``n``. Other pairs connect when they first exchange a message.

    Raises:
        RuntimeError: the members cannot connect. The message names the variable that selects the network interface.
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
            # Connect now, by a first gather: an unusable network must show here, where the error message names a
            # remedy.
            gather_rows(torch.zeros(1, device=HOST), group, timeout)
        return group

    if backend == "gloo":
        allow_files(len(ranks))
    try:
        with warn_of_waiting(_SILENCE, f"still making process group {name!r} after {_SILENCE:g} s. {remedy}"):
            # The time limit is needed because members exchange addresses through the store, which may not answer: see
            # zeropp.comm.watch.
            return within(timeout.total_seconds() + _MARGIN, make, "connecting ranks")
    except (RuntimeError, TimeoutError) as error:
        raise RuntimeError(
            f"process group {name!r} could not be made: {error}. A rank has ended or stands still, and the ranks are "
            f"no longer in step; or the network is the wrong one: {remedy}"
        ) from error


def allow_files(count: int) -> None:
    """Raise this process's limit on open files and sockets so that ``count`` more fit, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not os.path.isdir(_OPEN_FILES) or soft == resource.RLIM_INFINITY:
        return
    wanted = len(os.listdir(_OPEN_FILES)) + count + _SPARE
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    # The limit is raised no further than needed, because select() fails for large file numbers, and some programs loop
    # over all file numbers below the limit to close them.
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def host_group(group: dist.ProcessGroup, seconds: float) -> dist.ProcessGroup:
    """Return a gloo group with the same ranks that sends from host memory.

    The result is ``group`` itself if ``group`` has gloo for the CPU. Otherwise all members create a gloo group together
    at the first call. That group is destroyed when ``group`` is collected as garbage.

    Args:
        group: any process group.
        seconds: time limit for connecting the members.
    """
    if sends_from_host(group):
        return group
    made = _host_groups.get(group)
    if made is None:
        # torch gives a group the same name on all of its members and uses the name only once in a job, so the new name
        # is unique.
        name = f"zeropp host {group.group_name}"
        ranks = dist.get_process_group_ranks(group)
        limit = timedelta(seconds=seconds)
        made = make_group(ranks, "gloo", limit, name, HOST, for_rows=True)
        _host_groups[group] = made
        # torch keeps every group until it is destroyed explicitly. A gloo group may be destroyed on one rank at any
        # time, because gloo does not wait for the other members.
        when_dropped(group, free_groups, [made])
    return made


def free_groups(groups: list[dist.ProcessGroup]) -> None:
    """Destroy process groups and empty the list, so that a second call does nothing."""
    while groups:
        group = groups.pop()
        # The user may have called destroy_process_group() before, which destroys all groups.
        if dist.is_initialized() and is_registered(group):
            # The user may also call destroy_process_group() at this moment, because this function may run on a thread
            # that dropped the last reference to an engine. Then torch raises these errors for a group that it no longer
            # knows.
            with contextlib.suppress(KeyError, ValueError):
                dist.destroy_process_group(group)


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort process groups, waiting at most 5 seconds in all."""
    ending = [threading.Thread(target=_abort, args=(group,), name="zeropp abort", daemon=True) for group in groups]
    # The groups are aborted in parallel, because one abort may wait for a device that another group's kernel blocks.
    for thread in ending:
        thread.start()
    until = time.monotonic() + _ABORTING
    for thread in ending:
        thread.join(max(until - time.monotonic(), 0.0))


def _abort(group: dist.ProcessGroup) -> None:
    """Abort one process group, ignoring errors."""
    # RuntimeError: the group is already ending. NotImplementedError: the backend has no abort.
    with contextlib.suppress(RuntimeError, NotImplementedError):
        group.abort()


def close_connections(group: dist.ProcessGroup, *, exchanges: bool = False) -> None:
    """Close this rank's gloo connections in a group, so that ranks that wait for this rank get an error at once.

    Other threads of this rank that wait in the group get the error, too.

    Args:
        group: group with gloo for the CPU.
        exchanges: True if every member sends to every other member. False if the group only has the connections of
            :func:`gather_rows` and of gloo's own rings and trees, which connect ranks at distances that are powers of
            two.
    """
    rank = group.rank()
    world = group.size()
    distances = range(1, world) if exchanges else [1 << power for power in range((world - 1).bit_length())]
    into = [torch.empty(1, device=HOST)]
    for peer in {(rank + sign * distance) % world for distance in distances for sign in (1, -1)}:
        # gloo's ``abort`` does not close connections, but a receive that times out closes its connection.
        with contextlib.suppress(RuntimeError):
            group.recv(into, peer, _NEVER).wait(timedelta(milliseconds=1))


# Gathers of rows and objects from all members.


def gather_rows(own: Tensor, group: dist.ProcessGroup, timeout: timedelta) -> Tensor:
    """Gather one row from every member, over gloo sends and receives, in about log2(n) rounds.

    In each round a rank sends all rows that it has and so doubles the number of rows that others have (Bruck et al.,
    IEEE TPDS 1997). gloo's own all-gather is a ring of n - 1 hops. Each round here has its own time limit, whatever the
    timeout of the group is.

    Args:
        own: this rank's row, [width] on the CPU, of the same width and dtype on all ranks.
        group: group with gloo for the CPU.
        timeout: time limit of each round.

    Returns:
        Tensor [members, width], in the order of the group.

    Raises:
        CollectiveError: a member did not send its rows in time, or its connection was closed.
    """
    rank = group.rank()
    world = group.size()
    known = 1
    # ``rows`` starts with this rank's own row, followed by the rows of the next higher ranks, modulo ``world``.
    rows = own.new_empty(world, own.numel())
    rows[0] = own
    while known < world:
        more = min(known, world - known)
        # The group's own methods also work after the user has ended torch.distributed, as long as a reference to the
        # group exists. A thread may still write a checkpoint then. ``dist.send`` and ``dist.recv`` would raise an
        # error.
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
    """Gather one picklable value from every member; ranks may arrive up to ``seconds`` apart.

    Unlike ``dist.all_gather_object``, this function needs no NumPy and sends from host memory, never from a device.
    During wrapping the model's device is not yet known.

    Args:
        value: this rank's value.
        group: any process group; the values travel over its :func:`host_group`.
        seconds: time limit of each round of messages.

    Returns:
        The values of all members, in the order of the group.
    """
    return gather_pickled(value, host_group(group, seconds), seconds)


def gather_pickled(value: _T, group: dist.ProcessGroup, seconds: float) -> list[_T]:
    """Gather one picklable value from every member, in the order of the group.

    Args:
        value: this rank's value.
        group: group with gloo for the CPU. The group works even if torch no longer has it registered.
        seconds: time limit of each round of messages.
    """
    data = pickle.dumps(value)
    timeout = timedelta(seconds=seconds)
    # The first round sends the size of each value and the first 248 bytes of the value. Usually that is the whole
    # value, and no second round is needed.
    first = bytearray(_SIZE + _SHORT)
    first[:_SIZE] = len(data).to_bytes(_SIZE, "little")
    first[_SIZE:] = data[:_SHORT].ljust(_SHORT, b"\0")
    rows = _rows_as_bytes(gather_rows(torch.frombuffer(first, dtype=torch.uint8), group, timeout))
    sizes = [int.from_bytes(row[:_SIZE], "little") for row in rows]
    if max(sizes) > _SHORT:
        return gather_sized(data, sizes, group, seconds)
    return [pickle.loads(row[_SIZE : _SIZE + size]) for row, size in zip(rows, sizes, strict=True)]


def gather_sized(data: bytes, sizes: list[int], group: dist.ProcessGroup, seconds: float) -> list[Any]:
    """Gather the pickled values of all members when every member already has all sizes.

    Args:
        data: this rank's pickled value.
        sizes: size in bytes of each member's pickled value, in the order of the group.
        group: group with gloo for the CPU.
        seconds: time limit of each round of messages.

    Returns:
        The unpickled values, in the order of the group.
    """
    # A bytearray is used because torch warns about read-only memory. All rows are padded to the length of the longest
    # value, because ``gather_rows`` needs equal widths.
    own = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    rows = _rows_as_bytes(gather_rows(own, group, timedelta(seconds=seconds)))
    return [pickle.loads(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def send_to_all(value: _T, source: int, group: dist.ProcessGroup, seconds: float) -> _T:
    """Broadcast a picklable value from one member to all members.

    Args:
        value: the value to send; ignored on other ranks than ``source``.
        source: rank in the group of the member that sends.
        group: group with gloo for the CPU.
        seconds: time limit of each of the two broadcasts (the size, then the value).

    Returns:
        The value of member ``source``.
    """
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
    """Return the rows of a contiguous uint8 matrix as memory views."""
    data = memoryview(_as_bytes(rows))
    width = rows.shape[1]
    return [data[start : start + width] for start in range(0, len(data), width)]


def _as_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a contiguous uint8 tensor on the CPU."""
    # numpy() is not used because PyTorch does not require NumPy. tolist() would create a Python object for every byte.
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


# Errors of collectives, and names of ranks for messages.


class CollectiveError(RuntimeError):
    """An error of a collective over gloo, whose own errors are plain RuntimeErrors without a type of their own."""

    @staticmethod
    def from_backend(error: RuntimeError) -> RuntimeError:
        """Return the error to raise for a RuntimeError that a backend's call has raised.

        Args:
            error: the error of the call.

        Returns:
            A CollectiveError with the same message for a plain RuntimeError without a cause; otherwise ``error``
            itself, which is an error of another type or of other code.
        """
        return CollectiveError(str(error)) if type(error) is RuntimeError and error.__cause__ is None else error


def what_ended(error: BaseException) -> str | None:
    """Return the reason why a collective ended, in words for a message.

    Returns:
        "time ran out" or "a connection to another rank was closed". None if the error has another reason, or does not
        come from a collective, whatever its message is.
    """
    if not isinstance(error, (CollectiveError, dist.DistError)):
        return None
    if re.search(_TIMED_OUT, str(error), re.IGNORECASE):  # the result is clearer than the backend's own message
        return "time ran out"
    return "a connection to another rank was closed" if re.search(_CLOSED, str(error), re.IGNORECASE) else None


def name_ranks(ranks: Iterable[int]) -> str:
    """Return rank numbers as text: "rank 3", "ranks 0, 1 and 2", or the first eight and "... and 16 more"."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        return f"ranks {', '.join(map(str, numbers[:8]))} and {len(numbers) - 8} more"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
