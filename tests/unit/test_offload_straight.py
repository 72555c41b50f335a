"""Files read directly into GPU memory, with a stand-in for kvikio, which needs a GPU."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.offload_pairs import host_apart
from zeropp.offload.read_ahead import GdsReader
from zeropp.optimizer.host_step import HostStep

CPU = torch.device("cpu")


class CuFile:
    """A stand-in for kvikio.CuFile; ``pread`` returns a future of the number of bytes read."""

    opened: list[str] = []  # noqa: RUF012
    short = 0
    error = ""

    def __init__(self, path: str, flags: str) -> None:
        assert flags == "r"
        self._descriptor = os.open(path, os.O_RDONLY)
        CuFile.opened.append(path)

    def pread(self, buffer: Tensor, size: int, file_offset: int) -> Any:
        def get() -> int:
            if CuFile.error:
                raise RuntimeError(CuFile.error)
            # Write to the address directly, because a numpy view would keep the storage from being resized.
            memory = (ctypes.c_ubyte * (size - CuFile.short)).from_address(buffer.data_ptr())
            return os.preadv(self._descriptor, [memory], file_offset)

        return SimpleNamespace(get=get)


class Card:
    """A stand-in for a CUDA device, passed only to the check of the device's type; memory is the CPU's."""

    type = "cuda"


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[CuFile]]:
    monkeypatch.setitem(sys.modules, "kvikio", SimpleNamespace(CuFile=CuFile))
    monkeypatch.setattr(CuFile, "opened", [])
    plain = GdsReader.__init__
    monkeypatch.setattr(GdsReader, "__init__", lambda self, device: plain(self, cast(Any, Card())))
    yield CuFile


def train(folder: Path, **aio: Any) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model[1].weight.requires_grad_(False)
    block = {"device": "nvme", "nvme_path": str(folder)}
    config = make_config(
        offload_optimizer=block, offload_param={**block, "max_in_cpu": 0}, bf16={"enabled": True},
        aio={"block_size": 4096, **aio},
    )  # fmt: skip
    losses = []
    with host_apart():
        optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), model, config)
        for _ in range(4):
            loss = model(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean()
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        weights = zeropp.full_state(model)
        optimizer.close()
    return losses, weights


def test_the_bits_of_reads_through_the_ring(
    kvikio: type[CuFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = HostStep._step

    def late(*arguments: Any) -> None:
        time.sleep(0.01)
        step(*arguments)

    expected, weights = train(tmp_path)
    # Delay the host's steps. Otherwise rows are up to date before a gather has to wait for the step.
    monkeypatch.setattr(HostStep, "_step", late)
    assert not kvikio.opened
    losses, others = train(tmp_path, use_gds=True)
    # All rows are in one file, which is opened by its descriptor because it has no name.
    assert len(kvikio.opened) == 1 and kvikio.opened[0].startswith("/proc/self/fd/")
    assert losses == expected and all(torch.equal(others[name], value) for name, value in weights.items())


@pytest.mark.parametrize(("attribute", "value", "text"), [("short", 3, "only"), ("error", "cuFile is cross", "cross")])
def test_errors_of_direct_reads_name_their_cause(
    attribute: str, value: Any, text: str, kvikio: type[CuFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvikio, attribute, value)
    with pytest.raises(RuntimeError, match=f"cannot read .* into a card.*{text}"):
        train(tmp_path, use_gds=True)


def test_no_card(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"aio.use_gds reads files into a card's memory, and this engine trains on 'cpu'"
    ):
        train(tmp_path, use_gds=True)
    assert not list(tmp_path.iterdir())


def test_without_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(ImportError, match=r"needs kvikio, which cannot be imported .*zeropp\[gds\]"):
        GdsReader(Card())  # type: ignore[arg-type]


def test_nothing_to_read() -> None:
    model = nn.Linear(8, 8)
    with pytest.warns(UserWarning, match="aio.use_gds has no effect"):
        optimizer = zeropp.ZeroOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(aio={"use_gds": True})
        )
    optimizer.close()
