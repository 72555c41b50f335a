"""The code blocks and commands of README.md, and the model, data and loss with which tests run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = [
    "BATCH", "BLOCKS", "DEEPSPEED", "FEWER_BYTES", "FIRST", "FSDP2", "LIGHTNING", "ROOT", "STEPS", "TESTS", "TEXT",
    "TRAIN", "TRAINER", "Data", "Losses", "Model", "block", "every", "run", "sides",
]  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = dict(reversed(each) for each in re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL))
"""The language of each fenced block, keyed by the block's content."""
# Marks: each is a text that occurs in only one block, and tests select the block by it.
FIRST, FEWER_BYTES, FSDP2 = "Model().to(device)", '"zero_quantized_weights"', "fully_shard(model"
DEEPSPEED, TRAINER, LIGHTNING = "import deepspeed", "zeropp.compat.deepspeed", "L.Trainer"
TRAIN, TESTS = "train_gpt.py", "pytest"
# WIDTH is so large that weights are partitioned; smaller weights would be persistent.
WIDTH, BATCH, STEPS = 400, 8, 5


def block(mark: str, language: str) -> str:
    (found,) = (body for body in BLOCKS if mark in body)
    assert BLOCKS[found] == language
    return found


def sides(mark: str) -> tuple[str, str]:
    """Return the program before and the program after a diff block."""
    lines = [(line[:1], line[2:]) for line in block(mark, "diff").splitlines()]
    assert {mark for mark, _ in lines} <= {"", " ", "+", "-"}
    return tuple("\n".join(text for mark, text in lines if mark != left) for left in "+-")  # type: ignore[return-value]


class Data(Dataset):
    """Random inputs and targets, each [WIDTH]."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.pairs = torch.randn(2, STEPS * 2 * BATCH, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)

    def __len__(self) -> int:
        return self.pairs.size(1)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pairs[0, index], self.pairs[1, index].tanh()


class Model(nn.Module):
    """A model with its blocks in a ModuleList, as transformers models have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x)
        return self.head(x)


class Losses(nn.MSELoss):
    """The mean squared error, with a list of all its values."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def forward(self, found: Tensor, wanted: Tensor) -> Tensor:
        loss = super().forward(found.to(wanted.dtype), wanted)
        self.values.append(loss.item())
        return loss


def every(text: str, *replaced: tuple[str, str]) -> str:
    """Return the text with each (old, new) pair replaced. Every old text must occur."""
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    return text


def run(command: str, folder: Path, *flags: str) -> str:
    """Run a command of README in a shell and return its output. Programs of this environment come first on PATH."""
    programs = Path(sys.executable).parent
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "RANK", "WORLD_"))}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": f"{programs}:{env['PATH']}"}
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run(
        " ".join([command.strip(), *flags]),
        shell=True,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
