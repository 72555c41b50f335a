"""Disk errors under offloaded states: every rank raises, wrong states are not saved, and training can be resumed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.offload_pairs import host_apart
from tests.support.rank_pool import run_ranks
from tests.support.small_models import MODELS
from tests.support.tmpfs import tmpfs
from zeropp.offload import swap

SOON = 15.0  # seconds; below hang_timeout, so a wait that only hang_timeout ends fails the test
STEPS, FAULTY = 6, 3
PLACES: dict[str, dict[str, Any]] = {
    "states": {},
    "states and weights": {"offload_param": {"device": "nvme", "max_in_cpu": 0, "buffer_count": 2}},
}


def settings(folder: Path | str, **more: Any) -> dict[str, Any]:
    path = {"nvme_path": str(folder)}
    zero: dict[str, Any] = {"offload_optimizer": {"device": "nvme", "pipeline_write": True, **path}}
    if "offload_param" in more:
        zero["offload_param"] = {**more["offload_param"], **path}
    return make_config(**zero, aio={"block_size": 1024}, gradient_clipping=0.3)


def make(config: dict[str, Any]) -> tuple[nn.Module, zeropp.ZeroOptimizer]:
    torch.manual_seed(3)
    model = MODELS["gpt"].build().float()
    return model, zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True), model, config)


def train(model: nn.Module, optimizer: zeropp.ZeroOptimizer, step: int) -> float:
    kind = MODELS["gpt"]
    optimizer.zero_grad()
    loss = kind.loss(model, kind.batch(torch.Generator().manual_seed(31 * step + dist.get_rank())))
    optimizer.backward(loss)
    optimizer.step()
    return loss.item()


@contextlib.contextmanager
def faulty(which: str, number: int, after: int) -> Iterator[None]:
    """Let ``swap.<which>`` fail with errno ``number`` after ``after`` calls; for 0 it moves no bytes (end of file)."""
    plain: Callable[..., int] = getattr(swap, which)
    left = [after]

    def call(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] >= 0:
            return plain(*arguments)
        if number:
            raise OSError(number, os.strerror(number))
        return 0

    with mock.patch.object(swap, which, call):
        yield


def caught(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fails(folder: str, place: str, which: str, number: int, after: int, apart: bool) -> dict[str, Any]:
    """Train until the last rank's disk fails, then step and save once more, and resume from a checkpoint.

    Returns:
        "error": the first error. "took": seconds of the steps with the failing disk. "again" and "saved": errors of a
        further step and of a save. "losses": losses after resuming.
    """
    with host_apart(apart):
        model, optimizer = make(settings(folder, **PLACES[place]))
        for step in range(FAULTY):
            train(model, optimizer, step)
        zeropp.checkpoint.save(f"{folder}/saved", model, optimizer)
        bad = dist.get_rank() == dist.get_world_size() - 1
        error, begun = "", time.monotonic()
        with faulty(which, number, after) if bad else contextlib.nullcontext():
            for step in range(FAULTY, STEPS):
                error = error or caught(lambda step=step: train(model, optimizer, step))  # type: ignore[misc]
            # If only the last step fails, no later step raises its error. full_state waits for the step and raises it.
            error = error or caught(lambda: zeropp.full_state(model))
        took = time.monotonic() - begun
        again = caught(lambda: train(model, optimizer, STEPS))
        saved = caught(lambda: zeropp.checkpoint.save(f"{folder}/late", model, optimizer))
        optimizer.close()
        model, optimizer = make(settings(folder, **PLACES[place]))
        zeropp.checkpoint.load(f"{folder}/saved", model, optimizer)
        losses = [train(model, optimizer, step) for step in range(FAULTY, STEPS)]
        optimizer.close()
    return {"error": error, "took": took, "again": again, "saved": saved, "losses": losses}


def undisturbed() -> list[float]:
    """Return this rank's losses of training without offload."""
    model, optimizer = make(make_config(gradient_clipping=0.3))
    losses = [train(model, optimizer, step) for step in range(STEPS)]
    optimizer.close()
    return losses


