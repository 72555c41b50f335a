"""README's blocks for scripts that are written for DeepSpeed, and for transformers' Trainer."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.deepspeed_stand_in import standing_in
from tests.support.rank_pool import run_ranks
from tests.support.readme import DEEPSPEED, ROOT, STEPS, TRAINER, Data, Losses, Model, block, every, run, sides


def engine_losses(program: str, folder: str) -> list[float]:
    """Train with the JSON of a file, and with README's import or, by the stand-in, with DeepSpeed's."""
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
    """With the example's script as train.py, which knows nothing of zeropp."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    for name in ("hf_trainer.py", "text_data.py"):
        (tmp_path / name.replace("hf_trainer", "train")).write_text((ROOT / "examples" / name).read_text())
    (tmp_path / "zero3.json").write_text((ROOT / "examples" / "zero3_auto.json").read_text())
    with contextlib.suppress(FileExistsError):
        (tmp_path.parent / "LICENSE").write_text((ROOT / "LICENSE").read_text())
    command = every(block(TRAINER, "sh"), ("--nproc-per-node 8", "--standalone --nproc-per-node 2"))
    assert "parameters in" in run(command, tmp_path, "--folder=runs", "--steps=2")
