"""Gradients that are held until a window's last micro-batch are all in its step, and never mixed with another's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.distributed.harness import run_ranks
from tests.distributed.parity import assert_close
from tests.distributed.shapes import make_config, worst


class Half(nn.Module):
    """One layer whose weights only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.always = nn.Linear(16, 16)
        self.sometimes = nn.Linear(16, 16)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.always(x)
        return self.sometimes(x) if both else x


def in_parts(settings: dict[str, object], uses: list[list[bool]], steps: int) -> tuple[dict[str, Tensor], Any]:
    """Each step's micro-batches use both layers or one; some steps have fewer than configured."""
    model = Half().double()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**settings, gradient_accumulation_steps=3))
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro, both in enumerate(uses[step % len(uses)]):
            optimizer.backward(model(batch(step, micro, dist.get_rank()), both).square().mean())
        optimizer.step()
        norms.append(optimizer.grad_norm)
    assert all(gradient.held is None for gradient in optimizer.engine.gradients)
    return zeropp.full_state(model), norms


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 100 + micro * 10 + rank)
    return torch.randn(2, 16, dtype=torch.float64, generator=generator)


def in_parts_plain(uses: list[list[bool]], steps: int, world: int) -> tuple[dict[str, Tensor], list[float]]:
    model = Half().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro, both in enumerate(uses[step % len(uses)]):
            for rank in range(world):
                (model(batch(step, micro, rank), both).square().mean() / (3 * world)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
        optimizer.step()
    return model.state_dict(), norms


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


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", HOLDING)
def test_held_gradients_are_all_in_the_step(name: str, window: str) -> None:
    """Whatever micro-batches a layer has gradients in, and also where a step comes early or late."""
    state, norms = in_parts_plain(WINDOWS[window], 4, 4)
    for found, own in run_ranks(4, in_parts, HOLDING[name], WINDOWS[window], 4, local_world_size=2):
        assert_close(own, norms, 1e-9, "norms")
        for key, value in state.items():
            assert_close(found[key], value, 1e-9, key)


def after_an_error(settings: dict[str, object], how: str) -> float:
    """A micro-batch, an error on every rank, the second micro-batch; how far the step is off plain torch's."""
    model, plain = Half().double(), Half().double()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**settings, gradient_accumulation_steps=2))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        for micro in range(2):
            optimizer.backward(model(batch(step, micro, rank), True).square().mean())
            for other in range(world):
                (plain(batch(step, micro, other), True).square().mean() / (2 * world)).backward()
            if micro == 0 and step and how == "lent":
                with pytest.raises(RuntimeError, match="inside Gathered"), zeropp.zero.GatheredParameters(model):
                    model(batch(step, 5, rank), True)
            elif micro == 0 and step:
                with torch.set_grad_enabled(how == "forward"), pytest.raises(TypeError):
                    model("no tensor", True)
        optimizer.step()
        reference.step()
    return worst(zeropp.full_state(model), plain.state_dict())


@pytest.mark.parametrize("how", ["forward", "evaluation", "lent"])
@pytest.mark.parametrize("name", HOLDING)
def test_an_error_between_micro_batches_loses_none(name: str, how: str) -> None:
    assert max(run_ranks(4, after_an_error, HOLDING[name], how, local_world_size=2)) <= 1e-12


def scaled(settings: dict[str, object], uses: list[list[bool]]) -> tuple[float, int]:
    """With torch's GradScaler: how far weights are off after steps that were not skipped, and how many were."""
    model, plain = Half().double(), Half().double()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**settings, gradient_accumulation_steps=2))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step, window in enumerate(uses):
        optimizer.zero_grad()
        reference.zero_grad()
        for micro, both in enumerate(window):
            optimizer.backward(scaler.scale(model(batch(step, micro, rank), both).square().mean()))
            for other in range(world):
                (plain(batch(step, micro, other), both).square().mean() / (2 * world)).backward()
        scaler.step(optimizer)
        scaler.update()
        if not optimizer.step_was_skipped:
            reference.step()
    return worst(zeropp.full_state(model), plain.state_dict()), optimizer.skipped_steps


@pytest.mark.parametrize("name", HOLDING)
def test_held_gradients_and_a_scaler_are_never_mixed(name: str) -> None:
    """A layer that only the first micro-batch of a later window uses: in that step or, once, a step is skipped."""
    uses = [[False, False], [True, False], [True, False], [True, True], [True, False]]
    for off, skipped in run_ranks(4, scaled, HOLDING[name], uses, local_world_size=2):
        assert off <= 1e-12 and skipped <= 1


def cleared(settings: dict[str, object]) -> float:
    """The wrapped optimizer's own ``zero_grad`` after the first of three micro-batches: the other two are stepped."""
    model, plain = Half().double(), Half().double()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**settings, gradient_accumulation_steps=2))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for micro in range(3):
        optimizer.backward(model(batch(0, micro, dist.get_rank()), True).square().mean())
        for other in range(dist.get_world_size()):
            (plain(batch(0, micro, other), True).square().mean() / (2 * dist.get_world_size())).backward()
        if micro == 0:
            inner.zero_grad()
            reference.zero_grad()
    optimizer.step()
    reference.step()
    return worst(zeropp.full_state(model), plain.state_dict())


@pytest.mark.parametrize("name", HOLDING)
def test_zero_grad_of_the_wrapped_optimizer_forgets_what_is_held(name: str) -> None:
    assert max(run_ranks(4, cleared, HOLDING[name], local_world_size=2)) <= 1e-12
