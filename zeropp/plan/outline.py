"""What the engine would make of a model and a configuration: units, placements and layouts, and no memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from zeropp.comm.hops import GroupKey, Groups, Hop
from zeropp.comm.ledger import Ledger
from zeropp.config import Config, ConfigSource, load_config, require_stage_for_offload
from zeropp.params.build import BufferKey, ask_for_hops, buffer_layouts, check_dtypes
from zeropp.params.dtypes import computed_with
from zeropp.partition.layout import BufferLayout
from zeropp.partition.levels import HopSpec, Placement, choose_mode
from zeropp.partition.topology import ranks_per_node
from zeropp.partition.units import form_units, unit_options
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

    def groups(self, world: int) -> set[GroupKey]:
        """The process groups that rank 0's hops will have; other ranks have as many."""
        found = _Groups(world)
        for unit in self.units:
            for key, layout in unit.buffers:
                ask_for_hops(found, unit.placement, key, layout, self.encoding)
        return found.keys


class _Groups:
    """Notes what hops ask for, as :class:`zeropp.comm.hops.Comm` would make it."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.keys: set[GroupKey] = set()
        self._ledger = Ledger()

    def hop(self, kind: str, spec: HopSpec) -> Hop:
        self.keys.add((kind, spec.outer, spec.inner))
        return Hop(spec, None, "none", 0, self._ledger, kind)

    def all_ranks(self, kind: str) -> object:
        self.keys.add((kind, self.world, 0))
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
