"""A run that DeepSpeed began goes on: weights, states, counters, the schedule's place, the script's own values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeropp
from tests.distributed.deepspeed_files import write_deepspeed
from tests.distributed.harness import run_ranks

CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 8, "warmup_type": "linear"}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def model_of() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def written(folder: Path) -> nn.Module:
    """Four steps of plain torch, as DeepSpeed would have saved them."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
    place = write_deepspeed(folder, model, optimizer, 2, 3)
    for path in place.glob("*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        state |= {"global_samples": 64, "epoch": 3, "names": ["a", ("b", None)], "noise": torch.ones(3)}
        torch.save(state, path)
    return model


def resumed(folder: Path, how: dict[str, Any]) -> tuple[Any, ...]:
    engine, *_ = zeropp.initialize(model=model_of(), config=CONFIG)
    with pytest.warns(UserWarning, match="not read: noise"):
        path, client = engine.load_checkpoint(folder, **how)
    counts = engine.global_steps, engine.global_samples, engine.lr_scheduler.last_batch_iteration
    return Path(path).name, client, counts, zeropp.full_state(engine.module)


@pytest.mark.parametrize("alone", [False, True], ids=["all", "weights alone"])
def test_a_run_of_deepspeed_goes_on(alone: bool, tmp_path: Path) -> None:
    model = written(tmp_path)
    for name, client, counts, state in run_ranks(2, resumed, tmp_path, {"load_module_only": alone}):
        assert name == "global_step4" and client == {"epoch": 3, "names": ["a", ("b", None)]}
        assert counts == ((0, 0, -1) if alone else (4, 64, 3))
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
