"""Process groups of the staged backend, which carries collectives by gloo through host memory, and training in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import zeropp
from bench.common import staged
from tests.support.branch_routes import ALL, BRANCHES
from tests.support.branching_models import Routed, chain, make_config
from tests.support.sharded_and_plain import Pair

__all__ = ["BF16", "CODED", "SETTINGS", "STEPS", "over", "weights"]


def over(fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn`` in a process group of the staged backend."""
    staged.register()
    dist.init_process_group(staged.NAME)
    return fn(*args)


STEPS = {
    "opposite orders": [BRANCHES] * 3,
    "changing orders": [BRANCHES, BRANCHES, BRANCHES[::-1], BRANCHES],
    "parts": [[ALL], [ALL, chain(0, 3)], [chain(0, 2), chain(1, 3)], [((3,),), ALL]],
}


def weights(
    dtype: torch.dtype, settings: dict[str, object], device: str = "cpu"
) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the name of the backend in use and the full weights after four steps."""
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
