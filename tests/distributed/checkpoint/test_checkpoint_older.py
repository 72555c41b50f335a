"""Checkpoints written by commit e90cce9 in each placement load bit for bit, on the same ranks and on others."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeropp
from tests.support.older_checkpoints import (
    CONFIGS,
    EXCEPTIONAL,
    WORLDS,
    Holder,
    Model,
    equal,
    extra_of,
    make,
    tensors_of,
    train,
    unpack,
)
from tests.support.quantized_model import decoded
from tests.support.rank_pool import run_ranks
from zeropp import checkpoint

VALUES = ("groups", "optimizer", "skipped_steps", "loss_scale", "modules")


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("older"))


def in_memory(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a tensor's elements as a flat tensor, in the memory order of a parameter with the given strides."""
    found = torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)
    return found.as_strided((value.numel(),), (1,))


def wrong_states(optimizer: zeropp.ZeroOptimizer, model: torch.nn.Module, there: dict[str, Tensor]) -> list[str]:
    """Return the names of this rank's optimizer states that differ from the saved ones.

    Args:
        optimizer: optimizer whose states were loaded.
        model: its model.
        there: tensors of the checkpoint by name.
    """
    strides, found, seen = {n: p.stride() for n, p in model.named_parameters()}, [], 0
    for part in (part for part in optimizer.slices.all if part.unit >= 0):
        for key, value in optimizer.inner.state[part.parameter].items():
            expected, seen = there[f"optimizer.state.{part.name}.{key}"], seen + 1
            if key != "step":
                expected = in_memory(expected, strides[part.name])[part.start : part.start + value.numel()]
            if not equal(value, expected.to(value.dtype)):
                found.append(f"{part.name}.{key}")
    assert seen or not optimizer.slices.all
    return found


def wrong_weights(found: dict[str, Tensor], there: dict[str, Tensor], first: dict[str, Tensor]) -> list[str]:
    """Return the names of weights and buffers that differ from the saved ones.

    Args:
        found: full_state after the load.
        there: tensors of the checkpoint by name.
        first: initial state dict, with values of parameters that the checkpoint does not have.
    """
    wrong = []
    for key, value in found.items():
        # The checkpoint has a tied weight under one name only.
        name = key.replace("head.weight", "table.weight")
        saved = there.get(f"model.{name}", first[name])
        if f"zeropp.codes.{name}" in there:
            saved = decoded(first[name])
        if not equal(value, saved.to(value.dtype)):
            wrong.append(key)
    return wrong


def wrong_extra(found: dict[str, Any], holder: Holder, rank: int) -> list[str]:
    expected = {**extra_of(rank), **EXCEPTIONAL}
    told = expected.pop("holder").value
    assert found.keys() == expected.keys()
    wrong = [name for name, value in expected.items() if not equal(found[name], value)]
    return wrong + ([] if equal(holder.value, told) else ["holder"])


def wrong_values(path: Path, other: Path) -> list[str]:
    """Return the names of the values of a job, such as loss_scale, that differ between two checkpoints."""
    one, two = (json.loads((each / "metadata.json").read_bytes())["checkpoint"]["values"] for each in (path, other))
    return [name for name in VALUES if one[name] != two[name]]


def load(root: Path, names: list[str], again: Path, config: str | None) -> dict[str, list[str]]:
    """Load each checkpoint, and compare everything that was loaded with the saved values.

    Args:
        root: folder of the checkpoints.
        names: checkpoints to load: keys of CONFIGS.
        again: folder in which each checkpoint is saved again, if ``config`` is None.
        config: configuration to load with; None for the one of each checkpoint.

    Returns:
        Names of wrong values for each checkpoint.
    """
    rank, wrong, first = dist.get_rank(), {}, Model().state_dict()
    for name in names:
        there = tensors_of(root / name)
        model, optimizer = make(name, config)
        average, holder = zeropp.ema(model, 0.5), Holder(None)
        train(model, optimizer, 1)
        loaded = checkpoint.load(root / name, model, optimizer, {"holder": holder, "average": average})
        wrong[name] = wrong_extra(loaded.extra, holder, 0 if config else rank) + wrong_states(optimizer, model, there)
        wrong[name] += wrong_weights(zeropp.full_state(model), there, first)
        assert equal(model.told, {"empty": torch.empty(0, 3), "words": ("a", None)})
        if config is None:
            kept = {key: value for key, value in loaded.extra.items() if key not in EXCEPTIONAL}
            only = {"exclude_frozen_parameters": True} if "trained" in name else {}
            extra = {**kept, "holder": holder, "average": average}
            checkpoint.save(again / name, model, optimizer, extra=extra, **only)
            found = tensors_of(again / name)
            wrong[name] += sorted(found.keys() ^ there.keys()) + wrong_values(root / name, again / name)
            wrong[name] += [key for key, value in found.items() if not equal(value, there.get(key))]
            drawn = [torch.get_rng_state(), torch.tensor(random.getstate()[1][:624]), numpy.random.get_state()[1]]
            random.setstate((3, (*range(rank, rank + 624), 624), None))
            expected = [torch.Generator().manual_seed(rank % 2).get_state(), torch.arange(rank, rank + 624)]
            wrong[name] += [] if all(map(equal, drawn, expected)) else ["random numbers"]
        dist.barrier()
    return wrong


@pytest.mark.parametrize("world", sorted(set(WORLDS.values())))
def test_on_the_ranks_that_wrote_them(world: int, older: Path, tmp_path: Path) -> None:
    """Weights, states, values and random numbers are equal.

    A checkpoint that is saved again has exactly the tensors of the first.
    """
    names = [name for name in CONFIGS if WORLDS[name] == world]
    for wrong in run_ranks(world, load, older, names, tmp_path, None, local_world_size=2):
        assert wrong == {name: [] for name in names}


@pytest.mark.filterwarnings("ignore:the checkpoint was saved by", "ignore:carried errors of quantized gradients")
@pytest.mark.filterwarnings("ignore:ranks had different extra states")
def test_on_others(older: Path, tmp_path: Path) -> None:
    """On three ranks in stage 3, weights and states are equal bit for bit. Every rank gets rank 0's extra values."""
    for wrong in run_ranks(3, load, older, list(CONFIGS), tmp_path, "2 stage 3"):
        assert wrong == {name: [] for name in CONFIGS}
