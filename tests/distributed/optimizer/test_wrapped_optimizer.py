"""``ZeroOptimizer`` gives users, schedulers and reports access to the wrapped optimizer's attributes and states."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import Routed, make_config, worst
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Half, Pair


def single() -> tuple[bool, list[str], int]:
    """Wrap a model of one parameter and train it.

    Returns:
        True if its averaged weight equals its weight, the names in the whole state, and the number of units that sent
        data.
    """
    model = nn.Linear(8, 8, bias=False)
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    model(torch.ones(1, 8)).sum().backward()
    with zeropp.ema(model).applied():
        state = zeropp.full_state(model)
    return (
        torch.equal(state["weight"], zeropp.full_state(model)["weight"]),
        list(state),
        len(zeropp.comm_report(model).rows),
    )


def test_a_model_of_one_parameter_is_found_like_any_other() -> None:
    for same, names, rows in run_ranks(2, single):
        assert same and names == ["weight"] and rows > 0


class Odd(torch.optim.SGD):
    """SGD with attributes and a method of its own."""

    schedule = "cosine"

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.rounds = 3
        self._secret = 4

    def describe(self) -> str:
        return f"{self.schedule} {self.rounds}"


def attributes() -> list[str]:
    model, wrong = Routed(), []
    optimizer = zeropp.ZeroOptimizer(Odd(model.parameters(), lr=0.1), model, make_config())
    if (optimizer.rounds, optimizer.schedule, optimizer.describe()) != (3, "cosine", "cosine 3"):
        wrong.append("attributes")
    for name in ("_secret", "train", "eval", "nothing"):
        if hasattr(optimizer, name):
            wrong.append(name)
    if str(zeropp.comm_report(optimizer)) != str(zeropp.comm_report(model)):
        wrong.append("comm_report")
    try:
        zeropp.comm_report(optimizer.inner)
    except ValueError as error:
        if "give the ZeroOptimizer" not in str(error):
            wrong.append(str(error))
    else:
        wrong.append("a plain optimizer has a report")
    return wrong


def test_public_attributes_of_the_wrapped_optimizer_are_readable() -> None:
    assert run_ranks(2, attributes) == [[], []]


def scheduled_before() -> list[str]:
    """Return the warnings of a scheduler that was made for the optimizer before wrapping."""
    model = nn.Linear(8, 8)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    return [str(each.message) for each in caught]


def test_a_scheduler_made_before_wrapping_sees_steps() -> None:
    assert run_ranks(2, scheduled_before) == [[], []]


class Turned(nn.Module):
    """Model with a weight that is stored transposed, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.turned = nn.Parameter(torch.randn(7, 5).t())
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(x @ self.turned.t()))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def wrapped_in_the_middle(settings: dict[str, object]) -> float:
    """Take three steps with plain torch and three after wrapping; return the weight difference from six plain steps."""
    halves = [Half(model, adam(model), [0], inputs) for model in (Turned().double(), Turned().double())]
    for _ in range(3):
        one_step(halves)
    whole, sharded = halves
    sharded.optimizer = zeropp.ZeroOptimizer(sharded.optimizer, sharded.model, make_config(**settings))
    for _ in range(3):
        one_step(halves)
    return worst(sharded.state(), whole.state())


def one_step(halves: list[Half]) -> None:
    for half in halves:
        half.zero_grad()
        half.backward()
        half.step()


def inputs(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def test_state_of_a_transposed_parameter_is_taken_over() -> None:
    """Slices are cut in the order of storage, so the optimizer's existing moments must be cut in that order, too."""
    assert max(run_ranks(2, wrapped_in_the_middle, {})) < 1e-12


class Taking(torch.optim.SGD):
    """SGD whose step changes the gradients: it sets them to None, or halves them in new tensors.

    Attributes:
        keeps: factor of the gradients that stay; 0 for none.
    """

    keeps = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad = parameter.grad * self.keeps if self.keeps else None


def taken_in_the_step(keeps: float) -> float:
    """Train without ``zero_grad()``, and return the largest difference from plain torch."""
    pair = Pair(Routed(2), make_config(), optimizer=lambda model: Taking(model.parameters(), lr=0.1))
    for half in pair.halves:
        getattr(half.optimizer, "inner", half.optimizer).keeps = keeps
    for _ in range(4):
        pair.backward()
        pair.step()
    return pair.difference()


@pytest.mark.parametrize("keeps", [0.0, 0.5])
def test_gradients_stay_as_the_optimizer_s_step_leaves_them(keeps: float) -> None:
    assert max(run_ranks(2, taken_in_the_step, keeps)) <= 1e-12
