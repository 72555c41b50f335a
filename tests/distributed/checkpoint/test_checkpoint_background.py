"""Asynchronous checkpoints, which a thread writes while training goes on."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.checkpoint_training import CONFIGS, train, wrap
from tests.support.disk_faults import wait_until
from tests.support.quantized_model import Model
from tests.support.rank_pool import ROOT, run_ranks
from zeropp import checkpoint
from zeropp.checkpoint import saving


class Gate:
    """A context in which os.pwrite waits until ``opened`` is set, and then writes or raises ``error``."""

    def __init__(self, error: OSError | None = None) -> None:
        self.opened = threading.Event()
        self.error = error
        self._write = os.pwrite

    def __enter__(self) -> Gate:
        def write(*arguments: Any) -> int:
            assert self.opened.wait(60)
            if self.error is not None:
                # A new error each time: its traceback keeps all frames alive, and so the objects of the test.
                raise OSError(*self.error.args)
            return self._write(*arguments)

        os.pwrite = write
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.set()
        try:
            checkpoint.wait()
        finally:
            os.pwrite = self._write


def trains_meanwhile(path: Path) -> None:
    """Train during an asynchronous save. The checkpoint has the weights at the time of the call."""
    model, optimizer = wrap("hpz loco bf16")
    train(model, optimizer, range(2))
    before = zeropp.full_state(model)
    write_files = saving.write_files

    def write_later(*arguments: Any) -> Any:
        # Wait before the thread reads any value. The thread copies small tensors before it writes them, so a wait in
        # os.pwrite alone would come after the copy and hide values that are read too late.
        assert gate.opened.wait(60)
        return write_files(*arguments)

    with Gate() as gate, mock.patch.object(saving, "write_files", write_later):
        checkpoint.save(path, model, optimizer, asynchronous=True)
        train(model, optimizer, range(2, 5))
        assert not (path / "metadata.json").exists()
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
    """Let the write of rank 1 fail, and return the error of the next call on this rank.

    The error is raised once on every rank, and later saves and loads succeed.

    Args:
        path: folder of the checkpoint.
        hears: next call: "wait" or "save".
    """
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
    # The error must be raised once only.
    checkpoint.wait()
    train(model, optimizer, range(1, 2))
    checkpoint.save(path, model, optimizer, asynchronous=True)
    train(model, optimizer, range(2, 3))
    checkpoint.load(path, model, optimizer)
    return str(caught.value)


@pytest.mark.parametrize("hears", ["wait", "save"])
def test_a_failed_write_is_an_error(hears: str, tmp_path: Path) -> None:
    for told in run_ranks(2, fails_on_one, tmp_path / "here", hears):
        assert (
            "saved asynchronously, failed" in told and "failed on rank 1: OSError: [Errno 5] the disk is broken" in told
        )


def saves_often(root: Path) -> dict[str, int]:
    """Save twenty times.

    Returns:
        Numbers of threads, open files, process groups and tensors after the third save and after the last; number of
        files in the root; and the newest step.
    """
    model, optimizer = wrap("stage 3")
    series = checkpoint.Series(root, keep=2)
    found: dict[str, int] = {}
    for step in range(1, 21):
        train(model, optimizer, [step])
        series.save(step, model, optimizer, {"step": step}, asynchronous=True)
        if step in (3, 20):
            checkpoint.wait()
            gc.collect()
            time.sleep(0.2)  # finished threads need a moment to end
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
            # Fewer than before is fine, because objects of an earlier test may be freed in the meantime.
            assert found[f"{kind} 3"] >= found[f"{kind} 20"], found
        # Three entries: two checkpoints and the file "latest".
        assert found["left"] == 3 and found["latest"] == 20


def closes_meanwhile(path: Path) -> bool:
    """Close the optimizer during a save. Return True if the checkpoint is complete afterwards."""
    model, optimizer = wrap("stage 3")
    with Gate() as gate:
        checkpoint.save(path, model, optimizer, asynchronous=True)
        threading.Timer(0.5, gate.opened.set).start()
        optimizer.close()
        return (path / "metadata.json").exists()


def test_closing_waits(tmp_path: Path) -> None:
    assert run_ranks(2, closes_meanwhile, tmp_path / "here") == [True, True]


def drops_meanwhile(path: Path, fails: bool) -> tuple[str, bool]:
    """Drop model and optimizer during an asynchronous save.

    Args:
        path: folder of the checkpoint.
        fails: True to let the write fail.

    Returns:
        The error of wait() ("" if there is none), and True if the engine's process groups are freed afterwards.
    """
    model, optimizer = wrap("stage 3")
    engine, comm = weakref.ref(optimizer.engine), weakref.ref(optimizer.engine.comm)
    gate = Gate(OSError(errno.EIO, "the disk is broken") if fails else None)
    told = ""
    with gate:
        checkpoint.save(path, model, optimizer, asynchronous=True)
        del model, optimizer
        gc.collect()
        assert engine() is None and comm() is not None
        gate.opened.set()
        try:
            checkpoint.wait()
        except checkpoint.CheckpointError as error:
            told = str(error)
    assert (path / "metadata.json").exists() is not fails
    checkpoint.wait()  # the error must be raised once only

    def is_freed() -> bool:
        gc.collect()
        return comm() is None

    # The writing thread holds a reference until it ends.
    return told, wait_until(is_freed) and not saving._unfinished


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_is_dropped_is_written(fails: bool, tmp_path: Path) -> None:
    for told, freed in run_ranks(2, drops_meanwhile, tmp_path / "here", fails):
        assert freed and ("the disk is broken" in told if fails else told == "")


def impatient(seconds: float) -> tuple[Model, zeropp.ZeroOptimizer]:
    """Return a model and optimizer with ``seconds`` as hang_timeout."""
    model = Model()
    config = {**CONFIGS["stage 3"], "zeropp": {"unit_min_blocks": 0, "hang_timeout": seconds}}
    dist.barrier()  # ranks may start further apart than hang_timeout
    return model, zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)


def meets_others(folder: Path) -> float:
    """Wait longer than hang_timeout for a slow disk, which is no error, and then for a rank that does not come.

    Returns:
        Seconds until the missing rank is reported; on rank 0.
    """
    model, optimizer = impatient(1)
    second = dist.get_rank() == 1
    with Gate() as gate:
        checkpoint.save(folder / "slow", model, optimizer, asynchronous=True)
        threading.Timer(2.5 * second, gate.opened.set).start()
        checkpoint.wait()
    assert (folder / "slow" / "metadata.json").exists()
    gone, gather = threading.Event(), saving.gather_rows

    def never(*_: Any) -> Any:
        gone.wait(30)
        raise RuntimeError("it was lost")

    saving.gather_rows = never if second else gather
    checkpoint.save(folder / "lost", model, optimizer, asynchronous=True)
    start = time.monotonic()
    if not second:
        with pytest.raises(checkpoint.CheckpointError, match="some rank has failed, ended or not come to making"):
            checkpoint.wait()
    seconds = time.monotonic() - start
    dist.barrier()
    gone.set()
    if second:
        with pytest.raises(checkpoint.CheckpointError, match="it was lost"):
            checkpoint.wait()
    saving.gather_rows = gather
    assert not (folder / "lost").exists()
    return seconds


def test_a_slow_disk_is_waited_for_and_a_lost_rank_is_not(tmp_path: Path) -> None:
    assert run_ranks(2, meets_others, tmp_path)[0] < 10


def closes_after_a_loss(path: Path) -> bool:
    """Close rank 0's optimizer after the ranks have lost each other, while rank 1's write does not end.

    Returns:
        True if the checkpoint exists.
    """
    model, optimizer = impatient(2)
    second = dist.get_rank() == 1
    with Gate() as gate:
        if not second:
            saving._AFTER_LOSS = 0.5
            gate.opened.set()
        checkpoint.save(path, model, optimizer, asynchronous=True)
        if not second:
            optimizer.engine.comm.abort()  # Abort, as a pass does when it waits in vain for another rank.
            optimizer.close()
            saving._AFTER_LOSS = 30.0
        dist.barrier()
        gate.opened.set()
        with pytest.raises(checkpoint.CheckpointError):
            checkpoint.wait()
    return path.exists()


def test_closing_after_a_loss_does_not_wait_for_other_disks(tmp_path: Path) -> None:
    assert run_ranks(2, closes_after_a_loss, tmp_path / "here", timeout=50) == [False, False]


def test_an_error_that_nobody_asks_for_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error that nobody has waited for is logged at the end of the program.

    An error that wait() has raised is not.
    """
    model, optimizer = wrap("stage 3")
    for asks in (True, False):
        caplog.clear()
        with Gate(OSError(errno.EIO, "the disk is broken")) as gate:
            checkpoint.save(tmp_path / "here", model, optimizer, asynchronous=True)
            gate.opened.set()
            if asks:
                with pytest.raises(checkpoint.CheckpointError):
                    checkpoint.wait()
            saving._tell()
            if not asks:
                with pytest.raises(checkpoint.CheckpointError):
                    checkpoint.wait()
        assert ("saved asynchronously, failed" in caplog.text and "the disk is broken" in caplog.text) is not asks


