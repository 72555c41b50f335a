"""FSDP2's parameter groups below a model, and checks of what codecs can carry.

All names that torch keeps private and that the adapter leans on are used here. They are those of torch 2.11 to 2.13.
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
"""Numbers of some parameters of a unit, in FSDP2's order."""

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# Units are keys of dicts, by identity.
@dataclass(frozen=True, eq=False)
class ShardedUnit:
    """Parameters that FSDP2 shards, gathers and reduces together: those of one ``fully_shard`` call on one mesh.

    Attributes:
        name: of the modules it was called on; "(root)" for the model itself. Where ``shard_placement_fn`` puts
            parameters of one call on several meshes, with a number.
        param_group: FSDP2's object for them, which holds its communication.
        group: ranks that the parameters are sharded over.
        replicas: ranks that have the same shards (HSDP), over which FSDP2 sums by itself; None without.
        secondary: smaller group that they are sharded over between forward and backward, if
            ``reshard_after_forward`` is a number; else None.
        device: where gathered parameters live.
        parameters: their names, in FSDP2's order.
        sizes: elements of one rank's shard of each, with FSDP2's padding.
        vectors: for each, whether it has one dimension, other than those of size 1, as a bias or the weight of a norm.
        gathered: dtype that each parameter is gathered in, by name.
        extended: parameters with an all-gather extension of their own.
        reduced: dtypes in which gradients travel; none if nothing is trained.
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
        """Account of what must be the same on every rank."""
        # Sizes and names: groups and modules of different ranks cannot be compared.
        smaller = None if self.secondary is None else self.secondary.size()
        dtypes = tuple((name, str(dtype)) for name, dtype in self.gathered.items())
        return (self.name, smaller, dtypes, sorted(map(str, self.reduced)), self.sizes, self.trained())

    def trained(self) -> Parts:
        """The parameters that require a gradient now."""
        params = enumerate(self.param_group.fsdp_params)
        return tuple(at for at, param in params if param.sharded_param.requires_grad)

    def install(self, gather: AllGather, reduce: ReduceScatter, finish: Callable[[Tensor], None]) -> None:
        """Use these from now on; ``finish`` after each reduction, if nothing else comes between."""
        # What FSDP2's setters set. They refuse a module whose parameters are on several meshes, since they have no
        # argument for the mesh.
        self.param_group._all_gather_comm = gather
        self.param_group._reduce_scatter_comm = reduce
        # With replicas the hook comes after their all-reduce, which needs the finished sums.
        if self.replicas is None and self.param_group._all_reduce_hook is None:
            self.param_group._all_reduce_hook = finish

    def finishes(self, finish: Callable[[Tensor], None]) -> bool:
        """Tell whether FSDP2 calls ``finish`` after each reduction."""
        # Not by identity: Python makes a new bound method at each access.
        return bool(self.param_group._all_reduce_hook == finish)

    def watch(self, note: Callable[[Parts], None]) -> None:
        """Have ``note`` told, before each reduction, which parameters' gradients are in FSDP2's buffer."""
        post_backward = self.param_group.post_backward

        def noted(*args: object) -> None:
            note(_with_gradient(self.param_group))
            post_backward(*args)

        # FSDP2 hands over a buffer, and says of which parameters nowhere else.
        self.param_group.post_backward = noted

    def restore(self, gather: AllGather, reduce: ReduceScatter, finish: Callable[[Tensor], None]) -> None:
        """Use FSDP2's own again in place of what :meth:`install` and :meth:`watch` have set, and of nothing else."""
        group = self.param_group
        if self.finishes(finish):
            group._all_reduce_hook = None
        # The user may have set others since, which stay.
        if group._all_gather_comm is gather:
            group._all_gather_comm = DefaultAllGather()
        if group._reduce_scatter_comm is reduce:
            group._reduce_scatter_comm = DefaultReduceScatter()
        # The instance's attribute goes, and the method of its class is there again.
        group.__dict__.pop("post_backward", None)

    def check_weights(self) -> None:
        """Refuse what int8 cannot carry.

        Raises:
            ValueError: extensions, several dtypes in one buffer, or dtypes that are not floating point.
        """
        if self.extended:
            raise ValueError(
                f"{self.name}: {list(self.extended)} bring their own all-gather extension (fsdp_pre_all_gather), as "
                "float8 weights do: what they send is encoded already. Expected plain parameters; switch that "
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
        """Refuse gradients that are not floating point.

        Raises:
            ValueError: with the dtype.
        """
        if not self.reduced <= set(_FLOATS):
            raise ValueError(
                f"{self.name}: gradients are reduced in {sorted(map(str, self.reduced))}; expected float64, float32, "
                "bfloat16 or float16. Give MixedPrecisionPolicy(reduce_dtype=...)"
            )


def factor_of(op: ReduceOp, world: int) -> float:
    """The factor by which FSDP2 wants the sum over ``world`` ranks to be multiplied.

    FSDP2 divides before and after by itself where it asks for a sum (float16, or
    ``set_force_sum_reduction_for_comms``), and leaves it to the reduction otherwise.

    Raises:
        ValueError: another reduction than a sum, a mean or a scaled sum.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / world
    if op == dist.ReduceOp.PREMUL_SUM:
        # As it would be pickled; torch shows the factor nowhere else.
        return float(cast(Any, op).__getstate__()[1])
    raise ValueError(f"reduction is {op}; expected SUM, AVG or PREMUL_SUM, the ones that FSDP2 asks for")


def find_units(model: nn.Module) -> list[ShardedUnit]:
    """Everything that ``fully_shard`` has sharded below a model, in order of modules.

    Raises:
        TypeError: no module, or none that ``fully_shard`` was called on.
        ValueError: a mesh that only replicates, or communication hooks already there.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module sharded with fully_shard")
    states = _states(model)
    if not states:
        raise TypeError(
            f"no module of this {type(model).__name__} has been sharded; call torch.distributed.fsdp.fully_shard on "
            "its blocks and on itself first"
        )
    # Parameters hash by identity, DTensors included.
    names = {parameter: name for name, parameter in model.named_parameters()}
    units: list[ShardedUnit] = []
    for state, name in states:
        groups = parameter_groups(state)
        for number, group in enumerate(groups, 1):
            several = f" ({number} of {len(groups)})" if len(groups) > 1 else ""
            units.append(_unit(name + several, group, names))
    return units


def sharded_since(model: nn.Module, units: Sequence[ShardedUnit]) -> list[str]:
    """Names of the modules below a model whose parameters ``fully_shard`` has sharded since these units were found."""
    known = {id(unit.param_group) for unit in units}
    return [name for state, name in _states(model) if any(id(group) not in known for group in parameter_groups(state))]


def _states(model: nn.Module) -> list[tuple[Any, str]]:
    """FSDP2's state of each ``fully_shard`` call below a model, with the names of its modules."""
    states: dict[int, Any] = {}
    # One call of fully_shard can be given several modules, which then share one state.
    owners: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            states[id(state)] = state
            owners[id(state)].append(name or "(root)")
    return [(state, ", ".join(owners[key])) for key, state in states.items()]


def parameter_groups(state: Any) -> list[Any]:
    """FSDP2's parameter groups; torch 2.11 has one at most."""
    # A list in later versions, empty where the call found no parameters of its own.
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _with_gradient(group: Any) -> Parts:
    """The parameters whose gradients FSDP2 is about to reduce: its own choice in ``FSDPParamGroup.post_backward``."""
    zeros = getattr(group, "reduce_scatter_unused_params", False)  # from torch 2.13 on
    found = []
    for at, param in enumerate(group.fsdp_params):
        # Missing until the parameters have been gathered once.
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
        # By type and not by isinstance: a class derived from the default is somebody's hook.
        if type(comm) is not default:
            raise ValueError(
                f"{name}: has a {type(comm).__name__} already; expected FSDP2's {default.__name__}. Undo "
                "set_custom_..., set_symm_mem_for_comm or set_allocate_memory_from_process_group_for_comm; what "
                "zeropp.fsdp2.apply returned has remove()"
            )
    # None where parameters stay gathered, the mesh itself where they are sharded again; for a number a mesh of its own,
    # of which only the sharding dimension gathers.
    after = group.post_forward_mesh_info
    secondary = None
    if after is not None and after.shard_process_group.size() != mesh.shard_process_group.size():
        secondary = after.shard_process_group
    # Parameters that are gathered just now are not registered in their sharded form, and have no name.
    params = {names.get(p.sharded_param, f"parameter {at}"): p for at, p in enumerate(group.fsdp_params)}
    trained = [param for param in params.values() if param.sharded_param.requires_grad]
    policy = group.mp_policy
    return ShardedUnit(
        name=name,
        param_group=group,
        group=mesh.shard_process_group,
        # HSDP's info is of both classes.
        replicas=mesh.replicate_process_group if isinstance(mesh, DDPMeshInfo) else None,
        secondary=secondary,
        device=group.device,
        parameters=tuple(params),
        # FSDP2 pads each parameter until all ranks have the same of it.
        sizes=tuple(param.padded_sharded_param_size.numel() for param in params.values()),
        vectors=tuple(max(p.sharded_param.shape, default=1) == p.sharded_param.numel() for p in params.values()),
        gathered={key: _dtype(param, policy.param_dtype) for key, param in params.items()},
        # By the attribute that FSDP2 itself goes by.
        extended=tuple(key for key, p in params.items() if hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather")),
        # Without a dtype of the policy FSDP2 reduces in the one that gradients come in.
        reduced=frozenset(policy.reduce_dtype or _dtype(param, policy.param_dtype) for param in trained),
    )


def _dtype(param: Any, wanted: torch.dtype | None) -> torch.dtype:
    """Dtype in which a parameter is gathered and its gradient computed."""
    own: torch.dtype = param.sharded_param.dtype
    # FSDP2 casts floating parameters only.
    return wanted if wanted is not None and own.is_floating_point else own
