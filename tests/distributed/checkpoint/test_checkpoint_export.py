"""Safetensors files are read straight into shards, and exports are read by transformers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.checkpoint_training import saves, train, wrap
from tests.support.hf_models import MODELS, logits, make
from tests.support.quantized_model import Model
from tests.support.rank_pool import run_ranks
from zeropp import checkpoint
from zeropp.checkpoint.boxes import CheckpointError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def sharded(model: nn.Module, **top: object) -> zeropp.ZeroOptimizer:
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, **top}
    config["zeropp"] = {"unit_min_blocks": 0, "hang_timeout": 30}
    return zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model, config)


def exports(path: Path, kind: str, layout: str, limit: int) -> Tensor:
    model = make(kind, 1)
    sharded(model)
    checkpoint.export(path, model, layout=layout, file_nbytes=limit)  # type: ignore[arg-type]
    # The second export replaces the first.
    checkpoint.export(path, model, layout=layout, file_nbytes=limit)  # type: ignore[arg-type]
    return logits(model)


@pytest.mark.every(32)
@pytest.mark.parametrize(("kind", "layout", "limit"), [*((k, "hf", 20_000) for k in MODELS), ("llama", "single", 1)])
def test_from_pretrained_reads_an_export(kind: str, layout: str, limit: int, tmp_path: Path) -> None:
    """transformers reads an export and computes the same logits. Several files have an index, and all ranks write."""
    found = run_ranks(2, exports, tmp_path / "there", kind, layout, limit)
    names = sorted(each.name for each in (tmp_path / "there").iterdir())
    make(kind, 1).save_pretrained(tmp_path / "theirs")
    ours, theirs = (all_of(tmp_path / each) for each in ("there", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())
    shutil.rmtree(tmp_path / "theirs")
    assert ("model.safetensors.index.json" in names) == (layout == "hf") and "config.json" in names
    assert not [each for each in tmp_path.iterdir() if each.name != "there"]
    model = getattr(transformers, MODELS[kind][0]).from_pretrained(tmp_path / "there").eval()
    assert all(torch.equal(logits(model), rank) for rank in found)


def all_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def reads(path: Path, kind: str) -> tuple[Tensor, int, list[str]]:
    model = make(kind, 2)
    sharded(model)
    found = checkpoint.load_safetensors(model, path)
    return logits(model), found.nbytes_converted, found.missing


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("kind", "world"),
    [
        pytest.param(k, w, marks=() if w == 2 or k == "llama" else pytest.mark.campaign)
        for k in MODELS
        for w in (1, 2, 3)
    ],
)
def test_files_of_transformers_are_read_into_shards(kind: str, world: int, tmp_path: Path) -> None:
    model = make(kind, 1)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    ranks = run_ranks(world, reads, tmp_path, kind, local_world_size=world)
    assert all(torch.equal(found, logits(model)) and missing == [] for found, _, missing in ranks)
    # Stacked experts are read as boxes of the files, without a conversion. nomic's fused attention weight must be split
    # by transformers' conversion.
    assert any(converted for _, converted, _ in ranks) == (kind == "nomic")


class Large(nn.Module):
    """A model of two 16 MB matrices. They are so large that a page more or less hardly changes the bytes read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def reads_large(path: Path) -> int:
    model = Large()
    sharded(model)
    return checkpoint.load_safetensors(model, path).nbytes_read


def test_each_rank_reads_its_share_and_no_more(tmp_path: Path) -> None:
    model = Large()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    share = sum(tensor.nbytes for tensor in model.state_dict().values()) / 4
    assert all(share <= found <= 1.02 * share for found in run_ranks(4, reads_large, tmp_path, local_world_size=2))


def exports_as(path: Path, dtype: torch.dtype | None, top: dict[str, object]) -> dict[str, Tensor]:
    model = Model()
    optimizer = sharded(model, **top)
    train(model, optimizer, range(2))
    checkpoint.export(path, model, dtype=dtype)
    return zeropp.full_state(model)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """An export has the main weights rounded once to the given dtype; by default to the compute dtype."""
    state = run_ranks(2, exports_as, tmp_path / "there", dtype, {"bf16": {"enabled": True}})[0]
    found = load_file(tmp_path / "there" / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value.to(dtype or torch.bfloat16)) for name, value in state.items())


