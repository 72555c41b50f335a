"""The hops that serve the units of one mesh: over which process groups, on which comm streams, with which codecs."""

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
"""The call that ranks make together, for errors."""

_BETA = 0.8  # the default of the configuration, too


def members_of(
    group: dist.ProcessGroup, device: torch.device, local_world_size: int | None, hosts: Mapping[int, str]
) -> Members:
    try:
        # Its errors name the key of the configuration, and a caller of apply has an argument instead.
        return find_members(group, device, local_world_size, hosts)
    except ValueError as error:
        raise ValueError(f"{error}. For zeropp.fsdp2.apply it is the argument local_world_size") from None


class Routes:
    """The hops of one mesh, shared by all units on it."""

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
        self.groups: list[dist.ProcessGroup] = []  # made here; FSDP2's own are others
        self.waiting = Waiting(units[0].device, options.hang_timeout, self.groups)
        # That of the first rank; a count of calls could differ between ranks with different histories.
        own = f"zeropp-fsdp2-{uuid.uuid4().hex[:12]}", default_ctas(units[0].device)
        rows = exchange(mesh, own, WHAT, options.hang_timeout)
        # Cards may differ, and NCCL wants one number of channels.
        self.job = rows[0][0]
        self.ctas = least([each for _, each in rows])
        device = units[0].device
        codec = BlockCodec(8) if options.weights is not None else None
        # Gathers in backward share the comm streams of those in forward, and have groups of their own.
        self.gathering = make_comm_streams("fsdp2 gather", device, sends=True, overlap=True)
        self.reducing = make_comm_streams("fsdp2 reduce", device, sends=True, overlap=True)
        self.gathers = {mesh: GatherRoute(self._gather_hops(mesh, device, "gather"), codec)}
        # By size alone: FSDP2 cuts the ranks of a mesh into runs of that size, the same for each call.
        self._by_size: dict[int, GatherRoute] = {}
        for unit in units:
            if unit.secondary is not None:
                self.gathers[unit.secondary] = self._secondary(unit.secondary, device, codec)
        self.reduce = self._reduce_route(mesh, device)

    def comms(self, unit: ShardedUnit) -> tuple[GatherComm, ReduceComm]:
        """The hooks of a unit."""
        groups = [unit.group] if unit.secondary is None else [unit.group, unit.secondary]
        routes = {group: self.gathers[group] for group in groups}
        return GatherComm(unit.name, routes, self.gathering, self.before, self.waiting), ReduceComm(unit, self.reduce)

    def close(self) -> None:
        """End the comm streams, and destroy the process groups made here."""
        for comm_streams in (self.gathering, self.reducing):
            comm_streams.close()
        self.waiting.close()
        # The user may have ended torch.distributed before.
        free_groups(self.groups)

    def _secondary(self, group: dist.ProcessGroup, device: torch.device, codec: Codec | None) -> GatherRoute:
        """FSDP2 makes a group for each call of ``fully_shard``; one of each size is enough."""
        size = group.size()
        if size not in self._by_size:
            # What FSDP2 keeps after forward is decoded already; sent as values it is forward's to the bit.
            codec = codec if self.options.secondary == "codes" else None
            self._by_size[size] = GatherRoute(self._gather_hops(group, device, "second"), codec)
        return self._by_size[size]

    def _gather_hops(self, group: dist.ProcessGroup, device: torch.device, kind: str) -> list[Hop]:
        members, placement = self._place(group, device)
        specs = placement.gather_path(len(members.ranks), 1)
        if len(specs) > 1 and self.options.gather_hops == 1:
            world = len(members.ranks)
            # FSDP2's order: by rank.
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
        # As in stage 3: shards over all ranks, nothing cached. Of the mode only the paths between levels are used.
        mode = Mode(build_chain(world, [members.local]), states=world, cached=None, gradients=world)
        return members, Placement(mode, group.rank(), members.local)

    def _hop(self, spec: HopSpec, members: Members, rank: int, kind: str) -> Hop:
        """A hop with a group of its own, in the order of its pieces."""
        # Not FSDP2's, over all ranks either: each group's collectives come from one comm stream, so in one order on all
        # ranks, while the user goes on with that one.
        ranks = [members.ranks[each] for each in spec.ranks]
        # The first rank tells groups of one kind apart, which exist side by side.
        name = f"{self.job} {kind} {spec.outer}->{spec.inner} of {len(members.ranks)} {ranks[0]}"
        timeout = timedelta(seconds=self.options.hang_timeout)
        # At its timeout NCCL ends the process, and on CPU gloo raises the error.
        timeout += OUTLASTS if members.device.type in BLIND else timedelta()
        group = make_group(ranks, members.backend, timeout, name, members.device, self.ctas.for_link(spec.link))
        self.groups.append(group)
        return Hop(spec, group, members.backend, rank, self.ledger, kind)