@cache
def expected(world: int) -> list[list[float]]:
    """Return the losses of training without offload, one list per rank."""
    return run_ranks(world, undisturbed)


@pytest.mark.every(12)
@pytest.mark.parametrize(
    ("world", "place", "which", "number", "after", "apart"),
    [
        (2, "states and weights", "read_at", errno.EIO, 25, True),
        (1, "states", "read_at", errno.EIO, 0, False),
        (2, "states", "read_at", 0, 40, False),
        (2, "states", "write_at", errno.EIO, 9, False),
        (1, "states", "write_at", errno.ENOSPC, 70, True),
        (2, "states and weights", "write_at", errno.EIO, 0, True),
    ],
)
def test_a_disk_that_fails(
    world: int, place: str, which: str, number: int, after: int, apart: bool, tmp_path: Path
) -> None:
    """Every rank raises the disk's error, saving is refused from then on, and the last checkpoint can be resumed."""
    plain = expected(world)
    found = run_ranks(world, fails, str(tmp_path), place, which, number, after, apart)
    # A read or write that moves no bytes (number 0) counts as an I/O error of the disk.
    reason = os.strerror(number or errno.EIO)
    assert all(reason in each["error"] for each in found), found
    assert all(each["took"] < SOON for each in found), found
    # Ranks with a good disk have taken a step that the failing rank has not, so training must resume from a checkpoint.
    assert all("go on from a checkpoint" in each["error"] for each in found), found
    # A further step raises the same error, and a save states its reason, because both would use wrong states.
    assert all(each["again"] == each["error"] and reason in each["saved"] for each in found), found
    assert (tmp_path / "saved" / "metadata.json").exists() and not (tmp_path / "late" / "metadata.json").exists()
    assert [each["losses"] for each in found] == [losses[FAULTY:] for losses in plain]
    assert not list(tmp_path.glob("zeropp-*")), "directories are removed"


def opened(folder: str) -> str:
    found = caught(lambda: make(settings(folder, **PLACES["states and weights"])))
    dist.barrier()  # collectives of the ranks still match after the error
    return found


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """Wrapping raises on every rank if a disk has no room for the states, before any training."""
    with tmpfs(tmp_path / "disk", "-o", "size=64k") as full:
        found = run_ranks(2, opened, str(full))
        # Both ranks raise. At least the rank whose disk was full first states the reason.
        assert all(found) and any("No space left" in each and "offload less" in each for each in found), found
        assert not list(full.iterdir())


def between_passes(folder: str) -> tuple[float, str]:
    """Return the seconds until full_state raises after rank 1's disk failed in a step, and the text of the error.

    Rank 1 sleeps after the failure, but its process stays alive.
    """
    config = settings(folder, **PLACES["states"])
    config["zeropp"]["hang_timeout"] = 10
    model, optimizer = make(config)
    train(model, optimizer, 0)
    optimizer.zero_grad()
    kind, bad = MODELS["gpt"], dist.get_rank() == 1
    optimizer.backward(kind.loss(model, kind.batch(torch.Generator().manual_seed(1))))
    with faulty("read_at", errno.EIO, 0) if bad else contextlib.nullcontext():
        optimizer.step()
        begun = time.monotonic()
        said = caught(lambda: zeropp.full_state(model))
    took = time.monotonic() - begun
    # Rank 1 stays busy for longer than rank 0 may take (7 seconds), so rank 0 must not wait for rank 1.
    time.sleep(8 if bad else 0)
    optimizer.close()
    return took, said


@pytest.mark.campaign
def test_a_call_between_passes_does_not_wait_for_a_rank_whose_disk_has_failed(tmp_path: Path) -> None:
    for took, said in run_ranks(2, between_passes, str(tmp_path)):
        assert took < 7 and "Input/output error" in said, (took, said)


