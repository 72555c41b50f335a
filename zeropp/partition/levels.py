"""Levels and layouts: the number of ranks that share each tensor, hops between levels, and the ranges that ranks own.

A `Mode` says at which level each part of a unit is, and `Placement` has the hops between levels as one rank sees them.
Integers only, no process and no tensor.

A *level* is the number of ranks one copy of a thing is spread over. The levels of a run form a divisor chain
1 | v1 | v2 | ... | W. A rank is a mixed-radix number over that chain, the digit of the first (node-local) factor
fastest; the piece it owns is the number read with its digits reversed. With 2 nodes of 2 ranks::

    flat buffer   | slice 0          | slice 1          |
                  | piece 0 | piece 1 | piece 2 | piece 3 |
    owner         | rank 0  | rank 2  | rank 1  | rank 3  |

so a gather between nodes yields one contiguous slice, and a gather inside the node the whole buffer: no hop needs
a copy to put things in order.

A layout puts the parameters of a unit into one flat buffer. Each parameter starts on a block of 256 elements, so that
no codec's group ever holds two parameters; the end of the buffer is padded until every rank's piece is a whole number
of blocks.
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


# The levels of the parts of a unit.


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
        """Tell whether gradients of several backwards are summed before they go all the way."""
        return self.gradients < self.chain.world

    @property
    def stays_whole(self) -> bool:
        """Tell whether gathered weights stay whole between uses, as in stages 0 to 2."""
        return self.cached == 1

    @property
    def held_level(self) -> int:
        """Level at which gradients wait for a later backward; whole, where only ``no_sync`` makes them wait."""
        # If gradients are to be spread over all ranks, every backward sends its own all the way. Inside ``no_sync``
        # nothing is sent at all, so there they wait whole.
        return self.gradients if self.sums else 1

    def for_unit(self, persistent: bool) -> Mode:
        """The mode of a unit; weights of persistent ones stay whole."""
        return replace(self, cached=1) if persistent else self


# The chain of levels.


@dataclass(frozen=True)
class Chain:
    """The levels of one run, ascending from 1 to the world size, each dividing the next."""

    levels: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.levels or self.levels[0] != 1:
            raise ValueError(f"levels {self.levels} must start at 1")
        for smaller, larger in zip(self.levels, self.levels[1:], strict=False):
            if larger <= smaller or larger % smaller:
                raise ValueError(f"levels {self.levels} are no divisor chain: {smaller} does not divide {larger}")

    @property
    def world(self) -> int:
        """Number of ranks: the last level."""
        return self.levels[-1]

    def _between(self, inner: int, outer: int) -> list[tuple[int, int]]:
        """(weight, factor) of each digit between two levels, fastest digit first."""
        for level in (inner, outer):
            if level not in self.levels:
                raise ValueError(f"{level} is not a level of {self.levels}")
        low = self.levels.index(inner)
        high = self.levels.index(outer)
        return [(self.levels[i], self.levels[i + 1] // self.levels[i]) for i in range(low, high)]

    def slice_index(self, rank: int, level: int) -> int:
        """The number of the slice that this rank holds when a flat buffer is spread over ``level``, in equal slices."""
        # Horner's rule with the node-local digit first, and so the most significant: the place in the node decides on
        # the slice at the node's level, and the node on the piece inside it.
        index = 0
        for weight, factor in self._between(1, level):
            index = index * factor + (rank // weight) % factor
        return index

    def owner(self, piece: int) -> int:
        """The rank that owns a piece at the last level: the inverse of ``slice_index(rank, world)``."""
        rank = 0
        # Taken off from the piece's fastest digit, which is the rank's slowest.
        for weight, factor in reversed(self._between(1, self.world)):
            rank += (piece % factor) * weight
            piece //= factor
        return rank

    def hop_ranks(self, rank: int, outer: int, inner: int) -> tuple[int, ...]:
        """Ranks that exchange data when something moves between two levels, in piece order.

        Position i of the result holds part i of the slice that all of them have at level ``inner``.
        """
        digits = self._between(inner, outer)
        # Members differ from this rank in the digits between the two levels only.
        base = rank - sum(((rank // weight) % factor) * weight for weight, factor in digits)
        members = [base]
        # The rank's slowest digit is the piece's fastest, hence innermost. Over more than one digit the result does not
        # ascend, so a process group must be numbered in this order; dist.new_group would sort it.
        for weight, factor in digits:
            members = [member + digit * weight for member in members for digit in range(factor)]
        return tuple(members)

    def hops(self, outer: int, inner: int) -> list[tuple[int, int]]:
        """Adjacent (outer, inner) pairs on the way from ``outer`` down to ``inner``."""
        low = self.levels.index(inner)
        high = self.levels.index(outer)
        return [(self.levels[i + 1], self.levels[i]) for i in range(high - 1, low - 1, -1)]


def build_chain(world: int, sizes: Sequence[int]) -> Chain:
    """The chain 1 | sizes... | world.

    Args:
        world: number of ranks.
        sizes: group sizes that must be levels, such as the ranks per node, in any order.

    Raises:
        ValueError: a size does not divide the next one; the message lists the sizes that would.
    """
    # A set: levels that coincide, such as a node that is the whole world, become one, and no hop has a single member.
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


# Hops, as one rank sees them.


@dataclass(frozen=True)
class HopSpec:
    """One hop between two levels, as this rank sees it."""

    outer: int  # level with the smaller slices
    inner: int
    ranks: tuple[int, ...]  # group ranks that take part, in piece order
    link: str  # "local" inside a node, "cross" between nodes


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

    @cached_property
    def replica(self) -> int:
        """The number of the replica of the whole that this rank belongs to."""
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


# Nodes.

_REMEDY = (
    'Start with torchrun, which sets it, or give {"zeropp": {"local_world_size": N}} in the config, N ranks per node'
)


def ranks_per_node(ranks: Sequence[int], local_world_size: int | None, hosts: Sequence[str] | None = None) -> int:
    """Ranks of a group that share one node.

    With a number of ranks per node, nodes are runs of so many consecutive global ranks, as torchrun numbers them; one
    host may carry several. Without one, every host is a node.

    Args:
        ranks: global ranks of the group, in group order.
        local_world_size: ranks per node; None reads LOCAL_WORLD_SIZE.
        hosts: name of the machine that each of ``ranks`` runs on, where that is known.

    Raises:
        ValueError: the number is unknown or no number, a node so made spans two hosts, ranks were placed cyclically,
            or the group does not take the same number of ranks from each node, node after node.
    """
    # One rank has no link to classify, so it needs no launcher.
    if len(ranks) == 1:
        return 1
    claimed = local_world_size if local_world_size is not None else _claimed_by_launcher()
    nodes: Sequence[object]
    if claimed is not None:
        # Global ranks, also for a group that is a part of the world: nodes are a property of the job.
        nodes = [rank // claimed for rank in ranks]
        source = f"{claimed} ranks per node"
        _refuse_nodes_across_hosts(ranks, hosts or [], claimed)
    elif hosts is not None:
        nodes = list(hosts)
        source = "named after their hosts, since LOCAL_WORLD_SIZE is not set"
    else:
        raise ValueError(f"the number of ranks per node is unknown: LOCAL_WORLD_SIZE is not set. {_REMEDY}")
    per_node = nodes.count(nodes[0])
    # Levels are plain factors of the group rank, so a node must be a run of group ranks, and all runs equally long. The
    # last test finds a node that comes back after another.
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
    """LOCAL_WORLD_SIZE, or None where no launcher has set it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not text:
        return None
    # No falling back on host names: somebody meant to say a number.
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"the number of ranks per node is unknown: LOCAL_WORLD_SIZE is {text!r}. {_REMEDY}")
    return int(text)


