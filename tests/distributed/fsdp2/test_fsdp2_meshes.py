"""zeropp.fsdp2 on meshes of two dimensions (HSDP), and for modules whose parameters are on several meshes.

All tests have four ranks. The mean over all ranks is compared with that of unchanged FSDP2 or of plain torch.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from tests.support.branching_models import apart
from tests.support.fsdp2_models import DTYPES, PLAIN, gradients, hooks, plain_gradients
from tests.support.fsdp2_reference import Net, tokens
from tests.support.rank_pool import run_ranks, some, spread
from zeropp import fsdp2
from zeropp.fsdp2 import routes
from zeropp.fsdp2.shards import parameter_groups


def hybrid(replicas: int, dtype: str = "fp32", reshard: bool | int = True) -> Any:
    """Return an HSDP model: ``replicas`` copies, each sharded over the ranks of one row of the mesh."""
    mesh = dist.init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicas", "shards"))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
    model: Any = Net()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return model


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference of a parameter's gradient, relative to the gradient's largest element."""
    assert found.keys() == wanted.keys()
    return max(apart(found[name], wanted[name]) / float(wanted[name].abs().max()) for name in wanted)


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all gradients together, relative to the norm of ``wanted``."""
    both = [torch.cat([each[name].flatten() for name in wanted]) for each in (found, wanted)]
    return float((both[0] - both[1]).norm() / both[1].norm())


def step(model: Any, how: str) -> dict[str, Tensor]:
    """Run one backward, or two with accumulation, and return the gradients.

    Args:
        model: model sharded with FSDP2.
        how: use of FSDP2's settings, one of the cases of the test below.
    """
    rank, modules = dist.get_rank(), [each for each in model.modules() if isinstance(each, FSDPModule)]
    if how == "a divide factor":
        for module in modules:
            module.set_gradient_divide_factor(3.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    if how == "accumulated":
        # The first gradient is reduced within a row of the mesh only. The next backward adds the second gradient and
        # reduces the sum over the replicas.
        model.set_requires_all_reduce(False)
        model(tokens(1, rank)).backward()
        model.set_requires_all_reduce(True)
    if how == "unsynchronised":
        model.set_requires_gradient_sync(False)
        model(tokens(1, rank)).backward()
        model.set_requires_gradient_sync(True)
    sums: list[float] = []
    if how == "a hook":
        for module in modules:
            module.set_all_reduce_hook(lambda output: sums.append(float(output.sum())))
    model(tokens(0, rank)).backward()
    assert len(sums) == (len(modules) if how == "a hook" else 0)
    return gradients(model)


def replicated(replicas: int, how: str, dtype: str) -> tuple[float, float, float]:
    """Return three distances from the gradients of unchanged FSDP2.

    They are the distances with plain hops, with codes, and after ``remove()``.
    """
    wanted = step(hybrid(replicas, dtype), how)
    model = hybrid(replicas, dtype)
    fsdp2.apply(model, **PLAIN)
    plain = worst(step(model, how), wanted)
    model = hybrid(replicas, dtype)
    adapter = fsdp2.apply(model, gradient_bits=(8, 8))
    coded = distance(step(model, how), wanted)
    assert {row.ranks for row in adapter.ledger.rows} == {2}
    adapter.remove()
    model.zero_grad()
    return plain, coded, worst(step(model, how), wanted)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("how", "dtype"),
    spread(["a divide factor", "once", "accumulated", "unsynchronised", "a hook"], ["fp32", "bf16"], 2),
)
@pytest.mark.parametrize("replicas", some([2, 1], 2))
def test_replicas_have_the_mean_over_all_ranks(replicas: int, how: str, dtype: str) -> None:
    """Plain hops differ only in the order of sums. 8-bit codes differ by at most 0.03 of the norm."""
    for plain, coded, removed in run_ranks(4, replicated, replicas, how, dtype, local_world_size=2):
        assert plain < 2e-6 and 1e-4 < coded < 0.03 and removed == 0.0


def with_everything() -> tuple[float, list[str]]:
    """Run one backward with all quantizations on one replica, whose shards lie across nodes.

    With a reshard size of 2, weights are kept inside the node after forward.

    Returns:
        Largest deviation from 1 of a slope ``<gradient, mean> / <mean, mean>`` over all matrices, with the mean of
        plain torch, and the kind and codec of each ledger row.
    """
    model = hybrid(1, reshard=2)
    adapter = fsdp2.apply(model, secondary="codes", hadamard=True, feedback="both")
    model(tokens(0, dist.get_rank())).backward()
    found, plain = gradients(model), plain_gradients(0)
    means = {name: torch.stack([each[name] for each in plain]).mean(0) for name in found}
    products = [
        float((found[name] * mean).sum() / mean.square().sum()) for name, mean in means.items() if mean.ndim > 1
    ]
    return max(abs(slope - 1) for slope in products), sorted({f"{row.kind} {row.codec}" for row in adapter.ledger.rows})


def test_one_replica_with_everything_quantized() -> None:
    for slope, sent in run_ranks(4, with_everything, local_world_size=2):
        assert slope < 0.1
        reduce = {"reduce feedback(hadamard(int8)+fp32)", "reduce feedback(hadamard(int4)+bf16)"}
        assert set(sent) == {"gather int8", "second int8", *reduce}


class Routed(nn.Module):
    """Two experts, stored in one linear layer and weighted by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.router = nn.Linear(24, 2)
        self.experts = nn.Linear(24, 48)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + (self.experts(y).view(-1, 2, 24) * self.router(y).softmax(-1)[..., None]).sum(1)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Routed() for _ in range(2))
        self.head = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def of_several_meshes(how: str) -> Any:
    """Return a model whose experts are on another mesh than all other parameters.

    torchtitan shards experts this way with expert parallelism.

    Args:
        how: mesh of the experts: "replicated experts" (HSDP), "across nodes" or "inside nodes".
    """
    whole = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
    dense = _fsdp_common.FSDPMeshInfo(whole, shard_mesh_dim=0)
    if how == "replicated experts":
        sparse = _fsdp_common.HSDPMeshInfo(grid, shard_mesh_dim=1, replicate_mesh_dim=0)
    else:
        sparse = _fsdp_common.FSDPMeshInfo(grid["replicas" if how == "across nodes" else "experts"], shard_mesh_dim=0)
    model = Experts()
    for block in model.blocks:
        experts = set(block.experts.parameters())

        def place(parameter: nn.Parameter, experts: set[nn.Parameter] = experts) -> Any:
            mesh = sparse if parameter in experts else dense
            return _fsdp_common.ShardPlacementResult(placement=Shard(0), mesh_info=mesh)

        fully_shard(block, mesh=whole, shard_placement_fn=place)
    return fully_shard(model, mesh=whole)


