"""Process groups: how they are made, and the one that carries what ranks agree on."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from zeropp._compat import backends, new_group
from zeropp.comm.accounts import name_ranks
from zeropp.comm.watch import warn_of_waiting

__all__ = ["HOST", "host_group", "make_group"]

HOST = torch.device("cpu")
"""Where what is agreed on lies, whatever the model's device."""

_MEETING = 1800.0  # seconds that ranks may be apart when they wrap a model: one may read it from a disk
_SILENCE = 30.0  # seconds to connect in silence
# Of each group that cannot send from the host's memory, the one made for that.
_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def make_group(
    ranks: Sequence[int], backend: str, timeout: timedelta, name: str, device: torch.device
) -> dist.ProcessGroup:
    """A process group whose members connect now; only they call. Arguments as in :func:`zeropp._compat.new_group`.

    Raises:
        RuntimeError: they cannot; with what decides which network they take.
    """
    variable = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME"
    chosen = os.environ.get(variable) or "not set: then host names or routes decide"
    remedy = (
        f"{backend} connects {name_ranks(ranks)} over the network interface that {variable} names (it is {chosen}). "
        "Set it on every node to one that reaches the others; docs/multinode.md says how to find it"
    )
    try:
        with warn_of_waiting(_SILENCE, f"still making process group {name!r} after {_SILENCE:g} s. {remedy}"):
            return new_group(ranks, backend, timeout, name, device)
    except RuntimeError as error:
        raise RuntimeError(f"process group {name!r} could not be made: {error}. {remedy}") from error


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that sends from the host's memory: itself, if it has gloo for that.

    Else one of gloo, made by the members together when they first ask, and kept as long as the group is.
    """
    if backends(group).get("cpu") == "gloo":
        return group
    made = _host_groups.get(group)
    if made is None:
        # torch gives a group one name on all of its members, and that name once in a job.
        name = f"zeropp host {group.group_name}"
        made = make_group(dist.get_process_group_ranks(group), "gloo", timedelta(seconds=_MEETING), name, HOST)
        _host_groups[group] = made
    return made
