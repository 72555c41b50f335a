"""FSDP2's parameter groups of a model, and checks that the codecs can send their weights and gradients.

All private names of torch that this package depends on are used in this file. They exist in torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

__all__ = [
    "AllGather",
    "Parts",
    "ReduceOp",
    "ReduceScatter",
    "ShardedUnit",
    "factor_of",
    "find_units",
    "parameter_groups",
    "sharded_since",
]

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType

Parts = tuple[int, ...]
"""Indices of some parameters of a unit, in FSDP2's order."""

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# Compared and hashed by identity (eq=False), because units are keys of dicts.
@dataclass(frozen=True, eq=False)
class ShardedUnit:
    """Parameters that FSDP2 shards, gathers and reduces together: those of one ``fully_shard`` call on one mesh.

    Attributes:
        name: names of the modules of the call, "(root)" for the model itself; with a number if ``shard_placement_fn``
            puts parameters of one call on several meshes.
        param_group: FSDP2's parameter group, which stores its communication hooks.
        group: process group that the parameters are sharded over.
        replicas: process group of ranks with equal shards (HSDP), over which FSDP2 itself sums; None without replicas.
        secondary: smaller process group that shards the parameters between forward and backward, if
            ``reshard_after_forward`` is a number; else None.
        device: device of gathered parameters.
        parameters: names of the parameters, in FSDP2's order.
        sizes: elements of one rank's shard of each parameter, with FSDP2's padding.
        vectors: for each parameter, True if at most one dimension has a size other than 1, as in a bias.
        gathered: dtype in which each parameter is gathered, by name.
        extended: names of parameters with an all-gather extension of their own.
        reduced: dtypes in which gradients are reduced; empty if no parameter is trained.
    """

    name: str
    param_group: Any
    group: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    secondary: dist.ProcessGroup | None
    device: torch.device
    parameters: tuple[str, ...]
    sizes: tuple[int, ...]
    vectors: tuple[bool, ...]
    gathered: dict[str, torch.dtype]
    extended: tuple[str, ...]
    reduced: frozenset[torch.dtype]

    def describe(self) -> tuple[object, ...]:
        """Return the properties that must be equal on all ranks."""
        # Use sizes and names, because groups and modules of different ranks cannot be compared.
        smaller = None if self.secondary is None else self.secondary.size()
        dtypes = tuple((name, str(dtype)) for name, dtype in self.gathered.items())
        return (self.name, smaller, dtypes, sorted(map(str, self.reduced)), self.sizes, self.trained())

    def trained(self) -> Parts:
        """Return the indices of the parameters that require a gradient now."""
        params = enumerate(self.param_group.fsdp_params)
        return tuple(at for at, param in params if param.sharded_param.requires_grad)

    def install(self, gather: AllGather, reduce: ReduceScatter, finish: Callable[[Tensor], None]) -> None:
        """Set this unit's hooks; FSDP2 calls ``finish`` after each reduction unless another all-reduce hook exists.

        With replicas (HSDP), ``finish`` is not set.
        """
        # Set the attributes that FSDP2's setters set. The setters take no mesh as an argument, so they refuse a module
        # whose parameters are on several meshes.
        self.param_group._all_gather_comm = gather
        self.param_group._reduce_scatter_comm = reduce
        # With replicas, FSDP2 calls the all-reduce hook after the replicas' all-reduce, which needs the finished sums.
        if self.replicas is None and self.param_group._all_reduce_hook is None:
            self.param_group._all_reduce_hook = finish

    def finishes(self, finish: Callable[[Tensor], None]) -> bool:
        """Return True if FSDP2 calls ``finish`` after each reduction."""
        # Compare by equality: each access to a bound method creates a new object.
        return bool(self.param_group._all_reduce_hook == finish)

    def watch(self, note: Callable[[Parts], None]) -> None:
        """Call ``note`` before each reduction with the indices of the parameters whose gradients it sums."""
        post_backward = self.param_group.post_backward

        def noted(*args: object) -> None:
            note(_with_gradient(self.param_group))
            post_backward(*args)

        # FSDP2 passes a buffer to the reduce hook, but not the parameters, so replace the method that fills the buffer.
        self.param_group.post_backward = noted

    def restore(self, gather: AllGather, reduce: ReduceScatter, finish: Callable[[Tensor], None]) -> None:
        """Restore FSDP2's own hooks, but only in place of those that :meth:`install` and :meth:`watch` set."""
        group = self.param_group
        if self.finishes(finish):
            group._all_reduce_hook = None
        # Hooks that the user has set since then stay.
        if group._all_gather_comm is gather:
            group._all_gather_comm = DefaultAllGather()
        if group._reduce_scatter_comm is reduce:
            group._reduce_scatter_comm = DefaultReduceScatter()
        # Delete the instance's attribute, so that lookups find the class's method again.
        group.__dict__.pop("post_backward", None)

    def check_weights(self) -> None:
        """Raise an error if int8 codes cannot represent the unit's weights.

        Raises:
            ValueError: parameters with all-gather extensions, of several dtypes, or of a dtype that is not floating
                point.
        """
        if self.extended:
            raise ValueError(
                f"{self.name}: {list(self.extended)} bring their own all-gather extension (fsdp_pre_all_gather), as "
                "float8 weights do, so their messages are encoded already. Expected plain parameters; switch that "
                "extension off, or give weights=None"
            )
        by_dtype = defaultdict(list)
        for name, dtype in self.gathered.items():
            by_dtype[dtype].append(name)
        listed = {str(dtype): names for dtype, names in by_dtype.items()}
        if len(by_dtype) > 1:
            raise ValueError(
                f"{self.name}: parameters are gathered together in several dtypes, {listed}, so FSDP2 sends them as "
                "bytes; expected one. Give MixedPrecisionPolicy(param_dtype=...), call fully_shard for each dtype "
                "apart, or give weights=None"
            )
        if not set(by_dtype) <= set(_FLOATS):
            raise ValueError(
                f"{self.name}: parameters are gathered as {listed}; int8 codes stand for float64, float32, bfloat16 "
                "or float16. Leave them out (ignored_params of fully_shard), or give weights=None"
            )

    def check_gradients(self) -> None:
        """Raise an error if the unit's gradients are not floating point.

        Raises:
            ValueError: a dtype that is not floating point; the message names it.
        """
        if not self.reduced <= set(_FLOATS):
            raise ValueError(
                f"{self.name}: gradients are reduced in {sorted(map(str, self.reduced))}; expected float64, float32, "
                "bfloat16 or float16. Give MixedPrecisionPolicy(reduce_dtype=...)"
            )


