"""Configured clipping: fused optimizers divide gradients inside their step; a separate pass scales them for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.parity import assert_close
from tests.support.rank_pool import run_ranks
from zeropp.optimizer import optimizer_step

BOUND, STEPS = 0.05, 4
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 1.0, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-2}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-1, "eps": 1e-2}),
}


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 3)).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return 3 * torch.randn(7, 40, generator=torch.Generator().manual_seed(10 * step + rank), dtype=dtype)


def loss(model: nn.Module, step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a rank's loss. The last step's loss is so small that its gradients need no clipping."""
    return model(batch(step, rank, dtype)).square().sum() * (1e-3 if step == STEPS - 1 else 1.0)


def clipped_steps(
    name: str, fused: bool, dtype: torch.dtype, late_weights: bool
) -> tuple[dict[str, torch.Tensor], list[float], list[float], int]:
    """Train with configured clipping.

    Returns:
        Whole weights, norms before clipping, norms of the gradients that each step leaves, and the number of separate
        passes that scale gradients.
    """
    kind, settings = OPTIMIZERS[name]
    model = make_model(dtype)
    # In stage 1 new weights are sent after the step, so the optimizer steps in several chunks.
    config = make_config(gradient_clipping=BOUND, stage=1 if late_weights else 3)
    inner = kind(model.parameters(), fused=fused, **settings)
    optimizer = zeropp.ZeroOptimizer(inner, model, config)
    scaled, scale = [], optimizer_step.scale_gradients
    before, after = [], []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(optimizer_step, "scale_gradients", lambda *given: [scaled.append(1), scale(*given)][1])
        for step in range(STEPS):
            optimizer.backward(loss(model, step, torch.distributed.get_rank(), dtype))
            optimizer.step()
            before.append(optimizer.grad_norm or 0.0)
            squares = torch.stack([g.shard.double().square().sum() for g in optimizer.engine.gradients]).sum()
            optimizer.engine.comm.sum(squares)
            after.append(squares.sqrt().item())
            optimizer.zero_grad()
    assert not hasattr(inner, "grad_scale") and not hasattr(inner, "found_inf")
    return zeropp.full_state(model), before, after, len(scaled)


def plain_steps(name: str, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[float]]:
    kind, settings = OPTIMIZERS[name]
    model = make_model(dtype)
    optimizer = kind(model.parameters(), **settings)
    found = []
    for step in range(STEPS):
        losses = [loss(model, step, rank, dtype) / 2 for rank in range(2)]
        torch.stack(losses).sum().backward()
        found.append(nn.utils.clip_grad_norm_(model.parameters(), BOUND).item())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), found


@pytest.mark.every(4)
@pytest.mark.parametrize("late_weights", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipped_steps_are_plain_torchs(name: str, fused: bool, late_weights: bool) -> None:
    weights, expected = plain_steps(name, torch.float32)
    assert expected[0] > 10 * BOUND and expected[-1] < BOUND
    for found, before, after, passes in run_ranks(2, clipped_steps, name, fused, torch.float32, late_weights):
        assert_close(before, expected, 1e-5, "norms before clipping")
        # In stage 1 as in stage 3, the step leaves clipped shards of gradients.
        assert_close(after[:-1], [BOUND] * (STEPS - 1), 1e-5, "norms of what is left")
        assert_close(after[-1], expected[-1], 1e-5, "what needed no clipping")
        # The bound allows for float32 sums in another order, and for a division instead of a product.
        for key, value in weights.items():
            assert_close(found[key], value, 2e-6, key)
        assert passes == (0 if fused else STEPS)


@pytest.mark.every(5)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_of_64_bits_are_not_divided_in_32(name: str) -> None:
    weights, expected = plain_steps(name, torch.float64)
    for found, before, _, passes in run_ranks(2, clipped_steps, name, True, torch.float64, False):
        assert_close(before, expected, 1e-9, "norms")
        assert passes == STEPS
        for key, value in weights.items():
            assert_close(found[key], value, 1e-9, key)
