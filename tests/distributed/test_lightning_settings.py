"""What a Trainer with zeropp's strategy is told: precisions, configurations, hooks, and what is refused."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.distributed.harness import run_ranks

LAUNCHED = {"TORCHELASTIC_RUN_ID": "tests"}
PRECISIONS = {
    "32-true": torch.float32,
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
}
CONFIG: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 4, "warmup_type": "linear"}},
    "zeropp": {"unit_min_blocks": 0},
}


def precisions() -> list[str]:
    """What is wrong with a precision."""
    from tests.distributed import lightning_cases as cases
    from zeropp.integrations.lightning import ZeroPrecision

    wrong = []
    for name, dtype in PRECISIONS.items():
        # By a plugin: by its name Lightning turns float16 on a CPU into bfloat16.
        given = {"precision_plugin": ZeroPrecision(name), "initial_scale_power": 4, "loss_scale_window": 3}
        module = cases.built()
        begins = module.net[1].weight.detach().clone()
        run, module = cases.trained(cases.strategy(stage=3, **given), module, max_epochs=6)
        engine, seen = run.strategy.engine, module.seen
        if seen["dtypes"] != {(dtype, dtype)}:
            wrong.append(f"{name}: batch and weights were {seen['dtypes']}")
        if any(buffer.shard.dtype != torch.float32 for buffer in engine.core.trainable_buffers):
            wrong.append(f"{name}: main weights are not in float32")
        if not sum(seen["losses"][-5:]) < 0.9 * sum(seen["losses"][:5]):
            wrong.append(f"{name}: losses are {seen['losses']}")
        # It doubles at every third step after the first.
        scale, steps = engine.optimizer.loss_scale, engine.global_steps
        if scale != (1.0 if dtype != torch.float16 else 2.0 ** (4 + (steps - 1) // 3)):
            wrong.append(f"{name}: the loss scale is {scale} after {steps} steps")
        fresh = cases.built()
        cases.trained(cases.strategy(stage=3, **given), fresh, max_epochs=0)
        start = zeropp.full_state(fresh)["net.1.weight"]
        rounded = begins.to(dtype).float() if name.endswith("true") else begins
        # Rank 0's values are everyone's.
        if torch.equal(start, rounded) != (dist.get_rank() == 0):
            wrong.append(f"{name}: weights do not begin with those of rank 0")
    return wrong


def test_every_precision_trains() -> None:
    assert run_ranks(2, precisions, env=LAUNCHED) == [[], []]


def hooked(wanted: dict[str, Any]) -> dict[str, float]:
    """How far weights are from those of a Trainer in one process, where hooks and callbacks of the user's act."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    from tests.distributed import lightning_cases as cases

    found = {}
    for name, (state, _) in wanted.items():
        kind, more = cases.HOOKS[name]
        if more.get("callbacks"):
            more = {**more, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}
        run, module = cases.trained(cases.strategy(stage=3), cases.built(kind), **more)
        found[name] = cases.distance(module, state)
    return found


def hooks_alone() -> dict[str, Any]:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    from tests.distributed import lightning_cases as cases

    found = {}
    for name, (kind, more) in cases.HOOKS.items():
        if more.get("callbacks"):
            more = {**more, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}
        module = cases.plain(2, kind, **more)
        found[name] = module.state_dict(), module.seen["losses"]
    return found


def test_hooks_act_as_in_one_process() -> None:
    """In float32: 1e-5, of weights of about 1."""
    (wanted,) = run_ranks(1, hooks_alone)
    states = [state["net.1.weight"] for state, _ in wanted.values()]
    # Each hook does something: no two end alike.
    assert all(float((a - b).abs().max()) > 1e-3 for i, a in enumerate(states) for b in states[:i])
    for found in run_ranks(2, hooked, wanted, env=LAUNCHED):
        assert max(found.values()) < 1e-5, found
