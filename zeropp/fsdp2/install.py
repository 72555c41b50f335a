"""Installation of quantized communication on a model that FSDP2 has sharded: checks, process groups, hooks."""

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
    """The communication that :func:`apply` installed on a model.

    ``torch.distributed.checkpoint`` accepts an adapter like an optimizer: ``dcp.save({"adapter": adapter, ...})``.

    Attributes:
        ledger: bytes that this rank has sent, by unit, kind and hop. The kinds are "gather" for weights, "second" for
            weights that backward gathers from a smaller group (``reshard_after_forward`` as a number), and "reduce" for
            gradients. A hop is named by two levels, such as "8->2", before and after the hop: at level n a rank has
            1 / n of the buffer.
    """

    def __init__(self, ledger: Ledger, comms: _Comms, routes: Sequence[Routes]) -> None:
        self.ledger = ledger
        self._comms = comms
        self._routes = routes
        self._removed = False
        # Errors differ between ranks, and a checkpoint stores one tensor per name, so names contain the rank.
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
        """Treat all stored quantization errors as zero from now on; LoCo does this every few hundred steps."""
        for feedback in self._feedbacks().values():
            feedback.fresh = True

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of this rank's quantization errors, uint8, by unit, hop, codec, parameters and rank."""
        return {name: feedback.saved() for name, feedback in self._feedbacks().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore quantization errors from :meth:`state_dict`, saved by the same rank with the same model and settings.

        Args:
            state: error tensors by name.

        Raises:
            ValueError: the names or sizes differ from those of :meth:`state_dict`.
        """
        # Parameters may have been frozen or unfrozen since the last backward, and errors exist for trained parameters
        # only.
        for unit, (_, reduce) in self._comms.items():
            reduce.follow(unit.trained())
        own = {name: feedback.state for name, feedback in self._feedbacks().items()}
        # Compare all names and sizes before copying, so that an error leaves the old state unchanged.
        given, expected = ({name: each.numel() for name, each in some.items()} for some in (state, own))
        if given != expected:
            missing, other = (sorted(one.items() - two.items()) for one, two in ((expected, given), (given, expected)))
            raise ValueError(
                f"the state has no errors for {missing[:3]}, and has {other[:3]} (name, bytes; at most three of each); "
                f"expected those of {len(own)} names that state_dict() gives: the same model, trained parameters, "
                "ranks and settings. Without a loaded state, errors start at zero, which costs one step's rounding"
            )
        for name, feedback in self._feedbacks().items():
            feedback.state.copy_(state[name])
            # A reset of the error feedback that was requested before the load must not discard the loaded errors.
            feedback.fresh = False

    def remove(self) -> None:
        """Restore FSDP2's own communication, and destroy the process groups of :func:`apply`. Collective.

        Hooks that the user has set after :func:`apply` stay. A second call does nothing.
        """
        if self._removed:
            return  # a later apply() may have installed hooks of its own, which must stay
        self._removed = True
        # Remove the hooks first, so that no hook can use a destroyed group.
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
    """Install quantized all-gathers and reductions on a model that is sharded with ``fully_shard``.

    Collective: every rank of the model's mesh calls it after all calls of ``fully_shard`` and before the first forward.
    Weights are encoded once, by their owner, and decoded into FSDP2's buffer. All ranks, the owner included, compute
    with the decoded values. Gradients are summed in float32, inside the node and then between nodes. Sharded parameters
    and gradients stay float32 or bfloat16 DTensors. docs/fsdp2.md has the details.

    Args:
        model: model with ``fully_shard`` called on it, on modules below it, or both.
        weights: "int8", or None for plain values.
        secondary: encoding of the gather in backward if ``reshard_after_forward`` is a number. "values" gathers the
            weights of forward, bit for bit. "codes" sends about half the bytes of 16-bit weights (a quarter of those of
            float32), and rounds these weights again.
        gradient_bits: bits per element (intra-node, inter-node); a single hop uses the second. 4 or 8 for codes, 16 for
            bfloat16, 32 for float32. None for plain values in FSDP2's reduce dtype.
        hadamard: True to rotate each 32 elements of a gradient before they are quantized.
        feedback: hops with error feedback (LoCo, arXiv 2407.04480): "cross" between nodes (or the only hop), "both"
            also inside the node, None for no hop. Memory per rank: 1 byte per element that it sends between nodes; with
            "both", another byte per element of the model.
        beta: factor on the old error; None for 0.8.
        gather_hops: 2 to gather between nodes and then inside them, 1 for one all-gather over all ranks, for backends
            that already send each part once over each link.
        vector_bits: 16 to send gradients of one-dimensional parameters (sizes of 1 do not count) in 16 bits or more.
            None to quantize them, in groups whose scales also serve neighbouring parameters.
        local_world_size: ranks per node; None to read LOCAL_WORLD_SIZE, or else to take each host as a node.
        hang_timeout: seconds after which a collective on a process group of this call is an error.

    Returns:
        The adapter, with a ledger of sent bytes.

    Raises:
        TypeError: the model is not sharded with ``fully_shard``; raised on this rank only.
        ValueError: parameters are only replicated, or have hooks already; raised on this rank only. A setting, dtype or
            all-gather extension is not supported, nodes are uneven or unknown, or ranks differ; raised on all ranks,
            with the model unchanged.
        RuntimeError: another rank failed; the message contains its error.

    Source: ZeRO++ (arXiv 2306.10209), sections 3.1 and 3.3.
    """
    options = Options(
        weights, secondary, gradient_bits, hadamard, feedback, beta, gather_hops, vector_bits, local_world_size,
        hang_timeout,
    )  # fmt: skip
    return _install(model, options)


def _install(model: nn.Module, options: Options) -> Adapter:
    """Check the options and the model on all ranks, install the communication, and return the adapter."""
    # Local, because before the units are found there is no group to exchange errors over.
    units = find_units(model)
    ledger = Ledger()
    routes = _make_routes(units, options, ledger, _FirstUse(model, units))
    # One rank may lack memory for error feedback. Then no rank installs anything.
    comms = _all_comms(units, routes, options)
    for unit, (gather, reduce) in comms.items():
        unit.install(gather, reduce, reduce.finish_reduction)
        # Replace FSDP2's ``post_backward`` only where needed, because the replacement runs for each unit in every
        # backward.
        if reduce.needs_parts:
            unit.watch(reduce.note_parts)
    return Adapter(ledger, comms, list(routes.values()))


class _FirstUse:
    """A check at the first gather: raises an error if modules were sharded after :func:`apply`."""

    def __init__(self, model: nn.Module, units: Sequence[ShardedUnit]) -> None:
        # A weak reference, because the model holds the hooks.
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
                f"fully_shard was called on {late} after zeropp.fsdp2.apply, so their communication is not quantized. "
                "Call apply after the last fully_shard. To go on in this process, call remove() of the adapter that "
                "apply returned, call apply again, and call reset_iter_state() of the root (torch 2.13), because FSDP2 "
                "has begun a forward"
            )
        # Check once only: a walk over all modules at each gather would cost host time.
        self._passed = True


def _make_routes(
    units: Sequence[ShardedUnit], options: Options, ledger: Ledger, before: Callable[[], None]
) -> dict[dist.ProcessGroup, Routes]:
    """Return the routes of each mesh, after every rank has passed its checks."""
    # A list in module order instead of a set, because ranks must call collectives in one order.
    meshes = list(dict.fromkeys(unit.group for unit in units))
    hosts: dict[int, str] = {}
    for mesh in meshes:
        # Nodes are checked with the names of hosts. A fake group returns only this rank's name.
        hosts.update(exchange(mesh, whereabouts(), WHAT, options.patience()))
    _agree(units, options, partial(_check_arguments, units, options, hosts), lambda accounts, group: accounts[group])
    # This creates process groups: a rank that fails here leaves the others waiting, so all checks come before.
    return {
        mesh: Routes(mesh, [u for u in units if u.group == mesh], options, ledger, hosts, before) for mesh in meshes
    }


def _all_comms(units: Sequence[ShardedUnit], routes: Mapping[dist.ProcessGroup, Routes], options: Options) -> _Comms:
    """Return the hooks of all units without installing them; raises on all ranks if one rank fails."""
    try:
        return _agree(units, options, lambda: {unit: routes[unit.group].comms(unit) for unit in units})
    # Catch KeyboardInterrupt, too, because no process group may stay open after an interrupt.
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
    """Do local work, and raise an error on all ranks of all groups if the work fails on any rank.

    Args:
        units: units whose groups take part: first the groups that shard them, then the groups of replicas.
        options: settings with the time to wait.
        work: function without communication.
        same: takes the result of ``work`` and a group, and returns the value that all its ranks must have in common.

    Returns:
        The result of ``work``.
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
    # With replicas or several meshes, no group contains all ranks. So an error from one group is raised in the next
    # group, too, and reaches all ranks.
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
    """Check everything that this rank can refuse by itself; return, for each group, the values its ranks must share."""
    # Check here and not at the start of apply: an error before the first exchange would leave the other ranks waiting.
    options.check(dist.get_world_size() if dist.is_initialized() else 1)
    if options.secondary == "codes" and all(unit.secondary is None for unit in units):
        raise ValueError(
            "secondary is 'codes', and backward gathers nothing a second time; give fully_shard "
            "reshard_after_forward=<ranks per node>, or leave secondary out"
        )
    # Ranks compare these values by repr, so they must not contain tensors or groups. Units of other groups may differ:
    # with expert parallelism, each rank has its own experts under its own names.
    accounts: dict[dist.ProcessGroup, list[object]] = defaultdict(lambda: [options])
    for unit in units:
        if options.weights is not None:
            unit.check_weights()
        unit.check_gradients()
        account: list[object] = [unit.describe()]
        for group in (unit.group, unit.secondary):
            if group is not None:
                # Raises for uneven or unknown nodes, which must happen before process groups are created.
                members = members_of(group, unit.device, options.local_world_size, hosts)
                account.append((len(members.ranks), members.local, members.backend))
        # Replicas sum their shards element by element, so they must be sharded equally.
        for group in (unit.group, unit.replicas):
            if group is not None:
                accounts[group] += account
    return accounts