def factor_of(op: ReduceOp, world: int) -> float:
    """Return the factor by which the sum over ``world`` ranks is multiplied to give FSDP2's reduction.

    If FSDP2 requests a sum (for float16, or after ``set_force_sum_reduction_for_comms``), it divides by itself before
    and after the reduction. Otherwise the reduction has to divide.

    Args:
        op: reduction that FSDP2 requests.
        world: number of ranks.

    Raises:
        ValueError: the reduction is not a sum, a mean or a scaled sum.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / world
    if op == dist.ReduceOp.PREMUL_SUM:
        # torch exposes the factor in the pickled state only.
        return float(cast(Any, op).__getstate__()[1])
    raise ValueError(f"reduction is {op}; expected SUM, AVG or PREMUL_SUM, the ones that FSDP2 asks for")


def find_units(model: nn.Module) -> list[ShardedUnit]:
    """Return all units that ``fully_shard`` created in a model, in module order.

    Raises:
        TypeError: ``model`` is not a module, or ``fully_shard`` was called on none of its modules.
        ValueError: a mesh only replicates parameters, or custom communication hooks exist already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module sharded with fully_shard")
    states = _states(model)
    if not states:
        raise TypeError(
            f"no module of this {type(model).__name__} has been sharded; call torch.distributed.fsdp.fully_shard on "
            "its blocks and on itself first"
        )
    # Parameters, DTensors included, are hashed by identity.
    names = {parameter: name for name, parameter in model.named_parameters()}
    units: list[ShardedUnit] = []
    for state, name in states:
        groups = parameter_groups(state)
        for number, group in enumerate(groups, 1):
            several = f" ({number} of {len(groups)})" if len(groups) > 1 else ""
            units.append(_unit(name + several, group, names))
    return units


def sharded_since(model: nn.Module, units: Sequence[ShardedUnit]) -> list[str]:
    """Return the names of modules that were sharded with ``fully_shard`` after ``units`` were found."""
    known = {id(unit.param_group) for unit in units}
    return [name for state, name in _states(model) if any(id(group) not in known for group in parameter_groups(state))]


