"""Gradients of zeropp.fsdp2: the mean over ranks of those of plain torch, within half a scale of each code.

Two nodes of two ranks where nothing else is said.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.branching_models import apart
from tests.support.fsdp2_models import PLAIN, gradients, plain_gradients, sharded, units, whole
from tests.support.fsdp2_reference import Net, bound, table_of, tensors_of, tokens
from tests.support.rank_pool import run_ranks, some
from zeropp import fsdp2

Named = dict[str, Tensor]
Found = tuple[Named, list[list[Named]], dict[str, list[str]]]
WIDTHS = [(8, 4), (8, 8)]
CODED: dict[str, Any] = {"weights": None, "gradient_bits": (8, 4)}


def first_step(
    settings: dict[str, Any], reshard: bool | int, dtype: str, reduce: str, divide: float | None = None
) -> Found:
    """What SGD takes away in the first step, every rank's own gradient in plain torch, and the units."""
    model = sharded(reshard, dtype, reduce)
    cut = units(model)
    fsdp2.apply(model, **settings)
    if divide is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(divide)
    before = {name: whole(p).clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(tokens(0, dist.get_rank())).backward()
    optimizer.step()
    taken = {name: (before[name] - whole(p)).detach() for name, p in model.named_parameters() if p.requires_grad}
    return taken, [plain_gradients(0, dtype)], cut


def first_steps(*args: Any) -> list[Found]:
    """:func:`first_step` with each of WIDTHS."""
    return [first_step({"weights": None, "gradient_bits": bits}, *args) for bits in WIDTHS]


def check_mean(found: Found, local: int, bits: tuple[int, int], *, rounding: float = 0.0, factor: float = 1.0) -> None:
    """Each parameter's gradient is ``factor`` times the mean, as near as its codes are.

    With 4 bits a parameter that shares groups with larger neighbours can be rounded to zero there, so that its slope
    is looked at with 8 bits only, and with 4 that of the unit.

    Args:
        found: gradient, every rank's own for each reduction that was added up, units.
        local: ranks per node.
        bits: inside a node, between nodes.
        rounding: relative, of what FSDP2 does in 16 bits.
        factor: on the mean.
    """
    taken, rounds, cut = found
    for names in cut.values():
        trained = [name for name in names if name in taken]
        if not trained:
            continue
        shapes = [taken[name].shape for name in trained]
        limits = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        means = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        for plain in rounds:
            tables = [table_of([each[name] for name in trained], len(plain)) for each in plain]
            for one, more in zip(limits, tensors_of(bound(tables, local, bits), shapes), strict=True):
                one += more * factor
            for one, name in zip(means, trained, strict=True):
                one += torch.stack([each[name] for each in plain]).double().mean(0) * factor
        for name, limit, mean in zip(trained, limits, means, strict=True):
            error = (taken[name].double() - mean).abs()
            slack = (mean.abs() + limit) * rounding + 2e-6  # float32 weights lose that much
            assert bool((error <= limit + slack).all()), f"{name}: {float((error - limit).max())} above the bound"
            if bits == (8, 8):
                slope = float((taken[name] * mean).sum() / mean.square().sum())
                assert abs(slope - 1) < 0.03, f"{name} is off by a factor {slope}"
        expected = torch.cat([mean.flatten() for mean in means])
        given = torch.cat([taken[name].flatten() for name in trained])
        slope = float((given * expected).sum() / expected.square().sum())
        assert abs(slope - 1) < (0.1 if 4 in bits else 0.01), f"{names} are off by a factor {slope}"


@pytest.mark.every(8)
@pytest.mark.parametrize("dtype, reduce", [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp16")])
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_gradients_are_the_mean_within_the_codecs_bound(reshard: bool | int, dtype: str, reduce: str) -> None:
    rounding = {"fp32": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-9}[reduce]
    for results in run_ranks(4, first_steps, reshard, dtype, reduce, local_world_size=2):
        for bits, found in zip(WIDTHS, results, strict=True):
            check_mean(found, 2, bits, rounding=rounding)


@pytest.mark.campaign
@pytest.mark.parametrize("local", [4, 1])
def test_gradients_of_one_hop_are_the_mean(local: int) -> None:
    for results in run_ranks(4, first_steps, True, "fp32", "fp32", local_world_size=local):
        for bits, found in zip(WIDTHS, results, strict=True):
            check_mean(found, local, bits)


def test_the_divide_factor_replaces_the_mean() -> None:
    for found in run_ranks(4, first_step, CODED, True, "fp32", "fp32", 3.0, local_world_size=2):
        check_mean(found, 2, (8, 4), factor=4 / 3)


@pytest.mark.parametrize("settings", some([{"hadamard": True, "feedback": "both"}, {"hadamard": True}, {}], 3), ids=str)
def test_gradients_with_everything_quantized(settings: dict[str, Any]) -> None:
    """Backward sees other weights then: the error is small and the factor 1, but for a vector in crowded groups."""
    for taken, (plain,), _ in run_ranks(4, first_step, settings, 2, "fp32", "fp32", local_world_size=2):
        for name, value in taken.items():
            mean = torch.stack([each[name] for each in plain]).mean(0)
            error, slope = float((value - mean).norm() / mean.norm()), float((value * mean).sum() / mean.square().sum())
            if name == "head.bias":  # neighbours in its groups are twenty times as large, and most of it is rounded off
                assert error < 0.9 and slope > 0.2, f"{name}: {error}, factor {slope}"
            else:
                assert error < 0.3 and abs(slope - 1) < 0.1, f"{name}: {error}, factor {slope}"


class Idle(Net):
    """The last block and a vector have no gradient."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.head(self.norm(x + self.blocks[0](x))).float().square().mean()


def idle() -> Found:
    model = sharded(cls=Idle)
    cut = units(model)
    fsdp2.apply(model, **CODED)
    model(tokens(0, dist.get_rank())).backward()
    return gradients(model), [plain_gradients(0, model=Idle())], cut


def test_parameters_without_gradient_have_none() -> None:
    for found in run_ranks(4, idle, local_world_size=2):
        assert {"scale", "fixed.weight", "blocks.1.0.weight"}.isdisjoint(found[0]) and "norm.weight" in found[0]
        check_mean(found, 2, (8, 4))


def as_torchtitan() -> tuple[Found, list[str]]:
    """Its calls of fully_shard, on the meta device, one of them for two modules; no mean, but a sum."""
    with torch.device("meta"):
        model = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (model.table, *model.blocks, [model.norm, model.head], model):
        fully_shard(part, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    cut = units(model)
    adapter = fsdp2.apply(model, **CODED)
    model.to_empty(device="cpu")
    values = Net().state_dict()
    for name, parameter in model.named_parameters():
        placed = distribute_tensor(values[name], parameter.device_mesh, parameter.placements)
        parameter.to_local().detach().copy_(placed.to_local())
    model(tokens(0, dist.get_rank())).backward()
    return (gradients(model), [plain_gradients(0, "bf16")], cut), sorted({row.unit for row in adapter.ledger.rows})


def test_as_torchtitan_does_it() -> None:
    for found, rows in run_ranks(4, as_torchtitan, local_world_size=2):
        check_mean(found, 2, (8, 4), factor=4.0)
        assert rows == ["(root)", "blocks.0", "blocks.1", "norm, head", "table"]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(16, 52), nn.Linear(52, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def beside_tensor_parallel() -> list[tuple[float, float]]:
    """Largest difference from FSDP2 as it is, relative to the largest gradient: plain hops, and codes."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for settings in (None, PLAIN, {}):
        model = parallelize_module(Pair(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        if settings is not None:
            fsdp2.apply(model, **settings)
        model(torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank() // 2))).backward()
        found.append(gradients(model))
    usual = found[0]
    return [max(apart(f[n], usual[n]) / float(usual[n].abs().max()) for n in usual) for f in found[1:]]


def test_beside_tensor_parallel() -> None:
    """Each rank of a node belongs to an FSDP2 group of its own, which has one rank on every node."""
    for plain, coded in run_ranks(4, beside_tensor_parallel, local_world_size=2):
        assert plain < 1e-6 < coded < 0.3


def accumulated(sync: bool) -> Found:
    """Two micro-batches, each reduced by itself, or both together."""
    model = sharded()
    cut = units(model)
    fsdp2.apply(model, **CODED)
    for micro in range(2):
        model.set_requires_gradient_sync(sync or micro == 1)
        model(tokens(micro, dist.get_rank())).backward()
    rounds = [plain_gradients(0), plain_gradients(1)]
    if not sync:
        rounds = [[{name: one[name] + two[name] for name in one} for one, two in zip(*rounds, strict=True)]]
    return gradients(model), rounds, cut


@pytest.mark.every(2)
@pytest.mark.parametrize("sync", [True, False])
def test_accumulated_gradients_are_the_sum_of_means(sync: bool) -> None:
    for found in run_ranks(4, accumulated, sync, local_world_size=2):
        check_mean(found, 2, (8, 4))
