"""Putting quantized communication on a model that FSDP2 has sharded: checks, process groups, hooks."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar, cast

import torch.distributed as dist
from torch import Tensor, nn

from zeropp.comm.collective import exchange, run_on_all_ranks
from zeropp.comm.hops import Ledger
from zeropp.comm.process_groups import whereabouts
from zeropp.fsdp2.gather import GatherComm
from zeropp.fsdp2.options import Options
from zeropp.fsdp2.reduce import ReduceComm
from zeropp.fsdp2.routes import WHAT, Routes, members_of
from zeropp.fsdp2.shards import ShardedUnit, find_units, sharded_since
from zeropp.wire.codecs import Feedback

__all__ = ["Adapter", "apply"]

_T = TypeVar("_T")
_Comms = dict[ShardedUnit, tuple[GatherComm, ReduceComm]]


class Adapter:
    """The communication that :func:`apply` has put on a model.

    ``torch.distributed.checkpoint`` takes it as it takes an optimizer: ``dcp.save({"adapter": adapter, ...})``.

    Attributes:
        ledger: bytes that this rank has sent, by unit, direction and hop. ``kind`` is "gather" for weights,
            "second" for those gathered in backward from a smaller group (``reshard_after_forward`` as a number),
            and "reduce" for gradients; ``hop`` says between which numbers of ranks.
    """

    def __init__(self, ledger: Ledger, comms: _Comms, routes: Sequence[Routes]) -> None:
        self.ledger = ledger
        self._comms = comms
        self._routes = routes
        # Each rank has its own errors, and a checkpoint keeps one tensor for each name.
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._rank = f"rank {rank} of {world}"

    def __str__(self) -> str:
        return str(self.ledger)

    def _feedbacks(self) -> dict[str, Feedback]:
        return {
            f"{unit.name} {name}, {self._rank}": feedback
            for unit, (_, reduce) in self._comms.items()
            for name, feedback in reduce.errors().items()
        }

    def reset_feedback(self) -> None:
        """Let all errors that are fed back count as nothing from now on; LoCo does so every few hundred steps."""
        for feedback in self._feedbacks().values():
            feedback.fresh = True

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the errors this rank feeds back, uint8; by unit, hop, codec, parameters and rank."""
        return {name: feedback.saved() for name, feedback in self._feedbacks().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with errors from :meth:`state_dict` of the same rank of a run with the same model and settings.

        Raises:
            ValueError: other units, hops, parameters, ranks or sizes.
        """
        # Parameters may have been frozen or unfrozen since the last backward, and errors follow those that are trained.
        for unit, (_, reduce) in self._comms.items():
            reduce.follow(unit.trained())
        own = {name: feedback.state for name, feedback in self._feedbacks().items()}
        # Compared as a whole before anything is copied.
        given, expected = ({name: each.numel() for name, each in some.items()} for some in (state, own))
        if given != expected:
            missing, other = (sorted(one.items() - two.items()) for one, two in ((expected, given), (given, expected)))
            raise ValueError(
                f"the state has no errors for {missing[:3]}, and has {other[:3]} (name, bytes; at most three of each); "
                f"expected those of {len(own)} names that state_dict() gives: the same model, trained parameters, "
                "ranks and settings. Without them errors begin at nothing, which costs one step's rounding"
            )
        for name, feedback in self._feedbacks().items():
            feedback.state.copy_(state[name])
            # What has been loaded counts, though a reset was asked for before.
            feedback.fresh = False

    def remove(self) -> None:
        """Give FSDP2 its own communication back, and destroy the process groups made for it. All ranks.

        Hooks that others have set since stay. A second call does nothing.
        """
        # Hooks first: nothing may call into a group that is gone.
        for unit, (gather, reduce) in self._comms.items():
            unit.restore(gather, reduce, reduce.finish_reduction)
        for routes in self._routes:
            routes.close()


def apply(
    model: nn.Module,
    *,
    weights: str | None = "int8",
    secondary: str = "values",
    gradient_bits: tuple[int, int] | list[int] | None = (8, 4),
    hadamard: bool = False,
    feedback: str | None = None,
    beta: float | None = None,
    gather_hops: int = 2,
    vector_bits: int | None = 16,
    local_world_size: int | None = None,
    hang_timeout: float = 420.0,
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
        vector_bits: 16 (or more) for gradients of parameters of one dimension, other than those of size 1, such as
            biases, the weights of norms and class tokens, where others are codes; None for codes, whose scales they
            share with the parameters beside them.
        local_world_size: ranks per node; None reads LOCAL_WORLD_SIZE, which torchrun sets, or takes a host for a node.
        hang_timeout: seconds that a collective on a process group made here may take.

    Returns:
        What has been installed; its ledger counts bytes.

    Raises:
        TypeError: a model without ``fully_shard``; raised where that is so.
        ValueError: parameters that are only replicated, or hooks already there; raised where that is so. A setting,
            dtypes or all-gather extensions that cannot be honoured, nodes that are uneven or unknown, ranks that
            disagree; raised on every rank. Nothing has been changed then.
        RuntimeError: another rank refused its settings or could not go on; with its error.

    Source: ZeRO++ (arXiv 2306.10209), sections 3.1 and 3.3.
    """
    options = Options(
        weights, secondary, gradient_bits, hadamard, feedback, beta, gather_hops, vector_bits, local_world_size,
        hang_timeout,
    )  # fmt: skip
    return _install(model, options)


def _install(model: nn.Module, options: Options) -> Adapter:
    """See :func:`apply`."""
    # Local: before a model has been looked at there is no group to tell others over.
    units = find_units(model)
    ledger = Ledger()
    routes = _make_routes(units, options, ledger, _FirstUse(model, units))
    # Memory for errors that are fed back may be short on one rank; then no rank installs anything.
    comms = _all_comms(units, routes, options)
    for unit, (gather, reduce) in comms.items():
        unit.install(gather, reduce, reduce.finish_reduction)
        # Only where it is needed: the method that is put in place of FSDP2's runs in every backward.
        if reduce.needs_parts:
            unit.watch(reduce.note_parts)
    return Adapter(ledger, comms, list(routes.values()))


class _FirstUse:
    """Refuses, when something is first gathered, a model of which more has been sharded since :func:`apply`."""

    def __init__(self, model: nn.Module, units: Sequence[ShardedUnit]) -> None:
        # Weak, since the model holds the hooks.
        self._model = weakref.ref(model)
        self._units = units
        self._passed = False

    def __call__(self) -> None:
        model = None if self._passed else self._model()
        if model is None:
            return
        late = sharded_since(model, self._units)
        if late:
            raise RuntimeError(
                f"fully_shard was called on {late} after zeropp.fsdp2.apply, so that what they send is not quantized. "
                "Call apply after the last fully_shard. To go on in this process, remove() what apply returned, apply "
                "again, and call reset_iter_state() of the root (torch 2.13): FSDP2 has begun this forward"
            )
        # Once is enough: a walk over all modules at every gather would cost host time.
        self._passed = True


def _make_routes(
    units: Sequence[ShardedUnit], options: Options, ledger: Ledger, before: Callable[[], None]
) -> dict[dist.ProcessGroup, Routes]:
    """Hops for the units of each mesh, once every rank has found that it can go on."""
    # In order of modules and not as a set: collectives need one order on all ranks.
    meshes = list(dict.fromkeys(unit.group for unit in units))
    hosts: dict[int, str] = {}
    for mesh in meshes:
        # Names of hosts have to be known before nodes can be checked. A fake group has nobody to ask.
        hosts.update(exchange(mesh, whereabouts(), WHAT, options.patience()))
    _agree(units, options, partial(_check_arguments, units, options, hosts), lambda accounts, group: accounts[group])
    # Makes process groups: from here on all members must come along.
    return {
        mesh: Routes(mesh, [u for u in units if u.group == mesh], options, ledger, hosts, before) for mesh in meshes
    }


def _all_comms(units: Sequence[ShardedUnit], routes: Mapping[dist.ProcessGroup, Routes], options: Options) -> _Comms:
    """The hooks of all units, before any is installed; if they cannot be made on some rank, on none."""
    try:
        return _agree(units, options, lambda: {unit: routes[unit.group].comms(unit) for unit in units})
    # An interrupt leaves no groups behind, either.
    except BaseException:
        for route in routes.values():
            route.close()
        raise


def _agree(
    units: Sequence[ShardedUnit],
    options: Options,
    work: Callable[[], _T],
    same: Callable[[_T, dist.ProcessGroup], object] | None = None,
) -> _T:
    """Do local work that may fail, and fail on all ranks of all groups if it failed on any.

    Args:
        units: whose groups are told: those that they are sharded over, then their replicas.
        options: say how long to wait.
        work: local.
        same: the part of its result that must be the same on all ranks of a group.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught

    def tell(group: dist.ProcessGroup) -> object:
        if error is not None:
            raise error
        return None if same is None else same(cast("_T", result), group)

    groups = dict.fromkeys(unit.group for unit in units)
    groups |= dict.fromkeys(unit.replicas for unit in units if unit.replicas is not None)
    # With replicas, or several meshes, no group has all ranks: what one has heard of it tells in the next.
    for group in groups:
        try:
            run_on_all_ranks(group, WHAT, partial(tell, group), same=same is not None, patience=options.patience)
        except Exception as caught:
            error = caught
    if error is not None:
        raise error
    return cast("_T", result)


def _check_arguments(
    units: Sequence[ShardedUnit], options: Options, hosts: Mapping[int, str]
) -> dict[dist.ProcessGroup, list[object]]:
    """Everything that can be refused before anyone has to wait; for each group, what its ranks must agree on."""
    # Not earlier: an error before the exchange would leave the others waiting.
    options.check(dist.get_world_size() if dist.is_initialized() else 1)
    if options.secondary == "codes" and all(unit.secondary is None for unit in units):
        raise ValueError(
            "secondary is 'codes', and backward gathers nothing a second time; give fully_shard "
            "reshard_after_forward=<ranks per node>, or leave secondary out"
        )
    # Compared by repr, so what is in it must look the same on all ranks: no tensors, no groups. Units of other groups
    # need not: each rank has experts of its own, under names of their own.
    accounts: dict[dist.ProcessGroup, list[object]] = defaultdict(lambda: [options])
    for unit in units:
        if options.weights is not None:
            unit.check_weights()
        unit.check_gradients()
        account: list[object] = [unit.describe()]
        for group in (unit.group, unit.secondary):
            if group is not None:
                # Raises for nodes that are uneven or unknown, which must happen before any process group is made.
                members = members_of(group, unit.device, options.local_world_size, hosts)
                account.append((len(members.ranks), members.local, members.backend))
        # Replicas add their shards element by element, so they have to shard alike.
        for group in (unit.group, unit.replicas):
            if group is not None:
                accounts[group] += account
    return accounts
