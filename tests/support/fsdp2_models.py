"""FSDP2 models for the tests of zeropp.fsdp2, and the gradients that plain torch computes for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.support.fsdp2_reference import Net, tokens
from zeropp.fsdp2.shards import parameter_groups

PLAIN: dict[str, Any] = {"weights": None, "gradient_bits": None}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def sharded(reshard: bool | int = True, dtype: str = "fp32", reduce: str = "fp32", cls: Callable = Net) -> Any:
    """Return a model with FSDP2 applied to each block and to the root.

    Args:
        reshard: FSDP2's ``reshard_after_forward``.
        dtype: compute dtype, a key of ``DTYPES``.
        reduce: dtype of gradient reductions, a key of ``DTYPES``.
        cls: class of the model; the model has an attribute ``blocks``.
    """
    model = cls()
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=DTYPES[reduce])
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    return fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)


def units(model: nn.Module) -> dict[str, list[str]]:
    """Return the parameter names of each FSDP2 unit, in the order of FSDP2's flat buffer."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[int, tuple[str, list[str]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            (group,) = parameter_groups(module._get_fsdp_state())
            found.setdefault(id(group), (name or "(root)", [names[each.sharded_param] for each in group.fsdp_params]))
    return dict(found.values())


def hooks(module: Any) -> tuple[Any, Any, dist.ProcessGroup]:
    """Return the gather hook, the reduce hook and the process group of an FSDP2 module.

    If the module's parameters are on several meshes, the result is that of the first mesh.
    """
    group, *_ = parameter_groups(module._get_fsdp_state())
    ranks = getattr(group.mesh_info, "shard_process_group", dist.group.WORLD)
    return group._all_gather_comm, group._reduce_scatter_comm, ranks


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_gradients(step: int, dtype: str = "fp32", model: nn.Module | None = None) -> list[dict[str, Tensor]]:
    """Return each rank's own gradients, computed in one process with plain torch."""
    found = []
    for rank in range(dist.get_world_size()):
        own = copy.deepcopy(model or Net()).to(DTYPES[dtype])
        own(tokens(step, rank)).backward()
        wide = torch.promote_types(DTYPES[dtype], torch.float32)
        found.append({name: p.grad.to(wide) for name, p in own.named_parameters() if p.grad is not None})
    return found


def buffers(size: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the gradient table [ranks, size] of every rank, the same on all ranks.

    Row r is the part that rank r receives. Each row has its own magnitude, so that a row sent to a wrong rank shows.
    """
    world, draw = dist.get_world_size(), torch.Generator().manual_seed(size)
    magnitude = torch.arange(1, world + 1)[:, None]
    return [(torch.randn(world, size, generator=draw) * magnitude).to(dtype) for _ in range(world)]
