"""The blueprint of a model that is not wrapped, its NCCL communicators, and storage tiers that allocate nothing.

:func:`outline` computes the blueprint with the function that training uses. :func:`communicators` derives the
communicators and estimates their memory. :func:`plan_tiers` returns tiers with the engine's own rules for the place
and size of each tensor, but with tensors on the meta device.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from zeropp.comm.communicators import WORLD, Sharing, kind_of
from zeropp.config import Config, ConfigSource, load_config, require_stage_for_offload
from zeropp.offload.storage_tiers import Files, Memory, MemoryTensor, StorageTier, StoredTensor
from zeropp.offload.swap import ALIGNED
from zeropp.offload.tier_choice import Tiers, choose_tiers
from zeropp.params.buffer_maker import NoGroups, planned_transfers
from zeropp.partition.levels import ranks_per_node
from zeropp.setup.blueprint import Blueprint, draw_blueprint

__all__ = [
    "COMMUNICATOR_NBYTES",
    "CommunicatorMemory",
    "PlannedExtent",
    "PlannedMemory",
    "communicators",
    "estimate_nbytes",
    "outline",
    "plan_tiers",
]


_META = torch.device("meta")
_PROCESSORS = 132  # SMs of the GPU that plans assume: H100 or H200


def outline(
    model: nn.Module, config: ConfigSource, world: int, local: int | None, device: torch.device
) -> tuple[Config, Blueprint]:
    """Return the configuration and rank 0's blueprint for a model that is not wrapped.

    Args:
        model: model; meta parameters suffice.
        config: configuration as for ZeroOptimizer.
        world: number of ranks to partition over.
        local: number of ranks per node; None for a single node.
        device: device that trains; it need not exist on this machine.

    Raises:
        ValueError: ``world`` is not positive, does not fit ``local``, or the configuration is invalid for this model.
    """
    if world < 1:
        raise ValueError(f"world is {world}; expected the number of ranks, at least 1")
    settings = load_config(config)
    require_stage_for_offload(settings)
    # Do not read LOCAL_WORLD_SIZE: the plan may be for another machine than this one.
    local = ranks_per_node(range(world), local or world)
    return settings, draw_blueprint(model, settings, world, local, device, processors=_PROCESSORS)


def communicators(blueprint: Blueprint) -> tuple[CommunicatorMemory, ...]:
    """Return the communicators of each rank; all ranks have equally many.

    On a CPU these are gloo groups, and kinds of work share no groups.
    """
    world = blueprint.world
    groups = NoGroups(world, blueprint.rank)
    sharing = Sharing() if blueprint.device.type == "cpu" else blueprint.sharing
    every = tuple(range(world))
    widest = "local" if blueprint.local >= world else "cross"
    # (kind, ranks, link) -> (kinds of work, collectives)
    found: dict[tuple[str, tuple[int, ...], str], tuple[set[str], set[str]]] = {}

    def add(kind: str, ranks: tuple[int, ...], link: str, *names: str) -> None:
        kinds, collectives = found.setdefault((kind_of(kind, sharing), ranks, link), (set(), set()))
        kinds.add(kind)
        collectives.update(names)

    if world > 1:
        add(WORLD, every, widest, "all_reduce", "broadcast")
    for unit in blueprint.units:
        for buffer in unit.buffers:
            for each in planned_transfers(groups, unit.placement, buffer.key, buffer.layout, blueprint.encoding):
                add(each.hop.kind, each.hop.spec.ranks, each.hop.spec.link, each.collective)
    for kind in groups.of_all:
        add(WORLD if sharing.kinds else f"{kind} all", every, widest, "all_reduce")
    return tuple(
        CommunicatorMemory(
            " and ".join(sorted(kinds)),
            len(ranks),
            link,
            tuple(sorted(collectives)),
            estimate_nbytes(len(ranks), link, collectives, blueprint.ctas.for_link(link)),
        )
        for (_, ranks, link), (kinds, collectives) in found.items()
    )


# Communicators and their memory outside of torch's allocator.

COMMUNICATOR_NBYTES = 688 * 2**20
"""Estimated bytes of one NCCL communicator on a GPU after its first collective.