@pytest.mark.every(8)
@pytest.mark.parametrize("name", ["frozen codes", "hpz loco bf16"])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_checkpoint_becomes_whole_files_without_ranks(name: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    before = run_ranks(4, saves, tmp_path / "here", name, local_world_size=2)[0]
    checkpoint.consolidate(tmp_path / "here", tmp_path / "single", dtype=dtype)
    checkpoint.consolidate(tmp_path / "here", tmp_path / "several", dtype=dtype, layout="hf", file_nbytes=20_000)
    several: dict[str, Tensor] = {}
    for path in (tmp_path / "several").glob("*.safetensors"):
        several |= load_file(path)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == several.keys()
    for found in (load_file(tmp_path / "single" / "model.safetensors"), several):
        assert found.keys() == before.state.keys()
        for key, value in before.state.items():
            assert torch.equal(found[key], value if dtype is None else value.to(dtype)), key


def fails_on_one(path: Path) -> str:
    model, optimizer = wrap("stage 3")
    checkpoint.export(path, model)
    before = sorted(each.name for each in path.iterdir())
    write = os.pwrite
    if dist.get_rank() == 1:
        os.pwrite = lambda *_: (_ for _ in ()).throw(OSError(5, "the disk is broken"))
    try:
        checkpoint.export(path, model, layout="hf", file_nbytes=20_000)
    except (CheckpointError, OSError) as error:
        os.pwrite = write
        dist.barrier()  # rank 0 removes the files of the failed export before the barrier
        assert sorted(each.name for each in path.iterdir()) == before
        train(model, optimizer, range(1))
        checkpoint.export(path, model)
        return str(error)
    return ""


def test_one_rank_cannot_write(tmp_path: Path) -> None:
    for told in run_ranks(2, fails_on_one, tmp_path / "there"):
        assert "the disk is broken" in told
    assert [each.name for each in tmp_path.iterdir()] == ["there"]


def damaged(path: Path, how: str) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if how == "cut short":
        return (path.write_bytes(data[:-10]), None)[1]
    if how == "no header":
        return (path.write_bytes(b"not one of them at all"), None)[1]
    if how == "too large":
        header["head.bias"]["shape"] = [10**6]
    elif how == "unknown dtype":
        header["head.bias"]["dtype"] = "I3"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut short", "is damaged: .* would be bytes"),
        ("no header", "is no safetensors file"),
        ("too large", r"is damaged: 'head\.bias'"),
        ("unknown dtype", "of the dtype 'I3'"),
    ],
)
def test_damaged_files_are_refused_by_name(how: str, message: str, tmp_path: Path) -> None:
    model, _ = wrap("stage 3")
    path = tmp_path / "model.safetensors"
    save_file({name: value.contiguous() for name, value in Model().state_dict().items()}, path)
    checkpoint.load_safetensors(model, path)
    damaged(path, how)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.load_safetensors(model, tmp_path)
    assert "model.safetensors" in str(caught.value) and "nothing was changed" in str(caught.value)


def test_files_of_another_model(tmp_path: Path) -> None:
    model, _ = wrap("stage 3")
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        checkpoint.load_safetensors(model, tmp_path)
    save_file({"head.bias": torch.zeros(300), "other": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"the checkpoint has no 'scale', .* and the model has no 'other'"):
        checkpoint.load_safetensors(model, tmp_path)
    found = checkpoint.load_safetensors(model, tmp_path, strict=False)
    assert found.unexpected == ["other"] and "scale" in found.missing
    assert bool((zeropp.full_state(model)["head.bias"] == 0).all())
    save_file({"head.bias": torch.zeros(3)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"'head\.bias' is of shape \(300,\) here and of \(3,\) there"):
        checkpoint.load_safetensors(model, tmp_path, strict=False)


def test_a_run_goes_on_from_a_pretrained_file(tmp_path: Path) -> None:
    """Training from a safetensors file has the losses of a model that is built with the file's weights."""
    state = {name: value.contiguous() for name, value in Model().state_dict().items()}
    save_file({name: value + 0.01 for name, value in state.items()}, tmp_path / "model.safetensors")
    plain, losses = run_ranks(2, two_ways, tmp_path / "model.safetensors")[0]
    assert plain == losses


def two_ways(path: Path) -> tuple[list[float], list[float]]:
    found = []
    for by_file in (False, True):
        model = Model()
        if not by_file:
            model.load_state_dict(load_file(path))
        optimizer = sharded(model)
        if by_file:
            checkpoint.load_safetensors(model, path)
        found.append(train(model, optimizer, range(3)))
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, "bf16"])
def test_dtypes_of_no_weights_are_refused(dtype: Any, tmp_path: Path) -> None:
    model = make("llama", 1)
    sharded(model)
    with pytest.raises(TypeError, match=r"expected a floating torch\.dtype"):
        checkpoint.export(tmp_path / "out", model, dtype=dtype)


def test_buffers_keep_their_dtype(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    checkpoint.export(tmp_path / "here", model, dtype=torch.bfloat16)
    found = load_file(tmp_path / "here" / "model.safetensors")
    assert found["1.weight"].dtype == torch.bfloat16
    assert found["1.running_var"].dtype == torch.float32 and found["1.num_batches_tracked"].dtype == torch.int64
