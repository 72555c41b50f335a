"""Checks of a source tree to which the code of CONTRIBUTING's recipes has been added: a codec, a width, a placement.

:mod:`tests.distributed.docs.test_contributing` copies the tree, adds the code and runs this file in the copy. The
checks train with configuration keys that the original tree does not have.
"""

from __future__ import annotations

import torch

import zeropp
import zeropp_kernels
from tests.support.branching_models import Routed, chain, make_config
from tests.support.rank_pool import run_ranks, shutdown
from tests.support.sharded_and_plain import Pair

__all__ = ["main"]


def _train(dtype: torch.dtype, **keys: object) -> Pair:
    config = make_config()
    for key, value in keys.items():
        config["zero_optimization" if key.startswith("zero_") else "zeropp"][key] = value
    pair = Pair(Routed(3), config, dtype=dtype)
    for _ in range(4):
        pair.train(chain(3))
    return pair


def _with_a_codec(key: str, value: object, kind: str) -> None:
    pair = _train(torch.float32, **{key: value})
    rows = [row for row in zeropp.comm_report(pair.model).rows if row.kind == kind]
    assert {row.codec for row in rows} == {"cut16"}
    # Compare bytes per call, because gathers and reductions differ in number. Each rank sends half of a unit, 2 bytes
    # per element.
    sent = {row.unit: row.bytes // row.calls for row in rows}
    assert sent == {unit.name: unit.numel * 2 // 2 for unit in pair.engine.units}
    # The codec keeps seven mantissa bits, so each value sent has a relative error of at most 2**-7.
    assert 0 < pair.difference() < 0.02


def _with_a_width() -> None:
    numel = 1000
    message = torch.zeros(zeropp_kernels.message_layout(numel, 2).nbytes, dtype=torch.uint8)
    values, found = torch.randn(numel, generator=torch.Generator().manual_seed(1)), torch.empty(numel)
    zeropp_kernels.quantize_(values, message, bits=2)
    zeropp_kernels.dequantize_(message, found, bits=2)
    # The codes of a group are -1, 0 and 1, times the group's largest absolute value rounded up to bfloat16.
    for group, coded in zip(values.split(128), found.split(128), strict=True):
        scale = coded.abs().max()
        assert group.abs().max() <= scale <= group.abs().max() * 1.01
        assert torch.equal(coded, (group / scale).round() * scale)
    pair = _train(torch.float32, zero_quantized_gradients=True, gradient_bits={"cross": 2})
    rows = [row for row in zeropp.comm_report(pair.model).rows if row.kind == "reduce"]
    assert {row.codec for row in rows} == {"int2"}
    half = {unit.name: zeropp_kernels.message_layout(unit.numel // 2, 2).nbytes for unit in pair.engine.units}
    assert {row.unit: row.bytes // row.calls for row in rows} == half
    assert 0 < pair.difference() < 0.5


def _with_a_placement() -> None:
    pair = _train(torch.float64, replicated_pairs=True)
    states = sum(part.parameter.numel() for part in pair.optimizer.slices.stepped)
    numel = sum(unit.numel for unit in pair.engine.units)
    assert 0 < states <= numel // 2 and all(unit.persistent for unit in pair.engine.units)
    pair.check()


def main() -> None:
    """Run all checks, each on a pool of ranks."""
    run_ranks(2, _with_a_codec, "cut_gradients", True, "reduce")
    run_ranks(2, _with_a_codec, "weight_codec", "cut16", "gather")
    run_ranks(2, _with_a_width)
    run_ranks(4, _with_a_placement, local_world_size=2)
    shutdown()
