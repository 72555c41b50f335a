"""Gradients under zeropp.fsdp2 equal the mean over ranks of plain torch's gradients, within the codecs' error bound.

The bound is half a quantization step per message. Unless a test says otherwise, the job has two nodes of two ranks.
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
    """Train one step with SGD at a learning rate of 1, so that the change of the weights is the gradient.

    Args:
        settings: arguments of ``fsdp2.apply``.
        reshard: FSDP2's ``reshard_after_forward``.
        dtype: compute dtype, a key of ``DTYPES``.
        reduce: dtype of FSDP2's gradient reductions, a key of ``DTYPES``.
        divide: FSDP2's gradient divide factor; None for the mean over ranks.

    Returns:
        The gradient of each trained parameter, a list with one element (the gradients of every rank in plain torch),
        and the parameter names of each unit.
    """
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
    """Return the results of :func:`first_step` for each pair of gradient bits in ``WIDTHS``."""
    return [first_step({"weights": None, "gradient_bits": bits}, *args) for bits in WIDTHS]


def check_mean(found: Found, local: int, bits: tuple[int, int], *, rounding: float = 0.0, factor: float = 1.0) -> None:
    """Assert that each parameter's gradient is ``factor`` times the mean, within the codecs' error bound.

    The slope is ``<gradient, mean> / <mean, mean>``; a wrong factor would change it. With 4 bits, a parameter whose
    groups also contain much larger elements may be rounded to zero, so the slope of a single parameter is checked with
    8 bits only. The slope of a whole unit is always checked.

    Args:
        found: the reduced gradients; for each accumulated reduction, the gradients of every rank; the parameter names
            of each unit.
        local: ranks per node.
        bits: bits per element (intra-node, inter-node).
        rounding: relative error of rounding to the compute dtype or to FSDP2's reduce dtype.
        factor: factor on the mean.
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
            # 2e-6: rounding error of a gradient that is computed as a difference of two float32 weights.
            slack = (mean.abs() + limit) * rounding + 2e-6
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
    """Gradients are the mean with 32 and 16 bits for weights and reductions, and with each resharding setting.

    With a reduce dtype of 16 bits, FSDP2's own rounding is added to the bound.
    """
    rounding = {"fp32": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-9}[reduce]
    for results in run_ranks(4, first_steps, reshard, dtype, reduce, local_world_size=2):
        for bits, found in zip(WIDTHS, results, strict=True):
            check_mean(found, 2, bits, rounding=rounding)


@pytest.mark.campaign
@pytest.mark.parametrize("local", [4, 1])
def test_gradients_of_one_hop_are_the_mean(local: int) -> None:
    """With one node, or with one rank per node, there is only one hop."""
    for results in run_ranks(4, first_steps, True, "fp32", "fp32", local_world_size=local):
        for bits, found in zip(WIDTHS, results, strict=True):
            check_mean(found, local, bits)


def test_the_divide_factor_replaces_the_mean() -> None:
    for found in run_ranks(4, first_step, CODED, True, "fp32", "fp32", 3.0, local_world_size=2):
        check_mean(found, 2, (8, 4), factor=4 / 3)


@pytest.mark.parametrize("settings", some([{"hadamard": True, "feedback": "both"}, {"hadamard": True}, {}], 3), ids=str)
def test_gradients_with_everything_quantized(settings: dict[str, Any]) -> None:
    """Quantized weights change the gradients themselves, so the codecs' bound does not apply.

    The relative error is at most 0.3, and the factor is 1 within 0.1.
    """
    for taken, (plain,), _ in run_ranks(4, first_step, settings, 2, "fp32", "fp32", local_world_size=2):
        for name, value in taken.items():
            mean = torch.stack([each[name] for each in plain]).mean(0)
            error, slope = float((value - mean).norm() / mean.norm()), float((value * mean).sum() / mean.square().sum())
            # A loose bound, which holds even if vectors are quantized in groups with elements twenty times as large. By
            # default vectors are sent as bfloat16, and the error is about 0.02.
            if name == "head.bias":
                assert error < 0.9 and slope > 0.2, f"{name}: {error}, factor {slope}"
            else:
                assert error < 0.3 and abs(slope - 1) < 0.1, f"{name}: {error}, factor {slope}"


class Idle(Net):
    """A model whose forward does not use the last block and the vector ``scale``, so that they have no gradient."""

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
    """Run one backward of a model that is sharded with torchtitan's calls.

    The model is created on the meta device, and its weights are set after ``fsdp2.apply``. One call of ``fully_shard``
    has two modules. A divide factor of 1 makes reductions sums and not means.

    Returns:
        Arguments for :func:`check_mean`, and the names of the units in the ledger.
    """
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
    """Gradients are the sum over ranks, 4 times the mean. The unit of two modules has both names."""
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
    """Compare gradients with those of unchanged FSDP2 in a model that also uses tensor parallelism inside nodes.

    Returns:
        Per rank, the largest difference relative to the largest element of the gradient, with plain hops and with
        codes.
    """
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
    """The FSDP2 groups connect nodes: each rank of a node is in another group, with one rank of every node."""
    for plain, coded in run_ranks(4, beside_tensor_parallel, local_world_size=2):
        assert plain < 1e-6 < coded < 0.3


def accumulated(sync: bool) -> Found:
    """Accumulate the gradients of two micro-batches.

    Args:
        sync: True to reduce after each micro-batch; False to add both gradients locally and to reduce the sum.

    Returns:
        Arguments for :func:`check_mean`.
    """
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
