"""Ranks, nodes, levels and the order of pieces: integers only, no process and no tensor.

A *level* is the number of ranks one copy of a thing is spread over. The levels of a run form a divisor chain
1 | v1 | v2 | ... | W. A rank is a mixed-radix number over that chain, the digit of the first (node-local) factor
fastest; the piece it owns is the number read with its digits reversed. With 2 nodes of 2 ranks::

    flat buffer   | slice 0          | slice 1          |
                  | piece 0 | piece 1 | piece 2 | piece 3 |
    owner         | rank 0  | rank 2  | rank 1  | rank 3  |

so a gather between nodes yields one contiguous slice, and a gather inside the node the whole buffer: no hop needs
a copy to put things in order.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Chain", "build_chain", "ranks_per_node"]


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
        low, high = self.levels.index(inner), self.levels.index(outer)
        return [(self.levels[i], self.levels[i + 1] // self.levels[i]) for i in range(low, high)]

    def slice_index(self, rank: int, level: int) -> int:
        """Which of the ``level`` equal slices of a flat buffer this rank holds when it is spread over ``level``."""
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
        low, high = self.levels.index(inner), self.levels.index(outer)
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
        nodes, source = [rank // claimed for rank in ranks], f"{claimed} ranks per node"
        _refuse_nodes_across_hosts(ranks, hosts or [], claimed)
    elif hosts is not None:
        nodes, source = list(hosts), "named after their hosts, since LOCAL_WORLD_SIZE is not set"
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


_REMEDY = (
    'Start with torchrun, which sets it, or give {"zeropp": {"local_world_size": N}} in the config, N ranks per node'
)


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
    """What is taken for the fast links inside a node must not be a network."""
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
