"""Penalties on weights: right if the model computes and stores them, refused by name if they are computed outside."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config, worst
from tests.support.rank_pool import run_ranks


class Beside(nn.Module):
    """A model whose output is a sum made in the root's forward, and which stores a penalty on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        self.aux = self.blocks[0][0].weight.square().mean()
        return x


class Listed(Beside):
    """A model that appends a penalty to a list in each forward, and never empties the list."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        self.history.append(sum(block[0].weight.abs().mean() for block in self.blocks))
        self.aux = self.history[-1]
        return x


class OnBlock(nn.Module):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.aux = {"decay": self.lin.weight.square().mean(), "none": None}
            return torch.tanh(self.lin(x)) + x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        self.aux = sum(block.aux["decay"] for block in self.blocks)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {"beside": Beside, "listed": Listed, "on blocks": OnBlock}


def penalised(name: str, settings: dict[str, object], first: bool) -> float:
    """Train four steps with a penalty that modules store.

    Args:
        name: key of MODELS.
        settings: keys for ``make_config``.
        first: True to add the loss to the penalty; False to add half the penalty to the loss.

    Returns:
        Largest difference of weights from plain torch.
    """
    torch.manual_seed(3)
    model = MODELS[name]().double()
    plain = copy.deepcopy(model)
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model, make_config(**settings))
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(4):
        x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for one, stepper in ((model, optimizer), (plain, reference)):
            stepper.zero_grad()
            out = one(x).square().mean()
            (one.aux + out if first else out + 0.5 * one.aux).backward()
            stepper.step()
    return worst(zeropp.full_state(model), plain.state_dict())


@pytest.mark.every(8)
@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
@pytest.mark.parametrize("settings", [{}, {"reuse": 0, "prefetch": 0}, {"stage": 0}], ids=["kept", "bare", "stage 0"])
@pytest.mark.parametrize("name", MODELS)
def test_a_penalty_kept_beside_the_output(name: str, settings: dict[str, object], first: bool) -> None:
    assert max(run_ranks(2, penalised, name, settings, first)) < 1e-12


PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda weight: weight.square().sum(),
    "rows": lambda weight: sum(row.norm() for row in weight),  # type: ignore[arg-type, return-value]
    "one row": lambda weight: weight[0].norm(),
    "transposed": lambda weight: weight.T.reshape(-1).norm(),
}


def outside(how: str, keep: bool) -> tuple[str, list[str], bool]:
    """Compute a penalty inside GatheredParameters, add it to a loss outside, and run backward; then train one step.

    Args:
        how: key of PENALTIES.
        keep: True to keep the penalty's graph; False to detach the penalty and leave it out of the loss.

    Returns:
        The error of backward, the warnings, and True if the step was taken.
    """
    model = Beside()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    weight, message = model.blocks[0][0].weight, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with zeropp.zero.GatheredParameters([weight]):
            penalty = PENALTIES[how](weight)
            if not keep:
                penalty = penalty.detach()
    if keep:
        with pytest.raises(RuntimeError) as error:
            (model(torch.ones(2, 8)).mean() + penalty).backward()
        message = str(error.value)
        optimizer.zero_grad()
    model(torch.ones(2, 8)).mean().backward()
    optimizer.step()
    return message, [str(each.message) for each in caught], optimizer.step_was_taken


@pytest.mark.every(2)
@pytest.mark.parametrize("how", PENALTIES)
def test_a_penalty_computed_outside_is_named_where_it_is_computed(how: str) -> None:
    for message, said, taken in run_ranks(2, outside, how, True):
        for text in (message, *said):
            assert "test_penalties.py:" in text and "'blocks.0.0.weight'" in text and "model's forward" in text, text
        assert len(said) == 1 and taken
    assert run_ranks(2, outside, how, False) == [("", [], True)] * 2


def uses() -> list[str]:
    """Use gathered values inside GatheredParameters in ways that are allowed: read, initialize, edit and copy them.

    Returns:
        Names of uses with a wrong result.
    """
    model = Beside()
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    wrong = []
    weight, bias = model.blocks[1][0].weight, model.blocks[1][0].bias
    own = type(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with zeropp.zero.GatheredParameters(model, modifier_rank=0):
            norm = weight.norm().item()
            if norm != torch.linalg.vector_norm(weight.detach()).item():
                wrong.append("norm")
            nn.init.orthogonal_(weight)
            with torch.no_grad():
                bias.fill_(2.0)
                bias[:2] *= 3
            copied = copy.deepcopy(weight)
            if not torch.equal(copied, weight):
                wrong.append("a copy")
            kept = weight.detach().clone()
        (copied * 2).sum().backward()  # allowed, because the copy is a parameter of the user
    if type(weight) is not own:
        wrong.append(f"{type(weight)} afterwards")
    state = zeropp.full_state(model)
    if not torch.equal(state["blocks.1.0.weight"], kept) or state["blocks.1.0.bias"].tolist() != [6.0] * 2 + [2.0] * 6:
        wrong.append("edits")
    return wrong


def test_lent_values_are_parameters() -> None:
    assert run_ranks(2, uses) == [[], []]
