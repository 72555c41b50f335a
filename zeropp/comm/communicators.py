"""The process groups that carry weights and gradients, and how the engines of one process share them.

[Note: communicators] With NCCL each process group is a communicator. A communicator takes GPU memory outside of torch's
allocator, and its kernels occupy SMs until every member has launched its own kernel. Three rules follow.

1. *The kernels of all communicators fit on the card at the same time.* A stream starts a kernel when the stream's
   earlier work is done, so two ranks may start the kernels of two communicators in different orders. If the first
   kernel leaves no room for the second, each rank waits for a kernel that the other rank cannot start. NCCL's setting
   `max_ctas` limits the thread blocks of each communicator's kernels, including sends and receives (for these NCCL
   rounds up to a power of two). One SM holds one such thread block. `require_room` compares the sum of the limits with
   the number of SMs. NCCL_LAUNCH_ORDER_IMPLICIT is not used instead, because with it a kernel starts only after all
   kernels launched before it have started. A step launches the refreshes of all units before the next forward launches
   its first gather, so that gather would wait for the last refresh, and hpZ could not hide the refreshes.
2. *On every rank the launches follow the order of the program.* Then NCCL runs the collectives of one communicator in
   that order, on whichever streams they are. Therefore refreshes use the communicators of gathers; small sums over all
   ranks use the communicator of reductions, if that communicator spans all ranks; and the engines of a process use the
   same communicators. Engines that may share and that have the same ranks have one `History`: if ranks use these
   engines in different orders, the next step raises an error. Where threads launch collectives (with offload, and on
   CPU), the order of launches may differ between ranks, so each kind of work of each engine has its own communicators.
3. *Ranks destroy a communicator together; a single rank aborts it.* NCCL's `destroy` waits for the other ranks of the
   node. Therefore ranks first exchange the names of the communicators that they no longer use. A rank that closes its
   engine without the others aborts its communicators.
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
"""The kind of work of small sums and broadcasts over all ranks."""

_MERGED = {"refresh": "gather", WORLD: "reduce"}
_LOCAL, _CROSS = 16, 8  # upper limits in thread blocks; NCCL's own choice on NVLink is 24 to 32 for each communicator
# zeropp's limit does not apply to a process group that the user has made. For an all-reduce in such a group NCCL uses
# one thread block for every 4 KiB (enqueue.cc, June 2026), at most 32 on NVLink.
_BLOCK_NBYTES = 2**12
_MOST = 32
_LOCAL_SHARE, _CROSS_SHARE = 8, 16  # also at most num_SMs // 8 (local) and num_SMs // 16 (cross)


@dataclass(frozen=True)
class Ctas:
    """Upper limits on the thread blocks (CTAs) of one communicator's kernels; None leaves the choice to NCCL.

    Attributes:
        local: limit for a communicator whose ranks are on one node.
        cross: limit for a communicator whose ranks are on several nodes.
    """

    local: int | None = None
    cross: int | None = None

    def for_link(self, link: str) -> int | None:
        """Return the limit for a communicator over links of the class "local" or "cross"."""
        return self.local if link == "local" else self.cross


@dataclass(frozen=True)
class Sharing:
    """The settings that say which kinds of work and which engines share communicators.

    Attributes:
        kinds: True if refreshes share the communicators of gathers, and small sums over all ranks share those of
            reductions: see rule 2 in [Note: communicators].
        engines: True if the engines of a process share communicators.
    """

    kinds: bool = False
    engines: bool = False


@dataclass(frozen=True)
class Key:
    """The properties in which two engines' communicators must agree to be shared.

    Attributes:
        kind: kind of work, such as "gather" or "reduce".
        owner: unique name of the one engine that uses the communicator; empty where engines share.
        ranks: global ranks of the members, in the order of the group.
        backend: name of the group's backend.
        device: device of the tensors that the communicator carries.
        timeout: time after which the backend ends a collective with an error.
        max_ctas: upper limit on the thread blocks of the kernels; None leaves the choice to NCCL.
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
    """A process group, together with the engines of this process that use it.

    Attributes:
        key: properties of the group, by which engines find it for sharing.
        group: the process group.
        users: the `Comm` objects of the engines that use this communicator. The references are weak: an engine that is
            collected as garbage no longer counts.
        aborted: True if the group was aborted and can no longer be used.
    """

    key: Key
    group: dist.ProcessGroup
    users: weakref.WeakSet[object] = field(default_factory=weakref.WeakSet)
    aborted: bool = False

    @property
    def name(self) -> str:
        """Name of the process group: equal on all ranks of the group, and unique in the job."""
        return str(self.group.group_name)


