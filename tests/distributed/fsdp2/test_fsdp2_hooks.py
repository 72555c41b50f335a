"""The hooks of zeropp.fsdp2, called without FSDP2, give the bits of a reference without process groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.fsdp2_models import buffers, hooks, sharded
from tests.support.fsdp2_reference import rounded, total
from tests.support.rank_pool import run_ranks
from zeropp import fsdp2

SIZES = [1, 5, 127, 256, 700, 1024]  # elements of one rank's piece
BITS = [(8, 4), (8, 8), (4, 4), (4, 8), (16, 4), (8, 16), (32, 32), (16, 16)]


def whole_collectives(*hops: Any) -> None:
    """Let hops call the backend's collectives, as on NCCL. With gloo, hops use sends and receives by default."""
    for hop in hops:
        hop.pairwise = False


def reduced(local: int, pairwise: bool = True) -> list[str]:
    """Reduce buffers of all sizes and dtypes with all codecs.

    Args:
        local: ranks per node.
        pairwise: True for sends and receives; False for the backend's collectives.

    Returns:
        Descriptions of the cases in which the result differs from the reference, or FSDP2's input buffer was changed.
    """
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
    """Reductions are exact for any size, in both dtypes, over one hop or two.

    The factor of the requested operation is applied once, to the final sum.
    """
    assert run_ranks(4, reduced, local, pairwise, local_world_size=local) == [[]] * 4


def not_finite() -> list[str]:
    """Put Inf or NaN into the part of rank 3's gradient that rank 1 receives, and reduce twice.

    Returns:
        Descriptions of failures: the element is finite on rank 1, an element outside its block of 256 is not finite, or
        the second reduction, without Inf and NaN, is not finite.
    """
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


def test_non_finite_gradients_arrive_and_are_not_stored_as_errors() -> None:
    """Error feedback does not store Inf or NaN, because they would spoil all later steps."""
    assert run_ranks(4, not_finite, local_world_size=2) == [[]] * 4


def beside_outliers(hadamard: bool) -> float:
    """Return the relative error of the elements that share a 4-bit group with one outlier.

    The outlier is twenty times the standard deviation. Every group of 128 elements has one.
    """
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
    """The Hadamard rotation reduces the error of an outlier's neighbours to less than 0.6 of the error without it."""
    usual, rotated = (run_ranks(4, beside_outliers, on, local_world_size=2) for on in (False, True))
    assert all(one < 0.6 * other for one, other in zip(rotated, usual, strict=True)), (rotated, usual)


def gathered(settings: dict[str, Any], most_calls: int, pairwise: bool) -> list[str]:
    """Gather shards of all sizes and dtypes.

    Args:
        settings: arguments of ``fsdp2.apply``.
        most_calls: largest number of messages that are decoded one at a time.
        pairwise: True for sends and receives; False for the backend's collectives.

    Returns:
        Descriptions of the cases in which the result differs from the shards, rounded once with a codec.
    """
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
            # A value that no shard has, so that an element that the gather does not write shows.
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
    """Gathers are exact over one hop or two, and with both ways of decoding.

    Messages whose size is no multiple of 256 are decoded one at a time, or all at once into a padded buffer.
    """
    for hops, most_calls, pairwise in ((2, 16, True), (2, 0, False), (1, 0, True)) if local == 2 else ((2, 0, False),):
        settings = {"weights": weights, "gather_hops": hops}
        assert run_ranks(4, gathered, settings, most_calls, pairwise, local_world_size=local) == [[]] * 4
