"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.distributed.checkpoints import train, wrap
from tests.distributed.harness import run_ranks
from zeropp import checkpoint


class Gate:
    """Lets writing to disk begin when it is told to, or fail."""

    def __init__(self, error: OSError | None = None) -> None:
        self.opened = threading.Event()
        self.error = error
        self._write = os.pwrite

    def __enter__(self) -> Gate:
        def write(*arguments: Any) -> int:
            assert self.opened.wait(60)
            if self.error is not None:
                raise self.error
            return self._write(*arguments)

        os.pwrite = write
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.set()
        checkpoint.wait()
        os.pwrite = self._write


def trains_meanwhile(path: Path) -> None:
    """What is saved is what there was at the call, whatever becomes of the weights before it is written."""
    model, optimizer = wrap("hpz loco bf16")
    train(model, optimizer, range(2))
    before = zeropp.full_state(model)
    with Gate() as gate:
        checkpoint.save(path, model, optimizer, asynchronous=True)
        train(model, optimizer, range(2, 5))
        assert not path.exists()
        with pytest.raises(checkpoint.CheckpointError, match="still being written"):
            checkpoint.save(path, model, optimizer, asynchronous=True, busy="refuse")
        gate.opened.set()
        checkpoint.wait()
        assert (path / "metadata.json").exists()
    after = zeropp.full_state(model)
    assert not torch.equal(after["head.weight"], before["head.weight"])
    checkpoint.load(path, model, optimizer)
    found = zeropp.full_state(model)
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_training_goes_on_meanwhile(tmp_path: Path) -> None:
    run_ranks(4, trains_meanwhile, tmp_path / "here", local_world_size=2)


def fails_on_one(path: Path, hears: str) -> str:
    """A write that failed is an error of the next save, or of wait(), on every rank; then all is well again."""
    model, optimizer = wrap("stage 3")
    train(model, optimizer, range(1))
    checkpoint.save(path, model, optimizer)
    broken = OSError(errno.EIO, "the disk is broken")
    gate = Gate(broken if dist.get_rank() == 1 else None)
    gate.opened.set()
    write = gate._write
    gate.__enter__()
    checkpoint.save(path, model, optimizer, asynchronous=True)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.wait() if hears == "wait" else checkpoint.save(path, model, optimizer)
    os.pwrite = write
    # Told once.
    checkpoint.wait()
    train(model, optimizer, range(1, 2))
    checkpoint.save(path, model, optimizer, asynchronous=True)
    train(model, optimizer, range(2, 3))
    checkpoint.load(path, model, optimizer)
    return str(caught.value)


@pytest.mark.parametrize("hears", ["wait", "save"])
def test_a_failed_write_is_an_error(hears: str, tmp_path: Path) -> None:
    for told in run_ranks(2, fails_on_one, tmp_path / "here", hears):
        assert "was not written" in told and "failed on rank 1: OSError: [Errno 5] the disk is broken" in told


def saves_often(root: Path) -> dict[str, int]:
    """Twenty saves: threads, descriptors, memory and groups after the second and after the last."""
    model, optimizer = wrap("stage 3")
    series = checkpoint.Series(root, keep=2)
    found: dict[str, int] = {}
    for step in range(1, 21):
        train(model, optimizer, [step])
        series.save(step, model, optimizer, {"step": step}, asynchronous=True)
        if step in (3, 20):
            checkpoint.wait()
            gc.collect()
            found[f"threads {step}"] = threading.active_count()
            found[f"files {step}"] = len(os.listdir("/proc/self/fd"))
            found[f"groups {step}"] = len(dist.distributed_c10d._world.pg_map)
            found[f"tensors {step}"] = sum(1 for each in gc.get_objects() if type(each) is torch.Tensor)
    found["left"] = len(list(root.iterdir()))
    found["latest"] = series.latest() or 0
    return found


def test_twenty_saves_leak_nothing(tmp_path: Path) -> None:
    for found in run_ranks(2, saves_often, tmp_path):
        for kind in ("threads", "files", "groups", "tensors"):
            assert found[f"{kind} 3"] == found[f"{kind} 20"], found
        # Two checkpoints and the name of the newest.
        assert found["left"] == 3 and found["latest"] == 20


def closes_meanwhile(path: Path) -> bool:
    """Closing waits for what is being written."""
    model, optimizer = wrap("stage 3")
    with Gate() as gate:
        checkpoint.save(path, model, optimizer, asynchronous=True)
        threading.Timer(0.5, gate.opened.set).start()
        optimizer.close()
        return (path / "metadata.json").exists()


def test_closing_waits(tmp_path: Path) -> None:
    assert run_ranks(2, closes_meanwhile, tmp_path / "here") == [True, True]


def ends_at_once(path: Path) -> float:
    """Only the copy is waited for."""
    model, optimizer = wrap("stage 3")
    with Gate() as gate:
        start = time.monotonic()
        checkpoint.save(path, model, optimizer, asynchronous=True)
        blocked = time.monotonic() - start
        assert gate.opened.is_set() is False and not path.exists()
    return blocked


def test_the_call_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    assert max(run_ranks(2, ends_at_once, tmp_path / "here")) < 20
