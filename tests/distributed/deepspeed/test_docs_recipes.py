"""The recipes of docs/using.md and docs/training.md that use DeepSpeed's calls run unchanged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.docs_recipes import Blocks, recipe, run
from tests.support.rank_pool import run_ranks
from tests.support.using_page import START, check_page


def test_using_md(tmp_path: Path) -> None:
    """init_distributed() names no backend; hops still send pairwise over gloo."""
    check_page(START, tmp_path)


def styled(folder: str) -> tuple[str, object]:
    os.chdir(folder)
    model = Blocks()
    data = TensorDataset(torch.randn(16, 32), torch.zeros(16, 32))
    space: dict[str, object] = {"model": model, "data": data, "loss_fn": nn.functional.mse_loss}
    run(recipe("training.md"), space)
    return str(space["path"]), space["client_state"]


def test_a_loop_in_deepspeed_s_style_saves_and_loads(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 3},
    }  # fmt: skip
    (tmp_path / "zero3.json").write_text(json.dumps(config))
    for path, client_state in run_ranks(2, styled, str(tmp_path)):
        assert "runs/first" in path and client_state == {"epoch": 1}
