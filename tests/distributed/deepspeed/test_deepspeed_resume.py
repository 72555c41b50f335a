"""A run saved by DeepSpeed resumes with its weights, states, counters, schedule and the script's own values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeropp
from tests.support.deepspeed_files import write_deepspeed
from tests.support.rank_pool import run_ranks

CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 8, "warmup_type": "linear"}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def model_of() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


SCALER = {"cur_scale": 2.0**9, "cur_iter": 6, "last_overflow_iter": 3, "cur_hysteresis": 1, "scale_window": 3}


def written(folder: Path) -> nn.Module:
    """Write a DeepSpeed checkpoint of four steps of plain torch, and return the model."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
    place = write_deepspeed(folder, model, optimizer, 2, 3, scaler=SCALER)
    for path in place.glob("*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        state |= {
            "global_samples": 64,
            "epoch": 3,
            "names": ["a", ("b", None)],
            "noise": torch.ones(3),
            "skipped_steps": 2,
        }
        torch.save(state, path)
    return model


def resumed(folder: Path, how: dict[str, Any]) -> tuple[Any, ...]:
    fp16 = {"enabled": True, "loss_scale_window": 3}
    engine, *_ = zeropp.initialize(model=model_of(), config={**CONFIG, "fp16": fp16})
    with pytest.warns(UserWarning, match="not read: noise"):
        path, client = engine.load_checkpoint(folder, **how)
    counts = engine.global_steps, engine.global_samples, engine.lr_scheduler.last_batch_iteration
    state, scales = zeropp.full_state(engine.module), [engine.optimizer.loss_scale]
    skipped = engine.skipped_steps
    # Iterations 6 and 7 follow. DeepSpeed doubles the scale if (iteration - last overflow - 1) is a multiple of the
    # window, so iteration 7 doubles it: (7 - 3 - 1) / 3 = 1.
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 6).half()).float().square().mean())
        engine.step()
        scales.append(engine.optimizer.loss_scale)
    return Path(path).name, client, counts, state, skipped, scales


@pytest.mark.parametrize("alone", [False, True], ids=["all", "weights alone"])
def test_a_run_of_deepspeed_goes_on(alone: bool, tmp_path: Path) -> None:
    model = written(tmp_path)
    for name, client, counts, state, skipped, scales in run_ranks(2, resumed, tmp_path, {"load_module_only": alone}):
        assert name == "global_step4" and client == {"epoch": 3, "names": ["a", ("b", None)]}
        assert counts == ((0, 0, -1) if alone else (4, 64, 3))
        assert skipped == (0 if alone else 2) and scales == ([2.0**16] * 3 if alone else [2.0**9, 2.0**9, 2.0**10])
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
