"""Process groups that carry weights and gradients, and that the engines of one process share.

[Note: communicators] Over NCCL each process group is a communicator: memory on the card outside of torch's allocator,
and kernels that hold SMs until every member has launched its own. Three rules follow.

1. *All communicators fit on the card side by side.* A stream starts its kernel when the work before it is done, so two
   ranks may start the kernels of two communicators in different orders. If the first kernel leaves no room for the
   second, each rank waits for a kernel that the other cannot start. NCCL's limit `max_ctas` bounds the thread blocks of
   each communicator, of sends and receives, too (there rounded up to a power of two); an SM holds one of them.
   `require_room` compares their sum with the SMs of the card. NCCL_LAUNCH_ORDER_IMPLICIT is not set instead: it starts
   a kernel after the kernels launched before it have started. A step launches the refreshes of all units before the
   next forward launches its first gather, which would then wait for the last refresh, and hpZ would hide nothing.
2. *The program's order is the order of launches, on every rank.* Then NCCL runs the collectives of one communicator
   in that order, on whatever streams they are. So refreshes use the communicators of gathers, small sums over all
   ranks use the communicator of reductions if that spans all ranks, and the engines of a process use the same ones.
   Engines over the same ranks that may share have one `History`: ranks that use them in different orders find out at
   the next step.
   Where threads launch (with offload, and on CPU) orders may differ: each kind of work of each engine has its own.
3. *Ranks destroy a communicator together or abort it alone.* NCCL waits in `destroy` for the other ranks of the node.
   So ranks tell each other first which communicators they use no more; a rank that closes alone aborts.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from zeropp._compat import is_registered
from zeropp.comm.process_groups import free_groups, make_group

__all__ = [
    "WORLD",
    "Communicator",
    "Ctas",
    "History",
    "Key",
    "Sharing",
    "choose_ctas",
    "default_ctas",
    "destroy_unused",
    "forget",
    "held_here",
    "history_here",
    "join_history",
    "kind_of",
    "least",
    "most_ctas",
    "obtain",
    "processors",
    "release",
    "require_room",
]

WORLD = "world"
"""The kind of small sums and broadcasts over all ranks."""

_MERGED = {"refresh": "gather", WORLD: "reduce"}
_LOCAL, _CROSS = 16, 8  # thread blocks at most; NCCL's own choice on NVLink is 24 to 32 for each communicator
# Our limit does not hold for a group that the user has made. There NCCL gives a sum one thread block for every 4 KiB
# (enqueue.cc, June 2026), and not more than 32 on NVLink.
_BLOCK_NBYTES = 2**12
_MOST = 32
_LOCAL_SHARE, _CROSS_SHARE = 8, 16  # and at most one SM in so many


@dataclass(frozen=True)
class Ctas:
    """Thread blocks (CTAs) that one communicator's kernels may have, by its links; None for NCCL's own choice."""

    local: int | None = None
    cross: int | None = None

    def for_link(self, link: str) -> int | None:
        """The limit for a communicator over "local" or other links."""
        return self.local if link == "local" else self.cross


@dataclass(frozen=True)
class Sharing:
    """The kinds of work, and the engines, that share communicators.

    Attributes:
        kinds: gathers share with refreshes, and reductions with small sums: see rule 2 in [Note: communicators].
        engines: the engines of a process share.
    """

    kinds: bool = False
    engines: bool = False


@dataclass(frozen=True)
class Key:
    """Everything that engines must have in common to share a communicator.

    Attributes:
        kind: of work.
        owner: the one engine that has it, by its unique name; empty where engines share.
        ranks: global ranks, in the order of the group.
        backend: of the group.
        device: whose tensors it carries.
        timeout: after which the backend gives up.
        max_ctas: see :class:`Ctas`.
    """

    kind: str
    owner: str
    ranks: tuple[int, ...]
    backend: str
    device: torch.device
    timeout: timedelta
    max_ctas: int | None


@dataclass(eq=False)
class Communicator:
    """A process group and its users in this process.

    Attributes:
        key: see :class:`Key`.
        group: the process group.
        users: engines that use it; one that is collected as garbage uses it no more.
        aborted: it is of no use any more.
    """

    key: Key
    group: dist.ProcessGroup
    users: weakref.WeakSet[object] = field(default_factory=weakref.WeakSet)
    aborted: bool = False

    @property
    def name(self) -> str:
        """The same on all of its ranks, and of no other group in the job."""
        return str(self.group.group_name)


class History:
    """A hash of the collectives that ranks have issued so far, of one engine or of all that share communicators.

    Attributes:
        value: the same on all ranks as long as they issue the same collectives in the same order.
        engines: how many have had it.
    """

    __slots__ = ("__weakref__", "engines", "value")

    def __init__(self) -> None:
        self.value = 1
        self.engines = 0

    @property
    def state(self) -> tuple[int, int]:
        """Both numbers, which ranks compare before an engine joins."""
        return self.value, self.engines


_held: dict[str, Communicator] = {}  # of this process, by name
Alike = tuple[tuple[int, ...], timedelta]
"""Global ranks and timeout of engines that share communicators."""

_histories: weakref.WeakValueDictionary[Alike, History] = weakref.WeakValueDictionary()


def kind_of(kind: str, sharing: Sharing) -> str:
    """The kind of work whose communicators carry another kind."""
    return _MERGED.get(kind, kind) if sharing.kinds else kind


def held_here() -> dict[str, bool]:
    """Names of this rank's communicators that can be used, and whether an engine uses each."""
    for name, communicator in list(_held.items()):
        # The user may have ended torch.distributed meanwhile.
        if communicator.aborted or not is_registered(communicator.group):
            del _held[name]
            if not communicator.users:
                free_groups([communicator.group])
    return {name: bool(communicator.users) for name, communicator in _held.items()}


