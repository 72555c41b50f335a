"""Ranks that lose each other during a checkpoint, or fail at different calls: no complete checkpoint is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.checkpoint_training import CONFIGS, train
from tests.support.quantized_model import Model
from tests.support.rank_pool import run_ranks, some
from zeropp import checkpoint
from zeropp.checkpoint import saving
from zeropp.checkpoint.metadata import Metadata
from zeropp.checkpoint.rank_sync import in_threads
from zeropp.checkpoint.saving import Background
from zeropp.comm.agreement import SAVED

TIMEOUT = 1.0


def impatient() -> tuple[Model, zeropp.ZeroOptimizer]:
    """Return a model and optimizer with a short hang_timeout of TIMEOUT seconds."""
    torch.manual_seed(0)
    model = Model()
    config = {**CONFIGS["stage 3"], "zeropp": {"unit_min_blocks": 0, "hang_timeout": TIMEOUT}}
    dist.barrier()  # ranks may start further apart than hang_timeout
    return model, zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, config)


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute by ``make(attribute)`` inside the context.

    Args:
        owner: object or module that has the attribute.
        name: name of the attribute.
        make: function that makes the replacement from the original.
    """
    function = getattr(owner, name)
    setattr(owner, name, make(function))
    try:
        yield
    finally:
        setattr(owner, name, function)


def late(seconds: float) -> Callable[[Any], Any]:
    """Return a decorator that makes a function sleep for ``seconds`` before it runs."""

    def make(function: Any) -> Any:
        def instead(*arguments: Any, **named: Any) -> Any:
            time.sleep(seconds)
            return function(*arguments, **named)

        return instead

    return make


def loses_at_the_end(path: Path) -> str:
    """Let rank 1 disappear when all files are written, while rank 0 on a slow disk completes the checkpoint.

    Returns:
        The error of rank 0; "" on rank 1.
    """
    model, optimizer = impatient()
    checkpoint.save(path, model, optimizer, file_nbytes=1 << 16)
    train(model, optimizer, [0])
    second, told = dist.get_rank() == 1, ""
    gone = threading.Event()

    def goes(function: Any) -> Any:
        def instead(self: Any, sync: Any, doing: str, work: Any) -> Any:
            if doing.startswith("completing"):
                gone.wait(30)
                raise RuntimeError("it was lost")
            return function(self, sync, doing, work)

        return instead

    slow = replaced(Metadata, "write", late(TIMEOUT + 0.5)), replaced(os, "unlink", late(0.3))
    lost = replaced(saving.CheckpointWriter, "_together", goes if second else lambda function: function)
    try:
        with slow[0], slow[1], lost:
            checkpoint.save(path, model, optimizer, asynchronous=True, file_nbytes=1 << 16)
            try:
                if not second:
                    checkpoint.wait()
            except checkpoint.CheckpointError as error:
                told = str(error)
            dist.barrier()
            gone.set()
            if second:
                with pytest.raises(checkpoint.CheckpointError):
                    checkpoint.wait()
    finally:
        optimizer.close()
    return told


def test_a_rank_that_goes_while_another_completes(tmp_path: Path) -> None:
    """A checkpoint whose metadata is in place is not deleted when rank 0 learns that rank 1 is gone."""
    told, _ = run_ranks(2, loses_at_the_end, tmp_path / "there")
    assert "some rank has failed, ended or not come to completing" in told
    found = Metadata.read(tmp_path / "there")
    assert all((tmp_path / "there" / file.name).stat().st_size == file.nbytes for file in found.files)
    checkpoint.consolidate(tmp_path / "there", tmp_path / "out")  # consolidate verifies every byte
    assert "It is complete all the same" in told