class History:
    """A hash of all collectives issued so far by one engine, or by all engines that share communicators.

    Attributes:
        value: the hash. Ranks that issue the same collectives in the same order have equal values.
        engines: number of engines that have used this history so far.
    """

    __slots__ = ("__weakref__", "engines", "value")

    def __init__(self) -> None:
        self.value = 1
        self.engines = 0

    @property
    def state(self) -> tuple[int, int]:
        """The pair (value, engines). Ranks compare their pairs before a new engine joins a history."""
        return self.value, self.engines


_held: dict[str, Communicator] = {}  # communicators of this process, by name
Alike = tuple[tuple[int, ...], timedelta]
"""Global ranks and timeout that engines must have in common to share communicators and a `History`."""

_histories: weakref.WeakValueDictionary[Alike, History] = weakref.WeakValueDictionary()


def kind_of(kind: str, sharing: Sharing) -> str:
    """Return the kind of work whose communicators carry ``kind``.

    Args:
        kind: kind of work, such as "refresh".
        sharing: settings that say if kinds of work share communicators. If they do, "refresh" gives "gather" and
            `WORLD` gives "reduce"; in all other cases the result is ``kind`` itself.
    """
    return _MERGED.get(kind, kind) if sharing.kinds else kind


def held_here() -> dict[str, bool]:
    """Return the usable communicators of this rank by name, each with True if an engine uses it.

    Communicators that were aborted, or that torch no longer knows, are removed from this rank's table first.
    """
    for name, communicator in list(_held.items()):
        # torch no longer knows the group if the user has called destroy_process_group() meanwhile.
        if communicator.aborted or not is_registered(communicator.group):
            del _held[name]
            if not communicator.users:
                free_groups([communicator.group])
    return {name: bool(communicator.users) for name, communicator in _held.items()}


def history_here(alike: Alike) -> History | None:
    """Return this rank's history for engines with the given ranks and timeout; None if there is no such engine."""
    return _histories.get(alike)


def join_history(alike: Alike, states: Iterable[tuple[int, int] | None]) -> History:
    """Return the history for a new engine: the existing one if its state is equal on all ranks, else a new one.

    Args:
        alike: global ranks and timeout of the new engine.
        states: one `History.state` for each rank of the new engine; None for a rank without such a history.
    """
    history = _histories.get(alike)
    # On some ranks the engines of a history may have been collected as garbage, and on other ranks not yet. Then the
    # states differ, and all ranks start a new history.
    if history is None or any(state != history.state for state in states):
        history = _histories[alike] = History()
    return history


def obtain(key: Key, user: object, held: Mapping[int, Mapping[str, bool]], name: str) -> Communicator:
    """Find or create a communicator for an engine, which uses it until it calls :func:`release`.

    Collective over the ranks of the key.

    Args:
        key: properties that the communicator must have.
        user: the `Comm` object of the engine.
        held: result of :func:`held_here` on each global rank, read while the present model is wrapped.
        name: name for a new process group, never used before in this job.
    """
    found = None
    # Sorted, so that all ranks take the same communicator if several match the key.
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
    """End an engine's use of communicators.

    Args:
        communicators: communicators that the engine no longer uses.
        user: the `Comm` object of the engine.

    Returns:
        The communicators among them that are aborted or that no engine of this process uses any more.
    """
    released = list(communicators)
    for communicator in released:
        communicator.users.discard(user)
    return [each for each in released if each.aborted or not each.users]


