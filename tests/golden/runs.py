"""Twenty training steps in each of twelve configurations, as hashes that a refactoring must leave equal.

Floating-point sums differ between machines, so no hashes are stored. Write them before a change and compare after the
change, on the same machine::

    python -m tests.golden --write before.json
    python -m tests.golden --compare before.json
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

import zeropp
from tests.support.parity import Recipe, build, continue_zero, make_optimizer
from tests.support.rank_pool import run_ranks

__all__ = ["CASES", "EQUAL", "differences", "run"]

_WORLD, _LOCAL = 4, 2
_BF16: dict[str, object] = {"bf16": {"enabled": True}}
_NOTHING_AHEAD: dict[str, object] = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
_HPZ: dict[str, object] = {"zero_hpz_partition_size": 2}
_QGZ: dict[str, object] = {"zero_quantized_gradients": True}
_QWZ: dict[str, object] = {"zero_quantized_weights": True}
_LOCO: dict[str, object] = {**_QGZ, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 8}}


def _recipe(zero: dict[str, object], accumulation: int = 1, **more: Any) -> Recipe:
    return Recipe(zero=zero, accumulation=accumulation, dtype=torch.float32, clip=1.0, steps=20, **more)


CASES = {
    "stage 0": _recipe({"stage": 0}),
    "stage 1, accumulated": _recipe({"stage": 1}, 2),
    "stage 2, overlapped": _recipe({"stage": 2, "overlap_comm": True}),
    "stage 3": _recipe({}, evaluate=True),
    "stage 3, nothing ahead": _recipe(_NOTHING_AHEAD, evaluate=True),
    "stage 3, small ones persistent, no_sync": _recipe({"stage3_param_persistence_threshold": 100}, 2, how="no_sync"),
    "hpZ, bf16": _recipe(_HPZ, top=_BF16),
    "hpZ, bf16, lossless": _recipe(_HPZ, top=_BF16, extension={"weight_codec": "lossless"}),
    "hpZ, bf16, delta4, qgZ": _recipe({**_HPZ, **_QGZ}, top=_BF16, extension={"weight_codec": "delta4"}),
    "qwZ, qgZ, rotated": _recipe({**_QWZ, **_QGZ}, top=_BF16, extension={"hadamard": True}),
    "LoCo, accumulated and deferred": _recipe(_LOCO, 2, extension={"defer_cross_reduction": True}),
    "MiCS, accumulated": _recipe({"mics_shard_size": 2}, 2),
}
EQUAL = [  # pairs of cases whose losses and weights are equal bit for bit
    ("stage 0", "stage 2, overlapped"),
    ("stage 3", "stage 3, nothing ahead"),
    ("stage 1, accumulated", "stage 3, small ones persistent, no_sync"),
    ("hpZ, bf16", "hpZ, bf16, lossless"),
]


def _hash(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _train(recipe: Recipe) -> dict[str, object]:
    model = build(recipe)
    optimizer = zeropp.ZeroOptimizer(make_optimizer(recipe, model), model, recipe.config())
    trained = continue_zero(recipe, model, optimizer, range(recipe.steps), dist.get_rank())
    ledger = zeropp.comm_report(model)
    optimizer.close()
    return {
        "losses": _hash([torch.tensor(trained.losses, dtype=torch.float64)]),
        "norms": _hash([torch.tensor(trained.norms, dtype=torch.float64)]),
        "weights": _hash(trained.state[name] for name in sorted(trained.state)),
        "bytes": {f"{row.unit}, {row.kind}, {row.hop}, {row.codec}": [row.calls, row.bytes] for row in ledger.rows},
    }


def run(names: Iterable[str]) -> dict[str, list[dict[str, object]]]:
    """Return the results of each case, one dict of hashes and traffic counts per rank."""
    return {name: run_ranks(_WORLD, _train, CASES[name], local_world_size=_LOCAL, timeout=120) for name in names}


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    """Return descriptions of the places where two results differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = list(dict.fromkeys([*before, *after]))
        return [line for key in keys for line in differences(before.get(key), after.get(key), f"{where}/{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for index, pair in pairs for line in differences(*pair, f"{where}/{index}")]
    return [] if before == after else [f"{where}: {before} before, {after} now"]
