"""Reductions by the backend's reduce-scatter give the mean of plain torch, and the ledger counts their bytes.

The tests run over gloo, which adds in the wire dtype and in another order than an exchange of messages.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.branching_models import Routed, make_config
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Pair
from zeropp.comm import hops

BY_BACKEND: dict[str, object] = {"reduce_scatter": "backend"}
PLACED: dict[str, dict[str, object]] = {
    "stage 3": {},
    "stage 2": {"stage": 2},
    "MiCS": {"mics_shard_size": 2},
    "stage 1, accumulated": {"stage": 1, "gradient_accumulation_steps": 2},
    "deferred": {"defer_cross_reduction": True, "gradient_accumulation_steps": 2},
}


def differs(settings: dict[str, object], dtype: torch.dtype) -> tuple[float, int, int]:
    """Train three steps beside plain torch.

    Args:
        settings: keys for ``make_config``.
        dtype: dtype of the model.

    Returns:
        The largest difference of weights relative to the largest weight, the number of calls of reduce-scatter, and the
        number of calls of all-to-all.
    """
    micros = int(str(settings.get("gradient_accumulation_steps", 1)))
    pair = Pair(Routed(3), make_config(**settings), micros=micros, dtype=dtype)
    patched = partial(mock.patch.object, hops.Hop, autospec=True)
    with (
        patched("reduce_scatter", side_effect=hops.Hop.reduce_scatter) as by_backend,
        patched("all_to_all", side_effect=hops.Hop.all_to_all) as by_hand,
    ):
        for _ in range(3):
            pair.zero_grad()
            for _ in range(micros):
                pair.backward()
            pair.step()
    most = max(float(value.abs().max()) for value in pair.whole.state().values())
    return pair.difference() / most, by_backend.call_count, by_hand.call_count


@pytest.mark.every(6)
@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_mean_is_that_of_plain_torch(name: str, dtype: torch.dtype) -> None:
    """After three steps, weights differ by at most 12 eps of the largest weight, because additions are reordered.

    All reductions use the backend's reduce-scatter.
    """
    bound = 12 * torch.finfo(dtype).eps
    for found, by_backend, by_hand in run_ranks(4, differs, {**PLACED[name], **BY_BACKEND}, dtype, local_world_size=2):
        assert found <= bound and by_backend > 0 and by_hand == 0


def test_auto_and_exchange_leave_no_sum_to_gloo() -> None:
    """gloo's reduce-scatter sends twice the bytes, so the default does not use it."""
    for choice in ({}, {"reduce_scatter": "exchange"}):
        for found, by_backend, by_hand in run_ranks(4, differs, choice, torch.float64, local_world_size=2):
            assert found <= 1e-12 and by_backend == 0 and by_hand > 0


def halves(dtype: torch.dtype, large: float) -> tuple[bool, float]:
    """Take one step with gradients of size ``large``.

    Args:
        dtype: dtype of the model.
        large: the gradient of every element of the bias, on every rank.

    Returns:
        True if the step was taken, and the relative error of the mean.
    """
    model = Routed(1).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.0)
    settings = make_config(**BY_BACKEND)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, settings)
    before = zeropp.full_state(model)["blocks.0.lin.bias"]
    (model(torch.zeros(1, 8, dtype=dtype)).sum() * large).backward()
    optimizer.step()
    moved = before - zeropp.full_state(model)["blocks.0.lin.bias"]
    return not optimizer.step_was_skipped, float((moved / large - 1).abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_in_16_bits_do_not_overflow_where_their_mean_does_not(dtype: torch.dtype) -> None:
    """Four times 40,000 exceeds float16, and the mean does not."""
    for finite, error in run_ranks(4, halves, dtype, 40_000.0, local_world_size=2):
        assert finite and error <= 2.0**-7


def sent(settings: dict[str, object]) -> tuple[int, int]:
    """Return the bytes of reductions that the ledger counts, and the bytes that the plan predicts."""
    model = Routed(3)
    config = make_config(**settings)
    plan = zeropp.plan.traffic(model, config, dist.get_world_size(), 2)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    model(torch.ones(2, 8)).sum().backward()
    return (
        sum(row.bytes for row in optimizer.engine.comm.ledger.rows if row.kind == "reduce"),
        sum(row.nbytes * row.times for row in plan.rows if row.way.kind == "reduce"),
    )


def test_the_ledger_counts_the_bytes_that_gloo_sends() -> None:
    """The plan predicts the bytes of an exchange; gloo's reduce-scatter sends twice as many."""
    for found, planned in run_ranks(4, sent, {}, local_world_size=2):
        assert found == planned > 0
    for found, planned in run_ranks(4, sent, BY_BACKEND, local_world_size=2):
        assert found == 2 * planned
