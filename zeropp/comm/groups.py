"""Process groups: how they are made, and the one that carries what ranks agree on."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp._compat import is_registered, new_group, sends_from_host
from zeropp.comm.threads import warn_of_waiting, within

__all__ = [
    "HOST",
    "OUTLASTS",
    "CollectiveError",
    "abort_groups",
    "allow_files",
    "free_groups",
    "gather_rows",
    "hang_up",
    "host_group",
    "make_group",
    "name_ranks",
    "what_ended",
]

HOST = torch.device("cpu")
"""Where what is agreed on lies, whatever the model's device."""

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
# Of each group that cannot send from the host's memory, the one made for that.
_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


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
            # Members find each other through the store, which may not answer: see zeropp.comm.status.
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
        ranks, limit = dist.get_process_group_ranks(group), timedelta(seconds=seconds)
        made = make_group(ranks, "gloo", limit, name, HOST, for_rows=True)
        _host_groups[group] = made
        # torch keeps every group until it is destroyed. gloo's may be at any time: its members do not meet for it.
        weakref.finalize(group, free_groups, [made]).atexit = False
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
    rank, world = group.rank(), group.size()
    distances = range(1, world) if exchanges else [1 << power for power in range((world - 1).bit_length())]
    into = [torch.empty(1, device=HOST)]
    for peer in {(rank + sign * distance) % world for distance in distances for sign in (1, -1)}:
        # gloo's ``abort`` leaves them open; a wait that is in vain closes one.
        with contextlib.suppress(RuntimeError):
            group.recv(into, peer, _NEVER).wait(timedelta(milliseconds=1))


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
    rank, world, known = group.rank(), group.size(), 1
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
            raise CollectiveError.of(error) from error.__cause__
        known += more
    return rows.roll(rank, 0)


_TIMED_OUT = "timed? ?out"  # in the words of backends


_CLOSED = "connection (was )?(closed|reset|refused)|broken pipe|socket closed|closed by peer|connect to .* failed"


class CollectiveError(RuntimeError):
    """An error of a collective over gloo, which raises plain RuntimeErrors; other backends have types of their own."""

    @staticmethod
    def of(error: RuntimeError) -> RuntimeError:
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
