"""Each dtype setting determines the dtype of computation, main weights, gradient sums or messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import WIDTH, Routed, make_config, worst
from tests.support.rank_pool import run_ranks

MASTER = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


class Seeing(Routed):
    """A model that stores the dtypes of its input and of its first weight in forward, as a set in ``seen``."""

    def forward(self, x: Tensor, route: Any = None) -> Tensor:
        self.seen = {x.dtype, self.blocks[0].lin.weight.dtype}
        return super().forward(x, route)


def kinds(built: torch.dtype, settings: dict[str, Any]) -> tuple[set[torch.dtype], torch.dtype, torch.dtype, int]:
    """Train one step.

    Args:
        built: dtype of the model before wrapping.
        settings: keys for ``make_config``.

    Returns:
        Set of dtypes of inputs and weights in forward, dtype of the main weights, dtype of the gradient sums, and bytes
        of gradients that this rank sends.
    """
    torch.manual_seed(0)
    with zeropp.zero.Init(dtype=built):
        model = Seeing(2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**settings))
    optimizer.backward(model(torch.ones(2, WIDTH, dtype=built)).float().sum())
    optimizer.step()
    (buffer,) = optimizer.engine.units[0].trainable_buffers
    rows = optimizer.engine.comm.ledger.rows
    sent = sum(row.bytes for row in rows if row.kind == "reduce")
    assert buffer.gradient is not None
    return model.seen, buffer.main_dtype, buffer.gradient.dtype, sent


F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
# Elements in the gradients of both units. Each unit has an 8 x 8 weight and 8 biases, both padded to one block of 256
# elements. With two ranks, a rank sends half of the elements.
NUMEL = 2 * 512


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("built", "settings", "computed", "main", "itemsize"),
    [
        (F32, {}, F32, F32, 4),
        (BF16, {}, BF16, F32, 2),
        (F64, {}, F64, F64, 8),
        (BF16, {"data_types": {"param_dtype": "fp32"}}, F32, F32, 4),
        (F32, {"data_types": {"param_dtype": "bf16"}}, BF16, F32, 2),
        (F32, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, BF16, F32, 2),
        (F32, {"bf16": MASTER, "data_types": {"grad_accum_dtype": "bf16"}}, BF16, BF16, 2),
        (F32, {"bf16": {"enabled": True}, "communication_data_type": "fp32"}, BF16, F32, 4),
        (F32, {"communication_data_type": "bf16"}, F32, F32, 2),
    ],
    ids=str,
)
def test_each_type_is_seen(built: Any, settings: dict[str, Any], computed: Any, main: Any, itemsize: int) -> None:
    for found in run_ranks(2, kinds, built, settings):
        assert found == ({computed}, main, main, NUMEL // 2 * itemsize)


# Gradients of ranks 0 and 1. They and their mean are exact in float16. Their sum is above 65504, the largest float16.
SLOPES = 40_000.0, 60_032.0


class Steep(nn.Module):
    """A model of 300 weights. Each element of the gradient is the rank's entry of ``SLOPES``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(300))

    def forward(self) -> Tensor:
        return (self.weight.float() * SLOPES[dist.get_rank()]).sum()


def stepped(settings: dict[str, Any]) -> tuple[int, dict[str, Tensor]]:
    fp16 = {"enabled": True, "loss_scale": 1}
    model = Steep()
    inner = torch.optim.SGD(model.parameters(), lr=2.0**-16)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(fp16=fp16, **settings))
    optimizer.backward(model())
    optimizer.step()
    return optimizer.skipped_steps, zeropp.full_state(model)


@pytest.mark.every(2)
@pytest.mark.parametrize("sums", ["exchange", "backend"])
def test_float16_means_do_not_overflow_without_dividing_before_the_sum(sums: str) -> None:
    """The mean of two float16 gradients is correct although their sum overflows float16.

    The keys that divide gradients before the sum, ``prescale_gradients`` and ``gradient_predivide_factor``, change no
    bit of the weights.
    """
    plain, *others = [
        run_ranks(2, stepped, {"reduce_scatter": sums, **keys})
        for keys in ({}, {"prescale_gradients": True}, {"gradient_predivide_factor": 2.0})
    ]
    for skipped, weights in plain:
        assert skipped == 0
        torch.testing.assert_close(weights["weight"], torch.full((300,), 1 - 50_016 * 2.0**-16), rtol=1e-6, atol=0)
    for found in others:
        assert [worst(weights, plain[0][1]) for _, weights in found] == [0.0, 0.0]
