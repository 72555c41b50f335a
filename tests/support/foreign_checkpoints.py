"""Loads of other programs' checkpoints with ``load_foreign`` on the ranks of a test, and a malicious pickle."""

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
    """Load a checkpoint into a trained model, and return this rank's state before and after four more steps.

    Args:
        path: the checkpoint.
        name: key of the configuration, for ``wrap``.
        states: True to load optimizer states, too.
        prefix: prefix of parameter names in the file.
        make: class of the model.
    """
    model, optimizer = wrap(name, make)
    train(model, optimizer, range(90, 91))
    found = checkpoint.load_foreign(path, model, optimizer if states else None, prefix=prefix)
    result = state_of_rank(model, optimizer)
    result.found = found
    result.drawn = [group["lr"] for group in optimizer.param_groups]
    result.losses = train(model, optimizer, range(4, 8))
    return result


def check_loaded(found: list[Went], model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Assert that weights, optimizer states and learning rates of all ranks equal the plain ones bit for bit."""
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
    """Two matrices of 16 MB. The size of headers is negligible beside them when bytes of reads are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))  # type: ignore[no-any-return]


def bytes_read(paths: list[Path], states: bool) -> list[int]:
    """Return the bytes that this rank reads of each checkpoint, with or without optimizer states."""
    model = Large()
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters()), model, config)
    return [checkpoint.load_foreign(path, model, optimizer if states else None).nbytes_read for path in paths]


class Evil:
    """An object whose unpickling runs a command: it creates the file ``mark``."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def refused(paths: list[Path]) -> list[str]:
    """Return the error message of loading each path, "" for a path that loads."""
    model, optimizer = wrap("stage 3")
    told = []
    for path in paths:
        try:
            checkpoint.load_foreign(path, model, optimizer)
            told.append("")
        except CheckpointError as error:
            told.append(str(error))
    return told
