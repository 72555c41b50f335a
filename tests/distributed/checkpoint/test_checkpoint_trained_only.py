"""Checkpoints without frozen parameters are smaller, resume bit for bit, and are never taken for complete ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import zeropp
from tests.support.checkpoint_training import CONFIGS, make_optimizer, train, wrap
from tests.support.quantized_model import Model
from tests.support.rank_pool import run_ranks
from zeropp import checkpoint
from zeropp.checkpoint import CheckpointError


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def saves_both(folder: Path, name: str) -> list[float]:
    model, optimizer = wrap(name)
    train(model, optimizer, range(3))
    checkpoint.save(folder / "whole", model, optimizer)
    checkpoint.save(folder / "trained", model, optimizer, exclude_frozen_parameters=True)
    return train(model, optimizer, range(3, 6))


def goes_on(path: Path, name: str) -> tuple[list[float], list[str], list[str]]:
    model, optimizer = wrap(name)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    found = checkpoint.load(path, model, optimizer)
    return train(model, optimizer, range(3, 6)), sorted(found.missing), sorted(frozen)


@pytest.mark.every(8)
@pytest.mark.parametrize("name", ["frozen codes hpz", "frozen", "frozen codes"])
def test_training_goes_on_with_the_frozen_parameters_that_are_there(name: str, tmp_path: Path) -> None:
    losses = run_ranks(2, saves_both, tmp_path, name)
    for was, (now, missing, frozen) in zip(losses, run_ranks(2, goes_on, tmp_path / "trained", name), strict=True):
        assert now == was and missing == frozen and len(frozen) > 5
    assert size_of(tmp_path / "trained") < 0.8 * size_of(tmp_path / "whole")


def groups_of(path: Path) -> list[float]:
    model, optimizer = wrap("frozen")
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    checkpoint.load(path, model, optimizer)
    return [group["lr"] for group in optimizer.param_groups]


def test_settings_of_groups_come_back(tmp_path: Path) -> None:
    run_ranks(2, saves_both, tmp_path, "frozen")
    assert run_ranks(2, groups_of, tmp_path / "trained") == [[1e-3, 2e-3]] * 2


def trains_all(path: Path) -> str:
    model = Model()
    optimizer = zeropp.ZeroOptimizer(make_optimizer(model), model, CONFIGS["stage 3"])
    before = zeropp.full_state(model)
    with pytest.raises(CheckpointError) as refused:
        checkpoint.load(path, model, optimizer)
    assert all(torch.equal(before[name], value) for name, value in zeropp.full_state(model).items())
    found = checkpoint.load(path, model, optimizer, strict=False)
    after = zeropp.full_state(model)
    assert all(torch.equal(before[name], after[name]) for name in found.missing) and "table.weight" in found.missing
    assert not torch.equal(before["blocks.1.1.weight"], after["blocks.1.1.weight"])
    return str(refused.value)


def test_a_model_that_trains_left_out_parameters_is_refused(tmp_path: Path) -> None:
    run_ranks(2, saves_both, tmp_path, "frozen")
    for message in run_ranks(2, trains_all, tmp_path / "trained"):
        assert re.search(r"the checkpoint has no '[\w.]+', .* and 6 more, which were frozen and left out", message)


def in_a_series(folder: Path) -> tuple[int, bool]:
    model, optimizer = wrap("frozen")
    train(model, optimizer, range(2))
    series = checkpoint.Series(folder)
    series.save(2, model, optimizer, asynchronous=True, exclude_frozen_parameters=True)
    checkpoint.wait()
    loaded = series.load(model, optimizer)
    assert loaded is not None
    return loaded[0], "table.weight" in loaded[1].missing


def test_in_the_background_of_a_series(tmp_path: Path) -> None:
    assert run_ranks(2, in_a_series, tmp_path) == [(2, True)] * 2


def with_other_arguments(folder: Path) -> None:
    model, optimizer = wrap("frozen")
    rank = torch.distributed.get_rank()
    checkpoint.save(folder / "x", model, optimizer, exclude_frozen_parameters=bool(rank))


def test_ranks_that_would_leave_out_other_things_are_refused(tmp_path: Path) -> None:
    for failure in run_ranks(2, with_other_arguments, tmp_path, catch=True):
        assert "exclude_frozen_parameters=True" in failure.message
    assert not (tmp_path / "x").exists()
