"""zeropp.fsdp2: FSDP2 with quantized communication, against FSDP2 as it is and against plain torch in one process.

Two nodes of two ranks where nothing else is said. The hooks alone are compared to the bit with a second statement of
what they compute (``fsdp2_oracle``); whole models within half a scale of each code.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeropp_kernels as kernels
from tests.distributed.fsdp2_oracle import Net, bound, half_scales, rounded, table_of, tensors_of, tokens, total
from tests.distributed.harness import run_ranks
from tests.distributed.watch import watch_weights
from zeropp import fsdp2

PLAIN: dict[str, Any] = {"weights": None, "gradient_bits": None}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def sharded(reshard: bool | int = True, dtype: str = "fp32", reduce: str = "fp32", cls: Callable = Net) -> Any:
    """A model with FSDP2 on each block and on itself."""
    model = cls()
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=DTYPES[reduce])
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    return fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)


def units(model: nn.Module) -> dict[str, list[str]]:
    """Names of the parameters of each unit, in the order of FSDP2's buffer."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[int, tuple[str, list[str]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            (group,) = module._get_fsdp_state()._fsdp_param_groups
            found.setdefault(id(group), (name or "(root)", [names[each.sharded_param] for each in group.fsdp_params]))
    return dict(found.values())


def hooks(module: Any) -> tuple[Any, Any, dist.ProcessGroup]:
    (group,) = module._get_fsdp_state()._fsdp_param_groups
    return group._all_gather_comm, group._reduce_scatter_comm, group.mesh_info.shard_process_group


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_gradients(step: int, dtype: str = "fp32", model: nn.Module | None = None) -> list[dict[str, Tensor]]:
    """Every rank's own, as one process with plain torch has them."""
    found = []
    for rank in range(dist.get_world_size()):
        own = copy.deepcopy(model or Net()).to(DTYPES[dtype])
        own(tokens(step, rank)).backward()
        found.append({name: p.grad.float() for name, p in own.named_parameters() if p.grad is not None})
    return found


# The hooks alone, to the bit.

SIZES = [1, 5, 127, 256, 700, 1024]  # of a rank's piece
BITS = [(8, 4), (8, 8), (4, 4), (4, 8), (16, 4), (8, 16), (32, 32), (16, 16)]


def buffers(size: int, dtype: torch.dtype) -> list[Tensor]:
    """Every rank's gradients for every rank, [ranks, size]; each piece of a magnitude of its own."""
    world, draw = dist.get_world_size(), torch.Generator().manual_seed(size)
    magnitude = torch.arange(1, world + 1)[:, None]
    return [(torch.randn(world, size, generator=draw) * magnitude).to(dtype) for _ in range(world)]


def whole_collectives(*hops: Any) -> None:
    """Let hops call the backend's collectives, as they do on NCCL, where gloo's default is sends and receives."""
    for hop in hops:
        hop.pairwise = False


