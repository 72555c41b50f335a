"""Inside a pass, any use of a weight equals plain torch, wherever the use is and wherever the loss is stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.branching_models import apart, make_config
from tests.support.owned_memory import live_numel
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Pair, rows


class Borrower(nn.Module):
    """A model that uses weights of its children in many ways, some of them without calling the child at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.store = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        store = self.store.weight
        x = self.blocks[0](x)
        x = F.linear(x, self.blocks[1].weight, self.blocks[1].bias)
        x = x @ store.T + store[0] + self.store.bias.detach()
        x = self.blocks[2](x) + self.blocks[2].weight.data.sum()
        for row in self.blocks[3].weight[:2]:
            x = x * (1 + row.tanh())
        x = x + F.linear(x, self.blocks[0].weight)  # a second use, after the module itself has run
        penalty = sum(p.square().sum() for p in self.parameters())
        return x.square().mean() + 1e-2 * penalty


class ByHand(nn.Module):
    """A model that applies its children's weights by ``F.linear``: transposed, and as a sum of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.left(x), self.left[0].weight.t())
        return (self.right(y) + F.linear(y, self.right[0].weight + self.left[0].weight)).square().mean()


class Keeps(nn.Module):
    """A model that stores its loss as an attribute and returns only a detached copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.last(torch.tanh(self.first(x))).square().mean()
        return self.loss.detach()


class Box:
    """An object that hides a tensor in a closure, where no search of attributes finds the tensor."""

    __slots__ = ("__weakref__", "hidden")

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = (lambda: hidden,)

    def open(self) -> Tensor:
        return self.hidden[0]()


class Boxed(nn.Module):
    """Children that return their output inside a `Box`, so that no hook can be put on the output.

    The input of the first child needs no gradient, but backward needs the weight of that child's second layer.
    """

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Box:
            return Box(torch.tanh(self.out(torch.tanh(self.lin(x)))))

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Inner() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x).open()
        return x.square().mean()


class Generates(nn.Module):
    """Children whose forward is a generator, so that its body runs after the hooks of the child."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lins = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
            for lin in self.lins:
                x = torch.tanh(lin(x)) + F.linear(x, lin.weight)
                yield x

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Inner() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = list(part(x))[-1]
        return x.square().mean()


class Checks(nn.Module):
    """Two linear layers and a mean square loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).square().mean()


INSIDE: dict[str, tuple[type[nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "borrower": (Borrower, lambda m, x: m(x)),
    "by hand": (ByHand, lambda m, x: m(x)),
    "boxed": (Boxed, lambda m, x: m(x)),
    "generator": (Generates, lambda m, x: m(x)),
}


def compare(name: str, settings: dict[str, object]) -> tuple[float, float, float, int]:
    """Train three steps, and plain torch beside them.

    Args:
        name: key of INSIDE.
        settings: keys for ``make_config``.

    Returns:
        Largest difference of losses and of weights, limit on live elements, and elements still gathered after the last
        step.
    """
    make, loss_of = INSIDE[name]
    torch.manual_seed(3)
    pair = Pair(
        make(),
        make_config(**settings),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        # The same batch on all ranks, so that sums over ranks are exact. AdamW would turn rounding errors of gradients
        # that should be zero into whole steps.
        batch=lambda step, micro, rank: rows(step, micro, 0),
        loss=loss_of,
    )
    off = 0.0
    for _ in range(3):
        pair.zero_grad()
        wanted, (loss,) = pair.whole.backward(), pair.sharded.backward()
        off = max(off, apart(loss, wanted[pair.rank]))
        pair.step()
    return off, pair.difference(), float(settings.get("live", 10**9)), live_numel(pair.engine.units)


@pytest.mark.every(5)
@pytest.mark.parametrize("settings", [{}, {"reuse": 0, "prefetch": 0, "live": 0}], ids=["default", "bare"])
@pytest.mark.parametrize("name", INSIDE)
def test_inside_a_pass_any_use_equals_torch(name: str, settings: dict[str, object]) -> None:
    for loss, weights, bound, live in run_ranks(2, compare, name, settings):
        assert loss < 1e-12 and weights < 1e-12
        assert live <= bound


def kept_loss(settings: dict[str, object]) -> float:
    """Train three steps with a loss that the model stores as an attribute.

    Returns:
        Largest difference of weights from plain torch.
    """

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        return model.loss

    torch.manual_seed(3)
    pair = Pair(Keeps(), make_config(**settings), loss=loss_of)
    for _ in range(3):
        pair.train()
    return pair.difference()


@pytest.mark.every(2)
@pytest.mark.parametrize("settings", [{}, {"reuse": 0, "prefetch": 0}], ids=["default", "bare"])
def test_a_loss_kept_on_the_module(settings: dict[str, object]) -> None:
    """Weights equal plain torch's, although backward begins at a tensor that no forward has returned."""
    assert max(run_ranks(2, kept_loss, settings)) < 1e-12