def room_for_all_but_states(folder: str, nbytes: int) -> tuple[str, bool, list[float]]:
    """Wrap a model while rank 1's disk has room for ``nbytes`` bytes. If this fails, train the model without offload.

    Returns:
        The error of wrapping ("" for none), True if the model's values are unchanged, and the losses.
    """
    torch.manual_seed(3)
    model = MODELS["gpt"].build().float()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = os.posix_fallocate

    def fallocate(descriptor: int, offset: int, length: int) -> None:
        if dist.get_rank() == 1 and offset + length > nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(descriptor, offset, length)

    with mock.patch.object(os, "posix_fallocate", fallocate):
        said = caught(lambda: zeropp.ZeroOptimizer(inner, model, settings(folder, **PLACES["states and weights"])))
    if not said:
        return said, True, []
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(gradient_clipping=0.3))
    losses = [train(model, optimizer, step) for step in range(STEPS)]
    optimizer.close()
    return said, same, losses


def test_space_for_states_is_taken_before_the_model_is_changed(tmp_path: Path) -> None:
    config = settings(tmp_path, **PLACES["states and weights"])
    plan = zeropp.plan.memory(MODELS["gpt"].build().float(), config, 2, device="cpu")
    plain = expected(2)
    found = run_ranks(2, room_for_all_but_states, str(tmp_path), plan.disk_total - plan.disk["optimizer_states"])
    assert [(same, losses) for _, same, losses in found] == [(True, losses) for losses in plain]
    assert all(f"cannot allocate {plan.disk_total} bytes" in said and "No space left" in said for said, _, _ in found)
    assert "failed on rank 1" in found[0][0] and not list(tmp_path.glob("zeropp-*")), found
    # A disk with exactly the planned bytes suffices, so wrapping reserves no more than the plan says.
    assert run_ranks(2, room_for_all_but_states, str(tmp_path), plan.disk_total)[1][0] == ""


def unfreezes(folder: str) -> tuple[str, float]:
    """Unfreeze parameters while rank 1's disk is full; return the error of the next step, and its seconds."""
    torch.manual_seed(3)
    model = MODELS["gpt"].build().float()
    frozen = list(model.parameters())[2:]
    for parameter in frozen:
        parameter.requires_grad_(False)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    optimizer = zeropp.ZeroOptimizer(inner, model, settings(folder, **PLACES["states and weights"]))
    train(model, optimizer, 0)
    for parameter in frozen:
        parameter.requires_grad_(True)
    refused = mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    begun = time.monotonic()
    with refused if dist.get_rank() == 1 else contextlib.nullcontext():
        said = caught(lambda: train(model, optimizer, 1))
    took = time.monotonic() - begun
    optimizer.close()
    return said, took


def test_a_full_disk_while_parameters_are_unfrozen_raises(tmp_path: Path) -> None:
    for said, took in run_ranks(2, unfreezes, str(tmp_path)):
        assert "No space left" in said and "making room for parameters that are unfrozen" in said, said
        assert took < SOON


def goes_on_without(folder: str) -> list[float]:
    """Return the losses of training whose swap directory is removed after the first step."""
    model, optimizer = make(settings(folder, **PLACES["states and weights"]))
    losses = [train(model, optimizer, 0)]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    losses += [train(model, optimizer, step) for step in range(1, FAULTY)]
    optimizer.close()
    return losses


def test_a_directory_that_vanishes(tmp_path: Path) -> None:
    """A swap file has no name while it is in use, so no process can remove or open it, and training goes on."""
    plain = expected(2)
    assert run_ranks(2, goes_on_without, str(tmp_path / "swap")) == [losses[:FAULTY] for losses in plain]


def side_by_side(folder: str) -> list[list[float]]:
    pairs = [make(settings(folder, **PLACES["states and weights"])) for _ in range(2)]
    losses: list[list[float]] = [[], []]
    for step in range(FAULTY):
        for number, (model, optimizer) in enumerate(pairs):
            losses[number].append(train(model, optimizer, step))
    for _, optimizer in pairs:
        optimizer.close()
    return losses


def test_two_jobs_on_one_path(tmp_path: Path) -> None:
    plain = expected(2)
    assert run_ranks(2, side_by_side, str(tmp_path / "swap")) == [[losses[:FAULTY]] * 2 for losses in plain]