def history_here(alike: Alike) -> History | None:
    """The history of engines that share communicators, if there are any."""
    return _histories.get(alike)


def join_history(alike: Alike, states: Iterable[tuple[int, int] | None]) -> History:
    """The history of a further engine, given the states of :func:`history_here` on each of its ranks."""
    history = _histories.get(alike)
    # On some rank its engines may have been collected as garbage, and on others not yet.
    if history is None or any(state != history.state for state in states):
        history = _histories[alike] = History()
    return history


def obtain(key: Key, user: object, held: Mapping[int, Mapping[str, bool]], name: str) -> Communicator:
    """A communicator that an engine may use until it releases it. Collective over the ranks of the key.

    Args:
        key: see :class:`Key`.
        user: the engine's process groups.
        held: :func:`held_here` of each global rank, asked since the last call of :func:`destroy_unused`.
        name: for a new one, never used before in this job.
    """
    found = None
    # Sorted: where several fit, all ranks take the same.
    for each in sorted(_held):
        if _held[each].key == key and all(each in held.get(rank, {}) for rank in key.ranks):
            found = _held[each]
            break
    if found is None:
        group = make_group(key.ranks, key.backend, key.timeout, name, key.device, key.max_ctas)
        found = _held[group.group_name] = Communicator(key, group)
    found.users.add(user)
    return found


def release(communicators: Iterable[Communicator], user: object) -> list[Communicator]:
    """End an engine's use of communicators; returns those that are aborted, or that no engine uses any more."""
    released = list(communicators)
    for communicator in released:
        communicator.users.discard(user)
    return [each for each in released if each.aborted or not each.users]


def forget(communicators: Iterable[Communicator]) -> None:
    """Let no engine obtain communicators any more, since they end."""
    for each in communicators:
        _held.pop(each.name, None)


def destroy_unused(held: Mapping[int, Mapping[str, bool]], own: Mapping[str, bool]) -> None:
    """Destroy communicators that no engine uses on any of their ranks, in one order.

    Args:
        held: :func:`held_here` of each global rank.
        own: of this rank, as it is in ``held``.
    """
    for name in sorted(own):
        ranks = _held[name].key.ranks if name in _held else ()
        if ranks and all(held.get(rank, {}).get(name) is False for rank in ranks):
            free_groups([_held.pop(name).group])


