"""Programs in processes of their own: the example under torchrun and with Lightning's launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.rank_pool import ROOT

EXAMPLE = str(ROOT / "examples" / "lightning_gpt.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(command: list[str], folder: Path, seconds: float = 110) -> str:
    """Run a program that must succeed, and return its standard output."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def loss_of(output: str, step: int) -> float:
    """Return the validation loss that a program has printed for a step."""
    (loss,) = re.findall(rf"^step {step}: validation loss ([\d.]+);", output, re.MULTILINE)
    return float(loss)


@pytest.mark.campaign
def test_the_example_under_torchrun(tmp_path: Path) -> None:
    """Each of two ranks trains on 16 batches of 8 sequences, two batches per step.

    A random model has a loss of ln 256, 5.5.
    """
    output = run([*TORCHRUN, EXAMPLE, "--folder", "out"], tmp_path)
    assert loss_of(output, 8) < 4.5
    assert (tmp_path / "out" / "last.ckpt" / "checkpoint" / "metadata.json").is_file()
    whole = torch.load(tmp_path / "out" / "whole.ckpt", weights_only=True)
    assert whole["hyper_parameters"]["width"] == 64 and whole["global_step"] == 8
    assert all(value.dtype == torch.float32 for value in whole["state_dict"].values()) and len(whole["state_dict"]) > 20


@pytest.mark.campaign
@pytest.mark.timeout(400)
def test_the_example_resumed_and_by_lightning_s_launcher(tmp_path: Path) -> None:
    """DDP on the same batches ends with the same loss within 1e-3 of about 2, because the order of sums differs."""
    run([*TORCHRUN, EXAMPLE, "--folder", "out"], tmp_path)
    resumed = run([*TORCHRUN, EXAMPLE, "--folder", "out", "--resume", "--epochs", "2"], tmp_path)
    popen = run([sys.executable, EXAMPLE, "--folder", "popen", "--epochs", "2", "--strategy", "zeropp"], tmp_path)
    plain = run([*TORCHRUN, EXAMPLE, "--folder", "ddp", "--epochs", "2", "--strategy", "ddp"], tmp_path)
    for output in (resumed, popen):
        assert loss_of(output, 16) == pytest.approx(loss_of(plain, 16), abs=1e-3)
