"""A disk that delays one rank beyond ``hang_timeout``, and signals and losses while other ranks wait for that rank."""

from __future__ import annotations

import logging
import os
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
from tests.support.quantized_model import Model
from tests.support.rank_pool import run_ranks
from zeropp import checkpoint
from zeropp.checkpoint.metadata import Metadata
from zeropp.comm.agreement import AT_WORK

TIMEOUT = 1.5


class Ended(BaseException):
    """The exception that the test's SIGTERM handler raises."""


def impatient(pipeline: bool = False) -> tuple[Model, zeropp.ZeroOptimizer]:
    """Return a model and optimizer with a short hang_timeout of TIMEOUT seconds.

    Args:
        pipeline: value of pipeline_loading_checkpoint.
    """
    torch.manual_seed(0)
    model = Model()
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
        "pipeline_loading_checkpoint": pipeline,
    }
    extension = {"unit_min_blocks": 0, "hang_timeout": TIMEOUT, "warn_after": 0.5, "local_world_size": 2}
    config = {"zero_optimization": zero, "zeropp": extension}
    dist.barrier()  # ranks may start further apart than hang_timeout
    return model, zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, config)


@contextmanager
def before(owner: Any, name: str, act: Callable[[], object] | None) -> Iterator[None]:
    """Call ``act`` once, before the next call of a function.

    Args:
        owner: object or module that has the function.
        name: name of the function.
        act: function to call; None for no call.
    """
    function, acts = getattr(owner, name), [act] if act is not None else []

    def instead(*arguments: Any) -> Any:
        if acts:
            acts.pop()()
        return function(*arguments)

    setattr(owner, name, instead)
    try:
        yield
    finally:
        setattr(owner, name, function)
        assert not acts  # the function must have been called


def slow() -> None:
    time.sleep(2 * TIMEOUT)


def one_is_slow(root: Path, action: str) -> tuple[list[str], bool]:
    """Save, load or export while one rank's disk takes 2 * TIMEOUT seconds.

    Args:
        root: folder for the files.
        action: "save", "export", "sixteen bit" (save_16bit_model), or "in turns" (load with
            pipeline_loading_checkpoint).

    Returns:
        Messages that this rank logged, and True if all weights are right afterwards.
    """
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeropp").addHandler(handler)
    second = dist.get_rank() == 1
    model, optimizer = impatient(pipeline=action == "in turns")
    expected = zeropp.full_state(model)
    name = {"save": "pwrite", "in turns": "preadv"}.get(action, "fsync")
    if action == "in turns":
        checkpoint.save(root / "there", model, optimizer)
        with torch.no_grad(), zeropp.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            for parameter in model.parameters():
                parameter.zero_()
    # A 16-bit model is written by rank 0 alone, so rank 0 must be the slow one.
    with before(os, name, slow if second != (action == "sixteen bit") else None):
        if action == "save":
            checkpoint.save(root / "there", model, optimizer)
        elif action == "export":
            # Files so small that each rank writes some.
            checkpoint.export(root / "out", model, file_nbytes=1 << 12)
        elif action == "sixteen bit":
            assert checkpoint.save_16bit_model(root, model, "all.bin")
        else:
            checkpoint.load(root / "there", model, optimizer)
    if action == "save":
        checkpoint.load(root / "there", model, optimizer)
    if action == "export":
        checkpoint.load_safetensors(model, root / "out")
    found = zeropp.full_state(model)
    logging.getLogger("zeropp").removeHandler(handler)
    return messages, all(torch.equal(found[key], expected[key]) for key in expected)


RARE = [pytest.param(action, marks=pytest.mark.campaign) for action in ("export", "sixteen bit")]


@pytest.mark.campaign
@pytest.mark.parametrize("action", ["save", "in turns", *RARE])
def test_a_slow_disk_is_waited_for(action: str, tmp_path: Path) -> None:
    """Ranks wait for a slow disk beyond hang_timeout, and their warning names the slow rank."""
    results = run_ranks(2, one_is_slow, tmp_path, action)
    assert all(right for _, right in results)
    waits, other = (1, 0) if action == "sixteen bit" else (0, 1)
    told = [text for text in results[waits][0] if f"rank {other} is still at" in text]
    assert told and f"rank {waits} has been waiting for" in told[0]


def signalled(root: Path, where: str) -> str:
    """Send SIGTERM, with a handler that raises, to the rank that waits for the other rank's disk.

    Args:
        root: folder of the checkpoint.
        where: work of the slow rank: "writing", "completing" or "loading".

    Returns:
        The error on this rank.
    """
    kept = signal.getsignal(signal.SIGTERM)

    def raises(*_: object) -> None:
        raise Ended

    signal.signal(signal.SIGTERM, raises)
    model, optimizer = impatient()
    expected = zeropp.full_state(model)
    checkpoint.save(root / "there", model, optimizer)
    rank, numbers = dist.get_rank(), [0, 0]
    dist.all_gather_object(numbers, os.getpid())
    # Only rank 0 completes a checkpoint, so only rank 0 can be slow in it.
    slow_one = 0 if where == "completing" else 1

    def act() -> None:
        time.sleep(0.5)  # the other rank has finished its own work by then
        os.kill(numbers[1 - slow_one], signal.SIGTERM)
        slow()

    owner: tuple[Any, str] = {"completing": (Metadata, "write"), "writing": (os, "pwrite"), "loading": (os, "preadv")}[
        where
    ]
    told = ""
    try:
        with before(*owner, act if rank == slow_one else None):
            if where == "loading":
                checkpoint.load(root / "there", model, optimizer)
            else:
                checkpoint.save(root / "there", model, optimizer)
    except (checkpoint.CheckpointError, Ended) as error:
        told = f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGTERM, kept)
    # After the signal, both ranks must be able to load together.
    checkpoint.load(root / "there", model, optimizer)
    found = zeropp.full_state(model)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    return told


@pytest.mark.campaign
@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("writing", "Nothing was saved, and what was there before is as it was"),
        ("completing", "It is complete all the same"),
        ("loading", "changed"),
    ],
)
def test_a_signal_while_a_rank_waits(where: str, words: str, tmp_path: Path) -> None:
    """The waiting rank raises its handler's exception. The other rank raises an error when its own work is done."""
    told = run_ranks(2, signalled, tmp_path, where)
    waits = 1 if where == "completing" else 0
    assert told[waits].startswith("Ended")
    assert "CheckpointError" in told[1 - waits] and f"rank {waits}: Ended" in told[1 - waits]
    assert words in told[1 - waits]


def loses(root: Path) -> float:
    """Let rank 1 stop answering during a save.

    Returns:
        Seconds until the error.
    """
    model, optimizer = impatient()
    gone, second = threading.Event(), dist.get_rank() == 1
    start = time.monotonic()
    if second:
        exchange = optimizer.engine.agreement.exchange

        def stands_still(kind: int, *arguments: Any) -> Any:
            if kind == AT_WORK:
                gone.wait(30)
            return exchange(kind, *arguments)

        optimizer.engine.agreement.exchange = stands_still  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=None if second else r"hang_timeout, 1.5 s, was reached"):
        if second:
            threading.Timer(TIMEOUT + 4, gone.set).start()
        checkpoint.save(root / "there", model, optimizer)
    assert not (root / "there").exists()
    return time.monotonic() - start


@pytest.mark.campaign
def test_a_lost_rank_is_not_waited_for(tmp_path: Path) -> None:
    """A rank that no longer answers is reported soon after ``hang_timeout``.

    Reading the ranks' statuses takes a few seconds more.
    """
    assert run_ranks(2, loses, tmp_path)[0] < TIMEOUT + 5
