"""Levels, hops, nodes and layouts: the ranks that share each tensor, and the elements that each rank owns.

A *level* is the number of ranks that share one copy of a tensor. A `Mode` gives the level of each part of a unit. A
`Placement` gives the hops between levels, as one rank sees them. This module computes with integers only. It uses no
process group and no tensor's values.

The levels of a run form a divisor chain 1 | v1 | v2 | ... | W. A rank is a mixed-radix number over this chain; the
digit of the first (node-local) factor varies fastest. The rank owns the piece whose number has the same digits in
reverse order. With 2 nodes of 2 ranks::

    flat buffer   | slice 0          | slice 1          |
                  | piece 0 | piece 1 | piece 2 | piece 3 |
    owner         | rank 0  | rank 2  | rank 1  | rank 3  |

So a gather between nodes fills one contiguous slice, and a gather inside the node fills the whole buffer. No hop needs
a copy to reorder elements.

A layout places the parameters of a unit in one flat buffer. Each parameter starts on a block of 256 elements, so no
codec group contains elements of two parameters. The end of the buffer is padded until each rank's piece is a whole
number of blocks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from torch import Tensor

__all__ = [
    "BLOCK",
    "BufferLayout",
    "Chain",
    "Fragment",
    "HopSpec",
    "Mode",
    "Placement",
    "Slot",
    "build_chain",
    "build_layout",
    "dense_strides",
    "ranks_per_node",
]


# Modes: the level of each part of a unit.


@dataclass(frozen=True)
class Mode:
    """The number of ranks that share each part of a unit.

    Attributes:
        chain: levels of the run.
        states: level of main weights and optimizer states; if smaller than the world size, each shard has replicas.
        cached: level at which gathered weights are cached between uses; 1 caches them whole, None caches nothing.
        gradients: level at which gradients of a window's backwards are summed before the last one sends them further.
        single_hop: True to gather a shard group's pieces in one hop even if the group spans nodes (MiCS).
    """

    chain: Chain
    states: int
    cached: int | None
    gradients: int
    single_hop: bool = False

    @property
    def sums(self) -> bool:
        """True if gradients of several backwards are summed at a smaller level before they are sent to all ranks."""
        return self.gradients < self.chain.world

    @property
    def stays_whole(self) -> bool:
        """True if gathered weights stay whole between uses, as in stages 0 to 2."""
        return self.cached == 1

    @property
    def held_level(self) -> int:
        """The level at which gradients wait for a later backward; 1 (whole) if only ``no_sync`` makes them wait."""
        # If ``gradients`` is the world size, each backward outside ``no_sync`` reduces its gradients completely. Inside
        # ``no_sync`` no collective runs, so gradients are held whole.
        return self.gradients if self.sums else 1

    def for_unit(self, persistent: bool) -> Mode:
        """Return the mode of one unit; persistent units cache whole weights."""
        return replace(self, cached=1) if persistent else self


# Chains: the levels of a run.


@dataclass(frozen=True)
class Chain:
    """The levels of one run: ascending from 1 to the world size, each dividing the next."""

    levels: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.levels or self.levels[0] != 1:
            raise ValueError(f"levels {self.levels} must start at 1")
        for smaller, larger in zip(self.levels, self.levels[1:], strict=False):
            if larger <= smaller or larger % smaller:
                raise ValueError(f"levels {self.levels} are no divisor chain: {smaller} does not divide {larger}")

    @property
    def world(self) -> int:
        """Number of ranks, which is the last level."""
        return self.levels[-1]

    def _between(self, inner: int, outer: int) -> list[tuple[int, int]]:
        """Return a (weight, factor) pair for each digit of a rank between two levels, fastest digit first."""
        for level in (inner, outer):
            if level not in self.levels:
                raise ValueError(f"{level} is not a level of {self.levels}")
        low = self.levels.index(inner)
        high = self.levels.index(outer)
        return [(self.levels[i], self.levels[i + 1] // self.levels[i]) for i in range(low, high)]

    def slice_index(self, rank: int, level: int) -> int:
        """Return the index of this rank's slice when a flat buffer is divided into ``level`` equal slices."""
        # Horner's rule in reversed digit order: the node-local digit is the most significant. So the place in the node
        # selects the slice at the node's level, and the node selects the piece inside that slice.
        index = 0
        for weight, factor in self._between(1, level):
            index = index * factor + (rank // weight) % factor
        return index

    def owner(self, piece: int) -> int:
        """Return the rank that owns a piece at the last level: the inverse of ``slice_index(rank, world)``."""
        rank = 0
        # The fastest digit of the piece is the slowest digit of the rank.
        for weight, factor in reversed(self._between(1, self.world)):
            rank += (piece % factor) * weight
            piece //= factor
        return rank

    def hop_ranks(self, rank: int, outer: int, inner: int) -> tuple[int, ...]:
        """Return the ranks that exchange data in a hop between two levels, in piece order.

        Position i of the result is the rank that has part i of the slice that all of these ranks share at level
        ``inner``.

        Args:
            rank: member whose group is computed.
            outer: level with the smaller slices.
            inner: level with the larger slices.
        """
        digits = self._between(inner, outer)
        # The members differ from this rank only in the digits between the two levels.
        base = rank - sum(((rank // weight) % factor) * weight for weight, factor in digits)
        members = [base]
        # The slowest digit of the rank is the fastest digit of the piece, hence the innermost loop. With several digits
        # the result is not ascending. A process group must keep this order, which dist.new_group would sort.
        for weight, factor in digits:
            members = [member + digit * weight for member in members for digit in range(factor)]
        return tuple(members)

    def hops(self, outer: int, inner: int) -> list[tuple[int, int]]:
        """Return the adjacent (outer, inner) level pairs on the way from ``outer`` down to ``inner``."""
        low = self.levels.index(inner)
        high = self.levels.index(outer)
        return [(self.levels[i + 1], self.levels[i]) for i in range(high - 1, low - 1, -1)]


def build_chain(world: int, sizes: Sequence[int]) -> Chain:
    """Return the chain 1 | sizes... | world.

    Args:
        world: number of ranks.
        sizes: group sizes that must be levels, such as the ranks per node, in any order.

    Raises:
        ValueError: A size does not divide the next one; the message lists the sizes that would.
    """
    # A set merges equal levels, such as a node that is the whole world. A hop between equal levels would have one
    # member.
    wanted = sorted({1, world, *sizes})
    for smaller, larger in itertools.pairwise(wanted):
        if larger > world or smaller < 1 or larger % smaller:
            legal = [d for d in range(1, world + 1) if world % d == 0]
            if larger > world:
                why = f"{larger} is more than there are"
            else:
                why = f"{smaller} does not divide {larger}"
            raise ValueError(
                f"group sizes {sorted(set(sizes))} do not chain up to {world} ranks: {why}; each size must divide the "
                f"next. Sizes that divide {world}: {legal}"
            )
    return Chain(tuple(wanted))


# Placements: the hops between levels, as one rank sees them.


@dataclass(frozen=True)
class HopSpec:
    """One hop between two levels, as one rank sees it."""

    outer: int  # level with the smaller slices
    inner: int  # level with the larger slices
    ranks: tuple[int, ...]  # group ranks that take part, in piece order
    link: str  # "local" inside a node, "cross" between nodes


@dataclass(frozen=True)
class Placement:
    """A mode together with a rank: the slices and hops of this rank.

    Attributes:
        mode: levels of the parts of a unit.
        rank: this rank in the process group.
        local: ranks per node.
    """

    mode: Mode
    rank: int
    local: int

    @property
    def chain(self) -> Chain:
        """The levels of the run."""
        return self.mode.chain

    @cached_property
    def replica(self) -> int:
        """The index of the replica of the main weights that this rank belongs to."""
        # The low digits of a rank are its position in the shard group, so each replica is a run of consecutive ranks.
        return self.rank // self.mode.states

    def slice_of(self, numel: int, level: int, within: int = 1) -> tuple[int, int]:
        """Return the range [start, stop) of this rank's slice at one level.

        Args:
            numel: elements of the whole buffer.
            level: level of the slice.
            within: smaller level; the range is counted from the start of this rank's slice at this level.
        """
        start = self.chain.slice_index(self.rank, level) * (numel // level)
        # Slices are nested: this rank's slice at ``level`` lies inside its slice at the smaller level ``within``.
        base = self.chain.slice_index(self.rank, within) * (numel // within)
        return start - base, start - base + numel // level

    def gather_path(self, outer: int, inner: int) -> tuple[HopSpec, ...]:
        """Return the hops that gather slices at ``outer`` into slices at ``inner``, slowest link first."""
        # MiCS gathers a shard group in one hop by default, as DeepSpeed does. The gather of gradient sums to replicas
        # begins at a level above ``states`` and always goes hop by hop, like the reduction before it.
        if self.mode.single_hop and inner < outer <= self.mode.states:
            return (self._hop(outer, inner),)
        # Gather between nodes first. Then no two ranks of a node receive the same bytes over the slow link.
        return tuple(self._hop(high, low) for high, low in self.chain.hops(outer, inner))

    def reduce_path(self, inner: int, outer: int) -> tuple[HopSpec, ...]:
        """Return the hops that sum slices at ``inner`` into slices at ``outer``, fastest link first."""
        # Reduce inside the node first. Then only sums cross nodes, and each rank of a node sends a different part.
        return tuple(self._hop(high, low) for high, low in reversed(self.chain.hops(outer, inner)))

    def _hop(self, outer: int, inner: int) -> HopSpec:
        return _hop(self.chain, self.rank, self.local, outer, inner)


@lru_cache(maxsize=256)  # units share few hops, and each spec lists all ranks of a group
def _hop(chain: Chain, rank: int, local: int, outer: int, inner: int) -> HopSpec:
    ranks = chain.hop_ranks(rank, outer, inner)
    # The group's ranks are ordered node after node; ``ranks_per_node`` refuses any other order.
    one_node = len({rank // local for rank in ranks}) == 1
    return HopSpec(outer, inner, ranks, "local" if one_node else "cross")


# Nodes.

_REMEDY = (
    'Start with torchrun, which sets it, or give {"zeropp": {"local_world_size": N}} in the config, N ranks per node'
)


def ranks_per_node(ranks: Sequence[int], local_world_size: int | None, hosts: Sequence[str] | None = None) -> int:
    """Return the number of ranks of a group that share one node.

    If the number of ranks per node is given, a node is a run of that many consecutive global ranks, as torchrun numbers
    them; one host may contain several nodes. Otherwise each host is a node.

    Args:
        ranks: global ranks of the group, in group order.
        local_world_size: ranks per node; None reads LOCAL_WORLD_SIZE.
        hosts: host name of each of ``ranks``; None if unknown.

    Raises:
        ValueError: The number of ranks per node is unknown or invalid, a node spans two hosts, ranks were placed on
            hosts cyclically, or the group does not take the same number of ranks from each node, node after node.
    """
    # A group of one rank has no links, so it needs no launcher variable.
    if len(ranks) == 1:
        return 1
    claimed = local_world_size if local_world_size is not None else _claimed_by_launcher()
    nodes: Sequence[object]
    if claimed is not None:
        # Use global ranks even if the group is a part of the world, because nodes are a property of the job.
        nodes = [rank // claimed for rank in ranks]
        source = f"{claimed} ranks per node"
        _refuse_nodes_across_hosts(ranks, hosts or [], claimed)
    elif hosts is not None:
        nodes = list(hosts)
        source = "named after their hosts, since LOCAL_WORLD_SIZE is not set"
    else:
        raise ValueError(f"the number of ranks per node is unknown: LOCAL_WORLD_SIZE is not set. {_REMEDY}")
    per_node = nodes.count(nodes[0])
    # Levels are factors of the group rank, so each node must be a run of consecutive group ranks, and all runs must
    # have one length. The last condition detects a node that occurs in two runs.
    runs = [nodes[start : start + per_node] for start in range(0, len(nodes), per_node)]
    even = len(nodes) % per_node == 0 and all(len(set(run)) == 1 for run in runs)
    if not even or len({run[0] for run in runs}) != len(runs):
        _refuse_round_robin(ranks, hosts or [])
        raise ValueError(
            f"ranks {list(ranks)} lie on nodes {nodes} ({source}): every node must give the "
            "same number of ranks, one node after the other. Choose a group that does, or correct "
            'LOCAL_WORLD_SIZE or {"zeropp": {"local_world_size": N}}'
        )
    return per_node


def _claimed_by_launcher() -> int | None:
    """Return LOCAL_WORLD_SIZE, or None if no launcher has set it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not text:
        return None
    # Do not fall back to host names: somebody meant to give a number.
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"the number of ranks per node is unknown: LOCAL_WORLD_SIZE is {text!r}. {_REMEDY}")
    return int(text)


def _refuse_round_robin(ranks: Sequence[int], hosts: Sequence[str]) -> None:
    """Refuse cyclic placement of ranks on hosts, because no number of ranks per node describes it.

    Raises:
        ValueError: Consecutive ranks are on different hosts, in turn.
    """
    dealt = list(dict.fromkeys(hosts))
    if 1 < len(dealt) < len(hosts) and all(host == dealt[i % len(dealt)] for i, host in enumerate(hosts)):
        raise ValueError(
            f"ranks {list(ranks)} go round the hosts {dealt}, one on each in turn (cyclic placement), so that "
            "neighbours in rank share no fast link. Start them host by host: srun --distribution=block, mpirun "
            "--map-by slot, or torchrun, which does so"
        )


def _refuse_nodes_across_hosts(ranks: Sequence[int], hosts: Sequence[str], claimed: int) -> None:
    """Refuse nodes that span hosts: their links would be treated as fast intra-node links.

    Raises:
        ValueError: Two ranks of one node are on different hosts, or ranks were placed on hosts cyclically.
    """
    _refuse_round_robin(ranks, hosts)
    first: dict[int, tuple[int, str]] = {}
    # If the host names are unknown, ``hosts`` is empty and nothing is checked.
    for rank, host in zip(ranks, hosts, strict=False):
        other, its_host = first.setdefault(rank // claimed, (rank, host))
        if its_host != host:
            raise ValueError(
                f"{claimed} ranks per node would make one node of rank {other} on host {its_host!r} and rank {rank} on "
                f"host {host!r}. Correct LOCAL_WORLD_SIZE or the config's zeropp.local_world_size, or leave both out: "
                "then each host is a node"
            )


# Equal to zeropp_kernels.wire.BLOCK. Defined again, because this package must not import the kernels.
BLOCK = 256
"""Elements per block; a multiple of the group size of every codec."""


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in its flat buffer."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # elements from the start of the buffer

    @property
    def numel(self) -> int:
        """Number of elements of the parameter, without padding."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter that lies in one slice; positions count elements in memory order."""

    slot: int  # index of the parameter in the layout
    start: int  # first element within the parameter
    stop: int  # element behind the last one, within the parameter
    offset: int  # first element within the slice


@dataclass(frozen=True)
class BufferLayout:
    """The layout of a flat buffer that can be divided into ``world`` equal pieces."""

    slots: tuple[Slot, ...]
    numel: int  # elements of the buffer, padding included
    world: int

    @property
    def piece_numel(self) -> int:
        """Number of elements of each piece."""
        return self.numel // self.world

    @cached_property
    def used_numel(self) -> int:
        """Number of elements of all parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges [start, stop) of padding."""
        # Slots are ascending and disjoint, so each gap lies between the end of one slot and the start of the next.
        ends = [slot.offset + slot.numel for slot in self.slots]
        starts = [slot.offset for slot in self.slots[1:]] + [self.numel]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if start > end)

    def views(self, whole: Tensor) -> list[Tensor]:
        """Return one view for each parameter into a buffer of [numel] elements."""
        # as_strided counts from the start of the storage, so ``whole`` must begin where its storage begins.
        return [whole.as_strided(slot.shape, slot.strides, slot.offset) for slot in self.slots]

    def gap_views(self, whole: Tensor) -> list[Tensor]:
        """Return one view for each gap between parameters in a buffer of [numel] elements."""
        return [whole[start:stop] for start, stop in self.gaps]

    def slice_range(self, index: int, level: int) -> tuple[int, int]:
        """Return the range [start, stop) of slice ``index`` when the buffer is divided into ``level`` slices."""
        size = self.numel // level
        return index * size, (index + 1) * size

    def fragments(self, index: int, level: int) -> list[Fragment]:
        """Return the parts of parameters that lie in slice ``index`` of ``level`` slices, in order."""
        start, stop = self.slice_range(index, level)
        found = []
        for index, slot in enumerate(self.slots):
            # A slice may begin and end inside a parameter. No fragment covers padding or empty parameters.
            low = max(start, slot.offset)
            high = min(stop, slot.offset + slot.numel)
            if low < high:
                found.append(Fragment(index, low - slot.offset, high - slot.offset, low - start))
        return found


def build_layout(parameters: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]], world: int) -> BufferLayout:
    """Return a layout with the parameters one after the other.

    Args:
        parameters: name, shape and dense strides of each parameter.
        world: number of pieces.

    Raises:
        ValueError: There are no parameters.
    """
    if not parameters:
        raise ValueError("a flat buffer needs at least one parameter")
    slots = []
    offset = 0
    for name, shape, strides in parameters:
        slots.append(Slot(name, tuple(shape), tuple(strides), offset))
        # Offsets do not depend on ``world``. So the same elements share a block, and get the same codes, on any number
        # of ranks.
        offset += -(-slots[-1].numel // BLOCK) * BLOCK
    # No block may be divided between ranks at any level. Every level divides ``world``, so it is enough that each of
    # the ``world`` pieces is a whole number of blocks. A buffer of empty parameters still has one block per rank.
    grain = BLOCK * world
    return BufferLayout(tuple(slots), max(-(-offset // grain), 1) * grain, world)


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that a parameter has in a flat buffer.

    A tensor is dense if its elements fill numel places without overlap in some order of dimensions, as channels_last
    tensors do. Dense tensors keep their strides. All other tensors get contiguous strides.
    """
    # In order from the fastest dimension, each stride of a dense tensor is the product of the sizes before it.
    # Dimensions of size 1 may have any stride.
    expected = 1
    for size, stride in sorted(
        ((n, s) for n, s in zip(shape, strides, strict=True) if n != 1), key=lambda pair: pair[1]
    ):
        if stride != expected:
            break
        expected *= size
    else:
        # Keep the memory format: a channels_last weight in another format would run other kernels, or be converted at
        # each use.
        return tuple(strides)
    # This is an expanded or sliced tensor. Its values are copied into the buffer, so its strides need not be kept.
    contiguous = []
    step = 1
    for size in reversed(shape):
        contiguous.append(step)
        step *= max(size, 1)
    return tuple(reversed(contiguous))
