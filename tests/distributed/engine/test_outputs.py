"""Ordinary code around partitioned weights: outputs of all kinds, gradients inside forward, and compiled blocks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import Routed, make_config, worst
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Pair

KEPT = {"released": 0, "some kept": 30, "kept": 10_000}


class Own(OrderedDict):
    """A mapping that refuses ``update``, as some libraries' model outputs do."""

    def update(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("not this way")


class Row(tuple):
    """A tuple class whose constructor takes its two elements as arguments."""

    def __new__(cls, first: object, second: object) -> Row:
        return super().__new__(cls, (first, second))


@dataclass
class Node:
    """A node of a reference cycle: parent and children refer to each other."""

    value: Tensor
    parent: Node | None = None
    kids: list[Node] = field(default_factory=list)


def cycle(x: Tensor, weight: Tensor) -> Node:
    root = Node(x)
    root.kids.append(Node(x * 2, root))
    return root


RETURNS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "the weight": (lambda x, w: (x, w), lambda out: (out[0] @ out[1]).square().mean()),
    "a view": (lambda x, w: (x, w[:5].t()), lambda out: (out[0][:, :5] @ out[1].t()).square().mean()),
    "in a mapping": (lambda x, w: Own(x=x, w=w[:, 1]), lambda out: (out["x"] * out["w"]).square().mean()),
    "in a tuple class": (lambda x, w: Row(x, w[2]), lambda out: (out[0] * out[1]).square().mean()),
    "a cycle": (cycle, lambda out: (out.kids[0].value + out.value).square().mean()),
}


class Returning(nn.Module):
    """A model that returns ``make(result, weight of its first layer)``."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.second(torch.tanh(self.first(x))), self.first.weight)


def returning(name: str, persist: int) -> float:
    make, loss = RETURNS[name]
    torch.manual_seed(1)
    model = Returning(make).double()
    plain = copy.deepcopy(model)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(persist=persist))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for each, its in ((model, optimizer), (plain, plain_optimizer)):
            its.zero_grad()
            loss(each(x)).backward()
            its.step()
    return worst(zeropp.full_state(model), plain.state_dict())


@pytest.mark.every(6)
@pytest.mark.parametrize("persist", KEPT)
@pytest.mark.parametrize("name", RETURNS)
def test_outputs_of_every_kind_train_like_plain_torch(name: str, persist: str) -> None:
    assert max(run_ranks(2, returning, name, KEPT[persist])) < 1e-12


def hidden() -> str:
    model = Returning(lambda x, w: SimpleNamespace(x=x, w=w[:3]))
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(2, 8))
    model.make = lambda x, w: x
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    return str(caught.value)


def test_a_view_in_an_object_that_cannot_be_rebuilt_is_named() -> None:
    [message] = run_ranks(1, hidden, init=False)
    assert "SimpleNamespace" in message and "weight.clone()" in message


class Forces(Routed):
    """A model that differentiates its energy with respect to the input inside forward, as force fields do."""

    def forward(self, x: Tensor, route: object = None) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).square()
            self.force = torch.autograd.grad(energy.sum(), x, retain_graph=True)[0].detach()
        return energy


def forces(settings: dict[str, object]) -> None:
    pair = Pair(Forces(), make_config(**settings))
    for _ in range(3):
        pair.train(None)
        pair.check()
        with torch.no_grad():
            pair.model.eval()(pair.batch(0))
            pair.plain(pair.batch(0))
        torch.testing.assert_close(pair.model.force, pair.plain.force)
        pair.model.train()
        assert all(unit.users == 0 for unit in pair.engine.units)


@pytest.mark.every(3)
@pytest.mark.parametrize("settings", [{}, {"reuse": 0, "prefetch": 0}, {"persist": 1000}], ids=str)
@pytest.mark.parametrize("world", [2, 1])
def test_gradients_inside_forward(world: int, settings: dict[str, object]) -> None:
    run_ranks(world, forces, settings)


def compiled(how: str, settings: dict[str, object]) -> None:
    whole = Routed(2)
    if how == "blocks, before":
        for block in whole.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    pair = Pair(whole, make_config(**settings))
    model = pair.model
    if how == "blocks":
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    if how == "model":
        pair.model = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        pair.train(None)
        assert worst(zeropp.full_state(model), pair.plain.state_dict()) < 1e-12


@pytest.mark.every(5)
@pytest.mark.parametrize("settings", [{}, {"persist": 1000}, {"unit_min_blocks": 128}, {"stage": 0}], ids=str)
@pytest.mark.parametrize("how", ["blocks, before", "blocks", "model"])
def test_compiling(how: str, settings: dict[str, object]) -> None:
    """Hooks run outside of compiled code, and compiled blocks have no graph break (``fullgraph=True``)."""
    run_ranks(2, compiled, how, settings, timeout=120)


def clipped_no_sync() -> None:
    """Train three steps with all backwards inside ``no_sync()``, so that ``clip_grad_norm_`` reduces the gradients."""
    pair = Pair(Routed(), make_config())
    for _ in range(3):
        pair.zero_grad()
        with pair.optimizer.no_sync():
            pair.backward(None)
        torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01)
        pair.optimizer.clip_grad_norm_(0.01)
        pair.step()
        pair.check(1e-9)


def first_used_without_zero_grad() -> None:
    """Use a block inside ``no_sync()`` that the step before did not use; ``step()`` must reduce its gradient."""
    pair = Pair(Routed(), make_config())
    pair.backward(((0,),))
    pair.step()
    with pair.optimizer.no_sync():
        pair.backward(((0,), (1,)))
    pair.step()
    pair.check(1e-9)


@pytest.mark.every(2)
@pytest.mark.parametrize("case", [clipped_no_sync, first_used_without_zero_grad])
@pytest.mark.parametrize("world", [2, 1])
def test_gradients_that_come_with_the_step(world: int, case: Callable[[], None]) -> None:
    run_ranks(world, case)


class Half(nn.Module):
    """One unit with a trainable weight ``w`` and a frozen weight ``f``. If ``edit`` is True, forward edits ``w``."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.f = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8), requires_grad=False)
        self.edit = True

    def forward(self, x: Tensor) -> Tensor:
        if self.edit:
            with torch.no_grad():
                self.w.zero_()
        return x @ self.w @ self.f


