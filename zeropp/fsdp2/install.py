"""Putting quantized communication on a model that FSDP2 has sharded: checks, process groups, hooks."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.comm.collective import exchange, on_all_ranks
from zeropp.comm.groups import make_group
from zeropp.comm.hops import Hop
from zeropp.comm.ledger import Ledger
from zeropp.comm.members import Members, find_members, whereabouts
from zeropp.comm.streams import make_lanes
from zeropp.fsdp2.gather import GatherComm, GatherRoute
from zeropp.fsdp2.options import Options
from zeropp.fsdp2.overlap import Reductions
from zeropp.fsdp2.reduce import ReduceComm, ReduceRoute
from zeropp.fsdp2.shards import ShardedUnit, find_units
from zeropp.partition.levels import HopSpec, Mode, Placement
from zeropp.partition.topology import build_chain
from zeropp.wire.codecs import BlockCodec, Codec, Feedback
from zeropp.wire.encoding import Encoding

__all__ = ["Adapter", "apply"]

_WHAT = "zeropp.fsdp2.apply"  # what ranks do together
_BETA = 0.8  # the default of the configuration, too


class Adapter:
    """What :func:`apply` has put on a model.

    Attributes:
        ledger: bytes that this rank has sent, by unit, direction and hop. ``kind`` is "gather" for weights,
            "second" for those gathered in backward from a smaller group (``reshard_after_forward`` as a number),
            and "reduce" for gradients; ``hop`` says between which numbers of ranks.
    """

    def __init__(
        self, ledger: Ledger, units: Sequence[ShardedUnit], reduces: Sequence[ReduceComm], routes: Sequence[_Routes]
    ) -> None:
        self.ledger = ledger
        self._units = units
        self._reduces = reduces
        self._routes = routes

    def __str__(self) -> str:
        return str(self.ledger)

    def _feedbacks(self) -> dict[str, Feedback]:
        return {
            # With the codec's name, so that errors of other codecs are not taken over.
            f"{comm.unit} {hop.spec.inner}->{hop.spec.outer} {hop.codec.name}": hop.feedback
            for comm in self._reduces
            # The dtype is that of hops without codes, which keep no errors.
            for hop in comm.reduce_hops(torch.float32)
            if hop.feedback is not None
        }

    def reset_feedback(self) -> None:
        """Let all errors that are fed back count as nothing from now on; LoCo does so every few hundred steps."""
        for feedback in self._feedbacks().values():
            feedback.fresh = True

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the errors this rank feeds back, by unit and hop; uint8. Every rank has its own."""
        return {name: feedback.saved() for name, feedback in self._feedbacks().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with errors from :meth:`state_dict` of the same rank of a run with the same model and settings.

        Raises:
            ValueError: other units, hops or sizes.
        """
        own = {name: feedback.state for name, feedback in self._feedbacks().items()}
        # Compared as a whole before anything is copied.
        given, expected = ({name: each.numel() for name, each in some.items()} for some in (state, own))
        if given != expected:
            raise ValueError(f"errors have bytes {given}; expected {expected}: the same model, ranks and settings")
        for name, feedback in self._feedbacks().items():
            feedback.state.copy_(state[name])
            # What has been loaded counts, though a reset was asked for before.
            feedback.fresh = False

    def remove(self) -> None:
        """Give FSDP2 its own communication back, and destroy the process groups made for it. All ranks."""
        # Hooks first: nothing may call into a group that is gone.
        for unit, reduce in zip(self._units, self._reduces, strict=True):
            unit.restore(reduce.finish)
        for routes in self._routes:
            routes.close()


def apply(
    model: nn.Module,
    *,
    weights: str | None = "int8",
    secondary: str = "values",
    gradient_bits: tuple[int, int] | None = (8, 4),
    hadamard: bool = False,
    feedback: str | None = None,
    beta: float | None = None,
    gather_hops: int = 2,
    local_world_size: int | None = None,
    hang_timeout: float = 600.0,
) -> Adapter:
    """Let a model sharded with ``fully_shard`` gather weights and reduce gradients through zeropp's codecs and hops.

    Collective: every rank of the model's mesh calls it, after all calls of ``fully_shard`` and before the first
    forward. Weights are encoded once, at the shard, and decoded into FSDP2's buffer; every rank, the owner included,
    computes with the decoded values. Gradients are summed inside the node, then between nodes, in float32. The sharded
    parameters and gradients stay what they were: float32 or bfloat16 DTensors. docs/fsdp2.md has the details.

    Args:
        model: with ``fully_shard`` called on it, on modules below it, or both.
        weights: "int8", or None for values as they are.
        secondary: what travels in backward where ``reshard_after_forward`` is a number: "values" (the weights of
            forward, to the bit) or "codes" (half the bytes, or fewer; those weights are rounded a second time).
        gradient_bits: bits of an element inside a node and between nodes (or on the only hop): for codes a width in
            ``zeropp_kernels.wire.GROUPS``, for values 16 (bfloat16) or 32. None for values in FSDP2's reduce dtype.
        hadamard: rotate 32 elements of a gradient at a time before they are encoded.
        feedback: add what encoding lost to the next gradient: "cross" between nodes (or on the only hop), "both" inside
            the node too, or None (LoCo, arXiv 2407.04480). Costs a rank 1 byte an element it sends between nodes,
            "both" 1 byte for each element of the model besides.
        beta: share of the old error that is kept; 0.8 if not given.
        gather_hops: 2 for gathering between nodes, then inside them, where there are both; 1 for one all-gather over
            all ranks, for backends that cross each link once by themselves.
        local_world_size: ranks per node; None reads LOCAL_WORLD_SIZE, which torchrun sets, or takes a host for a node.
        hang_timeout: seconds that a collective on a process group made here may take.

    Returns:
        What has been installed; its ledger counts bytes.

    Raises:
        TypeError: a model without ``fully_shard``; raised where that is so.
        ValueError: a mesh (HSDP), several for one unit, hooks already there; raised where that is so. A setting, dtypes
            or all-gather extensions that cannot be honoured, nodes that are uneven or unknown, ranks that disagree;
            raised on every rank. Nothing has been changed then.
        RuntimeError: another rank refused its settings or could not go on; with its error.

    Source: ZeRO++ (arXiv 2306.10209), sections 3.1 and 3.3.
    """
    options = Options(
        weights, secondary, gradient_bits, hadamard, feedback, beta, gather_hops, local_world_size, hang_timeout
    )
    # Local: before a model has been looked at there is no group to tell others over.
    units, ledger = find_units(model), Ledger()
    routes = _make_routes(units, options, ledger)
    # Memory for errors that are fed back may be short on one rank; then no rank installs anything.
    comms = _all_comms(routes)
    for unit, (gather, reduce) in comms.items():
        unit.install(gather, reduce, reduce.finish)
    return Adapter(ledger, units, [comms[unit][1] for unit in units], list(routes.values()))


def _make_routes(units: Sequence[ShardedUnit], options: Options, ledger: Ledger) -> dict[dist.ProcessGroup, _Routes]:
    """Hops for the units of each mesh, once every rank has found that it can go on."""
    # In order of modules and not as a set: collectives need one order on all ranks.
    meshes = list(dict.fromkeys(unit.group for unit in units))
    hosts: dict[int, str] = {}
    for mesh in meshes:
        # Names of hosts have to be known before nodes can be checked. A fake group has nobody to ask.
        hosts.update(exchange(mesh, whereabouts(), _WHAT, options.patience()))
    for mesh in meshes:
        # All units on each mesh, so that a refusal reaches everyone before groups are made.
        work, patience = partial(_check, units, options, hosts), options.patience
        on_all_ranks(mesh, _WHAT, work, same=True, patience=patience)
    # Makes process groups: from here on all members must come along.
    return {mesh: _Routes(mesh, [u for u in units if u.group == mesh], options, ledger, hosts) for mesh in meshes}


def _all_comms(routes: Mapping[dist.ProcessGroup, _Routes]) -> dict[ShardedUnit, tuple[GatherComm, ReduceComm]]:
    """The hooks of all units, before any is installed; if they cannot be made on some rank, on none."""
    comms: dict[ShardedUnit, tuple[GatherComm, ReduceComm]] = {}
    try:
        for mesh, route in routes.items():
            comms |= on_all_ranks(mesh, _WHAT, route.comms, patience=route.options.patience)
    # An interrupt leaves no groups behind, either.
    except BaseException:
        for route in routes.values():
            route.close()
        raise
    return comms


def _check(units: Sequence[ShardedUnit], options: Options, hosts: Mapping[int, str]) -> list[object]:
    """Everything that can be refused before anyone has to wait; what all ranks must agree on."""
    # Not earlier: an error before the exchange would leave the others waiting.
    options.check()
    if options.secondary == "codes" and all(unit.secondary is None for unit in units):
        raise ValueError(
            "secondary is 'codes', and backward gathers nothing a second time; give fully_shard "
            "reshard_after_forward=<ranks per node>, or leave secondary out"
        )
    # Compared by repr, so what is in it must look the same on all ranks: no tensors, no groups.
    account: list[object] = [options]
    for unit in units:
        if options.weights is not None:
            unit.check_weights()
        unit.check_gradients()
        account.append(unit.describe())
        for group in (unit.group, unit.secondary):
            if group is not None:
                members = _members(group, unit.device, options.local_world_size, hosts)
                account.append((len(members.ranks), members.local, members.backend))
    return account


def _members(
    group: dist.ProcessGroup, device: torch.device, local_world_size: int | None, hosts: Mapping[int, str]
) -> Members:
    try:
        return find_members(group, device, local_world_size, hosts)
    except ValueError as error:
        raise ValueError(f"{error}. For zeropp.fsdp2.apply it is the argument local_world_size") from None


class _Routes:
    """The hops of one mesh, shared by all units on it."""

    def __init__(
        self,
        mesh: dist.ProcessGroup,
        units: Sequence[ShardedUnit],
        options: Options,
        ledger: Ledger,
        hosts: Mapping[int, str],
    ) -> None:
        self.options = options
        self.hosts = hosts
        self.units = units
        self.ledger = ledger
        # Of groups made here; FSDP2's own keep theirs.
        self.timeout = timedelta(seconds=options.hang_timeout)
        self.groups: list[dist.ProcessGroup] = []
        # That of the first rank; a count of calls could differ between ranks with different histories.
        self.job = exchange(mesh, f"zeropp-fsdp2-{uuid.uuid4().hex[:12]}", _WHAT, options.hang_timeout)[0]
        device, codec = units[0].device, BlockCodec(8) if options.weights is not None else None
        # Gathers in backward share the lanes of those in forward, and have groups of their own.
        self.gathering = make_lanes("fsdp2 gather", device, sends=True, overlap=True)
        self.reducing = make_lanes("fsdp2 reduce", device, sends=True, overlap=True)
        self.gathers = {mesh: GatherRoute(self._gather_hops(mesh, device, "gather"), codec)}
        # By size alone: FSDP2 cuts the ranks of a mesh into runs of that size, the same for each call.
        self._by_size: dict[int, GatherRoute] = {}
        for unit in units:
            if unit.secondary is not None:
                self.gathers[unit.secondary] = self._secondary(unit.secondary, device, codec)
        self.reduce = self._reduce_route(mesh, device)

    def comms(self) -> dict[ShardedUnit, tuple[GatherComm, ReduceComm]]:
        """The hooks of all units."""
        return {unit: self._comms(unit) for unit in self.units}

    def _comms(self, unit: ShardedUnit) -> tuple[GatherComm, ReduceComm]:
        groups = [unit.group] if unit.secondary is None else [unit.group, unit.secondary]
        gather = GatherComm(unit.name, {group: self.gathers[group] for group in groups}, self.gathering)
        return gather, ReduceComm(unit.name, self.reduce, unit.trained_numel, unit.device, unit.finishes)

    def close(self) -> None:
        """End the lanes, and destroy the process groups made here."""
        for lanes in (self.gathering, self.reducing):
            lanes.close()
        for group in self.groups:
            dist.destroy_process_group(group)
        self.groups = []

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
            bits=options.gradient_bits,
            rotate=options.hadamard,
            feedback=options.feedback,
            beta=_BETA if options.beta is None else options.beta,
        )
        return ReduceRoute(placement, hops, encoding, Reductions(self.reducing))

    def _place(self, group: dist.ProcessGroup, device: torch.device) -> tuple[Members, Placement]:
        members = _members(group, device, self.options.local_world_size, self.hosts)
        world = len(members.ranks)
        # As in stage 3: shards over all ranks, nothing cached. Of the mode only the paths between levels are used.
        mode = Mode(build_chain(world, [members.local]), states=world, cached=None, gradients=world)
        return members, Placement(mode, group.rank(), members.local)

    def _hop(self, spec: HopSpec, members: Members, rank: int, kind: str) -> Hop:
        """A hop with a group of its own, in the order of its pieces."""
        # Not FSDP2's, over all ranks either: each group's collectives come from one lane, so in one order on all ranks,
        # while the user goes on with that one.
        ranks = [members.ranks[each] for each in spec.ranks]
        # The first rank tells groups of one kind apart, which exist side by side.
        name = f"{self.job} {kind} {spec.outer}->{spec.inner} of {len(members.ranks)} {ranks[0]}"
        group = make_group(ranks, members.backend, self.timeout, name, members.device)
        self.groups.append(group)
        return Hop(spec, group, members.backend, rank, self.ledger, kind)
