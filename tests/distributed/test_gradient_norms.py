"""Norms of each parameter's gradient: plain torch's, of parameters that have a gradient, in any buffer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeropp
from tests.distributed.default_recipe import PLACED, RECIPE, backward
from tests.distributed.harness import run_ranks
from tests.distributed.parity import assert_close, build
from tests.distributed.shapes import Routed, make_config


def normed(settings: dict[str, object], clip: float | None) -> tuple[dict[str, float], float | None, dict[str, float]]:
    model = build(RECIPE)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, make_config(**settings))
    backward(model, 0, None)
    if clip is not None:
        optimizer.clip_grad_norm_(clip)
    norms = optimizer.grad_norms()
    optimizer.step()
    return norms, optimizer.grad_norm, optimizer.grad_norms()


@pytest.mark.parametrize("placement", PLACED)
def test_norms_of_each_gradient(placement: str) -> None:
    model = build(RECIPE)
    backward(model, 0, 4)
    expected = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
    for norms, total, after in run_ranks(4, normed, PLACED[placement], None, local_world_size=2):
        assert norms.keys() == expected.keys() and after == norms
        assert_close(list(norms.values()), [expected[name] for name in norms], 1e-9, "norms")
        assert_close(sum(norm**2 for norm in norms.values()) ** 0.5, total, 1e-9, "all together")
    for norms, _, _ in run_ranks(4, normed, PLACED[placement], 0.01, local_world_size=2):
        assert_close(sum(norm**2 for norm in norms.values()) ** 0.5, 0.01, 1e-3, "clipped")


def partly() -> list[dict[str, float]]:
    """Norms of a model of which a block is not used, and inside windows."""
    model = Routed()
    config = make_config(gradient_accumulation_steps=2)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    found = []
    for _ in range(3):
        model(torch.ones(2, 8), ((0,), (2,))).square().mean().backward()
        found.append(optimizer.grad_norms())
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_norms_are_of_parameters_that_have_a_gradient() -> None:
    for first, whole, inside in run_ranks(2, partly):
        assert first == {} and inside == whole
        assert set(whole) == {f"blocks.{i}.lin.{part}" for i in (0, 2) for part in ("weight", "bias")}


class TwoDtypes(nn.Module):
    """One unit, two flat buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.linspace(-1, 1, 700))
        self.long = nn.Parameter(torch.linspace(-2, 1, 900, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return (self.short.square().sum() + 3 * self.long.square().sum()) / 2


def of_two_dtypes() -> tuple[int, dict[str, float]]:
    model = TwoDtypes()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    model().backward()
    return len(optimizer.engine.trainable_buffers), optimizer.grad_norms()


def test_norms_of_a_unit_with_two_buffers() -> None:
    expected = {"short": TwoDtypes().short.norm().item(), "long": 3 * TwoDtypes().long.norm().item()}
    for buffers, norms in run_ranks(2, of_two_dtypes):
        assert buffers == 2 and norms == pytest.approx(expected, rel=1e-6)