def after_an_edit(nested: bool) -> None:
    half = Half()
    model = nn.Sequential(half) if nested else half
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD([half.w], lr=0.1), model, make_config())
    with pytest.raises(RuntimeError, match="edit is lost"):
        model(torch.ones(2, 8))
    for parameter in (half.w, half.f):
        with pytest.raises(RuntimeError, match="keeps its values elsewhere"):
            parameter.sum()
    half.edit = False
    assert torch.equal(model.state_dict()[("0." if nested else "") + "w"], torch.ones(8, 8))
    assert torch.equal(model(torch.ones(2, 8)), torch.full((2, 8), 64.0))
    optimizer.step()


@pytest.mark.every(2)
@pytest.mark.parametrize("nested", [False, True])
def test_the_model_works_after_an_edit_was_named(nested: bool) -> None:
    run_ranks(1, after_an_edit, nested, init=False)


class Keeper(nn.Module):
    """A module without parameters that stores a loss of the last forward."""


class Penalized(nn.Module):
    """A block that stores a loss on a submodule. The block's output does not depend on that loss.

    Args:
        listed: True to store the loss in a list.
    """

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.keeper, self.listed = Keeper(), listed

    def forward(self, x: Tensor) -> Tensor:
        loss = self.inner(x).square().mean()
        self.keeper.kept = [loss] if self.listed else loss
        return x * 1.5


class KeepsLosses(nn.Module):
    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Penalized(listed), nn.Linear(8, 8), Penalized(listed)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        total = torch.zeros((), dtype=x.dtype)
        for block in self.blocks:
            if isinstance(block, Penalized):
                kept = block.keeper.kept
                total = total + (kept[0] if block.listed else kept)
        return total


class InPlace(nn.Module):
    """In-place operations on the outputs of linear layers. With inputs of three dimensions, these outputs are views."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x[None].expand(2, -1, -1)).relu_()
        y = self.blocks[1](x)
        y.mul_(0.5)
        y[..., 0] = 0
        return nn.functional.silu(self.blocks[2](x + y), inplace=True).square().mean()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "a kept loss": lambda: KeepsLosses(listed=False),
    "a list of kept losses": lambda: KeepsLosses(listed=True),
    "in place": InPlace,
}


def with_other_ways_back(name: str, settings: dict[str, object]) -> None:
    pair = Pair(MODULES[name](), make_config(**settings), loss=lambda model, x: model(x))
    for _ in range(3):
        pair.train()
        pair.check()


@pytest.mark.every(3)
@pytest.mark.parametrize("settings", [{}, {"reuse": 0, "prefetch": 0}], ids=["default", "bare"])
@pytest.mark.parametrize("name", MODULES)
def test_backward_finds_the_way_back(name: str, settings: dict[str, object]) -> None:
    run_ranks(2, with_other_ways_back, name, settings)
