"""Ranks whose data choose different branches, after steps in which all ranks did the same, train like plain torch.

The steps in which all ranks do the same need no exchange. `tests.order.branching` simulates many more such programs;
here modules, autograd and checkpointing are real.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.branch_routes import agreements
from tests.support.branching_models import WIDTH, make_config
from tests.support.rank_pool import RankFailure, run_ranks, some, spread
from tests.support.sharded_and_plain import Pair

Way = str  # words that choose the branches of a model's forward


class Gate(nn.Module):
    """A layer that uses its weight, or skips it if the way has "closed". Its output has a gradient in both cases."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.lin.weight, self.lin.bias))

    def forward(self, x: Tensor, way: Way = "") -> Tensor:
        if "closed" in way:
            return x * 0.5
        return x + (checkpoint(self.inner, x, use_reentrant=True) if "again" in way else self.inner(x))


class Gates(nn.Module):
    """Two gates, each a unit of its own, called in reverse order if the way has "flip"."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gates = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Gate(), Gate()])

    def forward(self, x: Tensor, way: Way) -> Tensor:
        x = self.first(x)
        for gate in reversed(self.gates) if "flip" in way else self.gates:
            x = gate(x, way)
        return x


class Outer(nn.Module):
    """A block around a module that the model also calls directly."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inside(x))


class Nest(nn.Module):
    """A list in which block 0 contains block 1, so that both are in one unit."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Outer(shared), shared, nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor, way: Way) -> Tensor:
        x = self.blocks[0](self.first(x))
        for _ in range(0 if "short" in way else 2):
            x = torch.tanh(self.blocks[1](x))
        return self.blocks[2](x)


class Leftover(nn.Module):
    """A model whose ``branch`` and ``head`` are in no block and share a unit; ``branch`` runs for some data only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.branch, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, way: Way) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        if "branch" in way:
            x = x + torch.tanh(self.branch(x))
        return self.head(torch.tanh(self.blocks[1](x)))


class Touching(nn.Module):
    """A model that may use the weight of ``some`` outside of its module, before the modules of that unit run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.some, self.more = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, way: Way) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        if "touch" in way:
            x = x + nn.functional.linear(x, self.some.weight)
        return self.more(torch.tanh(self.blocks[1](torch.tanh(self.some(x)))))


class Reader(nn.Module):
    """A block that uses its weight twice, once with a gradient and once detached; the way chooses order and manner."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def read(self, x: Tensor) -> Tensor:
        return x + torch.tanh(nn.functional.linear(x, self.weight.detach()))

    def forward(self, x: Tensor, way: Way, other: nn.Module | None = None) -> Tensor:
        if other is not None:
            return nn.functional.linear(other(self.read(x)), self.weight)
        if "last" in way:
            x = nn.functional.linear(x, self.weight)
        x = checkpoint(self.read, x, use_reentrant="anew" not in way) if "again" in way else self.read(x)
        return x if "last" in way else nn.functional.linear(x, self.weight)


class Readers(nn.Module):
    """A model in whose backward a weight is read again after the weight's gradient is complete, for some ways.

    This happens if forward reads the weight first and uses it with a gradient later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Reader(), Reader(), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor, way: Way) -> Tensor:
        x = self.blocks[0](x)
        if "other" in way:
            return self.blocks[1](self.blocks[2](x, way), way, self.blocks[3])
        return self.blocks[3](self.blocks[2](self.blocks[1](x, way), way))


class Asking(nn.Module):
    """A model whose forward calls ``torch.autograd.grad``.

    One block takes the gradient of its own input, or the model takes the gradient of the input of all blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Gate(), Gate(), Gate(), Gate()])

    def forward(self, x: Tensor, way: Way) -> Tensor:
        before = x = torch.tanh(self.first(x))
        for block in reversed(self.blocks) if "flip" in way else self.blocks:
            y = block(x)
            if "block" in way and block is self.blocks[2]:
                y = y + asked(y, x)
            x = y
        return x + asked(x, before) if "model" in way else x


