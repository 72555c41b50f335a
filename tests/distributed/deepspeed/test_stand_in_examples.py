"""The examples that import deepspeed, directly or through a library, run on two ranks."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.deepspeed_stand_in import standing_in
from tests.support.rank_pool import run_ranks

ROOT = Path(__file__).resolve().parents[3]


def rewarded(steps: int) -> list[float]:
    with standing_in(), contextlib.redirect_stdout(io.StringIO()):
        loop = importlib.import_module("trl_style_loop")
        try:
            return loop.train(loop.parse_arguments([f"--steps={steps}"]))
        finally:
            del sys.modules["trl_style_loop"]


def device_of_tokens() -> set[str]:
    """Sample from a model on the "meta" device, which stands for a GPU, and return the devices of the tokens."""
    with standing_in():
        loop = importlib.import_module("trl_style_loop")
        try:
            seen = []

            def model(tokens: Tensor) -> Tensor:
                seen.append(str(tokens.device))
                return torch.zeros(*tokens.shape, loop.MODEL.vocab)

            tokens = loop.rollout(model, torch.Generator(), torch.device("meta"))
            return {*seen, str(tokens.device)}
        finally:
            del sys.modules["trl_style_loop"]


def test_the_loop_keeps_its_tokens_on_the_model_s_device() -> None:
    """Tokens must be on the model's device: on a GPU, tokens on the CPU would be an error."""
    assert run_ranks(1, device_of_tokens, init=False) == [{"meta"}]


@pytest.mark.campaign
def test_the_reinforcement_loop_raises_the_reward() -> None:
    """The loop combines generation inside GatheredParameters, a reference model, an average and offloaded states."""
    first, second = run_ranks(2, rewarded, 16)
    assert first == second and first[0] < 0.02 and first[-1] > 0.2


def run(*command: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "HF_HUB_OFFLINE": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *command]
    if command[0].endswith("hf_trainer.py"):
        launch = [sys.executable, "-m", "zeropp.compat.deepspeed", *launch]
    done = subprocess.run(launch, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.campaign
@pytest.mark.timeout(400)
def test_as_commands(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    run("examples/trl_style_loop.py", f"--rewards={tmp_path / 'rewards.json'}")
    assert json.loads((tmp_path / "rewards.json").read_text())[-1] > 0.8
    said = run("examples/hf_trainer.py", f"--folder={tmp_path / 'hf'}")
    assert "parameters in" in said and "the terms of" in said
    run("examples/hf_trainer.py", f"--folder={tmp_path / 'hf'}", "--resume")