def one_by_one(root: Path) -> list[str]:
    """Let one save after the other fail on one rank only, and train on after each of them.

    Args:
        root: folder for the checkpoints.

    Returns:
        The error of each save on this rank; "" if there is none.
    """
    model, optimizer = impatient()
    second, told = dist.get_rank() == 1, []

    def told_by(act: Callable[[], object]) -> str:
        try:
            act()
        except (checkpoint.CheckpointError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def save() -> None:
        checkpoint.save(root / "there", model, optimizer, asynchronous=True)

    # Rank 1 alone has no memory for the copy.
    def full(*_: object) -> Any:
        raise MemoryError("no memory")

    with replaced(Background, "_copied", lambda function: full if second else function):
        told.append(told_by(save))
    train(model, optimizer, [0])

    # Rank 1's disk fails, and only rank 0 calls wait() before the next save.
    def broken(*_: object) -> Any:
        raise OSError("the disk is broken")

    with replaced(os, "pwrite", lambda function: broken if second else function):
        save()
        saving.backgrounds[optimizer.engine]._task.wait()  # type: ignore[union-attr]
    if not second:
        told_by(checkpoint.wait)
    told.append(told_by(save))
    train(model, optimizer, [1])
    # Rank 1's thread is late once.
    save()
    checkpoint.wait()
    with replaced(saving, "gather_rows", late(2.5 * TIMEOUT) if second else lambda function: function):
        save()
        told.append(told_by(checkpoint.wait))
    dist.barrier()
    save()
    checkpoint.wait()
    # The group of the writing threads is destroyed during a save, as at the end of a program.
    with replaced(os, "pwrite", late(0.2)):
        checkpoint.save(root / "last", model, optimizer, asynchronous=True)
        dist.destroy_process_group(saving.backgrounds[optimizer.engine]._sync._group)
        told.append(told_by(checkpoint.wait))
    assert (root / "last" / "metadata.json").exists(), "\n".join(told)
    checkpoint.load(root / "last", model, optimizer)
    return told


@pytest.mark.campaign
def test_errors_that_ranks_have_one_by_one(tmp_path: Path) -> None:
    """Every rank raises the error at the same call, and later saves succeed."""
    first, second = run_ranks(2, one_by_one, tmp_path)
    assert first[0].startswith("CheckpointError: copying") and "rank 1: MemoryError" in first[0]
    assert second[0] == "MemoryError: no memory"
    assert all("the disk is broken" in told and "not begun" in told for told in (first[1], second[1]))
    assert all("not come to making a folder" in told for told in (first[2], second[2]))
    assert first[3] == second[3] == ""


@pytest.mark.parametrize("fails", some([True, False], 2))
def test_a_handler_that_waits_too(fails: bool, tmp_path: Path) -> None:
    """A signal handler that calls wait() gets the error, and the wait() that it interrupts returns without one."""
    model, told = torch.nn.Linear(8, 8), []
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def waits(*_: object) -> None:
        try:
            checkpoint.wait()
        except checkpoint.CheckpointError as error:
            told.append(str(error))

    def slow(function: Any) -> Any:
        def instead(*arguments: Any) -> Any:
            time.sleep(0.5)
            if fails:
                raise OSError("the disk is broken")
            return function(*arguments)

        return instead

    kept = signal.signal(signal.SIGALRM, waits)
    try:
        with replaced(os, "pwrite", slow):
            checkpoint.save(tmp_path / "here", model, optimizer, asynchronous=True)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            checkpoint.wait()
    finally:
        signal.signal(signal.SIGALRM, kept)
    assert (tmp_path / "here" / "metadata.json").exists() is not fails
    assert ["the disk is broken" in each for each in told] == [True] * fails


def test_threads_end_before_their_caller_goes_on() -> None:
    """in_threads waits for its threads even if a signal handler raises.

    Otherwise a thread could write to a file descriptor that the caller has closed.
    """
    done: list[int] = []

    def work(numbers: Iterator[int]) -> None:
        for number in numbers:
            time.sleep(0.3)
            done.append(number)

    def raises(*_: object) -> None:
        raise InterruptedError

    kept = signal.signal(signal.SIGALRM, raises)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(InterruptedError):
            in_threads(20, work, 2)
    finally:
        signal.signal(signal.SIGALRM, kept)
    there = len(done)
    time.sleep(0.5)
    assert len(done) == there == 2


def same(function: Any) -> Any:
    """Return the function unchanged."""
    return function


def goes_on(root: Path, how: str) -> str:
    """Let rank 0 take longer than hang_timeout in one call, and call save and load afterwards.

    Args:
        root: folder for the checkpoints.
        how: slow work: "removing" the files of a failed save, or "looking" for the newest checkpoint.

    Returns:
        The error of the slow call on this rank; "" if there is none.
    """
    model, optimizer = impatient()
    first, told, series = dist.get_rank() == 0, "", checkpoint.Series(root / "series")
    expected = zeropp.full_state(model)
    series.save(1, model, optimizer)

    def broken(*_: object) -> Any:
        raise OSError("the disk is broken")

    slow = late(1.5 * TIMEOUT) if first else same
    patches = {
        "removing": [(os, "unlink", slow), (os, "pwrite", same if first else lambda function: broken)],
        "looking": [(checkpoint.Series, "latest", slow)],
    }
    with contextlib.ExitStack() as stack:
        for owner, name, make in patches[how]:
            stack.enter_context(replaced(owner, name, make))
        try:
            if how == "looking":
                assert series.load(model, optimizer) is not None
            else:
                checkpoint.save(root / "there", model, optimizer)
        except checkpoint.CheckpointError as error:
            told = f"{type(error).__name__}: {error}"
    checkpoint.save(root / "there", model, optimizer)
    checkpoint.load(root / "there", model, optimizer)
    found = zeropp.full_state(model)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    return told


@pytest.mark.every(2)
@pytest.mark.parametrize(("how", "words"), [("removing", "the disk is broken"), ("looking", "")])
def test_rank_0_may_take_longer_than_the_timeout_of_waiting_ranks(how: str, words: str, tmp_path: Path) -> None:
    """Rank 0 may remove files of a failed save, or look for the newest checkpoint, for longer than hang_timeout."""
    for told in run_ranks(2, goes_on, tmp_path, how):
        assert words in told and told.startswith("CheckpointError" if words else "")


def by_other_links(root: Path) -> None:
    model, optimizer = impatient()
    checkpoint.save(root / "one", model, optimizer)
    if dist.get_rank() == 0:
        shutil.copytree(root / "one", root / "two")
    dist.barrier()
    own = root / ("one" if dist.get_rank() == 0 else "two")

    def make(realpath: Any) -> Any:
        return lambda path, **given: str(own) if Path(path).name == "link" else realpath(path, **given)

    with replaced(os.path, "realpath", make):
        checkpoint.load(root / "link", model, optimizer)


def test_nodes_that_reach_a_disk_by_other_links(tmp_path: Path) -> None:
    run_ranks(2, by_other_links, tmp_path)


def at_other_places() -> str:
    _, optimizer = impatient()
    agreement = optimizer.engine.agreement
    with pytest.raises(RuntimeError) as caught:
        if dist.get_rank() == 0:
            agreement.exchange_objects("something", "comparing objects")
        else:
            agreement.exchange(SAVED, [1], "comparing numbers")
    return str(caught.value)


def test_objects_and_numbers_do_not_meet() -> None:
    """Exchanges of objects and of numbers must not match each other.

    Messages of different sizes would end the process, because gloo does not report them.
    """
    for told in run_ranks(2, at_other_places):
        assert "comparing objects" in told and "comparing numbers" in told


def test_wait_tells_all_errors(tmp_path: Path) -> None:
    """wait() raises the errors of all saves, also of an engine that is closed.

    A forked process does not wait for its parent's threads.
    """
    pairs = []
    for _ in range(2):
        model = torch.nn.Linear(8, 8)
        pairs.append((model, zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)))

    def broken(*_: object) -> Any:
        raise OSError("the disk is broken")

    with replaced(os, "pwrite", lambda function: broken):
        for number, pair in enumerate(pairs):
            checkpoint.save(tmp_path / f"of {number}", *pair, asynchronous=True)
        pairs[0][1].close()
        with pytest.raises(checkpoint.CheckpointError, match=r"of 0'.* the disk is broken.*of 1'.* the disk is broken"):
            checkpoint.wait()
    checkpoint.wait()
    with replaced(os, "pwrite", late(0.5)):
        checkpoint.save(tmp_path / "here", *pairs[1], asynchronous=True)
        saving._forget_all()
        checkpoint.wait()
        assert not (tmp_path / "here" / "metadata.json").exists()
        while not (tmp_path / "here" / "metadata.json").exists():
            time.sleep(0.1)