def most_ctas(communicators: Iterable[tuple[int | None, bool]]) -> int | None:
    """Thread blocks that the kernels of communicators have at most, all running; None if one has no limit.

    Args:
        communicators: (``max_ctas``, whether it exchanges: whether its kernels send and receive) of each.
    """
    total = 0
    for limit, exchanges in communicators:
        # NCCL lets the environment overrule what a program asks for.
        limit = _environment("NCCL_MAX_CTAS") or limit
        if limit is None:
            return None
        # These variables win over every limit; NCCL_MIN_CTAS does not (connect.cc and init.cc, June 2026).
        limit = max(limit, _environment("NCCL_MIN_NCHANNELS") or _environment("NCCL_MIN_NRINGS") or 0)
        if exchanges:
            # Sends and receives take a power of two: NCCL rounds up.
            limit = 1 << (max(limit, _environment("NCCL_MIN_P2P_NCHANNELS") or 0) - 1).bit_length()
        total += limit
    return total


def _environment(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def choose_ctas(processors: int, local: int | None = None, cross: int | None = None) -> Ctas:
    """Limits for a card, from what the user has asked for.

    Args:
        processors: SMs of the card.
        local: asked for, inside a node.
        cross: asked for, between nodes.
    """
    own = max(min(_LOCAL, processors // _LOCAL_SHARE), 1), max(min(_CROSS, processors // _CROSS_SHARE), 1)
    return Ctas(local or own[0], cross or own[1])


def processors(device: torch.device) -> int:
    """Multiprocessors (SMs) of a card."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def default_ctas(device: torch.device) -> Ctas:
    """Limits where nobody has asked for others; none on CPU."""
    return choose_ctas(processors(device)) if device.type == "cuda" else Ctas()


def least(limits: Iterable[Ctas]) -> Ctas:
    """The lower limits of several ranks; None where a rank has none."""
    each = list(limits)
    local = [one.local for one in each]
    cross = [one.cross for one in each]
    return Ctas(_least(local), _least(cross))


def _least(limits: list[int | None]) -> int | None:
    there = [limit for limit in limits if limit is not None]
    return min(there) if len(there) == len(limits) else None


def require_room(communicators: Collection[Communicator], device: torch.device, *, sums_nbytes: int = 0) -> None:
    """Refuse communicators of an engine whose kernels do not fit on its card together: see [Note: communicators].

    Communicators of other engines do not count: those that share have the same ones, and others mostly run one after
    another. Variables that stand in NCCL's configuration files are not seen.

    Args:
        communicators: of the engine.
        device: its card.
        sums_nbytes: of the largest sum that goes over a group that the user has made.

    Raises:
        ValueError: they do not fit.
    """
    users = min(-(-sums_nbytes // _BLOCK_NBYTES), _MOST)
    limits_of = [(each.key.max_ctas, each.key.kind == "reduce") for each in communicators]
    total = most_ctas([*limits_of, (users, False)] if users else limits_of)
    if total is not None and total > processors(device):
        names = [f"{each.key.kind} over {len(each.key.ranks)} ranks" for each in communicators]
        listed = ", ".join([*names, "your own group"] if users else names)
        limits = sorted({each.key.max_ctas for each in communicators if each.key.max_ctas is not None})
        raise ValueError(
            f"collectives that run at the same time may take {total} thread blocks ({listed}; limits {limits}), and "
            f"{device} has {processors(device)} multiprocessors, each of which holds one: ranks could wait for each "
            'other for ever. Lower {"zeropp": {"max_ctas": {"local": ..., "cross": ...}}}, or NCCL_MAX_CTAS, '
            "NCCL_MIN_NCHANNELS and NCCL_MIN_P2P_NCHANNELS if they are set"
        )
