"""DeepSpeed's ``zero_to_fp32`` functions, applied to DeepSpeed's folders and to zeropp's checkpoints."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import zeropp
from tests.support.checkpoint_training import saves, wrap
from tests.support.deepspeed_files import write_deepspeed
from tests.support.deepspeed_stand_in import standing_in
from tests.support.quantized_model import Model
from tests.support.rank_pool import run_ranks
from tests.support.torch_and_fsdp2_jobs import Other, other, plain
from zeropp import checkpoint
from zeropp.checkpoint.boxes import CheckpointError
from zeropp.deepspeed.zero_to_fp32 import (
    LazyTensor,
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)


@pytest.fixture(autouse=True)
def _no_warnings(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    yield
    assert not [each for each in recwarn if "latest" in str(each.message)]


def written(path: Path, of: str) -> dict[str, Tensor]:
    """Write a checkpoint to ``path``, and return its weights.

    Args:
        path: folder of the checkpoint.
        of: "zeropp", or the stage of a DeepSpeed folder.
    """
    if of == "zeropp":
        return run_ranks(2, saves, path, "hpz loco bf16", local_world_size=2)[0].state
    model, optimizer = plain()
    write_deepspeed(path, model, optimizer, 3, 3 if of == "stage 3" else 2)
    return dict(model.state_dict())


@pytest.mark.parametrize("of", ["zeropp", "stage 2", "stage 3"])
def test_files_that_need_nothing_else(of: str, tmp_path: Path) -> None:
    """Weights are equal bit for bit.

    They are written to one file or several, as pickle or safetensors, and read at once, lazily, and into a model.
    """
    state = written(tmp_path / "here", of)
    for safe in (False, True):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "here", tmp_path / "out", "20KB", safe_serialization=safe)
        index = "model.safetensors.index.json" if safe else "pytorch_model.bin.index.json"
        files = json.loads((tmp_path / "out" / index).read_text())["weight_map"]
        assert len(set(files.values())) > 1
        for name, value in state.items():
            path = tmp_path / "out" / files[name]
            found = load_file(path) if safe else torch.load(path, weights_only=True)
            assert torch.equal(found[name], value) and found[name].dtype == torch.float32
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "here", tmp_path / "one", None)
    assert [each.name for each in (tmp_path / "one").iterdir()] == ["pytorch_model.bin"]
    model = load_state_dict_from_zero_checkpoint(Model(), tmp_path / "here")
    lazy = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "here", lazy_mode=True)
    for name, value in state.items():
        assert torch.equal(model.state_dict()[name], value)
        assert isinstance(lazy[name], LazyTensor) and lazy[name].shape == value.shape
        assert torch.equal(lazy[name].contiguous(), value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_and_tied_ones(stage: int, tmp_path: Path) -> None:
    model, optimizer = other()
    write_deepspeed(tmp_path, model, optimizer, 2, stage, tag="first")
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path, "first")
    assert state.keys() == model.state_dict().keys() and state["last.weight"] is state["first.weight"]
    assert state["frozen.weight"].dtype == torch.float32
    Other().load_state_dict(state)  # type: ignore[arg-type]
    trained = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert state.keys() - trained.keys() == {"frozen.weight", "frozen.bias"}
    # Safetensors has no shared tensors, so the values are stored under each name.
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", safe_serialization=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    Other().load_state_dict(written)
    assert all(torch.equal(written[name], value) for name, value in state.items())  # type: ignore[arg-type]


def test_a_series_gives_weights_by_tag_or_trained_weights_only(tmp_path: Path) -> None:
    model, optimizer = wrap("frozen")
    optimizer.backward(model(torch.zeros(6, dtype=torch.long)))
    optimizer.step()
    series = checkpoint.Series(tmp_path)
    series.save(1, model, optimizer)
    optimizer.backward(model(torch.zeros(6, dtype=torch.long)))
    optimizer.step()
    series.save(2, model, optimizer)
    newest, first = (get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag) for tag in (None, series.path(1).name))
    changed = {name for name, value in newest.items() if not torch.equal(value, first[name])}  # type: ignore[arg-type]
    trained = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert changed <= trained.keys() < newest.keys()
    with pytest.raises(ValueError, match=r"load into it with zeropp\.checkpoint\.load"):
        load_state_dict_from_zero_checkpoint(model, tmp_path)


def engine_saved(path: Path) -> dict[str, Tensor]:
    engine, *_ = zeropp.initialize(
        model=Model(), config={"zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD"}}
    )
    engine.save_checkpoint(path, tag="first")
    engine.save_checkpoint(path, tag="second")
    return zeropp.full_state(engine.module)


def test_the_latest_checkpoint_of_a_training_engine_is_found(tmp_path: Path) -> None:
    """The functions find a training engine's latest checkpoint, and so does the command with DeepSpeed's name."""
    state = run_ranks(2, engine_saved, tmp_path)[0]
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
    with standing_in() as deepspeed:
        deepspeed.utils.zero_to_fp32.main([str(tmp_path), str(tmp_path / "out"), "--safe_serialization", "-t", "first"])
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == state.keys()


@pytest.mark.campaign
def test_the_module_is_a_command() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-m", "zeropp.checkpoint.zero_to_fp32", "/no/such/folder", "/no/such/out"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "'/no/such/folder' is no checkpoint" in done.stderr, done.stderr


def test_names_and_defaults_are_deepspeed_s() -> None:
    found = inspect.signature(convert_zero_checkpoint_to_fp32_state_dict).parameters
    assert {key: value.default for key, value in found.items() if not key.endswith("_dir")} == {
        "max_shard_size": "5GB", "safe_serialization": False, "tag": None, "exclude_frozen_parameters": False,
    }  # fmt: skip
    found = inspect.signature(get_fp32_state_dict_from_zero_checkpoint).parameters
    assert {key: value.default for key, value in found.items() if key != "checkpoint_dir"} == {
        "tag": None, "exclude_frozen_parameters": False, "lazy_mode": False,
    }  # fmt: skip
    assert list(inspect.signature(load_state_dict_from_zero_checkpoint).parameters) == [
        "model",
        "checkpoint_dir",
        "tag",
    ]


def test_missing_checkpoints_and_unusable_shard_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint of zeropp"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="has no folder 'there'"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "there")
    with pytest.raises(ValueError, match="max_shard_size is '5 apples'"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", "5 apples")
