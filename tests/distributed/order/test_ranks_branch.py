"""Ranks branch by their data where all ranks did the same before: they train as in plain torch, and no round is added.

`tests.order.branching` simulates many more such programs; here modules, autograd and checkpointing are real.
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

Way = str  # words that a model's forward looks for


class Gate(nn.Module):
    """Its weight is used, or not, as the way says; backward comes to its output in any case."""

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
    """Gates in one order or the other, which share their unit with nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gates = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Gate(), Gate()])

    def forward(self, x: Tensor, way: Way) -> Tensor:
        x = self.first(x)
        for gate in reversed(self.gates) if "flip" in way else self.gates:
            x = gate(x, way)
        return x


class Outer(nn.Module):
    """Runs a module that is run without it, too."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inside(x))


class Nest(nn.Module):
    """A block that holds another one of its list, so that both have one unit."""

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
    """Modules that are left over share a unit; one of them is run for some data only."""

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
    """A weight is used outside its module, and after it modules of its unit."""

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
    """Uses its weight twice, once without a gradient for it; in which order, and how, the way says."""

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
    """In backward, the first use of a weight comes after the weight has its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Reader(), Reader(), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor, way: Way) -> Tensor:
        x = self.blocks[0](x)
        if "other" in way:
            return self.blocks[1](self.blocks[2](x, way), way, self.blocks[3])
        return self.blocks[3](self.blocks[2](self.blocks[1](x, way), way))


class Asking(nn.Module):
    """Its forward asks for gradients: one block for that of its input, or the model for that of all blocks' input."""

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
    (gradient,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    return gradient * 0.1


def two_forwards(model: nn.Module, x: Tensor, way: Way) -> Tensor:
    """One loss of two forwards, or of the second alone."""
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
    """Train along each rank's way; returns the rounds that ranks took in the second step, which all do alike."""
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
    # A forward ends with a round where some module has not run yet: any rank's data may call for it.
    rounds = 1 if name == "a module that no rank has run" else 0
    assert run_ranks(2, branching, name, LIMITS[settings]) == [rounds, rounds]


class Borrowing(nn.Module):
    """A block's weight is used once more, outside of the block, for some data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, way: Way) -> Tensor:
        x = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        if "borrow" in way:
            x = x + torch.tanh(nn.functional.linear(x, self.blocks[0].weight))
        return self.blocks[2](x)


def borrows(settings: dict[str, object]) -> None:
    """A rank uses a weight whose unit stays gathered, since another rank has used it there before."""
    pair = Pair(Borrowing(), make_config(**settings), loss=one_forward)
    for ways in (["borrow", ""], ["", "borrow"], ["", ""], ["borrow", "borrow"]):
        pair.train(*ways)
        pair.check()


@pytest.mark.parametrize("settings", some(LIMITS, 2))
def test_a_weight_is_used_outside_its_module_while_its_unit_stays_gathered(settings: str) -> None:
    run_ranks(2, borrows, LIMITS[settings])


class Loop(nn.Module):
    """A block that is run as often as the way has letters, and another one."""

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
    model, steps, _ = MORE[name]
    pair = Pair(model(), make_config(live=0, reuse=0, prefetch=0, hang_timeout=2), loss=one_forward)
    for ways in steps:
        pair.train(*ways)


@pytest.mark.parametrize("name", MORE)
def test_a_rank_that_alone_does_more_than_ever_is_told_so(name: str) -> None:
    failures = run_ranks(2, more_often_than_ever, name, catch=True)
    told = [each.message for each in failures if isinstance(each, RankFailure)]
    assert any(re.search(f"rank 1 alone {MORE[name][2]}", text) for text in told), told
