"""Reads of weights and states right after a step that the host has not finished: every read waits for the step."""

from __future__ import annotations

import gc
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks
from tests.support.small_models import MODELS
from zeropp.optimizer.host_step import HostStep

READS: dict[str, Any] = {
    "full_state": lambda model, optimizer, average, folder: zeropp.full_state(model),
    "state_dict": lambda model, optimizer, average, folder: model.state_dict(),
    "gathered": lambda model, optimizer, average, folder: gathered(model),
    "evaluation": lambda model, optimizer, average, folder: {"loss": evaluated(model)},
    "average": lambda model, optimizer, average, folder: updated(average),
    "export": lambda model, optimizer, average, folder: exported(model, folder),
    "states": lambda model, optimizer, average, folder: {
        f"{number} {key}": value.clone()
        for number, part in enumerate(optimizer.slices.all)
        for key, value in optimizer.state[part.parameter].items()
    },
    "slices after close": lambda model, optimizer, average, folder: closed(optimizer),
    "without the optimizer": lambda model, optimizer, average, folder: zeropp.full_state(model),
}


def gathered(model: nn.Module) -> dict[str, Tensor]:
    with zeropp.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def evaluated(model: nn.Module) -> Tensor:
    kind = MODELS["gpt"]
    with torch.no_grad():
        return kind.loss(model, kind.batch(torch.Generator().manual_seed(9)))


def updated(average: Any) -> dict[str, Tensor]:
    average.update()
    return {str(number): piece.clone() for number, piece in enumerate(average.take_pieces().values())}


def exported(model: nn.Module, folder: str) -> dict[str, Tensor]:
    zeropp.checkpoint.export(folder, model)
    return dict(load_file(next(Path(folder).glob("*.safetensors"))))


def closed(optimizer: zeropp.ZeroOptimizer) -> dict[str, Tensor]:
    optimizer.close()
    return {str(number): part.parameter.detach().clone() for number, part in enumerate(optimizer.slices.all)}


def read_at_once(what: str, settings: dict[str, Any], folder: str, late: bool) -> dict[str, Tensor]:
    """Return the tensors that one kind of read returns right after a step.

    Args:
        what: kind of read, a key of READS.
        settings: settings of the configuration.
        folder: directory for exported files.
        late: True to delay the step of each unit on the host by 30 ms.
    """
    torch.manual_seed(3)
    kind = MODELS["gpt"]
    model = kind.build().float()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-2, fused=True)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**settings))
    average = zeropp.ema(model, 0.5)
    optimizer.backward(kind.loss(model, kind.batch(torch.Generator().manual_seed(5))))
    plain = HostStep._step

    def slow(*arguments: Any) -> None:
        time.sleep(0.03)
        plain(*arguments)

    with mock.patch.object(HostStep, "_step", slow if late else plain):
        optimizer.step()
        if what == "without the optimizer":
            del optimizer, inner
            gc.collect()
            return zeropp.full_state(model)
        found = READS[what](model, optimizer, average, f"{folder}/{late}")
    optimizer.close()
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.every(6)
@pytest.mark.parametrize("what", READS)
def test_whoever_reads_waits(what: str, tmp_path: Path) -> None:
    """Every read right after ``step()`` returns stepped values, with states in host memory and in files."""
    plains = run_ranks(2, read_at_once, what, {}, str(tmp_path), False)
    for block in ({"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path / "swap")}):
        settings = {"aio": {"block_size": 1024}, "offload_optimizer": block}
        for plain, found in zip(plains, run_ranks(2, read_at_once, what, settings, str(tmp_path), True), strict=True):
            assert found.keys() == plain.keys() and plain
            assert [name for name, value in plain.items() if not torch.equal(found[name], value)] == []
        shutil.rmtree(tmp_path / "True", ignore_errors=True)
