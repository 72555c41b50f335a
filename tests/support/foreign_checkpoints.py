"""Loads of other programs' checkpoints by ``load_foreign`` on the ranks of a test, and a crafted pickle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeropp
from tests.support.checkpoint_training import Went, states_of, train, wrap
from tests.support.checkpoint_training import went as state_of_rank
from tests.support.quantized_model import Model
from zeropp import checkpoint
from zeropp.checkpoint.boxes import CheckpointError

__all__ = ["Evil", "Large", "bytes_read", "check_loaded", "reads", "refused"]


def reads(path: Path, name: str, states: bool, prefix: str | None = None, make: type[Model] = Model) -> Went:
    model, optimizer = wrap(name, make)
    train(model, optimizer, range(90, 91))
    found = checkpoint.load_foreign(path, model, optimizer if states else None, prefix=prefix)
    result = state_of_rank(model, optimizer)
    result.found = found
    result.drawn = [group["lr"] for group in optimizer.param_groups]
    result.losses = train(model, optimizer, range(4, 8))
    return result


def check_loaded(found: list[Went], model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Weights, states and settings of all ranks are the plain ones, to the bit."""
    for name, value in model.state_dict().items():
        assert torch.equal(found[0].state[name], value), name
    if optimizer is not None:
        assert found[0].drawn == [group["lr"] for group in optimizer.param_groups]
        states = states_of(found)
        for name, parameter in model.named_parameters():
            assert optimizer.state[parameter].keys() == states[name].keys()
            for key, value in optimizer.state[parameter].items():
                assert torch.equal(states[name][key], value), (name, key)


class Large(nn.Module):
    """Two matrices of 16 MB, so that a page more or less does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))  # type: ignore[no-any-return]


def bytes_read(paths: list[Path], states: bool) -> list[int]:
    """Bytes that this rank reads of each file or folder, with or without optimizer states."""
    model = Large()
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters()), model, config)
    return [checkpoint.load_foreign(path, model, optimizer if states else None).nbytes_read for path in paths]


class Evil:
    """Runs a command where it is loaded by pickle."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def refused(paths: list[Path]) -> list[str]:
    """Errors of loading each, "" for one that is loaded."""
    model, optimizer = wrap("stage 3")
    told = []
    for path in paths:
        try:
            checkpoint.load_foreign(path, model, optimizer)
            told.append("")
        except CheckpointError as error:
            told.append(str(error))
    return told
