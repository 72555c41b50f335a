"""The first recipes of docs/checkpoints.md, fsdp2.md and training.md, on two ranks and with a model of the reader's."""

from __future__ import annotations

import io
import json
import os
import re
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import zeropp
from tests.support.branching_models import make_config
from tests.support.rank_pool import ROOT, run_ranks


def recipe(page: str, *changes: tuple[str, str]) -> str:
    """The first Python block of a page, with what a test cannot wait for changed."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert found is not None
    text = found[1]
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    return text


def run(text: str, space: dict[str, object]) -> str:
    """Run the block; its output."""
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(text, "docs", "exec"), space)
    return printed.getvalue()


class Blocks(nn.Module):
    """Layers under the name that the pages use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def saved(folder: str) -> tuple[int, int, list[int], bool]:
    """Save, resume and save; the first step of either run, the steps that are kept, and True if weights came back."""
    os.chdir(folder)
    text = recipe("checkpoints.md", ("1001", "41"), ("step % 100", "step % 10"))

    def start() -> dict[str, object]:
        model = Blocks()
        optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters()), model, make_config())

        def train(step: int) -> None:
            optimizer.zero_grad()
            optimizer.backward(model(torch.full((2, 32), step / 1000)).square().mean())
            optimizer.step()

        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        space: dict[str, object] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "train": train}
        run(text, space)
        space["state"] = zeropp.full_state(model)
        return space

    one, two = start(), start()
    states = (one["state"], two["state"])
    assert isinstance(states[0], dict) and isinstance(states[1], dict)
    same = all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert isinstance(one["first"], int) and isinstance(two["first"], int)
    return one["first"], two["first"], zeropp.checkpoint.Series("runs/first").steps(), same


def test_a_run_is_saved_and_resumed(tmp_path: Path) -> None:
    for result in run_ranks(2, saved, str(tmp_path)):
        assert result == (1, 41, [20, 30, 40], True)


def adapted() -> str:
    model = Blocks()

    def train() -> None:
        model(torch.ones(2, 32)).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())

    return run(recipe("fsdp2.md", ("...  # train as before", "train()")), {"model": model, "train": train})


def test_fsdp2_sends_codes() -> None:
    for printed in run_ranks(2, adapted):
        assert re.search(r"blocks\.1 +gather .* int8 ", printed) and re.search(
            r"blocks\.1 +reduce .* int4\+bf16 ", printed
        )


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
