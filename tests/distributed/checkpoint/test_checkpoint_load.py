"""Loading takes few reads, and an error of one rank's own objects is an error on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.support.checkpoint_training import train, wrap
from tests.support.quantized_model import Model
from tests.support.rank_pool import run_ranks
from zeropp import checkpoint
from zeropp.checkpoint import tensor_reader


def small_ones(count: int) -> tuple[nn.Module, zeropp.ZeroOptimizer]:
    """A model of many small parameters, each of which has its own step count in the optimizer's state."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(count)))
    config = {"zero_optimization": {"stage": 3}}
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model, config)
    optimizer.backward(model(torch.ones(3)).sum())
    optimizer.step()
    return model, optimizer


def test_many_small_tensors_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small_ones(100)
    checkpoint.save(tmp_path / "here", model, optimizer)
    nbytes = sum(each.stat().st_size for each in (tmp_path / "here").glob("*.safetensors"))
    calls: list[int] = []
    read = tensor_reader.read_blocks

    def counted(*arguments: Any) -> int:
        calls.append(1)
        return read(*arguments)

    monkeypatch.setattr(tensor_reader, "read_blocks", counted)
    other, state = small_ones(100)
    found = checkpoint.load(tmp_path / "here", other, state)
    # The first call reads the tensors, the second call reads the remaining bytes to verify them.
    assert len(calls) <= 2 and found.nbytes_read <= nbytes
    steps = {int(each["step"]) for each in state.inner.state.values()}
    assert steps == {1} and len({id(each["step"]) for each in state.inner.state.values()}) == 200


class Fussy:
    """An object whose load_state_dict raises if ``refusing`` is True."""

    def __init__(self, refusing: bool) -> None:
        self.refusing = refusing

    def state_dict(self) -> dict[str, int]:
        return {"position": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refusing:
            raise ValueError("not a state of mine")


class Wary(Model):
    """A model with extra state, which set_extra_state refuses if ``refusing`` is True."""

    refusing = False

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        Fussy(self.refusing).load_state_dict({})


def by_a_set(path: Path) -> None:
    model, optimizer = wrap("stage 3")
    checkpoint.save(path, model, optimizer)
    # A set of strings has a different order in each process, because Python randomizes hashes.
    for only in ({"model", "optimizer", "random"}, {"model", "random"}, {"extra", "optimizer", "model"}):
        checkpoint.load(path, model, optimizer, only=only)


def test_kinds_are_named_by_a_set(tmp_path: Path) -> None:
    run_ranks(4, by_a_set, tmp_path / "here", local_world_size=2)


def refuses(path: Path, where: str) -> str:
    """Let rank 1 refuse a part of a checkpoint. Every rank raises; a second load, in which no rank refuses, succeeds.

    Args:
        path: folder of the checkpoint.
        where: part that rank 1 refuses: a key of BLAMED.

    Returns:
        The error on this rank.
    """
    model, optimizer = wrap("stage 3", Wary)
    train(model, optimizer, range(1))
    extra = {"sampler": Fussy(False)}
    checkpoint.save(path, model, optimizer, extra)
    mine = dist.get_rank() == 1
    inner, kept = optimizer.inner, optimizer.inner.load_state_dict
    if where == "extra":
        extra["sampler"].refusing = mine
    elif where == "module":
        model.refusing = mine
    elif mine:
        inner.load_state_dict = Fussy(True).load_state_dict  # type: ignore[method-assign]
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load(path, model, optimizer, extra)
    extra["sampler"].refusing = False
    model.refusing = False
    inner.load_state_dict = kept  # type: ignore[method-assign]
    checkpoint.load(path, model, optimizer, extra)
    train(model, optimizer, range(1, 2))
    return str(caught.value)


BLAMED = {
    "extra": r"load_state_dict of extra['sampler'], of class Fussy",
    "module": "set_extra_state of the module '', of class Wary",
    "optimizer": "load_state_dict of the optimizer, of class AdamW",
}


@pytest.mark.every(8)
@pytest.mark.parametrize("where", BLAMED)
def test_an_error_of_one_rank_is_raised_on_all_ranks(where: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, refuses, tmp_path / "here", where)
    assert "failed on rank 1: CheckpointError: " in first
    for told in (first, second):
        assert f"{BLAMED[where]}, raised ValueError: not a state of mine" in told and "changed in part" in told