def expert_gradients(how: str, settings: dict[str, Any] | None) -> tuple[dict[str, Tensor], list[tuple[str, str, int]]]:
    """Return the gradients of two micro-batches, and (unit, kind, ranks) of each ledger row.

    Args:
        how: mesh of the experts, see :func:`of_several_meshes`.
        settings: arguments of ``fsdp2.apply``; None for unchanged FSDP2.
    """
    model = of_several_meshes(how)
    adapter = fsdp2.apply(model, **settings) if settings is not None else None
    for part in range(2):
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(dist.get_rank() + 10 * part))
        model(x).backward()
    found = gradients(model)
    if adapter is None:
        return found, []
    rows = [(row.unit, row.kind, row.ranks) for row in adapter.ledger.rows]
    adapter.remove()
    groups = parameter_groups(model.blocks[0]._get_fsdp_state())
    assert all(type(group._all_gather_comm).__name__ == "DefaultAllGather" for group in groups)
    return found, sorted(set(rows))


def experts(how: str) -> tuple[float, float, list[tuple[str, str, int]]]:
    """Return the distances of plain hops and of codes from unchanged FSDP2, and the ledger rows with codes."""
    wanted, _ = expert_gradients(how, None)
    plain, _ = expert_gradients(how, PLAIN)
    coded, rows = expert_gradients(how, {"gradient_bits": (8, 8), "feedback": "both"})
    return worst(plain, wanted), distance(coded, wanted), rows


@pytest.mark.skipif(not hasattr(_fsdp_common, "ShardPlacementResult"), reason="torch before 2.13 has one mesh a call")
@pytest.mark.parametrize("how", some(["replicated experts", "inside nodes", "across nodes"], 3))
def test_each_mesh_of_a_module_has_its_own_communication(how: str) -> None:
    for plain, coded, rows in run_ranks(4, experts, how, local_world_size=2):
        assert plain < 2e-6 and 1e-4 < coded < 0.03
        assert {unit for unit, *_ in rows} == {"(root)", *(f"blocks.{i} ({j} of 2)" for i in (0, 1) for j in (1, 2))}


def refused_in_one_row() -> str:
    """Return the error of an invalid setting on rank 3. The ranks of the other row must raise it, too."""
    with pytest.raises((ValueError, RuntimeError)) as raised:
        fsdp2.apply(hybrid(2), beta=2.0 if dist.get_rank() == 3 else 0.5, feedback="cross")
    return str(raised.value)


def other_bits_in_one_row() -> str:
    """Return the error if settings are equal within a row of the mesh, but differ between rows."""
    with pytest.raises((ValueError, RuntimeError)) as raised:
        fsdp2.apply(hybrid(2), gradient_bits=(8, 4 if dist.get_rank() < 2 else 8))
    return str(raised.value)


def short_of_memory_in_one_row() -> str:
    """Return the error if rank 3 runs out of memory while hooks are created. No hook may be installed."""
    made = routes.ReduceComm

    def failing(*args: Any) -> Any:
        if dist.get_rank() == 3:
            raise MemoryError("no room for this one")
        return made(*args)

    model = hybrid(2)
    with mock.patch.object(routes, "ReduceComm", failing), pytest.raises((MemoryError, RuntimeError)) as raised:
        fsdp2.apply(model, feedback="cross")
    assert type(hooks(model)[0]).__name__ == "DefaultAllGather"
    return str(raised.value)


def test_a_refusal_reaches_the_ranks_of_every_replica() -> None:
    """No process group contains all ranks, so an error must pass from group to group."""
    for said in run_ranks(4, refused_in_one_row, local_world_size=2):
        assert "beta is 2.0" in said
    for said in run_ranks(4, other_bits_in_one_row, local_world_size=2):
        assert "disagree" in said
    for said in run_ranks(4, short_of_memory_in_one_row, local_world_size=2):
        assert "no room for this one" in said
