"""Small checkpoints of an older version of zeropp, one per placement: the script that wrote them, and their values.

The archive tests/fixtures/checkpoints-e90cce9.tar.xz was written with the code of commit e90cce9 by this command:
PYTHONPATH=<tree of e90cce9>:<tree of e90cce9>/kernels python tests/support/older_checkpoints.py <archive>
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from zeropp import checkpoint

__all__ = [
    "ARCHIVE", "CONFIGS", "EXCEPTIONAL", "WORLDS", "Holder", "Model", "equal", "extra_of", "make", "tensors_of",
    "train", "unpack",
]  # fmt: skip

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "checkpoints-e90cce9.tar.xz"
_CUT: dict[str, object] = {"stage": 3, "stage3_param_persistence_threshold": 0}
_BF16: dict[str, object] = {"enabled": True}
_LOCO = {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}


def _config(zero: dict[str, object], top: dict[str, object] | None = None, **own: object) -> dict[str, object]:
    return {"zero_optimization": zero, "zeropp": {"unit_min_blocks": 0, "hang_timeout": 30, **own}, **(top or {})}


# Each name begins with the number of ranks that wrote the checkpoint. Nodes have two ranks.
CONFIGS: dict[str, dict[str, object]] = {
    "2 stage 0": _config({"stage": 0}),
    "2 stage 1": _config({"stage": 1}),
    "2 stage 2 fp16": _config({"stage": 2}, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "2 stage 3": _config(_CUT),
    "2 small parameters kept": _config({"stage": 3, "stage3_param_persistence_threshold": 20}),
    "2 main weights in bf16": _config(
        _CUT, {"bf16": {**_BF16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    ),
    "2 states on the host": _config({**_CUT, "offload_optimizer": {"device": "cpu"}}),
    "2 frozen codes": _config({**_CUT, "zero_quantized_nontrainable_weights": True}),
    "2 trained only": _config(_CUT),
    "4 mics": _config({**_CUT, "mics_shard_size": 2}),
    "4 hpz": _config({**_CUT, "zero_hpz_partition_size": 2}),
    "4 carried errors": _config(
        {**_CUT, **_LOCO, "zero_hpz_partition_size": 2},
        {"bf16": _BF16, "gradient_accumulation_steps": 1},
        feedback="both",
        defer_cross_reduction=True,
    ),
    "4 differences": _config({**_CUT, "zero_hpz_partition_size": 2}, {"bf16": _BF16}, weight_codec="delta4"),
}
WORLDS = {name: int(name[0]) for name in CONFIGS}


class Model(nn.Module):
    """A table, a tied head, a channels_last weight, a scalar, a buffer and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.inner = nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7), nn.Linear(7, 3))
        self.conv = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(3, 5)
        self.head.weight = self.table.weight
        self.register_buffer("seen", torch.tensor([3, -4]))
        self.told: object = None
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                row = torch.arange(parameter.numel()).add(index).remainder(9).sub(4).div(8)
                parameter.copy_(row.reshape(parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inner(self.table(x))
        picture = self.conv(rows.reshape(1, 2, 3, -1))
        return self.head(rows).square().mean() + self.scale * picture.square().mean()

    def get_extra_state(self) -> object:
        return {"empty": torch.empty(0, 3), "words": ("a", None)}

    def set_extra_state(self, state: object) -> None:
        self.told = state


class Holder:
    """An object with ``state_dict`` and ``load_state_dict``, saved among the extra values."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


# Values that newer versions refuse to write but still load.
EXCEPTIONAL: dict[str, object] = {"large": -(3**300), "half a pair": {"\udcff/x": ["\ud800"]}}


def extra_of(rank: int) -> dict[str, Any]:
    """Return the extra values of a rank, some of which differ between ranks."""
    return {
        "numbers": [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-300, 2**63, 2**127 - 1, True],
        "nothing": None,
        "tuples": ((), (1, (2.0, None)), [("a",)]),
        "keys": {1: "one", (2, 3): "pair", None: 0, 2.5: 2, "~tensor": "words", "": {"": {}}},
        "nested": {"a": {"b": [1, {"c": (torch.tensor([1.5, float("nan")]),)}]}},
        "tensors": [
            torch.tensor([1, 2], dtype=torch.bfloat16), torch.zeros(0, 3), torch.tensor(7), torch.tensor([True]),
            torch.tensor([1 + 2j]), torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
        ],
        "numpy": [numpy.arange(4, dtype=numpy.uint16).reshape(2, 2), numpy.float32(0.1)],
        "counter": Counter({3: 2, 5: 1}),
        "rank": (rank, torch.full((2,), rank)),
        "words": "ünïcödé \0 \u2028",
        "holder": Holder({"of": (rank // 2, "steps")}),
    }  # fmt: skip


def make(name: str, config: str | None = None) -> tuple[Model, zeropp.ZeroOptimizer]:
    """Return the model and optimizer of a saved checkpoint, wrapped with its own or another configuration.

    Args:
        name: name of the checkpoint, which decides on frozen parameters.
        config: name of the configuration; None for the checkpoint's own.
    """
    model = Model()
    if "frozen" in name or "trained" in name:
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(key.startswith("inner") or key == "scale")
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.03}, {"params": others, "lr": 2e-3, "betas": (0.5, 0.75)}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return model, zeropp.ZeroOptimizer(optimizer, model, CONFIGS[config or name])


def train(model: Model, optimizer: zeropp.ZeroOptimizer, steps: int, worst: float = 1.0) -> None:
    """Train some steps; the last loss is multiplied by ``worst``."""
    rank = dist.get_rank()
    for step in range(steps):
        loss = model(torch.tensor([step % 5, rank, 4, 0]))
        optimizer.backward(loss * (worst if step == steps - 1 else 1.0))
        optimizer.step()
        optimizer.zero_grad()


def equal(found: object, expected: object) -> bool:
    """Return True if both values are equal bit for bit and have the same types."""
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor) or (found.dtype, found.shape) != (expected.dtype, expected.shape):
            return False
        return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (found, expected)))
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        return list(found) == list(expected) and all(equal(found[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple)
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(expected, numpy.ndarray):
        assert isinstance(found, numpy.ndarray)
        return found.dtype == expected.dtype and found.shape == expected.shape and bool((found == expected).all())
    return repr(found) == repr(expected)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, read from its files as the format defines them, without zeropp's reader."""
    metadata = json.loads((folder / "metadata.json").read_bytes())["checkpoint"]
    dtypes = {
        "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "I32": torch.int32,
        "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "BOOL": torch.bool, "C64": torch.complex64,
        "F8_E4M3": torch.float8_e4m3fn,
    }  # fmt: skip
    files = [bytearray((folder / each["name"]).read_bytes()) for each in metadata["files"]]
    found = {}
    for name, entry in metadata["tensors"].items():
        dtype, value = dtypes[entry["dtype"]], torch.empty(entry["shape"], dtype=dtypes[entry["dtype"]])
        for box in entry["boxes"]:
            count = torch.Size(box["sizes"]).numel()
            place = tuple(slice(o, o + size) for o, size in zip(box["offsets"], box["sizes"], strict=True))
            if count:
                row = torch.frombuffer(files[box["file"]], dtype=dtype, count=count, offset=box["begin"])
                value[place] = row.reshape(box["sizes"])
        found[name] = value
    return found


def unpack(folder: Path) -> Path:
    """Extract the committed checkpoints into a folder, each under its name, and return the folder."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _save(root: Path, world: int) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    for name in (each for each in CONFIGS if WORLDS[each] == world):
        model, optimizer = make(name)
        average = zeropp.ema(model, 0.5)
        train(model, optimizer, 3)
        average.update()
        # The infinite loss skips a step, which is counted. It also clears carried errors, so another step follows.
        train(model, optimizer, 1, float("inf"))
        train(model, optimizer, 1)
        # Random states of few different bytes compress well.
        torch.manual_seed(rank % 2)
        random.setstate((3, (*range(rank, rank + 624), 624), None))
        numpy.random.seed(rank % 2)
        extra = {**extra_of(rank), **EXCEPTIONAL, "average": average}
        only = {"exclude_frozen_parameters": True} if "trained" in name else {}
        checkpoint.save(root / name, model, optimizer, extra=extra, **only)
    dist.destroy_process_group()


def _main(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for world in sorted(set(WORLDS.values())):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
            env = {**os.environ, "SAVE_TO": folder, "OMP_NUM_THREADS": "1"}
            subprocess.run([*command, __file__], env=env, check=True)
        with tarfile.open(archive, "w:xz", preset=9) as out:
            for name in CONFIGS:
                out.add(Path(folder) / name, name)


if __name__ == "__main__":
    if "RANK" in os.environ:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % 2)
        _save(Path(os.environ["SAVE_TO"]), int(os.environ["WORLD_SIZE"]))
    else:
        _main(Path(sys.argv[1]))
