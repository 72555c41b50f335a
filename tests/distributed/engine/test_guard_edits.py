"""While weights are gathered, views of them may be returned, and an edit raises an error instead of being lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branch_routes import BARE
from tests.support.branching_models import make_config, share
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Pair


class Positions(nn.Module):
    """A module that returns a view of the first rows of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 8))

    def forward(self, count: int) -> Tensor:
        return self.weight[:count]


class Placed(nn.Module):
    """A model that adds its positions to the input, and multiplies the output by the same positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(len(x))
        x = x + positions
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * positions


def placed(persist: int, compute: str) -> None:
    pair = Pair(Placed(), make_config(persist=persist, **BARE))
    for _ in range(3):
        pair.zero_grad()
        for rank in range(pair.world):
            (pair.plain(pair.batch(rank)).square().mean() / pair.world).backward()
        pair.model(pair.batch(pair.rank)).square().mean().backward()
        pair.step()
        pair.check()
    with torch.no_grad():
        part = pair.model.positions(5) if compute == "module" else pair.model(pair.batch(0))
        wanted = pair.plain.positions(5) if compute == "module" else pair.plain(pair.batch(0))
        torch.testing.assert_close(part, wanted)


@pytest.mark.every(6)
@pytest.mark.parametrize("compute", ["model", "module"])
@pytest.mark.parametrize("persist", [0, 1000])
@pytest.mark.parametrize("world", [1, 2])
def test_a_module_returns_a_view_of_its_weight(world: int, persist: int, compute: str) -> None:
    """The weight's memory is freed when the module ends, so hooks replace the returned view by a copy."""
    run_ranks(world, placed, persist, compute)


def touched_between(settings: dict[str, object]) -> list[str]:
    """Train four steps, and use a weight between forward and backward in the last one.

    Returns:
        Uses that did not raise the expected error, and the gradient norms if they differ between steps.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    share(model)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, make_config(**settings))
    x = torch.ones(2, 8)
    norms, wrong = [], []
    for step in range(4):
        loss = model(x).sum()
        weight = model[1].weight
        if step == 3:
            uses = {"add_": lambda w: w.add_(1), "data": lambda w: w.data.zero_(), "norm": lambda w: w.norm()}
            for name, use in uses.items():
                try:
                    with torch.no_grad():
                        use(weight)
                    wrong.append(name)
                except RuntimeError as error:
                    if "parameter '1.weight': zeropp keeps its values elsewhere" not in str(error):
                        wrong.append(f"{name}: {error}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    if len(set(norms)) > 1:
        wrong.append(f"norms {norms}")
    return wrong


@pytest.mark.every(5)
@pytest.mark.parametrize("settings", [{}, BARE, {"persist": 1000}], ids=["kept", "released", "persistent"])
def test_weights_kept_for_backward_are_guarded(settings: dict[str, object]) -> None:
    assert run_ranks(2, touched_between, settings) == [[], []]


class Editing(nn.Linear):
    """A linear layer that edits its weight in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def edited(persist: int) -> str:
    model = nn.Sequential(nn.Linear(8, 8), Editing(8, 8))
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(persist=persist))
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(2, 8))
    optimizer.zero_grad()  # allowed, because the failed forward has ended
    model[1].__class__ = nn.Linear
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    return str(caught.value)


@pytest.mark.every(5)
@pytest.mark.parametrize("persist", [0, 1000])
@pytest.mark.parametrize("world", [2, 1])
def test_an_edit_inside_forward_is_not_lost_silently(world: int, persist: int) -> None:
    for message in run_ranks(world, edited, persist):
        assert "1.weight" in message and "edit is lost" in message and "load_state_dict" in message


class Stubborn(nn.Module):
    """A model that catches the error of a layer that edits its weight, and calls the layer again without the edit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, edit: bool) -> Tensor:
        first, second = self.layers
        if edit:
            first.__class__ = Editing
            with pytest.raises(RuntimeError, match="edit is lost"):
                first(x)
            first.__class__ = nn.Linear
        return second(first(x))


def edit_caught() -> bool:
    model = Stubborn()
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**BARE))
    model(torch.ones(2, 8), False)
    return bool(model(torch.ones(2, 8), True).isfinite().all())


def test_a_layer_whose_edit_was_named_has_values_in_the_same_forward() -> None:
    assert run_ranks(2, edit_caught) == [True, True]
