"""The first recipes of docs/checkpoints.md and docs/fsdp2.md run on two ranks with a model of the reader's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

import zeropp
from tests.support.branching_models import make_config
from tests.support.docs_recipes import Blocks, recipe, run
from tests.support.rank_pool import run_ranks


def saved(folder: str) -> tuple[int, int, list[int], bool]:
    """Run the recipe twice: it trains and saves, and then resumes.

    Args:
        folder: working directory.

    Returns:
        First step of each run, steps of the kept checkpoints, and True if the second run has the first one's weights.
    """
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
