"""The hooks of zeropp.fsdp2 alone, compared to the bit with a second statement of what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.fsdp2_models import buffers, hooks, sharded
from tests.support.fsdp2_reference import rounded, total
from tests.support.rank_pool import run_ranks
from zeropp import fsdp2

SIZES = [1, 5, 127, 256, 700, 1024]  # of a rank's piece
BITS = [(8, 4), (8, 8), (4, 4), (4, 8), (16, 4), (8, 16), (32, 32), (16, 16)]


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
                reduce.finish_reduction(out)
                expected = total(tables, local, bits)[rank] * factor
                if not torch.equal(out, expected.to(dtype)):
                    wrong.append(f"{bits} {size} {dtype} {name}: {float((out - expected).abs().max())}")
                if not torch.equal(given.view(world, -1), tables[rank]):
                    wrong.append(f"{bits} {size} {dtype}: FSDP2's buffer was changed")
        adapter.remove()
    return wrong


@pytest.mark.every(5)
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
    size = reduce.numel(reduce.parts) // dist.get_world_size()
    for value in (float("inf"), float("nan")):
        for rounds in range(2):
            given = buffers(size, torch.float32)[rank]
            if rank == 3 and rounds == 0:
                given[1, 300] = value
            out = torch.empty(size)
            reduce(out, given.view(-1), group, dist.ReduceOp.AVG)
            reduce.finish_reduction(out)
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
    reduce.finish_reduction(out)
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
            gather(output_tensor=out, input_tensor=own, group=group).wait()
            expected = shards
            if settings["weights"]:
                expected = torch.stack([rounded(shard, 8) for shard in shards]).to(dtype)
            if not torch.equal(out.view(world, -1), expected):
                wrong.append(f"{settings} {size} {dtype}")
    adapter.remove()
    module._MOST_CALLS = before
    return wrong


@pytest.mark.every(5)
@pytest.mark.parametrize("local", [2, 1])
@pytest.mark.parametrize("weights", ["int8", None])
def test_gathers_to_the_bit(weights: str | None, local: int) -> None:
    """One hop or two; pieces decoded one by one, or all at once into a padded buffer."""
    for hops, most_calls, pairwise in ((2, 16, True), (2, 0, False), (1, 0, True)) if local == 2 else ((2, 0, False),):
        settings = {"weights": weights, "gather_hops": hops}
        assert run_ranks(4, gathered, settings, most_calls, pairwise, local_world_size=local) == [[]] * 4
