"""Who takes part: the process group a user means, its ranks, and how they lie on nodes."""

from __future__ import annotations

import ctypes
import pickle
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp._compat import backends, chosen_timeout, group_timeout
from zeropp.comm.groups import HOST, CollectiveError, gather_rows, host_group
from zeropp.partition.topology import ranks_per_node

__all__ = [
    "Group",
    "Members",
    "find_members",
    "gather_objects",
    "gather_pickled",
    "gather_sized",
    "group_size",
    "is_fake",
    "send_to_all",
    "to_process_group",
    "whereabouts",
    "world_group",
]

_T = TypeVar("_T")
_SIZE = 8  # bytes of a size
_SHORT = 248  # bytes of a pickled value that needs no second round

Group = dist.ProcessGroup | dist.DeviceMesh | None


@dataclass(frozen=True)
class Members:
    """Who takes part in a run."""

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


def whereabouts() -> tuple[int, str]:
    """What other ranks are told of this process: its global rank, and the name of its host."""
    return dist.get_rank() if dist.is_initialized() else 0, socket.gethostname()


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


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether a group only pretends: torch's own for trying out large worlds in one process."""
    return "fake" in backends(group).values()


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


def group_size(group: Group) -> int:
    """Ranks in a group; 1 if torch.distributed is not initialised."""
    return dist.get_world_size(to_process_group(group)) if dist.is_initialized() else 1


def gather_objects(value: _T, group: dist.ProcessGroup, seconds: float) -> list[_T]:
    """Every member's picklable value, in group order; ranks may come ``seconds`` apart.

    Unlike torch's own, it works where NumPy is not installed, and never goes over a device: before the model has been
    looked at, nobody knows which.
    """
    return gather_pickled(value, host_group(group, seconds), seconds)


def gather_pickled(value: _T, group: dist.ProcessGroup, seconds: float) -> list[_T]:
    """:func:`gather_objects` of a group that has gloo for the host's memory; it need not be torch's any more."""
    data, timeout = pickle.dumps(value), timedelta(seconds=seconds)
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
    """What every member has pickled, whose sizes in bytes all of them know, in group order."""
    # A bytearray: torch warns of memory that it may not write to. Rows are of one length: that of the longest.
    own = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    rows = _rows_as_bytes(gather_rows(own, group, timedelta(seconds=seconds)))
    return [pickle.loads(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def send_to_all(value: _T, source: int, group: dist.ProcessGroup, seconds: float) -> _T:
    """The picklable value of member ``source``, on every member of a group with gloo for the host's memory."""
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = source, timedelta(seconds=seconds)
    data = pickle.dumps(value) if group.rank() == source else b""
    try:
        size = torch.tensor([len(data)], device=HOST)
        group.broadcast([size], options).wait(options.timeout)
        row = torch.frombuffer(bytearray(data.ljust(int(size), b"\0")), dtype=torch.uint8)
        group.broadcast([row], options).wait(options.timeout)
    except RuntimeError as error:
        raise CollectiveError.of(error) from error.__cause__
    received: _T = pickle.loads(_as_bytes(row))
    return received


def _rows_as_bytes(rows: Tensor) -> list[memoryview]:
    """The rows of a contiguous uint8 matrix."""
    data, width = memoryview(_as_bytes(rows)), rows.shape[1]
    return [data[start : start + width] for start in range(0, len(data), width)]


def _as_bytes(tensor: Tensor) -> bytes:
    # Not numpy(), which PyTorch does not require; tolist() would make an object of 8 bytes and more for every byte.
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def world_group() -> dist.ProcessGroup:
    """The default process group."""
    world = dist.group.WORLD
    assert world is not None  # torch.distributed is initialised
    return world
