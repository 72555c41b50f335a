"""What the engine would make of a model and a configuration: units, placements and layouts, and no memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zeropp.comm.communicators import WORLD, Sharing, kind_of
from zeropp.comm.hops import Groups, Hop
from zeropp.comm.ledger import Ledger
from zeropp.config import Config, ConfigSource, load_config, require_stage_for_offload
from zeropp.params.build import BufferKey, buffer_layouts, check_dtypes, planned_transfers
from zeropp.params.dtypes import computed_with
from zeropp.partition.layout import BufferLayout
from zeropp.partition.levels import HopSpec, Placement, choose_mode, ranks_per_node
from zeropp.partition.units import form_units, unit_options
from zeropp.plan.communicators import CommunicatorMemory, choose_sharing, estimate_nbytes, planned_ctas
from zeropp.wire.encoding import Encoding, choose_encoding, require_base

__all__ = ["Outline", "OutlineUnit", "outline"]


@dataclass(frozen=True)
class OutlineUnit:
    """One unit: where it is cached and summed, and its flat buffers."""

    name: str
    placement: Placement
    buffers: tuple[tuple[BufferKey, BufferLayout], ...]


@dataclass(frozen=True)
class Outline:
    """The whole model; ``local`` ranks to a node."""

    settings: Config
    encoding: Encoding
    local: int
    units: tuple[OutlineUnit, ...]

    def no_groups(self, world: int) -> Groups:
        """What makes hops for paths on which nothing will be sent."""
        return _Groups(world)

    def communicators(self, world: int, device: torch.device) -> tuple[CommunicatorMemory, ...]:
        """The communicators that rank 0 will have; other ranks have as many. On CPU gloo's groups are not shared."""
        groups, sharing = _Groups(world), Sharing() if device.type == "cpu" else choose_sharing(self.settings, device)
        every, widest = tuple(range(world)), "local" if self.local >= world else "cross"
        # (kind, ranks, link) -> (kinds of work, collectives)
        found: dict[tuple[str, tuple[int, ...], str], tuple[set[str], set[str]]] = {}

        def add(kind: str, ranks: tuple[int, ...], link: str, *names: str) -> None:
            kinds, collectives = found.setdefault((kind_of(kind, sharing), ranks, link), (set(), set()))
            kinds.add(kind)
            collectives.update(names)

        if world > 1:
            add(WORLD, every, widest, "all_reduce", "broadcast")
        for unit in self.units:
            for key, layout in unit.buffers:
                for each in planned_transfers(groups, unit.placement, key, layout, self.encoding):
                    add(each.hop.kind, each.hop.spec.ranks, each.hop.spec.link, each.collective)
        for kind in groups.of_all:
            add(WORLD if sharing.kinds else f"{kind} all", every, widest, "all_reduce")
        ctas = planned_ctas(self.settings)
        return tuple(
            CommunicatorMemory(
                " and ".join(sorted(kinds)), len(ranks), link, tuple(sorted(collectives)),
                estimate_nbytes(len(ranks), link, collectives, ctas.of(link)),
            )
            for (_, ranks, link), (kinds, collectives) in found.items()
        )  # fmt: skip


class _Groups:
    """Makes hops that send nothing, as :class:`zeropp.comm.hops.Comm` would make them over NCCL."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.of_all: list[str] = []  # kinds of work that were asked about among all ranks
        self._ledger = Ledger()

    def hop(self, kind: str, spec: HopSpec) -> Hop:
        return Hop(spec, None, "nccl", 0, self._ledger, kind)

    def all_ranks(self, kind: str) -> object:
        self.of_all = [kind]
        return None


def outline(model: nn.Module, config: ConfigSource, world: int, local: int | None) -> Outline:
    """Cut a model that is not wrapped, as ZeroOptimizer would; meta parameters will do.

    Raises:
        ValueError: ``world`` is not positive, or ZeroOptimizer would refuse the groups, the weights' codec or the
            offload that the configuration asks for.
    """
    if world < 1:
        raise ValueError(f"world is {world}; expected the number of ranks, at least 1")
    settings = load_config(config)
    require_stage_for_offload(settings)
    parameters = computed_with(model, settings)
    # Without a number one node, whatever LOCAL_WORLD_SIZE says: the plan is for a machine that need not be this one.
    local = ranks_per_node(range(world), local or world)
    mode = choose_mode(settings, world, local)
    require_base(settings, mode)
    check_dtypes(model, settings)
    units = []
    for spec in form_units(model, world, unit_options(settings)):
        buffers = buffer_layouts(parameters, spec, settings, world)
        # That of rank 0; sizes are the same on all ranks.
        placement = Placement(mode.of(spec.persistent), 0, local)
        units.append(OutlineUnit(spec.name, placement, tuple((key, layout) for key, _, layout in buffers)))
    return Outline(settings, choose_encoding(settings), local, tuple(units))
