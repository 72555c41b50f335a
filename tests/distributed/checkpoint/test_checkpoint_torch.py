"""torch.distributed.checkpoint saves and loads ``zeropp.checkpoint.state``. FSDP2 and single processes read it, too."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import zeropp
from tests.support.checkpoint_training import Went, make_optimizer, moments, states_of, train, wrap
from tests.support.quantized_model import Model
from tests.support.rank_pool import run_ranks
from tests.support.torch_and_fsdp2_jobs import FLAT, Shardable, fsdp2_saves, sharded, train_fsdp2
from zeropp import checkpoint


def saves_by_torch(path: Path, name: str, how: str, make: type[Model] = Model) -> Went:
    model, optimizer = wrap(name, make)
    train(model, optimizer, range(4))
    state = checkpoint.state(model, optimizer)
    if how == "async":
        dcp.async_save({"app": state}, checkpoint_id=path, process_group=dist.new_group(backend="gloo")).result()
    elif how == "app":
        dcp.save({"app": state}, checkpoint_id=path)
    else:
        dcp.save(state.state_dict(), checkpoint_id=path)
    return went(model, optimizer)


def went(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> Went:
    result = Went(zeropp.full_state(model), moments(optimizer))
    result.losses = train(model, optimizer, range(4, 8))
    return result


def loads_by_torch(path: Path, name: str, how: str, trained: int, make: type[Model] = Model) -> Went:
    model, optimizer = wrap(name, make)
    train(model, optimizer, range(90, 90 + trained))
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    state = checkpoint.state(model, optimizer)
    if how == "plain":
        given = state.state_dict()
        dcp.load(given, checkpoint_id=path)
        state.load_state_dict(given)
    else:
        dcp.load({"app": state}, checkpoint_id=path)
    return went(model, optimizer)


@pytest.mark.every(16)
@pytest.mark.filterwarnings("ignore:carried errors of quantized gradients")
@pytest.mark.parametrize(
    ("saved", "how", "world", "loaded", "trained"),
    [
        ("hpz loco bf16", "app", 4, "hpz lossless", 2),
        ("stage 3", "plain", 4, "stage 1", 0),
        ("mics", "async", 4, "stage 3 small kept", 0),
        ("stage 2 bf16", "app", 2, "one unit", 1),
        ("stage 0", "plain", 3, "mics", 0),
    ],
)
def test_torch_saves_and_loads(saved: str, how: str, world: int, loaded: str, trained: int, tmp_path: Path) -> None:
    """Weights and states load bit for bit on other ranks and placements, also before the optimizer's first step."""
    before = run_ranks(4, saves_by_torch, tmp_path / "here", saved, how, local_world_size=2)
    loaded = "stage 3" if world == 3 else loaded
    local = 1 if world == 3 else 2
    after = run_ranks(world, loads_by_torch, tmp_path / "here", loaded, how, trained, local_world_size=local)
    assert all(torch.equal(after[0].state[name], value) for name, value in before[0].state.items())
    left, right = states_of(after), states_of(before)
    assert all(torch.equal(left[n][k], v) for n in right for k, v in right[n].items())
    if world == 4:
        assert after[0].losses == pytest.approx(before[0].losses, abs=0.2)


