"""Process groups, comm streams and codecs of the hops that serve all units of one mesh."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from zeropp.comm.collective import exchange
from zeropp.comm.communicators import default_ctas, least
from zeropp.comm.hops import Hop, Ledger
from zeropp.comm.process_groups import OUTLASTS, Members, find_members, free_groups, make_group
from zeropp.comm.streams import make_comm_streams
from zeropp.comm.watch import BLIND
from zeropp.fsdp2.gather import GatherComm, GatherRoute
from zeropp.fsdp2.options import Options
from zeropp.fsdp2.overlap import ReductionLimit, Waiting
from zeropp.fsdp2.reduce import ReduceComm, ReduceRoute
from zeropp.fsdp2.shards import ShardedUnit
from zeropp.partition.levels import HopSpec, Mode, Placement, build_chain
from zeropp.wire.codecs import BlockCodec, Codec
from zeropp.wire.encoding import Encoding

__all__ = ["WHAT", "Routes", "members_of"]

WHAT = "zeropp.fsdp2.apply"
"""Name of the collective call, for error messages."""

_BETA = 0.8  # also the default of zeropp's configuration


def members_of(
    group: dist.ProcessGroup, device: torch.device, local_world_size: int | None, hosts: Mapping[int, str]
) -> Members:
    """Return a group's ranks, nodes and backend as :func:`find_members` does; its errors name the argument of apply."""
    try:
        # Errors of find_members name a key of the configuration; name the argument of apply as well.
        return find_members(group, device, local_world_size, hosts)
    except ValueError as error:
        raise ValueError(f"{error}. For zeropp.fsdp2.apply it is the argument local_world_size") from None


