"""Penalties on weights: right where a model keeps them beside its output, named where they are computed outside."""

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
    """The output is no module's own, and the penalty is kept on the root."""

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
    """Penalties in a list that nobody empties, and one of a block on the block itself."""

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
    """How far a training with a penalty kept on modules is off plain torch's."""
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
    """A penalty computed inside GatheredParameters: the error in backward, what was warned of, whether all is well
    afterwards."""
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
    """What one may do with gathered values; complaints."""
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
        (copied * 2).sum().backward()  # a copy is the user's own
    if type(weight) is not own:
        wrong.append(f"{type(weight)} afterwards")
    state = zeropp.full_state(model)
    if not torch.equal(state["blocks.1.0.weight"], kept) or state["blocks.1.0.bias"].tolist() != [6.0] * 2 + [2.0] * 6:
        wrong.append("edits")
    return wrong


def test_lent_values_are_parameters() -> None:
    assert run_ranks(2, uses) == [[], []]