class WithNothing(Model):
    """A model with a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(3, 0))


@pytest.mark.campaign
def test_a_parameter_without_elements(tmp_path: Path) -> None:
    before = run_ranks(2, saves_by_torch, tmp_path / "here", "stage 3", "app", WithNothing, local_world_size=2)
    after = run_ranks(2, loads_by_torch, tmp_path / "here", "stage 3", "app", 0, WithNothing, local_world_size=2)
    assert after[0].losses == before[0].losses


def fsdp2_loads(path: Path, ours: bool = False) -> list[float]:
    model, optimizer = sharded()
    weights, states = get_state_dict(model, optimizer, options=FLAT)
    given = {"model": weights, "optimizer": states}
    if ours:
        dcp.load(given, storage_reader=checkpoint.Reader(path))
    else:
        dcp.load(given, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=given["model"], optim_state_dict=given["optimizer"], options=FLAT)
    return train_fsdp2(model, optimizer, range(4, 8))


def test_fsdp2_goes_on(tmp_path: Path) -> None:
    """FSDP2 resumes with weights, states and settings. Losses agree to 1e-5, because the order of sums differs."""
    before = run_ranks(2, saves_by_torch, tmp_path / "here", "stage 3", "plain", Shardable, local_world_size=2)
    for rank, losses in zip(before, run_ranks(2, fsdp2_loads, tmp_path / "here"), strict=True):
        assert losses == pytest.approx(rank.losses, rel=1e-5)


def saves(path: Path, name: str, make: type[Model]) -> Went:
    model, optimizer = wrap(name, make)
    train(model, optimizer, range(4))
    checkpoint.save(path, model, optimizer)
    return went(model, optimizer)


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_fsdp2_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """FSDP2 resumes from zeropp's own files, which ``checkpoint.Reader`` gives to torch's planner."""
    before = run_ranks(4, saves, tmp_path / "here", "hpz loco bf16", Shardable, local_world_size=2)
    right = run_ranks(2, saves, tmp_path / "there", "stage 3", Shardable, local_world_size=2)
    for rank, losses in zip(right, run_ranks(2, fsdp2_loads, tmp_path / "there", True), strict=True):
        assert losses == pytest.approx(rank.losses, rel=1e-5)
    check_weights(tmp_path / "here", before[0].state)


def check_weights(path: Path, state: dict[str, Tensor]) -> None:
    """Check that one process reads the weights of a checkpoint bit for bit.

    Args:
        path: folder of the checkpoint.
        state: expected weights by name.
    """
    single = {name: torch.empty_like(value) for name, value in state.items()}
    dcp.load({"model": single}, storage_reader=checkpoint.Reader(path))
    assert all(torch.equal(single[name], value) for name, value in state.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_single_process_reads_a_checkpoint_of_several_ranks(tmp_path: Path) -> None:
    check_weights(tmp_path / "here", run_ranks(2, saves, tmp_path / "here", "stage 3", Model)[0].state)


class Odd(WithNothing):
    """A model that also has a module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.blocks[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_single_process_reads_a_checkpoint(tmp_path: Path) -> None:
    """One process reads every name of a tied parameter, quantized and empty tensors, states and settings."""
    model, optimizer = wrap("frozen codes", Odd)
    train(model, optimizer, range(3))
    checkpoint.save(tmp_path / "here", model, optimizer)
    expected = {f"model.{name}": value for name, value in zeropp.full_state(model).items()}
    states = states_of([Went({}, moments(optimizer))])
    expected |= {
        f"optimizer.state.{name}.{key}": value for name, found in states.items() for key, value in found.items()
    }
    reader = checkpoint.Reader(tmp_path / "here")
    assert reader.validate_checkpoint_id(tmp_path / "here") and not reader.validate_checkpoint_id(tmp_path)
    there = reader.read_metadata().state_dict_metadata
    given: dict[str, Any] = {
        name: torch.full(found.size, -1, dtype=found.properties.dtype) if hasattr(found, "size") else None
        for name, found in there.items()
    }
    dcp.load(given, storage_reader=reader)
    settings = {name: value for name, value in given.items() if name not in expected}
    assert given.keys() - settings.keys() == expected.keys() and any("again" in name for name in expected)
    for name, value in expected.items():
        assert torch.equal(given[name].flatten(), value.flatten()), name
    assert all(name.startswith("optimizer.param_groups.") for name in settings)
    assert settings["optimizer.param_groups.head.bias.lr"] == 2e-3
    assert settings["optimizer.param_groups.head.bias.betas"] == (0.9, 0.999)
    file = next((tmp_path / "here").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointException, match=f"{file.name}.* is damaged"):
        dcp.load(given, storage_reader=checkpoint.Reader(tmp_path / "here"))
    dcp.load(given, storage_reader=checkpoint.Reader(tmp_path / "here", verify="none"))


@pytest.mark.campaign
def test_zeropp_goes_on_from_fsdp2(tmp_path: Path) -> None:
    before = run_ranks(2, fsdp2_saves, tmp_path / "here")
    after = run_ranks(2, loads_by_torch, tmp_path / "here", "stage 3", "plain", 0, Shardable, local_world_size=2)
    for losses, rank in zip(before, after, strict=True):
        assert rank.losses == pytest.approx(losses, rel=1e-5)


def test_one_file_for_a_single_process(tmp_path: Path) -> None:
    """A plain model and optimizer load the file that torch's own converter makes."""
    before = run_ranks(2, saves_by_torch, tmp_path / "here", "stage 3", "plain", local_world_size=2)
    dcp_to_torch_save(tmp_path / "here", tmp_path / "file.pt")
    found: dict[str, Any] = torch.load(tmp_path / "file.pt", weights_only=True)
    model = Model()
    model.load_state_dict(found["model"])
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before[0].state.items())
    optimizer = make_optimizer(model)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"], options=FLAT)
    expected: dict[str, dict[str, Tensor]] = states_of(before)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert all(torch.equal(state[key], value) for key, value in expected[name].items())


def test_torch_s_own_state_dict_of_the_optimizer_is_refused_by_torch() -> None:
    """torch's get_optimizer_state_dict raises a KeyError, because parameter groups have slices and not parameters.

    docs/checkpoints.md names the alternative.
    """
    model, optimizer = wrap("stage 3")
    train(model, optimizer, range(1))
    before = zeropp.full_state(model)
    with warnings.catch_warnings(), pytest.raises(KeyError):
        warnings.simplefilter("ignore")
        get_optimizer_state_dict(model, optimizer)
    after = zeropp.full_state(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