def _refuse_round_robin(ranks: Sequence[int], hosts: Sequence[str]) -> None:
    """Ranks that were dealt to hosts like cards: no number of ranks per node describes that."""
    dealt = list(dict.fromkeys(hosts))
    if 1 < len(dealt) < len(hosts) and all(host == dealt[i % len(dealt)] for i, host in enumerate(hosts)):
        raise ValueError(
            f"ranks {list(ranks)} go round the hosts {dealt}, one on each in turn (cyclic placement), so that "
            "neighbours in rank share no fast link. Start them host by host: srun --distribution=block, mpirun "
            "--map-by slot, or torchrun, which does so"
        )


def _refuse_nodes_across_hosts(ranks: Sequence[int], hosts: Sequence[str], claimed: int) -> None:
    """Refuse nodes across hosts: the links inside a node would be taken for fast ones, and are a network."""
    _refuse_round_robin(ranks, hosts)
    first: dict[int, tuple[int, str]] = {}
    # ``hosts`` is empty where nobody asked, and then there is nothing to contradict.
    for rank, host in zip(ranks, hosts, strict=False):
        other, its_host = first.setdefault(rank // claimed, (rank, host))
        if its_host != host:
            raise ValueError(
                f"{claimed} ranks per node would make one node of rank {other} on host {its_host!r} and rank {rank} on "
                f"host {host!r}. Correct LOCAL_WORLD_SIZE or the config's zeropp.local_world_size, or leave both out: "
                "then each host is a node"
            )


# The same as zeropp_kernels.wire.BLOCK, and written here once more because this room does not know the kernels.
BLOCK = 256
"""Elements per block; every codec's group divides it."""


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in its flat buffer."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # elements from the start of the buffer

    @property
    def numel(self) -> int:
        """Elements of the parameter, without padding."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter that lies in one slice; ranges in elements of dense storage order."""

    slot: int  # index of the parameter in the layout
    start: int  # first element within the parameter
    stop: int
    offset: int  # first element within the slice


@dataclass(frozen=True)
class BufferLayout:
    """A flat buffer that can be cut into ``world`` equal pieces."""

    slots: tuple[Slot, ...]
    numel: int  # with padding
    world: int

    @property
    def piece_numel(self) -> int:
        """Elements of each piece."""
        return self.numel // self.world

    @cached_property
    def used_numel(self) -> int:
        """Elements of parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, stop) of padding."""
        # Slots ascend without overlap, so each gap lies between one slot's end and the next one's start.
        ends = [slot.offset + slot.numel for slot in self.slots]
        starts = [slot.offset for slot in self.slots[1:]] + [self.numel]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if start > end)

    def views(self, whole: Tensor) -> list[Tensor]:
        """The parameters' places in a buffer of [numel]."""
        # as_strided counts from the start of the storage, not of the tensor: ``whole`` must begin where that does.
        return [whole.as_strided(slot.shape, slot.strides, slot.offset) for slot in self.slots]

    def slice_range(self, index: int, level: int) -> tuple[int, int]:
        """Range [start, stop) of slice ``index`` when the buffer is spread over ``level`` ranks."""
        size = self.numel // level
        return index * size, (index + 1) * size

    def fragments(self, index: int, level: int) -> list[Fragment]:
        """Parts of parameters that lie in slice ``index`` of ``level``, in order."""
        start, stop = self.slice_range(index, level)
        found = []
        for index, slot in enumerate(self.slots):
            # A slice may begin and end inside a parameter. Padding and empty parameters belong to no fragment.
            low = max(start, slot.offset)
            high = min(stop, slot.offset + slot.numel)
            if low < high:
                found.append(Fragment(index, low - slot.offset, high - slot.offset, low - start))
        return found