def reduced(local: int, pairwise: bool = True) -> list[str]:
    """What differs from the second statement."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    sums = {"AVG": 1 / world, "SUM": 1.0, "PREMUL_SUM": 0.375}
    for bits in BITS:
        model = sharded()
        adapter = fsdp2.apply(model, gradient_bits=bits)
        _, reduce, group = hooks(model)
        if not pairwise:
            whole_collectives(*reduce.route.hops)
        for index, size in enumerate(SIZES):
            for dtype in (torch.float32, torch.bfloat16):
                name, factor = list(sums.items())[index % 3]
                op = dist.ReduceOp.PREMUL_SUM(factor) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
                tables = buffers(size, dtype)
                given = tables[rank].clone().view(-1)
                out = reduce.allocate((size,), dtype=dtype, device=torch.device("cpu"))
                assert reduce(output_tensor=out, input_tensor=given, group=group, op=op) is None
                expected = total(tables, local, bits)[rank] * factor
                if not torch.equal(out, expected.to(dtype)):
                    wrong.append(f"{bits} {size} {dtype} {name}: {float((out - expected).abs().max())}")
                if not torch.equal(given.view(world, -1), tables[rank]):
                    wrong.append(f"{bits} {size} {dtype}: FSDP2's buffer was changed")
        adapter.remove()
    return wrong


@pytest.mark.parametrize("local, pairwise", [(2, True), (2, False), (4, True), (1, False)])
def test_reductions_to_the_bit(local: int, pairwise: bool) -> None:
    """Any size, both dtypes, one hop or two; the factor comes once, at the end, whatever FSDP2 asks for."""
    assert run_ranks(4, reduced, local, pairwise, local_world_size=local) == [[]] * 4


def not_finite() -> list[str]:
    """Inf or NaN of one rank that the rank it belongs to does not see; whatever else is lost with it."""
    rank, wrong = dist.get_rank(), []
    model = sharded()
    fsdp2.apply(model, feedback="both")
    _, reduce, group = hooks(model.blocks[0])
    size = reduce.numel // dist.get_world_size()
    for value in (float("inf"), float("nan")):
        for rounds in range(2):
            given = buffers(size, torch.float32)[rank]
            if rank == 3 and rounds == 0:
                given[1, 300] = value
            out = torch.empty(size)
            reduce(out, given.view(-1), group, dist.ReduceOp.AVG)
            lost = (~out.isfinite()).nonzero().flatten().tolist()
            if (300 in lost) != (rank == 1 and rounds == 0) or any(not 256 <= place < 512 for place in lost):
                wrong.append(f"{value}, round {rounds}: {lost}")
    return wrong


def test_what_is_not_finite_arrives_and_is_not_carried_over() -> None:
    assert run_ranks(4, not_finite, local_world_size=2) == [[]] * 4


def beside_outliers(hadamard: bool) -> float:
    """Relative error of what shares groups with one element that is twenty times as large."""
    model, rank, place = sharded(), dist.get_rank(), slice(5, None, 128)
    fsdp2.apply(model, weights=None, gradient_bits=(4, 4), hadamard=hadamard)
    _, reduce, group = hooks(model)
    tables = buffers(1024, torch.float32)
    for table in tables:
        table[:, place] = 20 * table.std(dim=1, keepdim=True)
    out = torch.empty(1024)
    reduce(out, tables[rank].clone().view(-1), group, dist.ReduceOp.AVG)
    mean = torch.stack(tables).mean(0)[rank]
    out[place] = mean[place] = 0.0
    return float((out - mean).norm() / mean.norm())


def test_rotation_spreads_outliers() -> None:
    usual, rotated = (run_ranks(4, beside_outliers, on, local_world_size=2) for on in (False, True))
    assert all(one < 0.6 * other for one, other in zip(rotated, usual, strict=True)), (rotated, usual)


def gathered(settings: dict[str, Any], most_calls: int, pairwise: bool) -> list[str]:
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    module = fsdp2.gather
    before, module._MOST_CALLS = module._MOST_CALLS, most_calls
    model = sharded()
    adapter = fsdp2.apply(model, **settings)
    gather, _, group = hooks(model)
    if not pairwise:
        whole_collectives(*gather.routes[group].hops)
    for size in SIZES:
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        for dtype in dtypes if settings["weights"] else (*dtypes, torch.uint8):
            shards = buffers(size, torch.float32)[0].abs().to(dtype)
            out = gather.allocate((world * size,), dtype=dtype, device=torch.device("cpu"))
            out.fill_(77)
            own = out[rank * size : (rank + 1) * size]
            own.copy_(shards[rank])
            assert gather(output_tensor=out, input_tensor=own, group=group) is None
            expected = shards
            if settings["weights"]:
                expected = torch.stack([rounded(shard, 8) for shard in shards]).to(dtype)
            if not torch.equal(out.view(world, -1), expected):
                wrong.append(f"{settings} {size} {dtype}")
    adapter.remove()
    module._MOST_CALLS = before
    return wrong


@pytest.mark.parametrize("local", [2, 1])
@pytest.mark.parametrize("weights", ["int8", None])
def test_gathers_to_the_bit(weights: str | None, local: int) -> None:
    """One hop or two; pieces decoded one by one, or all at once into a padded buffer."""
    for hops, most_calls, pairwise in ((2, 16, True), (2, 0, False), (1, 0, True)) if local == 2 else ((2, 0, False),):
        settings = {"weights": weights, "gather_hops": hops}
        assert run_ranks(4, gathered, settings, most_calls, pairwise, local_world_size=local) == [[]] * 4


# Gradients of a model: the mean over ranks of one process's.

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


@pytest.mark.parametrize("dtype, reduce", [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp16")])
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_gradients_are_the_mean_within_the_codecs_bound(reshard: bool | int, dtype: str, reduce: str) -> None:
    rounding = {"fp32": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-9}[reduce]
    for results in run_ranks(4, first_steps, reshard, dtype, reduce, local_world_size=2):
        for bits, found in zip(WIDTHS, results, strict=True):
            check_mean(found, 2, bits, rounding=rounding)


@pytest.mark.parametrize("local", [4, 1])
def test_gradients_of_one_hop_are_the_mean(local: int) -> None:
    for results in run_ranks(4, first_steps, True, "fp32", "fp32", local_world_size=local):
        for bits, found in zip(WIDTHS, results, strict=True):
            check_mean(found, local, bits)


def test_the_divide_factor_replaces_the_mean() -> None:
    for found in run_ranks(4, first_step, CODED, True, "fp32", "fp32", 3.0, local_world_size=2):
        check_mean(found, 2, (8, 4), factor=4 / 3)


@pytest.mark.parametrize("settings", [{}, {"hadamard": True}, {"hadamard": True, "feedback": "both"}], ids=str)
def test_gradients_with_everything_quantized(settings: dict[str, Any]) -> None:
    """Backward sees other weights then: the error is small and the factor 1, of what has groups to itself."""
    for taken, (plain,), _ in run_ranks(4, first_step, settings, 2, "fp32", "fp32", local_world_size=2):
        for name, value in taken.items():
            mean = torch.stack([each[name] for each in plain]).mean(0)
            error, slope = float((value - mean).norm() / mean.norm()), float((value * mean).sum() / mean.square().sum())
            assert mean.numel() < 1024 or (error < 0.3 and abs(slope - 1) < 0.1), f"{name}: {error}, factor {slope}"


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
    return [max(float((f[n] - usual[n]).abs().max() / usual[n].abs().max()) for n in usual) for f in found[1:]]


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


@pytest.mark.parametrize("sync", [True, False])
def test_accumulated_gradients_are_the_sum_of_means(sync: bool) -> None:
    for found in run_ranks(4, accumulated, sync, local_world_size=2):
        check_mean(found, 2, (8, 4))


# Weights.


def weights_seen(reshard: bool | int, dtype: str, secondary: str) -> list[str]:
    """Parameters that differ, in forward or backward of two steps, from shards rounded to int8 once, or twice."""
    world, wrong = dist.get_world_size(), []
    model = sharded(reshard, dtype)
    cut = units(model)
    fsdp2.apply(model, secondary=secondary)
    expected: dict[str, tuple[Tensor, Tensor]] = {}

    def look(name: str, parameter: nn.Parameter, backward: bool) -> None:
        once, twice = expected[name]
        if not torch.equal(parameter.float(), twice if backward and secondary == "codes" else once):
            wrong.append(f"{name}, {'backward' if backward else 'forward'}")

    watch_weights(model, look)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = dict(model.named_parameters())
    for step in range(2):
        for parameters in cut.values():
            shapes = [values[name].shape for name in parameters]
            table = table_of([whole(values[name]).detach().to(DTYPES[dtype]) for name in parameters], world)
            decoded = torch.stack([rounded(row, 8) for row in table]).to(DTYPES[dtype]).float()
            # Two ranks share what they keep parameter by parameter: each has two of the four rows of every one.
            sizes = [-(-shape[0] // world) * shape[1:].numel() for shape in shapes]
            halves = torch.cat([part.reshape(2, -1) for part in decoded.split(sizes, dim=1)], dim=1)
            twice = torch.stack([rounded(row.to(DTYPES[dtype]), 8) for row in halves]).to(DTYPES[dtype]).float()
            again = torch.cat([part.reshape(world, -1) for part in twice.split([2 * n for n in sizes], dim=1)], dim=1)
            pairs = zip(tensors_of(decoded, shapes), tensors_of(again, shapes), strict=True)
            expected.update(zip(parameters, pairs, strict=True))
        optimizer.zero_grad()
        model(tokens(step, dist.get_rank())).backward()
        optimizer.step()
    return wrong


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("reshard, secondary", [(True, "values"), (False, "values"), (2, "values"), (2, "codes")])
def test_every_rank_computes_with_the_decoded_weights(reshard: bool | int, secondary: str, dtype: str) -> None:
    """In forward and backward; from a smaller group the same, unless they travel as codes a second time."""
    assert run_ranks(4, weights_seen, reshard, dtype, secondary, local_world_size=2) == [[]] * 4


# Losses.


def losses(settings: dict[str, Any] | None, reshard: bool | int, dtype: str, steps: int = 5) -> list[float]:
    """Mean over ranks, each step's."""
    model = sharded(reshard, dtype)
    if settings is not None:
        fsdp2.apply(model, **settings)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(tokens(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(mean.item() / dist.get_world_size())
    return found


def loss_bounds(steps: int = 5, world: int = 4) -> tuple[list[float], list[float]]:
    """Losses of one process, and how far codes of 8 bits in weights and 8 and 4 in gradients can move each of them.

    To first order: weights are off by half a scale of their own, and by what the gradients of the steps before were
    off; a loss moves by at most the sum of those times its gradient.
    """
    model = Net()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    drift = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in trained.items()}
    found, limits = [], []
    cut = {"": [name for name in trained if "blocks" not in name]}
    cut |= {f"{index}": [name for name in trained if f"blocks.{index}." in name] for index in range(2)}
    for step in range(steps):
        plain, values = [], []
        for rank in range(world):
            model.zero_grad()
            loss = model(tokens(step, rank))
            loss.backward()
            values.append(loss.item())
            plain.append({name: p.grad.clone() for name, p in trained.items()})
        found.append(sum(values) / world)
        limit = 0.0
        for names in cut.values():
            shapes = [trained[name].shape for name in names]
            weights = table_of([trained[name].detach() for name in names], world)
            codes = tensors_of(half_scales(weights, 8), shapes)
            tables = [table_of([each[name] for name in names], world) for each in plain]
            errors = tensors_of(bound(tables, 2, (8, 4)), shapes)
            for name, code, error in zip(names, codes, errors, strict=True):
                mean = torch.stack([each[name] for each in plain]).mean(0)
                limit += float(((code + drift[name]) * mean.abs()).sum())
                drift[name] += 0.3 * error
                trained[name].data -= 0.3 * mean
        limits.append(limit)
    return found, limits


@pytest.mark.parametrize("reshard", [True, 2])
def test_losses_stay_within_the_codecs_bound(reshard: bool | int) -> None:
    """Of FSDP2 as it is, and of one process."""
    single, limits = loss_bounds()
    assert single[0] > single[-1]
    usual = run_ranks(4, losses, None, reshard, "fp32", local_world_size=2)[0]
    assert usual == pytest.approx(single, rel=1e-4)
    twice = [] if reshard is True else [{"secondary": "codes"}]
    for settings in ({}, {"feedback": "both", "hadamard": True}, *twice):
        for found in run_ranks(4, losses, settings, reshard, "fp32", local_world_size=2):
            assert found != usual
            for step, (value, other, limit) in enumerate(zip(found, usual, limits, strict=True)):
                assert abs(value - other) <= 2 * limit + 1e-6, f"step {step}: {value}, {other}, {limit}"
                assert value == pytest.approx(other, rel=0.03)


def test_losses_in_bf16() -> None:
    usual = run_ranks(4, losses, None, 2, "bf16", local_world_size=2)[0]
    for found in run_ranks(4, losses, {"feedback": "cross"}, 2, "bf16", local_world_size=2):
        assert found == pytest.approx(usual, rel=0.05) and found != usual


# Plain values over two hops.


def compared(reshard: bool | int, dtype: str) -> tuple[list[float], list[float], float]:
    """Losses of FSDP2 and of plain hops; largest relative difference of a parameter's gradient."""
    ours, usual = sharded(reshard, dtype), sharded(reshard, dtype)
    fsdp2.apply(ours, **PLAIN)
    found: tuple[list[float], list[float]] = ([], [])
    worst = 0.0
    for step in range(3):
        for model, values in zip((ours, usual), found, strict=True):
            model.zero_grad()
            loss = model(tokens(step, dist.get_rank()))
            loss.backward()
            values.append(loss.item())
        one, two = gradients(ours), gradients(usual)
        worst = max(worst, *(float((one[name] - two[name]).abs().max() / two[name].abs().max()) for name in two))
        with torch.no_grad():
            for p in (p for model in (ours, usual) for p in model.parameters() if p.grad is not None):
                p -= 0.1 * p.grad
    return *found, worst


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("reshard", [True, 2])
def test_plain_hops_are_fsdp2_up_to_the_order_of_sums(reshard: bool | int, dtype: str) -> None:
    for ours, usual, worst in run_ranks(4, compared, reshard, dtype, local_world_size=2):
        assert ours == pytest.approx(usual, abs=1e-6) and ours[0] == usual[0]
        assert worst < 3e-6


# Bytes.


Rows = dict[tuple[str, str, str, str], tuple[int, int, str]]  # unit, kind, hop, link -> calls, bytes, codec


def sent(settings: dict[str, Any], reshard: bool | int) -> tuple[Rows, dict[str, tuple[int, int]]]:
    """What a step sent; elements of a rank's shard of each unit, and of what is trained of it."""
    model = sharded(reshard)
    adapter = fsdp2.apply(model, **settings)
    cut, world = units(model), dist.get_world_size()
    values = dict(model.named_parameters())
    sizes = {}
    for unit, names in cut.items():
        rows = [-(-values[name].size(0) // world) * values[name].shape[1:].numel() for name in names]
        trained = [row for row, name in zip(rows, names, strict=True) if values[name].requires_grad]
        sizes[unit] = (sum(rows), sum(trained))
    model(tokens(0, dist.get_rank())).backward()
    text = str(adapter)
    assert all(unit in text for unit in cut) and f"{adapter.ledger.total_bytes:,}" in text
    return {(r.unit, r.kind, r.hop, r.link): (r.calls, r.bytes, r.codec) for r in adapter.ledger.rows}, sizes


@pytest.mark.parametrize(
    ("settings", "reshard"),
    [(s, r) for r in (True, 2) for s in ({}, PLAIN, {"gather_hops": 1})] + [({"secondary": "codes"}, 2)],
    ids=str,
)
def test_bytes_are_those_of_the_message_layouts(settings: dict[str, Any], reshard: bool | int) -> None:
    plain = settings is PLAIN
    weight = "fp32" if plain else "int8"
    for rows, sizes in run_ranks(4, sent, settings, reshard, local_world_size=2):
        wanted = {}
        for unit, (numel, trained) in sizes.items():
            shard = 4 * numel if plain else kernels.message_layout(numel, 8).nbytes
            # FSDP2's root is gathered once, unless told otherwise; its blocks anew in backward.
            times = 2 if reshard is True else 1
            if settings.get("gather_hops") == 1:
                wanted[unit, "gather", "4->1", "cross"] = (times, times * 3 * shard, weight)
            else:
                wanted[unit, "gather", "4->2", "cross"] = (times, times * shard, weight)
                wanted[unit, "gather", "2->1", "local"] = (2 * times, times * 2 * shard, weight)  # one call a node
            if reshard == 2:
                coded = settings.get("secondary") == "codes"
                nbytes = kernels.message_layout(2 * numel, 8).nbytes if coded else 4 * 2 * numel
                wanted[unit, "second", "2->1", "local"] = (1, nbytes, "int8" if coded else "fp32")
            piece = -(-trained // 256) * 256
            pair = (8 * trained, 4 * trained)
            if not plain:
                pair = (kernels.message_layout(2 * piece, 8).nbytes, kernels.message_layout(piece, 4).nbytes)
            wanted[unit, "reduce", "1->2", "local"] = (1, pair[0], "fp32" if plain else "int8")
            wanted[unit, "reduce", "2->4", "cross"] = (1, pair[1], "fp32" if plain else "int4")
        assert rows == wanted


# Errors that are fed back.


def fed(feedback: str | None) -> tuple[float, float, list[str]]:
    """Error of one gradient and of the mean of twelve, and what is wrong with the state."""
    model, wrong = sharded(), []
    adapter = fsdp2.apply(model, weights=None, gradient_bits=(4, 4), feedback=feedback)
    _, reduce, group = hooks(model.blocks[0])
    rank, world = dist.get_rank(), dist.get_world_size()
    size = reduce.numel // world
    tables = buffers(size, torch.float32)
    mean = torch.stack(tables).mean(0)[rank]

    def one() -> Tensor:
        out = torch.empty(size)
        reduce(out, tables[rank].clone().view(-1), group, dist.ReduceOp.AVG)
        return out

    first = one()
    outs = [first] + [one() for _ in range(11)]
    single, several = ((each - mean).norm() / mean.norm() for each in (first, torch.stack(outs).mean(0)))
    if feedback is not None:
        state = adapter.state_dict()
        if sum(name.startswith("blocks.0 ") for name in state) != {"cross": 1, "both": 2}[feedback]:
            wrong.append(f"state has {list(state)}")
        following = one()
        adapter.load_state_dict(state)
        wrong += [] if torch.equal(one(), following) else ["a loaded state gave another gradient"]
        adapter.reset_feedback()
        if any(bool(each.any()) for each in adapter.state_dict().values()):
            wrong.append("a cleared state is not empty")
        wrong += [] if torch.equal(one(), first) else ["a cleared state gave another gradient"]
        with pytest.raises(ValueError, match="the same model, ranks and settings"):
            adapter.load_state_dict({})
        with pytest.raises(RuntimeError, match="set_reduce_scatter_unused_params"):
            reduce(torch.empty(8), torch.empty(8 * world), group, dist.ReduceOp.AVG)
    return float(single), float(several), wrong


def test_what_encoding_loses_goes_with_the_next_gradient() -> None:
    for single, several, _ in run_ranks(4, fed, None, local_world_size=2):
        assert several == pytest.approx(single)
    one = [several for _, several, _ in run_ranks(4, fed, "cross", local_world_size=2)]
    for (single, several, wrong), cross in zip(run_ranks(4, fed, "both", local_world_size=2), one, strict=True):
        assert wrong == [] and several < cross < single and several < 0.35 * single


# What is refused, on every rank and before anything is sent.


def refused(case: str) -> str:
    """Message of the error; afterwards the ranks can still talk, and FSDP2 has its own communication."""
    make, settings = CASES[case]
    model = make()
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        fsdp2.apply(model, **(settings() if callable(settings) else settings))
    check = torch.ones(1)
    dist.all_reduce(check)
    assert check.item() == dist.get_world_size()
    for module in model.modules():
        if isinstance(module, FSDPModule) and case != "twice":
            assert all(type(hook).__name__.startswith("Default") for hook in hooks(module)[:2])
    return str(raised.value)


class Mixed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fixed.bfloat16()


class Whole(Net):
    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(8, dtype=torch.int64), requires_grad=False)


def unmixed(cls: type[nn.Module]) -> Any:
    """Without a policy: every parameter travels in its own dtype."""
    model = cls()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def replicated() -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return fully_shard(Net(), mesh=mesh)


def applied() -> nn.Module:
    model = sharded()
    fsdp2.apply(model)
    return model


def extended() -> nn.Module:
    model = sharded()
    param = model.blocks[0]._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0]
    param._sharded_local_tensor.fsdp_pre_all_gather = lambda *_: None
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "not sharded": (Net, {}),
    "twice": (applied, {}),
    "replicas": (replicated, {}),
    "dtypes": (lambda: unmixed(Mixed), {}),
    "integers": (lambda: unmixed(Whole), {}),
    "extension": (extended, {}),
    "uneven nodes": (sharded, {"local_world_size": 3}),
    "no nodes": (sharded, {"local_world_size": 0}),
    "weights": (sharded, {"weights": "int4"}),
    "bits": (sharded, {"gradient_bits": (8, 2)}),
    "one width": (sharded, {"gradient_bits": 8}),
    "secondary": (sharded, {"weights": None, "secondary": "codes"}),
    "nothing twice": (sharded, {"secondary": "codes"}),
    "feedback": (sharded, {"gradient_bits": None, "feedback": "cross"}),
    "feedback inside": (sharded, {"gradient_bits": (16, 4), "feedback": "both"}),
    "hadamard": (sharded, {"gradient_bits": (16, 16), "hadamard": True}),
    "beta": (sharded, {"feedback": "cross", "beta": 1.0}),
    "beta alone": (sharded, {"beta": 0.5}),
    "hops": (sharded, {"gather_hops": 3}),
    "timeout": (sharded, {"hang_timeout": 0.0}),
    "ranks disagree": (sharded, lambda: {"gradient_bits": (8, 8 if dist.get_rank() == 3 else 4)}),
    "one rank": (sharded, lambda: {"feedback": "cross", "beta": 2.0 if dist.get_rank() == 1 else 0.8}),
}
SAID = {
    "not sharded": "no module of this Net has been sharded; call torch.distributed.fsdp.fully_shard",
    "twice": r"has a GatherComm already; expected FSDP2's DefaultAllGather.*remove\(\)",
    "replicas": r"replicates \(HSDP\).*reshard_after_forward=<ranks per node>",
    "dtypes": r"\(root\): parameters are gathered together in several dtypes.*'torch.bfloat16': \['fixed.weight'\]",
    "integers": "in several dtypes.*torch.int64",
    "extension": r"blocks.0: \['blocks.0.0.weight'\] bring their own all-gather extension",
    "uneven nodes": "every node must give the same number of ranks.*the argument local_world_size",
    "no nodes": "local_world_size is 0; expected ranks per node",
    "weights": "weights is 'int4'; expected 'int8' or None",
    "bits": r"gradient_bits is \(8, 2\); expected None or \(inside a node, between nodes\)",
    "one width": "gradient_bits is 8; expected",
    "secondary": "codes need weights='int8'",
    "nothing twice": "backward gathers nothing a second time; give fully_shard reshard_after_forward=",
    "feedback": "feedback='cross' adds what encoding has lost, and gradient_bits=None does not encode",
    "feedback inside": r"gradient_bits=\(16, 4\) does not encode on every hop",
    "hadamard": "encodes nothing",
    "beta": "beta is 1.0; expected 0 <= beta < 1",
    "beta alone": "beta is 0.5 and feedback is None",
    "hops": "gather_hops is 3; expected 1 or 2",
    "timeout": "hang_timeout is 0.0",
    "ranks disagree": "ranks 0 and 3 disagree",
    "one rank": "beta is 2.0",
}


def refused_all() -> dict[str, str]:
    return {case: refused(case) for case in CASES}


def test_what_cannot_be_honoured_is_refused_on_every_rank() -> None:
    for said in run_ranks(4, refused_all, local_world_size=2):
        assert {case for case, text in said.items() if not re.search(SAID[case], text, re.DOTALL)} == set()


def late_changes() -> list[str]:
    """A dtype that changes after apply is refused while training. After remove FSDP2 is as it was."""
    model = unmixed(Net)
    fsdp2.apply(model)
    model.fixed.bfloat16()
    with pytest.raises(RuntimeError, match=r"FSDP2 sends torch\.uint8, since its parameters have had several dtypes"):
        model(tokens(0, dist.get_rank()))
    model = sharded()
    adapter = fsdp2.apply(model)
    model(tokens(0, dist.get_rank())).backward()
    before = adapter.ledger.total_bytes
    adapter.remove()
    model.zero_grad()
    model(tokens(0, dist.get_rank())).backward()
    usual = sharded()
    usual(tokens(0, dist.get_rank())).backward()
    one, two = gradients(model), gradients(usual)
    wrong = [name for name in two if not torch.equal(one[name], two[name])]
    if before == 0 or adapter.ledger.total_bytes != before:
        wrong.append("bytes after remove")
    fsdp2.apply(model, **PLAIN)
    model(tokens(0, dist.get_rank())).backward()
    return wrong


def test_late_changes_and_removal() -> None:
    assert run_ranks(4, late_changes, local_world_size=2) == [[]] * 4


def asynchronous() -> list[tuple[float, int]]:
    """Loss and bytes, with gathers that FSDP2 starts in its usual way, and asynchronously."""
    found = []
    for ahead in (False, True):
        model = sharded()
        adapter = fsdp2.apply(model)
        if ahead:
            handles = [block.unshard(async_op=True) for block in model.blocks]
            assert None not in handles
        loss = model(tokens(0, dist.get_rank()))
        loss.backward()
        found.append((loss.item(), adapter.ledger.total_bytes))
    return found


def test_gathers_that_are_started_ahead() -> None:
    for usual, ahead in run_ranks(4, asynchronous, local_world_size=2):
        assert usual == ahead


def lone() -> float:
    model = sharded()
    adapter = fsdp2.apply(model, feedback="both")
    loss = model(tokens(0, 0))
    loss.backward()
    assert adapter.ledger.rows == []
    return loss.item() - Net()(tokens(0, 0)).item()


def test_one_rank_sends_nothing() -> None:
    assert run_ranks(1, lone) == [0.0]
