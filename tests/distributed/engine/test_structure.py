"""Modules that change after wrapping: new and tied parameters are refused by name, and other changes do no harm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.func import grad as gradient_of

import zeropp
from tests.support.branching_models import Block, Routed, make_config
from tests.support.rank_pool import run_ranks


class WithHead(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 8)
        self.extra: nn.Module | None = None

    def forward(self, x: Tensor, route: object = None) -> Tensor:
        out: Tensor = self.head(super().forward(x))
        return out


def replace_head(model: WithHead) -> None:
    model.head = nn.Linear(8, 8)


def replace_where_the_old_one_was(model: WithHead) -> None:
    """Delete the head before making the new one, which may then get the same memory address."""
    del model.head
    model.head = nn.Linear(8, 8)


def replace_block(model: WithHead) -> None:
    model.blocks[1] = Block()


def append_block(model: WithHead) -> None:
    model.blocks.append(Block())


def replace_parameter(model: WithHead) -> None:
    model.blocks[2].lin.weight = nn.Parameter(torch.zeros(8, 8))


def register_parameter(model: WithHead) -> None:
    model.head.register_parameter("scale", nn.Parameter(torch.ones(8)))


def adapt(model: WithHead) -> None:
    model.blocks[0].lin.adapter = nn.Linear(8, 2, bias=False)


def frozen(model: WithHead) -> None:
    model.blocks[0].lin.register_parameter("gain", nn.Parameter(torch.ones(1), requires_grad=False))


NEW: dict[str, tuple[Callable[[WithHead], None], list[str]]] = {
    "head": (replace_head, ["head.weight", "head.bias"]),
    "head, in its place": (replace_where_the_old_one_was, ["head.weight", "head.bias"]),
    "block": (replace_block, ["blocks.1.lin.weight", "blocks.1.lin.bias"]),
    "one more block": (append_block, ["blocks.4.lin.weight", "blocks.4.lin.bias"]),
    "parameter": (replace_parameter, ["blocks.2.lin.weight"]),
    "one more parameter": (register_parameter, ["head.scale"]),
    "adapter": (adapt, ["blocks.0.lin.adapter.weight"]),
    "frozen": (frozen, ["blocks.0.lin.gain"]),
}


def without_spare(model: WithHead) -> None:
    del model.spare


def with_activation(model: WithHead) -> None:
    model.extra = nn.ReLU()


def tied(model: WithHead) -> None:
    model.head.weight = model.spare.weight


def tied_blocks(model: WithHead) -> None:
    model.blocks[1].lin.weight = model.blocks[0].lin.weight


def tied_in_a_new_module(model: WithHead) -> None:
    model.extra = nn.Linear(8, 8, bias=False)
    model.extra.weight = model.spare.weight


TIED: dict[str, tuple[Callable[[WithHead], None], list[str]]] = {
    "tied head": (tied, ["head.weight"]),
    "tied blocks": (tied_blocks, ["blocks.1.lin.weight"]),
    "tied in a new module": (tied_in_a_new_module, ["extra.weight"]),
}


def moved(model: WithHead) -> None:
    """Register a module under a second name."""
    model.extra = nn.Sequential(model.spare, nn.ReLU())


HARMLESS: dict[str, Callable[[WithHead], None]] = {
    "taken out": without_spare, "no parameters": with_activation, "moved": moved,
}  # fmt: skip


def changed(name: str, grad: bool) -> tuple[list[str], bool]:
    """Change a wrapped model, run two forwards, wrap the model again, and take a step.

    Args:
        name: key of NEW or TIED.
        grad: True to run the two forwards with gradients.

    Returns:
        Errors of the forwards, and True if the step was taken.
    """
    model = WithHead()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(hang_timeout=10))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    {**NEW, **TIED}[name][0](model)
    said = []
    for _ in range(2):  # the second forward must be refused, too
        try:
            with torch.set_grad_enabled(grad):
                model(torch.ones(2, 8))
        except RuntimeError as error:
            said.append(str(error))
    del optimizer
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return said, optimizer.step_was_taken


@pytest.mark.every(16)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", NEW)
def test_new_parameters_are_named(name: str, grad: bool) -> None:
    for said, trains in run_ranks(2, changed, name, grad):
        assert len(said) == 2 and all(f"parameters {NEW[name][1]} were added after" in text for text in said), said
        assert trains


@pytest.mark.every(2)
@pytest.mark.parametrize("name", TIED)
def test_parameters_that_are_tied_later_are_named(name: str) -> None:
    for said, trains in run_ranks(2, changed, name, True):
        assert len(said) == 2 and all(f"parameters {TIED[name][1]} were tied" in text for text in said), said
        assert trains


Weights = dict[str, Tensor]
FUNCTIONAL: dict[str, Callable[[WithHead, Weights], object]] = {
    "vmap of grad": lambda model, own: vmap(gradient_of(functional(model)), in_dims=(None, 0))(own, torch.ones(3, 8)),
    "grad": lambda model, own: gradient_of(functional(model))(own, torch.ones(8)),
    "jacrev": lambda model, own: jacrev(functional(model))(own, torch.ones(8)),
    "tensors": lambda model, own: functional(model)({n: torch.ones(p.shape) for n, p in own.items()}, torch.ones(8)),
    "one tensor": lambda model, own: functional(model)({"head.bias": torch.ones(8)}, torch.ones(8)),
}


def functional(model: WithHead) -> Callable[[Weights, Tensor], Tensor]:
    def loss(weights: Weights, x: Tensor) -> Tensor:
        found: Tensor = functional_call(model, weights, (x[None],)).sum()
        return found

    return loss


def called_functionally(stage: int) -> list[str]:
    """Call transforms of ``torch.func`` with other tensors in place of parameters, and train one step afterwards.

    Args:
        stage: ZeRO stage.

    Returns:
        The error of each transform.
    """
    model = WithHead()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": zero, "zeropp": {"hang_timeout": 10}}
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    said = []
    for call in FUNCTIONAL.values():
        with pytest.raises(RuntimeError, match=r"as by torch\.func\.functional_call") as caught:
            call(model, dict(model.named_parameters()))
        said.append(str(caught.value))
    # Allowed, because each parameter replaces itself.
    functional(model)(dict(model.named_parameters()), torch.ones(8)).backward()
    optimizer.step()
    assert optimizer.step_was_taken
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_functional_calls_with_other_tensors_are_refused_as_such(stage: int) -> None:
    for said in run_ranks(2, called_functionally, stage):
        assert len(said) == len(FUNCTIONAL) and all("in the place of its parameters [" in text for text in said)
        assert "['head.bias']" in said[-1]


def changed_harmlessly(name: str) -> list[str]:
    model = WithHead()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(hang_timeout=10))
    HARMLESS[name](model)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(zeropp.full_state(model))


@pytest.mark.every(2)
@pytest.mark.parametrize("name", HARMLESS)
def test_changes_without_new_parameters_do_no_harm(name: str) -> None:
    for names in run_ranks(2, changed_harmlessly, name):
        assert "head.weight" in names and ("spare.weight" in names) == (name != "taken out")


def borrowed() -> tuple[bool, bool]:
    """Put the head of another wrapped model into a model, and step first the model's optimizer, then the other's.

    Returns:
        For each of the two steps, True if it has changed the head's weight.
    """
    model, other = WithHead(), WithHead()
    own, theirs = (
        zeropp.ZeroOptimizer(torch.optim.SGD(each.parameters(), lr=0.1), each, make_config(hang_timeout=10))
        for each in (model, other)
    )
    model.head = other.head
    found = []
    for optimizer in (own, theirs):
        before = zeropp.full_state(other)["head.weight"]
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        found.append(not torch.equal(before, zeropp.full_state(other)["head.weight"]))
    return found[0], found[1]


def test_a_module_of_another_managed_model_may_be_used() -> None:
    assert run_ranks(2, borrowed) == [(False, True)] * 2
