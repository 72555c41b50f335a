"""Gradients held until the last micro-batch of a window are all in that window's step, and in no other step."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.parity import assert_close
from tests.support.rank_pool import run_ranks, some, spread
from tests.support.sharded_and_plain import Pair


class Sometimes(nn.Module):
    """Model with two layers, of which only some micro-batches use the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.always = nn.Linear(16, 16)
        self.sometimes = nn.Linear(16, 16)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.always(x)
        return self.sometimes(x) if both else x


def halves(settings: dict[str, object], micros: int, **more: Any) -> Pair:
    config = make_config(**settings, gradient_accumulation_steps=micros)
    return Pair(Sometimes(), config, batch=batch, micros=micros, **more)


def in_parts(settings: dict[str, object], uses: list[list[bool]], steps: int) -> None:
    """Train with micro-batches that use both layers or only the first, and compare with plain torch.

    Args:
        settings: settings of the configuration.
        uses: for each step, True for each micro-batch that uses both layers. A step may have fewer micro-batches than
            configured, or more.
        steps: number of steps.
    """
    pair = halves(settings, 3, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in range(steps):
        pair.zero_grad()
        for both in uses[step % len(uses)]:
            pair.backward(both)
        norm = nn.utils.clip_grad_norm_(pair.plain.parameters(), float("inf")).item()
        pair.optimizer.step(now=True)
        pair.plain_optimizer.step()
        pair.advance()
        assert_close(pair.optimizer.grad_norm, norm, 1e-9, "norm")
    assert all(gradient.held is None for gradient in pair.optimizer.engine.gradients)
    pair.check(1e-9)


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 100 + micro * 10 + rank)
    return torch.randn(2, 16, dtype=torch.float64, generator=generator)


WINDOWS = {
    "whole": [[True, True, True]],
    "used first": [[True, False, False]],
    "used last": [[False, False, True]],
    "short": [[True, True], [True]],
    "changing": [[True, False, False], [False, True], [True, True, True], [False]],
    "too many": [[True, False, True, False, True]],
    "new in a short one": [[False, False, False], [True]],
}
HOLDING: dict[str, dict[str, object]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "deferred": {"defer_cross_reduction": True},
    "mics": {"mics_shard_size": 2},
    "mics 1": {"mics_shard_size": 1},
}


TELLING = [("stage 1", "changing"), ("deferred", "used first")]


@pytest.mark.parametrize(
    ("name", "window"),
    [pytest.param(*row, marks=() if row in TELLING else pytest.mark.campaign) for row in product(HOLDING, WINDOWS)],
)
def test_held_gradients_are_all_in_the_step(name: str, window: str) -> None:
    """A step has the gradients of all its micro-batches, also if it comes before or after the window's end."""
    run_ranks(4, in_parts, HOLDING[name], WINDOWS[window], 4, local_world_size=2)


def after_an_error(settings: dict[str, object], how: str) -> None:
    """Let a call fail on every rank between two micro-batches; the step equals that of plain torch.

    Args:
        settings: settings of the configuration.
        how: failing call: "forward" and "evaluation" pass no tensor, "lent" runs the model inside GatheredParameters.
    """
    pair = halves(settings, 2)
    for step in range(3):
        pair.zero_grad()
        pair.backward(True)
        if step and how == "lent":
            with pytest.raises(RuntimeError, match="inside Gathered"), zeropp.zero.GatheredParameters(pair.model):
                pair.model(batch(step, 5, pair.rank), True)
        elif step:
            with torch.set_grad_enabled(how == "forward"), pytest.raises(TypeError):
                pair.model("no tensor", True)
        pair.backward(True)
        pair.step()
    pair.check()


@pytest.mark.every(16)
@pytest.mark.parametrize(("name", "how"), spread(HOLDING, ["forward", "evaluation", "lent"], 2))
def test_an_error_between_micro_batches_loses_none(name: str, how: str) -> None:
    run_ranks(4, after_an_error, HOLDING[name], how, local_world_size=2)


def scaled(settings: dict[str, object], uses: list[list[bool]]) -> tuple[float, int]:
    """Train with torch's GradScaler; return the weight difference from plain torch, and the number of skipped steps.

    Plain torch leaves out the skipped steps.
    """
    pair = halves(settings, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    pair.sharded.call = lambda loss: pair.optimizer.backward(scaler.scale(loss))
    for window in uses:
        pair.zero_grad()
        for both in window:
            pair.backward(both)
        scaler.step(pair.optimizer)
        scaler.update()
        if not pair.optimizer.step_was_skipped:
            pair.plain_optimizer.step()
        pair.advance()
    return pair.difference(), pair.optimizer.skipped_steps


@pytest.mark.parametrize("name", some(HOLDING, 3))
def test_held_gradients_and_a_scaler_are_never_mixed(name: str) -> None:
    """Only the first micro-batch of a later window uses the second layer.

    Its gradient is in that window's step, or the step is skipped, which happens at most once.
    """
    uses = [[False, False], [True, False], [True, False], [True, True], [True, False]]
    for off, skipped in run_ranks(4, scaled, HOLDING[name], uses, local_world_size=2):
        assert off <= 1e-12 and skipped <= 1


def cleared(settings: dict[str, object]) -> None:
    """Call the wrapped optimizer's own ``zero_grad`` after the first of three micro-batches, so two are stepped."""
    pair = halves(settings, 2)
    pair.backward(True)
    pair.optimizer.inner.zero_grad()
    pair.plain_optimizer.zero_grad()
    pair.backward(True)
    pair.backward(True)
    pair.step()
    pair.check()


@pytest.mark.parametrize("name", some(HOLDING, 3))
def test_zero_grad_of_the_wrapped_optimizer_clears_held_gradients(name: str) -> None:
    run_ranks(4, cleared, HOLDING[name], local_world_size=2)


def removed(settings: dict[str, object]) -> None:
    """Set one parameter's gradient to None after the first of two micro-batches; its second gradient is stepped."""
    pair = halves(settings, 2)
    for _ in range(2):
        pair.zero_grad()
        pair.backward(True)
        for model in (pair.model, pair.plain):
            model.always.weight.grad = None
        pair.backward(True)
        pair.step()
    pair.check()


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["stage 1", "deferred"])
def test_removing_a_gradient_keeps_held_gradients_of_others(name: str) -> None:
    """Held gradients are sharded over another number of ranks than optimizer states."""
    run_ranks(4, removed, HOLDING[name], local_world_size=2)