def _states(model: nn.Module) -> list[tuple[Any, str]]:
    """Return FSDP2's state of each ``fully_shard`` call in a model, with the names of the call's modules."""
    states: dict[int, Any] = {}
    # One call of fully_shard may have several modules, which share one state.
    owners: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            states[id(state)] = state
            owners[id(state)].append(name or "(root)")
    return [(state, ", ".join(owners[key])) for key, state in states.items()]


def parameter_groups(state: Any) -> list[Any]:
    """Return FSDP2's parameter groups of one ``fully_shard`` call; torch 2.11 has at most one."""
    # torch after 2.11 has a list, which is empty if the call found no parameters.
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _with_gradient(group: Any) -> Parts:
    """Return the indices of the parameters whose gradients FSDP2 is about to reduce.

    The conditions are those of ``FSDPParamGroup.post_backward``.
    """
    zeros = getattr(group, "reduce_scatter_unused_params", False)  # exists since torch 2.13
    found = []
    for at, param in enumerate(group.fsdp_params):
        # Absent until the parameters are gathered for the first time.
        whole = getattr(param, "_unsharded_param", None)
        if whole is None:
            continue
        given = param.unsharded_accumulated_grad is not None or whole.grad is not None
        if given or (zeros and whole.requires_grad):
            found.append(at)
    return tuple(found)


def _unit(name: str, group: Any, names: dict[nn.Parameter, str]) -> ShardedUnit:
    mesh = group.mesh_info
    if not isinstance(mesh, FSDPMeshInfo):
        raise ValueError(
            f"{name}: its mesh {mesh.mesh} replicates parameters and shards none, as replicate() does: no weight is "
            "gathered, and gradients are summed by an all-reduce that takes no hook. Expected parameters that "
            "fully_shard has sharded over a mesh of one dimension, or of two for HSDP"
        )
    for comm, default in (
        (group._all_gather_comm, DefaultAllGather),
        (group._reduce_scatter_comm, DefaultReduceScatter),
    ):
        # Compare the type, because a subclass of the default is a custom hook.
        if type(comm) is not default:
            raise ValueError(
                f"{name}: has a {type(comm).__name__} already; expected FSDP2's {default.__name__}. Undo "
                "set_custom_..., set_symm_mem_for_comm or set_allocate_memory_from_process_group_for_comm, or "
                "call remove() of the adapter that zeropp.fsdp2.apply returned"
            )
    # post_forward_mesh_info is None if parameters stay gathered after forward, and the mesh itself if they are
    # resharded completely. With a number, it is a mesh of two dimensions, of which the sharding dimension gathers.
    after = group.post_forward_mesh_info
    secondary = None
    if after is not None and after.shard_process_group.size() != mesh.shard_process_group.size():
        secondary = after.shard_process_group
    # Parameters that are gathered at the moment are not registered in their sharded form, so ``names`` lacks them.
    params = {names.get(p.sharded_param, f"parameter {at}"): p for at, p in enumerate(group.fsdp_params)}
    trained = [param for param in params.values() if param.sharded_param.requires_grad]
    policy = group.mp_policy
    return ShardedUnit(
        name=name,
        param_group=group,
        group=mesh.shard_process_group,
        # With HSDP, the mesh info is an instance of both classes.
        replicas=mesh.replicate_process_group if isinstance(mesh, DDPMeshInfo) else None,
        secondary=secondary,
        device=group.device,
        parameters=tuple(params),
        # FSDP2 pads each parameter so that all ranks have shards of equal size.
        sizes=tuple(param.padded_sharded_param_size.numel() for param in params.values()),
        vectors=tuple(max(p.sharded_param.shape, default=1) == p.sharded_param.numel() for p in params.values()),
        gathered={key: _dtype(param, policy.param_dtype) for key, param in params.items()},
        # FSDP2 itself detects extensions by this attribute.
        extended=tuple(key for key, p in params.items() if hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather")),
        # Without a reduce_dtype in the policy, FSDP2 reduces in the dtype of the gradients.
        reduced=frozenset(policy.reduce_dtype or _dtype(param, policy.param_dtype) for param in trained),
    )


def _dtype(param: Any, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a parameter is gathered and its gradient is computed."""
    own: torch.dtype = param.sharded_param.dtype
    # FSDP2 casts floating parameters only.
    return wanted if wanted is not None and own.is_floating_point else own
