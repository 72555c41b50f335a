"""Backends that have collectives but no cheap sends: the code that runs with NCCL, here over a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropp
from bench.common import staged
from tests.distributed.harness import run_ranks
from tests.distributed.shapes import Pair, Routed, chain, make_config
from tests.distributed.test_sequence import ALL, BRANCHES, follow


def over(fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn`` in a world whose backend is the staged one."""
    staged.register()
    dist.init_process_group(staged.NAME)
    return fn(*args)


STEPS = {
    "opposite orders": [BRANCHES] * 3,
    "changing orders": [BRANCHES, BRANCHES, BRANCHES[::-1], BRANCHES],
    "parts": [[ALL], [ALL, chain(0, 3)], [chain(0, 2), chain(1, 3)], [((3,),), ALL]],
}


@pytest.mark.parametrize("settings", [{}, {"reuse": 0, "prefetch": 0}, {"overlap_comm": False}, {"persist": 1000}])
@pytest.mark.parametrize("steps", STEPS)
def test_collectives_in_one_order(steps: str, settings: dict[str, object]) -> None:
    run_ranks(2, over, follow, STEPS[steps], settings, init=False)


def test_two_nodes() -> None:
    run_ranks(4, over, follow, [BRANCHES * 2] * 3, {}, init=False, local_world_size=2)


def weights(
    dtype: torch.dtype, settings: dict[str, object], device: str = "cpu"
) -> tuple[str, dict[str, torch.Tensor]]:
    """The backend in use and the weights after four steps."""
    torch.manual_seed(0)
    pair = Pair(Routed(), make_config(**settings), dtype=dtype, device=device)
    for _ in range(4):
        pair.train(ALL)
    return pair.engine.comm.backend, zeropp.full_state(pair.model)


BF16 = {"bf16": {"enabled": True}}
CODED: dict[str, dict[str, object]] = {
    "zero++": {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2},
    "codes": {"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "secondary": "codes"},
    "both hops": {"zero_quantized_gradients": True, "zeropp_loco_param": {}, "feedback": "both", "hadamard": True},
    "delta4": {"weight_codec": "delta4", "zero_hpz_partition_size": 2, "zero_quantized_gradients": True, **BF16},
    "lossless": {"weight_codec": "lossless", "zero_hpz_partition_size": 2, "zeropp_loco_param": {}, **BF16},
    "stage 1": {"stage": 1, "weight_codec": "lossless", "zero_quantized_gradients": True, **BF16},
}
SETTINGS: dict[str, dict[str, object]] = {"fp32": {}, "bf16": BF16, **CODED}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("local", [2, 4])
def test_bits_are_those_of_sends_and_receives(local: int, name: str) -> None:
    """Of every hop and codec, over one hop and two."""
    settings = SETTINGS[name]
    if local == 4:
        settings = {key: value for key, value in settings.items() if key != "zero_hpz_partition_size"}
        settings = {**settings, "stage": 1} if "weight_codec" in settings else settings
    (backend, expected), *_ = run_ranks(4, weights, torch.float32, settings, local_world_size=local)
    (other, found), *_ = run_ranks(4, over, weights, torch.float32, settings, init=False, local_world_size=local)
    assert (backend, other) == ("gloo", staged.NAME)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