class Routes:
    """The hops of one mesh, shared by all units on the mesh.

    Args:
        mesh: process group that shards the units.
        units: units on the mesh.
        options: arguments of ``apply``.
        ledger: ledger that counts sent bytes.
        hosts: name of the host of each global rank.
        before: function that is called before each gather.
    """

    def __init__(
        self,
        mesh: dist.ProcessGroup,
        units: Sequence[ShardedUnit],
        options: Options,
        ledger: Ledger,
        hosts: Mapping[int, str],
        before: Callable[[], None],
    ) -> None:
        self.options = options
        self.hosts = hosts
        self.before = before
        self.ledger = ledger
        self.groups: list[dist.ProcessGroup] = []  # process groups created here, without FSDP2's own
        self.waiting = Waiting(units[0].device, options.hang_timeout, self.groups)
        # Use the first rank's name: a counter could differ between ranks with different histories.
        own = f"zeropp-fsdp2-{uuid.uuid4().hex[:12]}", default_ctas(units[0].device)
        rows = exchange(mesh, own, WHAT, options.hang_timeout)
        # GPUs may differ between ranks, but NCCL needs the same number of channels on all of them.
        self.job = rows[0][0]
        self.ctas = least([each for _, each in rows])
        device = units[0].device
        codec = BlockCodec(8) if options.weights is not None else None
        # Gathers of forward and backward share comm streams, but use different process groups.
        self.gathering = make_comm_streams("fsdp2 gather", device, sends=True, overlap=True)
        self.reducing = make_comm_streams("fsdp2 reduce", device, sends=True, overlap=True)
        self.gathers = {mesh: GatherRoute(self._gather_hops(mesh, device, "gather"), codec)}
        # Routes by group size: for one size, FSDP2 always splits the ranks of a mesh into the same consecutive runs.
        self._by_size: dict[int, GatherRoute] = {}
        for unit in units:
            if unit.secondary is not None:
                self.gathers[unit.secondary] = self._secondary(unit.secondary, device, codec)
        self.reduce = self._reduce_route(mesh, device)

    def comms(self, unit: ShardedUnit) -> tuple[GatherComm, ReduceComm]:
        """Create the gather hook and the reduce hook of a unit."""
        groups = [unit.group] if unit.secondary is None else [unit.group, unit.secondary]
        routes = {group: self.gathers[group] for group in groups}
        return GatherComm(unit.name, routes, self.gathering, self.before, self.waiting), ReduceComm(unit, self.reduce)

    def close(self) -> None:
        """Stop the comm streams and the monitor, and destroy the process groups created here."""
        for comm_streams in (self.gathering, self.reducing):
            comm_streams.close()
        self.waiting.close()
        # Also works after the user has called destroy_process_group().
        free_groups(self.groups)

    def _secondary(self, group: dist.ProcessGroup, device: torch.device, codec: Codec | None) -> GatherRoute:
        """Return the route of a smaller group for gathers in backward.

        FSDP2 creates such a group per ``fully_shard`` call; one route per group size serves all calls.
        """
        size = group.size()
        if size not in self._by_size:
            # The values that FSDP2 keeps after forward are decoded already, so sending them as plain values reproduces
            # forward's weights bit for bit.
            codec = codec if self.options.secondary == "codes" else None
            self._by_size[size] = GatherRoute(self._gather_hops(group, device, "second"), codec)
        return self._by_size[size]

    def _gather_hops(self, group: dist.ProcessGroup, device: torch.device, kind: str) -> list[Hop]:
        members, placement = self._place(group, device)
        specs = placement.gather_path(len(members.ranks), 1)
        if len(specs) > 1 and self.options.gather_hops == 1:
            world = len(members.ranks)
            # One all-gather over all ranks, with parts in FSDP2's order, which is the order of ranks.
            specs = (HopSpec(world, 1, tuple(range(world)), "cross"),)
        return [self._hop(spec, members, placement.rank, kind) for spec in specs]

    def _reduce_route(self, group: dist.ProcessGroup, device: torch.device) -> ReduceRoute:
        members, placement = self._place(group, device)
        specs = placement.reduce_path(1, len(members.ranks))
        hops = [self._hop(spec, members, placement.rank, "reduce") for spec in specs]
        options = self.options
        encoding = Encoding(
            bits=options.bits(),
            rotate=options.hadamard,
            feedback=options.feedback,
            beta=_BETA if options.beta is None else options.beta,
        )
        return ReduceRoute(
            placement, hops, encoding, options.vector_bits is not None, ReductionLimit(self.reducing, self.waiting)
        )

    def _place(self, group: dist.ProcessGroup, device: torch.device) -> tuple[Members, Placement]:
        members = members_of(group, device, self.options.local_world_size, self.hosts)
        world = len(members.ranks)
        # Levels of stage 3: shards over all ranks, and no cached weights. Only the paths between levels are used.
        mode = Mode(build_chain(world, [members.local]), states=world, cached=None, gradients=world)
        return members, Placement(mode, group.rank(), members.local)

    def _hop(self, spec: HopSpec, members: Members, rank: int, kind: str) -> Hop:
        """Create a hop with a new process group, whose ranks are in the order of the hop's slices."""
        # Do not use FSDP2's group, even for a hop over all ranks: FSDP2 and the user go on using that group.
        # Collectives of a new group come from one comm stream, so their order is equal on all ranks.
        ranks = [members.ranks[each] for each in spec.ranks]
        # The first rank makes the name unique, because the groups of one kind are disjoint.
        name = f"{self.job} {kind} {spec.outer}->{spec.inner} of {len(members.ranks)} {ranks[0]}"
        timeout = timedelta(seconds=self.options.hang_timeout)
        # NCCL ends the process at its timeout, so on a GPU the timeout is longer than the monitor's. gloo raises an
        # error.
        timeout += OUTLASTS if members.device.type in BLIND else timedelta()
        group = make_group(ranks, members.backend, timeout, name, members.device, self.ctas.for_link(spec.link))
        self.groups.append(group)
        return Hop(spec, group, members.backend, rank, self.ledger, kind)
