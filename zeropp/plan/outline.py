"""The blueprint of a model that is not wrapped; its communicators, and tiers whose tensors take no memory.

:func:`outline` draws what an engine would be made of, by the engine's own function. From it follow the communicators on
a card, and what they take outside of torch's allocator. An engine's own rules say where each row would be, and how
large: :func:`plan_homes` gives them tiers that take nothing.
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
from zeropp.offload.tier_choice import ALL, Tiers, choose_tiers
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
    "plan_homes",
]


_META = torch.device("meta")
_PROCESSORS = 132  # of the card that plans assume: H100, H200


def outline(
    model: nn.Module, config: ConfigSource, world: int, local: int | None, device: torch.device
) -> tuple[Config, Blueprint]:
    """Draw rank 0's engine for a model that is not wrapped, as ZeroOptimizer would; meta parameters will do.

    Raises:
        ValueError: ``world`` is not positive, or ZeroOptimizer would refuse the groups, the weights' codec or the
            offload that the configuration asks for.
    """
    if world < 1:
        raise ValueError(f"world is {world}; expected the number of ranks, at least 1")
    settings = load_config(config)
    require_stage_for_offload(settings)
    # Without a number one node, whatever LOCAL_WORLD_SIZE says: the plan is for a machine that need not be this one.
    local = ranks_per_node(range(world), local or world)
    return settings, draw_blueprint(model, settings, world, local, device, processors=_PROCESSORS)


def communicators(blueprint: Blueprint) -> tuple[CommunicatorMemory, ...]:
    """The communicators that a rank will have; all ranks have as many. On CPU gloo's groups are not shared."""
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


# Communicators, and the memory that they take outside of torch's allocator.

COMMUNICATOR_NBYTES = 688 * 2**20
"""Bytes of one NCCL communicator on a card once it has gathered or summed, estimated: 688 MiB were seen on four A100
with NVLink, 544 for two ranks (NVIDIA/nccl issue 964), with as many channels as NCCL chooses.
"""
_CONNECTION_NBYTES = 10 * 2**20  # a channel between two GPUs of a node (NVIDIA/nccl issue 1685)
_CHANNELS = 32  # between two GPUs with NVLink, unless `max_ctas` is less; NCCL takes a power of two


@dataclass(frozen=True)
class CommunicatorMemory:
    """One communicator, and an estimate of its memory. It has not been measured on a card.

    Attributes:
        kind: of work: "gather", "refresh", "reduce", "world" for small sums over all ranks; or several of them.
        ranks: number of its members.
        link: "local" inside a node, "cross" between nodes.
        collectives: names of the collectives that it runs; each takes its memory at its first use, while wrapping.
        nbytes: estimated, outside of torch's allocator.
    """

    kind: str
    ranks: int
    link: str
    collectives: tuple[str, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.ranks} ranks {self.link} ({', '.join(self.collectives)})"


def estimate_nbytes(ranks: int, link: str, collectives: Collection[str], max_ctas: int | None) -> int:
    """Bytes that a communicator takes on a card once each of its collectives has run.

    Between nodes sends and receives share buffers, and nothing is counted for them.
    """
    total = COMMUNICATOR_NBYTES
    if link == "local" and "all_to_all" in collectives:
        channels = min(_CHANNELS, _CHANNELS if max_ctas is None else 1 << (max_ctas - 1).bit_length())
        total += (ranks - 1) * channels * _CONNECTION_NBYTES
    return total


# Tiers whose tensors take no memory.


def plan_homes(blueprint: Blueprint) -> Tiers:
    """Tiers as :func:`zeropp.offload.tier_choice.open_tiers` would open them, without staging buffers."""
    options, device = blueprint.tiers, blueprint.device
    # Rows say where they would be by their place; their tensors are all on the meta device.
    memory = PlannedMemory(device)
    # A CPU that trains has its memory in common with the host.
    host: StorageTier = memory if device.type == "cpu" else PlannedMemory(torch.device("cpu"), "host")
    main, kept = choose_tiers(
        options, memory, host, lambda path: Files(partial(_in_file, path), options.io.block_size, host)
    )
    return Tiers(main, main, main, kept, device_numel=ALL if options.stepped is None else 0)


def _in_file(path: str, numel: int, dtype: torch.dtype) -> StoredTensor:
    return PlannedExtent(torch.empty(numel, dtype=dtype, device=_META), "disk", path)


class PlannedMemory(Memory):
    """Memory of which nothing is taken."""

    def allocate_tensor(self, numel: int, dtype: torch.dtype) -> StoredTensor:
        """See :class:`zeropp.offload.storage_tiers.StorageTier`."""
        # Sizes are all that is asked of it.
        return MemoryTensor(torch.empty(numel, dtype=dtype, device=_META), self.place)


@dataclass(frozen=True)
class PlannedExtent(MemoryTensor):
    """A row of a file that is not there.

    Attributes:
        path: the ``nvme_path`` that the file would be below.
    """

    path: str = ""
    in_memory = False
    at_hand = False

    @property
    def nbytes(self) -> int:
        """See :class:`zeropp.offload.storage_tiers.StoredTensor`."""
        return -(-self.tensor.nbytes // ALIGNED) * ALIGNED
