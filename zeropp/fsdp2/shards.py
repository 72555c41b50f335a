"""What FSDP2 has made of a model, and what of it cannot be quantized.

All names that torch keeps private and that the adapter leans on are used here. They are those of torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

__all__ = ["AllGather", "ReduceOp", "ReduceScatter", "ShardedUnit", "factor_of", "find_units"]

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class ShardedUnit:
    """Parameters that one ``fully_shard`` call shards, gathers and reduces together.

    Attributes:
        name: of the modules it was called on; "(root)" for the model itself.
        module: the first of them, which takes the hooks.
        group: ranks that the parameters are sharded over.
        secondary: smaller group that they are sharded over between forward and backward, if
            ``reshard_after_forward`` is a number; else None.
        device: where gathered parameters live.
        gathered: dtype that each parameter is gathered in, by name.
        extended: parameters with an all-gather extension of their own.
        reduced: dtypes in which gradients travel; none if nothing is trained.
        trained_numel: elements of all trained parameters, with FSDP2's padding.
    """

    name: str
    module: FSDPModule
    group: dist.ProcessGroup
    secondary: dist.ProcessGroup | None
    device: torch.device
    gathered: dict[str, torch.dtype]
    extended: tuple[str, ...]
    reduced: frozenset[torch.dtype]
    trained_numel: int

    def describe(self) -> tuple[object, ...]:
        """What must be the same on every rank."""
        # Sizes and names: groups and modules of different ranks cannot be compared.
        smaller = None if self.secondary is None else self.secondary.size()
        dtypes = tuple((name, str(dtype)) for name, dtype in self.gathered.items())
        return (self.name, smaller, dtypes, sorted(map(str, self.reduced)), self.trained_numel)

    def install(self, gather: AllGather, reduce: ReduceScatter, finish: Callable[[Tensor], None]) -> None:
        """Use these from now on; ``finish`` after each reduction, if the user has no all-reduce hook there."""
        # Sets it for the state, which all modules of one fully_shard call share; the first of them is enough.
        self.module.set_custom_all_gather(gather)
        self.module.set_custom_reduce_scatter(reduce)
        if self._all_reduce_hook() is None:
            self.module.set_all_reduce_hook(finish)

    def finishes(self, finish: Callable[[Tensor], None]) -> bool:
        """Whether FSDP2 calls this after each reduction."""
        return self._all_reduce_hook() == finish

    def restore(self, finish: Callable[[Tensor], None]) -> None:
        """Use FSDP2's own again; ``finish`` as given before."""
        if self.finishes(finish):
            # FSDP2 takes None for no hook; its annotation does not say so.
            self.module.set_all_reduce_hook(cast(Any, None))
        # There is no public way back; _unit has made sure that these are what was there.
        self.module.set_custom_all_gather(DefaultAllGather())
        self.module.set_custom_reduce_scatter(DefaultReduceScatter())

    def _all_reduce_hook(self) -> object:
        (group,) = _groups(self.module._get_fsdp_state())
        return group._all_reduce_hook

    def check_weights(self) -> None:
        """Refuse what int8 cannot carry.

        Raises:
            ValueError: extensions, several dtypes in one buffer, or dtypes that are not floating point.
        """
        if self.extended:
            raise ValueError(
                f"{self.name}: {list(self.extended)} bring their own all-gather extension (fsdp_pre_all_gather), as "
                "float8 weights do, and send bytes that are no numbers to round; expected plain parameters. Switch "
                "that extension off, or give weights=None"
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
    """What FSDP2 wants the sum over ``world`` ranks to be multiplied by.

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
        ValueError: a mesh that also replicates, several meshes below one call, or communication hooks already there.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module sharded with fully_shard")
    states: dict[int, Any] = {}
    # One call of fully_shard can be given several modules, which then share one state.
    owners: dict[int, list[str]] = defaultdict(list)
    modules: dict[int, FSDPModule] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            states[id(state)] = state
            owners[id(state)].append(name or "(root)")
            # Modules come in the model's order, so this is the first.
            modules.setdefault(id(state), module)
    if not states:
        raise TypeError(
            f"no module of this {type(model).__name__} has been sharded; call torch.distributed.fsdp.fully_shard on "
            "its blocks and on itself first"
        )
    # Parameters hash by identity, DTensors included.
    names = {parameter: name for name, parameter in model.named_parameters()}
    units: list[ShardedUnit] = []
    for key, state in states.items():
        unit, groups = ", ".join(owners[key]), _groups(state)
        # FSDP2's setters raise for these, but only after other units would have been changed.
        if len(groups) > 1:
            raise ValueError(
                f"{unit}: shard_placement_fn puts its parameters on {len(groups)} meshes, and FSDP2 then takes no "
                "custom communication; expected one mesh for each call of fully_shard"
            )
        units += [_unit(unit, modules[key], group, names) for group in groups]
    return units


def _groups(state: Any) -> list[Any]:
    """FSDP2's parameter groups; torch 2.11 has one at most."""
    # A list in later versions, empty where the call found no parameters of its own.
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _unit(name: str, module: FSDPModule, group: Any, names: dict[nn.Parameter, str]) -> ShardedUnit:
    mesh = group.mesh_info
    # HSDP's info is of both classes; one that only replicates is no FSDPMeshInfo.
    if isinstance(mesh, DDPMeshInfo) or not isinstance(mesh, FSDPMeshInfo):
        raise ValueError(
            f"{name}: its mesh {mesh.mesh} replicates (HSDP), and FSDP2 sums over replicas with an all-reduce of its "
            "own, which takes no hook; the link between nodes would carry every gradient unquantized. Expected a "
            "mesh of one dimension. fully_shard(..., mesh=<all ranks>, reshard_after_forward=<ranks per node>) "
            "gathers inside the node in backward, as HSDP does"
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
        module=module,
        group=mesh.shard_process_group,
        secondary=secondary,
        device=group.device,
        gathered={key: _dtype(param, policy.param_dtype) for key, param in params.items()},
        # By the attribute that FSDP2 itself goes by.
        extended=tuple(key for key, p in params.items() if hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather")),
        # Without a dtype of the policy FSDP2 reduces in the one that gradients come in.
        reduced=frozenset(policy.reduce_dtype or _dtype(param, policy.param_dtype) for param in trained),
        # FSDP2 pads each parameter until all ranks have the same of it.
        trained_numel=sum(param.padded_sharded_param_size.numel() for param in trained) * mesh.shard_mesh_size,
    )


def _dtype(param: Any, wanted: torch.dtype | None) -> torch.dtype:
    """Dtype in which a parameter is gathered and its gradient computed."""
    own: torch.dtype = param.sharded_param.dtype
    # FSDP2 casts floating parameters only.
    return wanted if wanted is not None and own.is_floating_point else own
