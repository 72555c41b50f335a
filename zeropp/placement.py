"""From a mode to levels, from levels to paths: over how many ranks each thing is spread, and how it travels.

Only stage 3 is offered in this version, but nothing below this file knows a stage: a mode is three levels.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeropp.topology import Chain

__all__ = ["HopSpec", "Placement", "stage3_placement"]


@dataclass(frozen=True)
class HopSpec:
    """One hop between two levels, as this rank sees it."""

    outer: int  # level with the smaller slices
    inner: int
    ranks: tuple[int, ...]  # group ranks that take part, in piece order
    link: str  # "local" inside a node, "cross" between nodes


@dataclass(frozen=True)
class Placement:
    """Levels of the parts of a unit, and the hops between them.

    Attributes:
        chain: levels of the run.
        rank: this rank in the process group.
        local: ranks per node.
        states: level of main weights and optimizer states.
        weights: level of the weights between uses; 1 for persistent parameters.
        gradients: level at which gradients are accumulated between backward passes.
    """

    chain: Chain
    rank: int
    local: int
    states: int
    weights: int
    gradients: int

    def gather_path(self, outer: int, inner: int) -> tuple[HopSpec, ...]:
        """Hops that bring slices at ``outer`` together to slices at ``inner``; slowest link first."""
        return tuple(self._hop(high, low) for high, low in self.chain.hops(outer, inner))

    def reduce_path(self, inner: int, outer: int) -> tuple[HopSpec, ...]:
        """Hops that sum slices at ``inner`` into slices at ``outer``; fastest link first."""
        return tuple(reversed(self.gather_path(outer, inner)))

    def _hop(self, outer: int, inner: int) -> HopSpec:
        ranks = self.chain.hop_ranks(self.rank, outer, inner)
        one_node = len({rank // self.local for rank in ranks}) == 1
        return HopSpec(outer, inner, ranks, "local" if one_node else "cross")


def stage3_placement(chain: Chain, rank: int, local: int, *, persistent: bool) -> Placement:
    """Everything over all ranks; persistent weights stay whole between uses."""
    world = chain.world
    return Placement(chain, rank, local, states=world, weights=1 if persistent else world, gradients=world)