def build_layout(parameters: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]], world: int) -> BufferLayout:
    """Lay parameters out one after the other.

    Args:
        parameters: (name, shape, dense strides) of each.
        world: number of pieces.
    """
    if not parameters:
        raise ValueError("a flat buffer needs at least one parameter")
    slots = []
    offset = 0
    for name, shape, strides in parameters:
        slots.append(Slot(name, tuple(shape), tuple(strides), offset))
        # Offsets do not depend on the world, and so neither does what shares a block: codes are the same on any number
        # of ranks.
        offset += -(-slots[-1].numel // BLOCK) * BLOCK
    # Blocks must not be split between ranks, at any level of the chain. Every level divides the world, so it is enough
    # that the pieces of the last one are whole blocks. A buffer of empty parameters still gets a block a rank.
    grain = BLOCK * world
    return BufferLayout(tuple(slots), max(-(-offset // grain), 1) * grain, world)


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides to keep a parameter's memory format; contiguous ones where its elements are not dense.

    A tensor is dense when its elements fill numel places without overlap in some order of dimensions, as
    channels_last tensors do.
    """
    # From the fastest dimension on, each stride must be the product of the sizes before it. Dimensions of size 1 may
    # have any stride.
    expected = 1
    for size, stride in sorted(
        ((n, s) for n, s in zip(shape, strides, strict=True) if n != 1), key=lambda pair: pair[1]
    ):
        if stride != expected:
            break
        expected *= size
    else:
        # Kept as they are: a channels_last weight in another format would run other kernels, or be converted each time.
        return tuple(strides)
    # An expanded or sliced tensor. Its values are copied into the buffer, so how they lay before need not be kept.
    contiguous = []
    step = 1
    for size in reversed(shape):
        contiguous.append(step)
        step *= max(size, 1)
    return tuple(reversed(contiguous))
