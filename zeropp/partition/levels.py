"""From a mode to levels, from levels to paths: over how many ranks each thing is spread, and how it travels.

Stages, hpZ and MiCS end here: whatever takes a mode (layouts, paths, units, the engine) knows levels only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from zeropp.config import Config, ConfigError
from zeropp.partition.topology import Chain, build_chain

__all__ = ["HopSpec", "Mode", "Placement", "choose_mode"]


@dataclass(frozen=True)
class HopSpec:
    """One hop between two levels, as this rank sees it."""

    outer: int  # level with the smaller slices
    inner: int
    ranks: tuple[int, ...]  # group ranks that take part, in piece order
    link: str  # "local" inside a node, "cross" between nodes


@dataclass(frozen=True)
class Mode:
    """Over how many ranks each part of a unit is spread.

    Attributes:
        chain: levels of the run.
        states: level of main weights and optimizer states; several replicas if it is not the last one.
        cached: level at which gathered weights are cached between uses: 1 is whole, None that nothing is cached.
        gradients: level at which gradients of several backwards are summed, before the last one's go on from there.
        single_hop: gather a shard group's pieces in one hop, though it spans nodes.
    """

    chain: Chain
    states: int
    cached: int | None
    gradients: int
    single_hop: bool = False

    @property
    def sums(self) -> bool:
        """Whether gradients of several backwards are summed before they go all the way."""
        return self.gradients < self.chain.world

    @property
    def held_level(self) -> int:
        """Level at which gradients wait for a later backward; whole, where only ``no_sync`` makes them wait."""
        # If gradients are to be spread over all ranks, every backward sends its own all the way. Inside ``no_sync``
        # nothing is sent at all, so there they wait whole.
        return self.gradients if self.sums else 1

    def of(self, persistent: bool) -> Mode:
        """The mode of a unit; weights of persistent ones stay whole."""
        return replace(self, cached=1) if persistent else self


def choose_mode(config: Config, world: int, local: int) -> Mode:
    """Levels for a configuration.

    Args:
        config: stage, group sizes and deferral are read.
        world: number of ranks.
        local: ranks per node.

    Raises:
        ConfigError: group sizes do not divide each other; with the key and the sizes that would do.
    """
    zero = config.zero
    states = group = world
    if zero.stage == 3 and zero.mics_shard_size > 0:
        states = group = _fitting("mics_shard_size", zero.mics_shard_size, world, [local])
    size = zero.zero_hpz_partition_size
    # A multiple of the shard group makes no second copy: the first is spread over as few ranks already, or fewer.
    if zero.stage == 3 and size > 1 and (size < states or size % states):
        group = _fitting("zero_hpz_partition_size", size, states, [local, states])
    # The node is a level even where nothing is spread over it, so that hop by hop fast links and slow ones stay apart.
    chain = build_chain(world, [local, states, group])
    if zero.stage == 3:
        cached, gradients = group if group < states else None, states
    else:
        # Below stage 3 weights stay whole between uses. Stages 0 and 1 hold whole gradients between micro-batches;
        # stage 2 sends each backward's all the way.
        states, cached, gradients = world if zero.stage > 0 else 1, 1, world if zero.stage == 2 else 1
    if config.zeropp.defer_cross_reduction:
        # Deferral trades memory for traffic between nodes. Stages 0 and 1, which hold more already, stay as they are.
        gradients = min(gradients, local)
    in_groups = zero.stage == 3 and states < world
    return Mode(chain, states, cached, gradients, single_hop=in_groups and not zero.mics_hierarchical_params_gather)


def _fitting(key: str, size: int, most: int, others: list[int]) -> int:
    """``size``, if it and the others divide each other."""
    # Dividing ``most`` is not enough for a chain: of two sizes, neither may cut through a group of the other.
    legal = [n for n in range(1, most + 1) if most % n == 0 and all(n % m == 0 or m % n == 0 for m in others)]
    if size not in legal:
        raise ConfigError(
            f"{key} is {size}; with {others[0]} ranks to a node it must be one of {legal}, since the sizes of groups "
            f"divide each other up to {most} ranks"
        )
    return size


@dataclass(frozen=True)
class Placement:
    """A mode, as one rank sees it: the hops between its levels.

    Attributes:
        mode: levels of the parts.
        rank: this rank in the process group.
        local: ranks per node.
    """

    mode: Mode
    rank: int
    local: int

    @property
    def chain(self) -> Chain:
        """Levels of the run."""
        return self.mode.chain

    @property
    def replica(self) -> int:
        """Which of the replicas of the whole this rank belongs to."""
        # The low digits of a rank say where in its shard group it stands, so a replica is a run of consecutive ranks.
        return self.rank // self.mode.states

    def slice_of(self, numel: int, level: int, within: int = 1) -> tuple[int, int]:
        """Range [start, stop) of this rank's slice at ``level``, counted from the start of its slice at ``within``."""
        start = self.chain.slice_index(self.rank, level) * (numel // level)
        # Slices nest: this rank's at ``level`` lies inside its own at the smaller level ``within``.
        base = self.chain.slice_index(self.rank, within) * (numel // within)
        return start - base, start - base + numel // level

    def gather_path(self, outer: int, inner: int) -> tuple[HopSpec, ...]:
        """Hops that bring slices at ``outer`` together to slices at ``inner``; slowest link first."""
        # As in DeepSpeed, MiCS gathers a shard group at once unless told otherwise. The way of sums back to replicas
        # begins beyond ``states``, and goes hop by hop like the reduction before it.
        if self.mode.single_hop and inner < outer <= self.mode.states:
            return (self._hop(outer, inner),)
        # Between nodes first: no two ranks of a node then fetch the same bytes over the slow link.
        return tuple(self._hop(high, low) for high, low in self.chain.hops(outer, inner))

    def reduce_path(self, inner: int, outer: int) -> tuple[HopSpec, ...]:
        """Hops that sum slices at ``inner`` into slices at ``outer``; fastest link first."""
        # Inside the node first: what crosses nodes has been summed, and each rank of a node sends another part of it.
        return tuple(self._hop(high, low) for high, low in reversed(self.chain.hops(outer, inner)))

    def _hop(self, outer: int, inner: int) -> HopSpec:
        return _hop(self.chain, self.rank, self.local, outer, inner)


@lru_cache(maxsize=256)  # every unit asks for the same few, and each names as many ranks as a group has
def _hop(chain: Chain, rank: int, local: int, outer: int, inner: int) -> HopSpec:
    ranks = chain.hop_ranks(rank, outer, inner)
    # Group ranks lie node after node; ``ranks_per_node`` refuses others.
    one_node = len({rank // local for rank in ranks}) == 1
    return HopSpec(outer, inner, ranks, "local" if one_node else "cross")
