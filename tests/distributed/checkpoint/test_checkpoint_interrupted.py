"""Saves that are interrupted by SIGTERM, by a folder that vanishes, or by a disk that becomes read-only.

Ranks that a signal ends are in test_checkpoint_killed.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.checkpoint_training import train, wrap
from tests.support.quantized_model import tokens
from tests.support.rank_pool import run_ranks
from tests.support.tmpfs import tmpfs
from zeropp import checkpoint


class Ended(BaseException):
    """The exception that the test's SIGTERM handler raises."""


def in_mid_save(act: Callable[[], object]) -> Callable[[], None]:
    """Call ``act`` once, before the first block is written. Return a function that restores os.pwrite."""
    write, done = os.pwrite, []

    def instead(*arguments: Any) -> int:
        if not done:
            done.append(True)
            act()
        return write(*arguments)

    os.pwrite = instead

    def undo() -> None:
        os.pwrite = write

    return undo


def interrupted(root: Path, act: Callable[[], object] | None, handler: bool = False) -> str:
    """Save step 1, fail to save step 2, load step 1, and save step 2 again.

    Args:
        root: folder of the series.
        act: function that is called during the failing save; None to write normally on this rank.
        handler: True to install a SIGTERM handler that raises.

    Returns:
        The error of the failed save on this rank.
    """
    if handler:

        def raises(*_: object) -> None:
            raise Ended

        signal.signal(signal.SIGTERM, raises)
    model, optimizer = wrap("stage 3")
    series = checkpoint.Series(root)
    train(model, optimizer, [0])
    series.save(1, model, optimizer)
    before = zeropp.full_state(model)
    train(model, optimizer, [1])
    after = zeropp.full_state(model)
    undo = in_mid_save(act) if act is not None else lambda: None
    try:
        series.save(2, model, optimizer)
    except (checkpoint.CheckpointError, Ended) as error:
        told = f"{type(error).__name__}: {error}"
    finally:
        undo()
    assert series.latest() == 1 and series.load(model, optimizer) is not None
    found = zeropp.full_state(model)
    assert all(torch.equal(found[name], before[name]) for name in before)
    train(model, optimizer, [1])
    series.save(2, model, optimizer)
    assert series.load(model, optimizer) is not None and series.latest() == 2
    found = zeropp.full_state(model)
    assert all(torch.equal(found[name], after[name]) for name in after)
    dist.barrier()
    assert sorted(each.name for each in root.iterdir()) == ["latest", "step-00000001", "step-00000002"]
    return told


def vanishing(root: Path) -> str:
    """Delete the folder that is being written to, and return the error of the save."""

    def act() -> None:
        shutil.rmtree(root / "step-00000002")

    return interrupted(root, act if dist.get_rank() == 0 else None)


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    for told in run_ranks(2, vanishing, tmp_path):
        assert told.startswith("CheckpointError") and "No such file or directory" in told
        assert "saving again is possible" in told


def remount(place: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(place)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk") as place:
        yield place


def read_only(root: Path) -> str:
    model, optimizer = wrap("stage 3")
    series = checkpoint.Series(root)
    series.save(1, model, optimizer)
    before = zeropp.full_state(model)
    train(model, optimizer, [1])
    if dist.get_rank() == 0:
        remount(root, "ro")
    dist.barrier()
    with pytest.raises(checkpoint.CheckpointError) as caught:
        series.save(2, model, optimizer)
    assert series.latest() == 1 and series.load(model, optimizer) is not None
    found = zeropp.full_state(model)
    assert all(torch.equal(found[name], before[name]) for name in before)
    dist.barrier()
    if dist.get_rank() == 0:
        remount(root, "rw")
    dist.barrier()
    series.save(2, model, optimizer)
    assert series.latest() == 2
    return str(caught.value)


def test_a_read_only_disk(disk: Path) -> None:
    for told in run_ranks(2, read_only, disk):
        assert "failed on rank 0: OSError: [Errno 30] Read-only file system" in told


def by_signal(root: Path) -> str:
    """Send SIGTERM to rank 1 while it writes, and return the error of the save on this rank."""
    act = (lambda: os.kill(os.getpid(), signal.SIGTERM)) if dist.get_rank() == 1 else None
    kept = signal.getsignal(signal.SIGTERM)
    try:
        return interrupted(root, act, handler=True)
    finally:
        signal.signal(signal.SIGTERM, kept)


def test_sigterm_with_a_handler_that_raises(tmp_path: Path) -> None:
    """Rank 1 raises its handler's exception, and rank 0 raises an error that names rank 1 and the exception."""
    first, second = run_ranks(2, by_signal, tmp_path)
    assert "failed on rank 1: Ended" in first and second.startswith("Ended")


@pytest.mark.parametrize("remedy", ["step", "zero_grad"])
def test_gradients_that_wait_for_a_step(remedy: str, tmp_path: Path) -> None:
    """A save between backward and step() is refused, because the gradients would be lost.

    Both remedies in the message work.
    """
    model, optimizer = wrap("stage 3")
    optimizer.backward(model(tokens(0, 0)))
    with pytest.raises(checkpoint.CheckpointError, match=r"of 1 micro-batches .* save after step\(\), or discard them"):
        checkpoint.save(tmp_path / "here", model, optimizer)
    assert not list(tmp_path.iterdir())
    if remedy == "step":
        optimizer.step()
    else:
        optimizer.zero_grad(now=True)
    checkpoint.save(tmp_path / "here", model, optimizer)
    checkpoint.load(tmp_path / "here", model, optimizer)