def forget(communicators: Iterable[Communicator]) -> None:
    """Remove communicators that are about to be destroyed from this rank's table, so that no engine can obtain them."""
    for each in communicators:
        _held.pop(each.name, None)


def destroy_unused(held: Mapping[int, Mapping[str, bool]], own: Mapping[str, bool]) -> None:
    """Destroy the communicators that no engine uses on any of their ranks, in the same order on all ranks.

    Args:
        held: result of :func:`held_here` on each global rank.
        own: this rank's entry in ``held``.
    """
    for name in sorted(own):
        ranks = _held[name].key.ranks if name in _held else ()
        if ranks and all(held.get(rank, {}).get(name) is False for rank in ranks):
            free_groups([_held.pop(name).group])


def most_ctas(communicators: Iterable[tuple[int | None, bool]]) -> int | None:
    """Return the number of thread blocks that communicators need at most when their kernels all run at once.

    Args:
        communicators: for each communicator a pair (``max_ctas``, True if its kernels send and receive).

    Returns:
        The number of thread blocks, or None if one of the communicators has no limit.
    """
    total = 0
    for limit, exchanges in communicators:
        # NCCL_MAX_CTAS in the environment takes precedence over the limit that a program sets.
        limit = _environment("NCCL_MAX_CTAS") or limit
        if limit is None:
            return None
        # These variables take precedence over every upper limit; NCCL_MIN_CTAS does not (connect.cc and init.cc, June
        # 2026).
        limit = max(limit, _environment("NCCL_MIN_NCHANNELS") or _environment("NCCL_MIN_NRINGS") or 0)
        if exchanges:
            # For sends and receives NCCL rounds the number of channels up to a power of two.
            limit = 1 << (max(limit, _environment("NCCL_MIN_P2P_NCHANNELS") or 0) - 1).bit_length()
        total += limit
    return total


def _environment(variable: str) -> int | None:
    """Return the positive integer in an environment variable; None if the variable holds no positive integer."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def choose_ctas(processors: int, local: int | None = None, cross: int | None = None) -> Ctas:
    """Return the limits for a card: the user's values, or defaults that depend on the number of SMs.

    The defaults are ``min(16, processors // 8)`` inside a node and ``min(8, processors // 16)`` between nodes, at least
    1.

    Args:
        processors: number of SMs of the card.
        local: limit that the user has set for communicators inside a node; None for the default.
        cross: limit that the user has set for communicators between nodes; None for the default.
    """
    own = max(min(_LOCAL, processors // _LOCAL_SHARE), 1), max(min(_CROSS, processors // _CROSS_SHARE), 1)
    return Ctas(local or own[0], cross or own[1])


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors (SMs) of a card."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def default_ctas(device: torch.device) -> Ctas:
    """Return the default limits for a card, used when the user sets none; on CPU there are no limits."""
    return choose_ctas(processors(device)) if device.type == "cuda" else Ctas()


def least(limits: Iterable[Ctas]) -> Ctas:
    """Return the smallest limits among several ranks; a limit is None if any rank has None for it.

    Args:
        limits: the limits of each rank. NCCL needs the same number of channels on all ranks.
    """
    each = list(limits)
    local = [one.local for one in each]
    cross = [one.cross for one in each]
    return Ctas(_least(local), _least(cross))


def _least(limits: list[int | None]) -> int | None:
    """Return the smallest of several limits; None if any of them is None."""
    there = [limit for limit in limits if limit is not None]
    return min(there) if len(there) == len(limits) else None


def require_room(communicators: Collection[Communicator], device: torch.device, *, sums_nbytes: int = 0) -> None:
    """Raise an error if the kernels of an engine's communicators do not fit on the card together.

    See [Note: communicators]. Communicators of other engines are not counted: engines that share have the same
    communicators, and other engines mostly run one after another. Variables that are set in NCCL's configuration files,
    and not in the environment, are not considered.

    Args:
        communicators: communicators of the engine.
        device: card of the engine.
        sums_nbytes: bytes of the largest all-reduce over a process group that the user has made; 0 if there is none.

    Raises:
        ValueError: the kernels may need more thread blocks than the card has SMs.
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