NVIDIA/nccl issue 964 reports 688 MiB on four A100s with NVLink, and 544 MiB with two ranks, with NCCL's own number of
channels.
"""
_CONNECTION_NBYTES = 10 * 2**20  # bytes of a channel between two GPUs of a node (NVIDIA/nccl issue 1685)
# Channels between two GPUs with NVLink, unless `max_ctas` is lower. NCCL rounds their number up to a power of two.
_CHANNELS = 32


@dataclass(frozen=True)
class CommunicatorMemory:
    """One communicator, with an estimate of its memory that has not been measured on a GPU.

    Attributes:
        kind: kinds of work, joined by " and ": "gather", "refresh", "reduce", or "world" for small sums over all ranks.
        ranks: number of member ranks.
        link: "local" inside a node, "cross" between nodes.
        collectives: names of the collectives that the communicator runs. Each allocates memory at its first use, while
            the model is wrapped.
        nbytes: estimated bytes outside of torch's allocator.
    """

    kind: str
    ranks: int
    link: str
    collectives: tuple[str, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.ranks} ranks {self.link} ({', '.join(self.collectives)})"


def estimate_nbytes(ranks: int, link: str, collectives: Collection[str], max_ctas: int | None) -> int:
    """Return the estimated bytes of a communicator on a GPU after each of its collectives has run once.

    Args:
        ranks: number of member ranks.
        link: "local" inside a node, "cross" between nodes. Between nodes, sends and receives share buffers, so they add
            nothing.
        collectives: names of the collectives; "all_to_all" adds channels for sends and receives.
        max_ctas: limit of thread blocks, which also limits channels; None for NCCL's own choice.
    """
    total = COMMUNICATOR_NBYTES
    if link == "local" and "all_to_all" in collectives:
        channels = min(_CHANNELS, _CHANNELS if max_ctas is None else 1 << (max_ctas - 1).bit_length())
        total += (ranks - 1) * channels * _CONNECTION_NBYTES
    return total


# Storage tiers whose tensors take no memory.


def plan_tiers(blueprint: Blueprint) -> Tiers:
    """Return the tiers of a blueprint, as :func:`zeropp.offload.tier_choice.open_tiers` opens them, but without memory.

    There are no staging buffers either.
    """
    options, device = blueprint.tiers, blueprint.device
    # Each planned tensor records the place where it would be; all tensors are on the meta device.
    memory = PlannedMemory(device)

    def host(locked: torch.device | None) -> StorageTier:
        # A CPU device and its host share one memory.
        return memory if device.type == "cpu" else PlannedMemory(torch.device("cpu"), "host", locked)

    return choose_tiers(
        options, memory, host, lambda path: Files(partial(_in_file, path), options.io.block_size, host(None))
    )


def _in_file(path: str, numel: int, dtype: torch.dtype) -> StoredTensor:
    return PlannedExtent(torch.empty(numel, dtype=dtype, device=_META), "disk", path=path)


class PlannedMemory(Memory):
    """A tier of device or host memory that allocates meta tensors, so it takes no memory."""

    def allocate_tensor(self, numel: int, dtype: torch.dtype) -> StoredTensor:
        """Return a planned tensor of [numel] elements at this tier's place."""
        # Plans read sizes only.
        return MemoryTensor(torch.empty(numel, dtype=dtype, device=_META), self.place, self.locked is not None)


@dataclass(frozen=True)
class PlannedExtent(MemoryTensor):
    """A planned tensor in a file that is not created.

    Attributes:
        path: ``nvme_path`` that the file would be below.
    """

    path: str = ""
    in_memory = False
    at_hand = False

    @property
    def nbytes(self) -> int:
        """Bytes in the file, rounded up to whole aligned blocks."""
        return -(-self.tensor.nbytes // ALIGNED) * ALIGNED
