"""Accumulation windows of a training engine: changed sizes, discarded micro-batches, and reads inside a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import worst
from tests.support.deepspeed_engine import loss_of, model_of, settings
from tests.support.rank_pool import run_ranks, some
from zeropp.deepspeed.parameter_values import safe_get_full_grad
from zeropp.training import Engine

ROWS = 3  # rows per micro-batch
PLAN = [2, 3, 1, 4, 2]  # micro-batches of each window


def engine_of(stage: int, **more: Any) -> Engine:
    config = settings(zero={"stage": stage}, **more)
    config["scheduler"]["params"] = {**config["scheduler"]["params"], "warmup_num_steps": 2}
    engine: Engine = zeropp.initialize(model=model_of(), config=config)[0]
    return engine


class Plain:
    """The same training in one process, on the batches of all ranks."""

    def __init__(self) -> None:
        self.model = model_of()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.1)
        self.steps = 0

    def step(self, window: list[tuple[int, int]]) -> None:
        """Take one step on a window.

        Args:
            window: (number, rank) of each batch of the window.
        """
        self.optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, max(0, self.steps - 1) / 2)
        self.optimizer.zero_grad()
        for number, rank in window:
            (loss_of(self.model, number, rank) / len(window)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1

    def state(self) -> dict[str, Tensor]:
        return self.model.state_dict()


def follows_a_plan(stage: int, clears: bool) -> tuple[float, list[int], list[int]]:
    """Train windows of different sizes.

    Args:
        stage: ZeRO stage.
        clears: True to call zero_grad() before each backward.

    Returns:
        Largest difference of weights from plain torch, numbers of the steps taken, and micro-batches of each window.
    """
    engine, plain, number, taken, sizes = engine_of(stage), Plain(), 0, [], []
    for size in PLAN:
        engine.set_train_batch_size(size * ROWS * 2)
        plain.step([(number + each, rank) for each in range(size) for rank in range(2)])
        count = 0
        while not taken or taken[-1] != plain.steps:
            if clears:
                # As a plain torch loop does for each micro-batch; it must not discard the window's gradients.
                engine.zero_grad()
            engine.backward(loss_of(engine, number, dist.get_rank()))
            engine.step()
            number, count = number + 1, count + 1
            taken += [engine.global_steps] * engine.was_step_applied()
            assert count <= size, "the window is too long"
        sizes.append(count)
    assert engine.global_samples == sum(PLAN) * ROWS * 2
    return worst(zeropp.full_state(engine.module), plain.state()), taken, sizes


@pytest.mark.every(8)
@pytest.mark.parametrize(("stage", "clears"), [(3, False), (1, True)])
def test_sizes_change_between_windows(stage: int, clears: bool) -> None:
    for apart, taken, sizes in run_ranks(2, follows_a_plan, stage, clears):
        assert apart < 1e-12 and taken == [1, 2, 3, 4, 5] and sizes == PLAN


def resumes(folder: Path, first: int, last: int, save: bool) -> float:
    """Train steps of 12 samples, with 4 / world micro-batches each. Load a checkpoint before if ``first`` > 0.

    Args:
        folder: folder of the checkpoint.
        first: first step to train.
        last: number of steps after which to stop.
        save: True to save at the end.

    Returns:
        Largest difference of weights from plain torch.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    engine, plain = engine_of(3, train_batch_size=12, gradient_accumulation_steps=4 // world), Plain()
    if first:
        engine.load_checkpoint(folder)
        # Load again in the middle of a window. The load must end that window.
        engine.backward(loss_of(engine, 0, rank))
        engine.step()
        engine.load_checkpoint(folder)
    for step in range(last):
        window = [(2 * step + each, other) for each in range(2) for other in range(2)]
        plain.step(window)
        for number, other in window[rank::world] if step >= first else ():
            engine.backward(loss_of(engine, number, other))
            engine.step()
    assert engine.global_steps == last
    if save:
        engine.save_checkpoint(folder)
    return worst(zeropp.full_state(engine.module), plain.state())


def test_a_resumption_on_other_ranks_begins_with_a_whole_window(tmp_path: Path) -> None:
    assert max(run_ranks(2, resumes, tmp_path, 0, 3, True)) < 1e-12
    assert max(run_ranks(1, resumes, tmp_path, 3, 5, True)) < 1e-12
    assert max(run_ranks(2, resumes, tmp_path, 5, 7, False)) < 1e-12


def throws_away(stage: int) -> tuple[float, list[bool], int]:
    """Discard a micro-batch before its step(), train a window, and call step() without a backward.

    Args:
        stage: ZeRO stage.

    Returns:
        Largest difference of weights from plain torch, for each step() True if it stepped, and the engine's number of
        steps.
    """
    engine, plain, applied = engine_of(stage), Plain(), []
    rank = dist.get_rank()
    engine.backward(loss_of(engine, 7, rank))
    engine.zero_grad()  # before step(), which would count the micro-batch
    for number in range(2):
        engine.backward(loss_of(engine, number, rank))
        engine.step()
        applied.append(engine.was_step_applied())
    plain.step([(number, each) for number in range(2) for each in range(2)])
    before = engine.get_lr()
    for _ in range(2):
        engine.step()
        applied.append(engine.was_step_applied())
    assert engine.get_lr() == before, "the rate went on without a step"
    return worst(zeropp.full_state(engine.module), plain.state()), applied, engine.global_steps


@pytest.mark.parametrize("stage", some([1, 3], 2))
def test_discarded_micro_batches_are_in_no_step(stage: int) -> None:
    for apart, applied, steps in run_ranks(2, throws_away, stage):
        assert apart < 1e-12 and applied == [False, True, False, False] and steps == 2


def asks(stage: int) -> list[str]:
    """Read gradients inside windows, at their ends, and at boundaries that the caller sets.

    Args:
        stage: ZeRO stage.

    Returns:
        Errors.
    """
    wrong, rank = [], dist.get_rank()
    engine = engine_of(stage, gradient_accumulation_steps=3)
    weight = next(parameter for parameter in engine.module.parameters() if parameter.requires_grad)
    for number in range(6):
        engine.backward(loss_of(engine, number, rank))
        if number % 3 == 2:
            wrong += [] if safe_get_full_grad(weight) is not None else [f"no gradient after {number}"]
        else:
            with pytest.raises(RuntimeError, match="inside a window of micro-batches"):
                safe_get_full_grad(weight)
        engine.step()
    for number in range(2):
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss_of(engine, number, rank))
        norm = float(engine.optimizer.clip_grad_norm_(1e-3))
        gradient = safe_get_full_grad(weight)
        wrong += [] if gradient is not None and 0 < float(gradient.norm()) < 1e-3 < norm else [f"forced {number}"]
        engine.step()
        wrong += [] if engine.was_step_applied() else [f"no step {number}"]
    return wrong


@pytest.mark.parametrize("stage", some([3, 1], 2))
def test_a_boundary_that_the_caller_gives_is_believed(stage: int) -> None:
    assert run_ranks(2, asks, stage) == [[], []]


def held(managed: bool) -> list[list[bool]]:
    """Train three windows of four micro-batches.

    Args:
        managed: value of ``managed_gradient_accumulation``.

    Returns:
        For each backward of each window, True if its reductions are held back for the next micro-batches.
    """
    engine = engine_of(1, gradient_accumulation_steps=4, managed_gradient_accumulation=managed)
    found = []
    for window in range(3):
        found.append([])
        for number in range(4):
            engine.backward(loss_of(engine, 4 * window + number, dist.get_rank()))
            found[-1].append(engine.core._reductions.holding)
            if managed or number == 3:
                engine.step()
    return found


@pytest.mark.parametrize("managed", [True, False])
def test_sums_travel_with_the_last_micro_batch_in_every_window(managed: bool) -> None:
    for found in run_ranks(2, held, managed):
        assert found == [[True, True, True, False]] * 3