def asked(y: Tensor, x: Tensor) -> Tensor:
    """Return a tenth of the gradient of ``y.square().sum()`` by ``x``."""
    (gradient,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    return gradient * 0.1


def two_forwards(model: nn.Module, x: Tensor, way: Way) -> Tensor:
    """Return the sum of the losses of all forwards, without the first one if its way has "skip".

    Args:
        model: model whose forward takes an input and a way.
        x: input.
        way: the ways of the forwards, separated by "+".
    """
    ways = way.split("+")
    outputs = [model(x * (number + 1), each) for number, each in enumerate(ways)]
    if "skip" in ways[0]:
        outputs = outputs[1:]
    total: Tensor = sum(output.square().mean() for output in outputs)  # type: ignore[assignment]
    return total


def one_forward(model: nn.Module, x: Tensor, way: Way) -> Tensor:
    loss: Tensor = model(x, way).square().mean()
    return loss


Loss = Callable[..., Tensor]
CASES: dict[str, tuple[type[nn.Module], Loss, list[list[Way]]]] = {
    "a gradient comes before the last call": (
        Gates,
        two_forwards,
        [["open+open"], ["open+open"], ["open+open", "closed+open"], ["open+closed", "open+open"]],
    ),
    "a gradient for each call": (
        Gates,
        two_forwards,
        [["skip again+again"], ["skip again+again"], ["again+again", "again flip+again flip"]] * 2,
    ),
    "blocks in another order": (Gates, two_forwards, [["a+a"], ["a+a"], ["flip+a", "a+flip"], ["a+a", "flip+flip"]]),
    "a module inside another one of its unit": (
        Nest,
        two_forwards,
        [["all"], ["all"], ["all+all", "all+short"], ["all+all"], ["all+short", "short+short"]],
    ),
    "a module that no rank has run": (
        Leftover,
        one_forward,
        [["none"], ["none"], ["none"], ["none", "branch"], ["branch", "none"]],
    ),
    "a weight read after its gradient": (
        Readers,
        one_forward,
        [["last"], ["last"], ["last", "first"], ["first", "last"], ["first"]],
    ),
    "a weight read after its gradient by a checkpoint": (
        Readers,
        one_forward,
        [["again last"], ["again last"], ["again last", "again"], ["again"], ["anew again", "anew again last"]],
    ),
    "a gradient asked for inside a block": (Asking, one_forward, [["block"], ["block"], ["block", "block flip"]]),
    "a gradient asked for over all blocks": (Asking, one_forward, [["model"], ["model"], ["model", "model flip"]]),
    "a weight read after its gradient, and another module": (
        Readers,
        one_forward,
        [["other"], ["other"], ["other", "other last"], ["other"], ["other last"]],
    ),
    "a weight that all ranks touched": (
        Touching,
        one_forward,
        [["touch"], ["touch"], ["touch", "none"], ["none", "touch"], ["none"]],
    ),
}
LIMITS = {"nothing stays": {"live": 0}, "default": {}, "bare": {"reuse": 0, "prefetch": 0}}


def branching(name: str, settings: dict[str, object]) -> int:
    """Train with each rank's own ways.

    Args:
        name: key of ``CASES``.
        settings: keys for ``make_config``.

    Returns:
        Number of exchanges in the second step, in which all ranks do the same.
    """
    model, loss, steps = CASES[name]
    pair = Pair(model(), make_config(**settings), loss=loss)
    rounds = []
    for ways in steps:
        before = agreements(pair.optimizer)
        pair.train(*ways)
        rounds.append(agreements(pair.optimizer) - before)
        pair.check()
    return rounds[1]


@pytest.mark.parametrize(("name", "settings"), spread(CASES, LIMITS, 3))
def test_ranks_branch(name: str, settings: str) -> None:
    """Weights equal those of plain torch within 1e-12 after every step."""
    # A forward ends with an exchange if some module has not run yet, because another rank may need that module.
    rounds = 1 if name == "a module that no rank has run" else 0
    assert run_ranks(2, branching, name, LIMITS[settings]) == [rounds, rounds]


class Borrowing(nn.Module):
    """A model that uses the weight of block 0 once more outside of the block, for some data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, way: Way) -> Tensor:
        x = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        if "borrow" in way:
            x = x + torch.tanh(nn.functional.linear(x, self.blocks[0].weight))
        return self.blocks[2](x)


def borrows(settings: dict[str, object]) -> None:
    """Train steps in which one rank, no rank or both ranks use a weight outside of its module."""
    pair = Pair(Borrowing(), make_config(**settings), loss=one_forward)
    for ways in (["borrow", ""], ["", "borrow"], ["", ""], ["borrow", "borrow"]):
        pair.train(*ways)
        pair.check()


@pytest.mark.parametrize("settings", some(LIMITS, 2))
def test_a_weight_is_used_outside_its_module_while_its_unit_stays_gathered(settings: str) -> None:
    """The unit is gathered at that place because the other rank has used it there in an earlier step."""
    run_ranks(2, borrows, LIMITS[settings])


class Loop(nn.Module):
    """A model that runs block 0 once for each letter of the way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor, way: Way) -> Tensor:
        for _ in way:
            x = torch.tanh(self.blocks[0](x))
        return self.blocks[1](x)


MORE = {
    "runs a module": (
        Loop,
        [["xx"], ["xx"], ["xx", "xxx"]],
        r"runs module 'blocks.0', of unit .*, 3 times in a forward .*; no rank ever .* than 2",
    ),
    "uses a weight": (
        Borrowing,
        [[""], [""], ["", "borrow"]],
        "needs weights of unit 'blocks.0', outside of their module, more often in a forward .* than any rank ever did",
    ),
}


def more_often_than_ever(name: str) -> None:
    """Train the steps of a row of ``MORE``; in the last one, rank 1 needs a unit more often than any rank before."""
    model, steps, _ = MORE[name]
    pair = Pair(model(), make_config(live=0, reuse=0, prefetch=0, hang_timeout=2), loss=one_forward)
    for ways in steps:
        pair.train(*ways)


@pytest.mark.parametrize("name", MORE)
def test_a_rank_that_alone_does_more_than_ever_is_told_so(name: str) -> None:
    """The other rank does not gather the unit, so this is an error, which names the rank and the module."""
    failures = run_ranks(2, more_often_than_ever, name, catch=True)
    told = [each.message for each in failures if isinstance(each, RankFailure)]
    assert any(re.search(f"rank 1 alone {MORE[name][2]}", text) for text in told), told
