"""README's scripts that use ``init_distributed``, DeepSpeed's calls, or transformers' Trainer."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.deepspeed_stand_in import standing_in
from tests.support.rank_pool import run_ranks
from tests.support.readme import (
    DEEPSPEED,
    FIRST,
    ROOT,
    STEPS,
    TEXT,
    TRAINER,
    Data,
    Losses,
    Model,
    block,
    every,
    run,
    sides,
)


def trained(program: str, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """Run the first script of README, and return this rank's losses and the weights at the end."""
    given: dict[str, Any] = {"Model": lambda: Model().to(dtype), "data": Data(dtype), "loss_fn": Losses()}
    exec(program, given)
    if isinstance(given["optimizer"], zeropp.ZeroOptimizer):
        # In stage 3 a rank has no values of large weights between steps.
        assert type(given["model"].head.weight) is not nn.Parameter
        return given["loss_fn"].values, zeropp.full_state(given["model"])
    return given["loss_fn"].values, given["model"].state_dict()


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp64", 1e-6), ("bf16", 2e-2)])
def test_the_first_diff_trains_like_the_script_that_it_changes(dtype: str, tolerance: float) -> None:
    plain, ours = sides(FIRST)
    # Without shuffling, the ranks together have the batches of the plain script.
    plain = every(plain, ("batch_size=8, shuffle=True", "batch_size=16"))
    ours = every(ours, ("DistributedSampler(data)", "DistributedSampler(data, shuffle=False)"))
    given = torch.float32
    if dtype == "fp64":  # in bf16, rounding of small gradients decides Adam's steps, so only fp64 has a close bound
        given = torch.float64
        ours = every(ours, ('"bf16": {"enabled": True}', '"bf16": {"enabled": False}'))
    expected, weights = trained(plain, given)
    ranks = run_ranks(2, trained, ours, given)
    assert len(expected) == STEPS
    losses = [sum(each) / 2 for each in zip(*(losses for losses, _ in ranks), strict=True)]
    assert losses == pytest.approx(expected, rel=tolerance)
    if dtype == "fp64":
        for _, found in ranks:
            for name, weight in weights.items():
                torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6)


def test_torchrun_starts_the_first_script(tmp_path: Path) -> None:
    """A script started by torchrun exits without errors, even if it closes nothing and collectives are in flight."""
    (command,) = re.findall(r"`(torchrun --nproc-per-node 8 train\.py)`", TEXT)
    source = "from tests.support.readme import Data, Losses, Model\ndata, loss_fn = Data(), Losses()\n"
    (tmp_path / "train.py").write_text(f"{source}{sides(FIRST)[1]}\nprint('trained', flush=True)\n")
    assert run(every(command, ("node 8", "node 2 --standalone")), tmp_path).count("trained") == 2


def engine_losses(program: str, folder: str) -> list[float]:
    """Train with the JSON of a file, by README's import or, with the stand-in, by DeepSpeed's.

    Args:
        program: lines that make the engine.
        folder: folder for the JSON file.

    Returns:
        Losses of this rank.
    """
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
    }
    path = Path(folder) / f"zero3-{dist.get_rank()}.json"
    path.write_text(json.dumps(config))
    given: dict[str, Any] = {"model": Model()}
    with standing_in():
        exec(every(program, ("zero3.json", str(path))), given)
    engine, losses, (x, y) = given["engine"], Losses(), Data().pairs[:, :4]
    for _ in range(STEPS):
        engine.backward(losses(engine(x), y.tanh()))
        engine.step()
    assert given["scheduler"].last_batch_iteration > 0
    return losses.values


def test_the_deepspeed_import(tmp_path: Path) -> None:
    before, after = sides(DEEPSPEED)
    unchanged, changed = (run_ranks(2, engine_losses, each, str(tmp_path)) for each in (before, after))
    assert unchanged == changed and changed[0] == changed[1] and changed[0][-1] < changed[0][0]


@pytest.mark.campaign
@pytest.mark.timeout(240)
def test_the_trainer_s_command(tmp_path: Path) -> None:
    """README's command runs examples/hf_trainer.py, which does not import zeropp, under the name train.py."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    for name in ("hf_trainer.py", "text_data.py"):
        (tmp_path / name.replace("hf_trainer", "train")).write_text((ROOT / "examples" / name).read_text())
    (tmp_path / "zero3.json").write_text((ROOT / "examples" / "zero3_auto.json").read_text())
    with contextlib.suppress(FileExistsError):
        (tmp_path.parent / "LICENSE").write_text((ROOT / "LICENSE").read_text())
    command = every(block(TRAINER, "sh"), ("--nproc-per-node 8", "--standalone --nproc-per-node 2"))
    assert "parameters in" in run(command, tmp_path, "--folder=runs", "--steps=2")