@pytest.mark.campaign
def test_an_error_that_nobody_asks_for_is_logged_at_the_end_of_a_program(tmp_path: Path) -> None:
    program = (
        "import os, torch, zeropp\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)\n"
        "os.pwrite = None\n"
        f"zeropp.checkpoint.save({str(tmp_path / 'there')!r}, model, optimizer, asynchronous=True)\n"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *(each for each in sys.path if each)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "saved asynchronously, failed" in done.stderr, done.stderr


def ends_at_once(path: Path) -> float:
    """Return the seconds for which an asynchronous save blocks. Only the copy to host memory may block."""
    model, optimizer = wrap("stage 3")
    with Gate() as gate:
        start = time.monotonic()
        checkpoint.save(path, model, optimizer, asynchronous=True)
        blocked = time.monotonic() - start
        assert gate.opened.is_set() is False and not (path / "metadata.json").exists()
    return blocked


def test_the_call_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    assert max(run_ranks(2, ends_at_once, tmp_path / "here")) < 20


def test_copies_are_waited_for_on_the_device_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are awaited on the device of each tensor. Without ``torch.cuda.set_device`` another device is current."""
    events: list[object] = []

    def part(device: str) -> Any:
        values = mock.Mock(nbytes=8, dtype=torch.float32, device=torch.device(device), is_cuda=device != "cpu")
        return mock.Mock(values=values, box=mock.Mock(sizes=(2,)))

    def stream(device: torch.device | None = None) -> Any:
        return mock.Mock(synchronize=lambda: events.append(device))

    room = mock.MagicMock()
    room.__getitem__().view().view().copy_ = lambda values, non_blocking: events.append("copy")
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(saving, "replace", lambda part, values: part)
    made = saving.Background(mock.Mock(world=1), None)
    monkeypatch.setattr(made, "_room", lambda nbytes, parts: room)
    made._copied([part("cuda:1"), part("cpu"), part("cuda:1"), part("cuda:2")])
    assert events == ["copy"] * 4 + [torch.device("cuda", 1), torch.device("cuda", 2)]
