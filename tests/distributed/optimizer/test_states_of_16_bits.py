"""States that an optimizer made for 16-bit weights go on in the dtype of main weights, with the right values.

The reference is mixed precision by hand: plain torch steps float32 weights and states with gradients of a bf16 model.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config, worst
from tests.support.rank_pool import run_ranks

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02, "initial_accumulator_value": 0.1}),
    "Adagrad fused": (torch.optim.Adagrad, {"lr": 0.02, "initial_accumulator_value": 0.1, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "Adam fused": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "fused": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05, "t0": 0}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
BF16 = {"bf16": {"enabled": True}}


def made(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kind, settings = KINDS[name]
    return kind(model.parameters(), **settings)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(next(model.parameters()).dtype)
    result: Tensor = model(x).float().square().mean()
    return result


class ByHand:
    """A bf16 model whose weights are rounded from a float32 copy, which plain torch steps."""

    def __init__(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, main: dict[str, Tensor]) -> None:
        self.computing = copy.deepcopy(model).bfloat16()
        self.main = copy.deepcopy(model).float()
        self.main.load_state_dict(main)
        self.optimizer = made(name, self.main)
        for old, new in zip(model.parameters(), self.main.parameters(), strict=True):
            # States at step 0 are not copied, because the new optimizer has created them in float32.
            for key, value in optimizer.state[old].items() if float(optimizer.state[old].get("step", 1)) else ():
                self.optimizer.state[new][key] = value.float() if isinstance(value, Tensor) else value

    def step(self, number: int, world: int) -> None:
        whole = [torch.zeros_like(p) for p in self.main.parameters()]
        for rank in range(world):
            self.computing.zero_grad()
            loss_of(self.computing, number, rank).backward()
            for total, parameter in zip(whole, self.computing.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad.float() / world
        for parameter, total in zip(self.main.parameters(), whole, strict=True):
            parameter.grad = total
        self.optimizer.step()
        self.computing.load_state_dict(self.main.state_dict())


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3)).to(dtype)


def check_beside(model: nn.Module, optimizer: zeropp.ZeroOptimizer, hand: ByHand) -> None:
    for number in range(10, 14):
        optimizer.backward(loss_of(model, number, dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()
        hand.step(number, dist.get_world_size())
        assert worst(zeropp.full_state(model), hand.main.state_dict()) < 1e-6, number
    kinds = {v.dtype for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)}
    assert kinds == {torch.float32}, kinds


def stepped_before(name: str, settings: dict[str, Any], steps: int) -> None:
    """Train a bf16 model with plain torch for ``steps`` steps, wrap it, and compare further steps."""
    model = model_of(torch.bfloat16)
    inner = made(name, model)
    for number in range(steps):
        loss_of(model, number, 0).backward()
        inner.step()
        inner.zero_grad()
    hand = ByHand(name, model, inner, {name: value.float() for name, value in model.state_dict().items()})
    check_beside(model, zeropp.ZeroOptimizer(inner, model, make_config(**settings)), hand)


@pytest.mark.parametrize("name", KINDS)
def test_states_of_plain_steps(name: str) -> None:
    run_ranks(2, stepped_before, name, BF16, 2)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ["Adagrad", "Adagrad fused"])
@pytest.mark.parametrize("stage", [1, 3])
def test_states_made_with_the_optimizer(name: str, stage: int) -> None:
    run_ranks(2, stepped_before, name, {"stage": stage, **BF16}, 0)


@pytest.mark.parametrize("name", ["AdamW fused", "Adagrad fused"])
def test_states_stepped_on_the_host(name: str) -> None:
    run_ranks(2, stepped_before, name, {"offload_optimizer": {"device": "cpu"}, **BF16}, 2)


def wrapped_again(name: str) -> None:
    """Wrap a model again after its first engine left it in bf16, for which the second optimizer creates states."""
    model = model_of(torch.float32)
    first = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model, make_config(stage=1, **BF16))
    first.backward(loss_of(model, 0, dist.get_rank()))
    first.step()
    main = zeropp.full_state(model)
    del first
    inner, twin = made(name, model), model_of(torch.float32)
    hand = ByHand(name, twin, made(name, twin), main)
    hand.computing.load_state_dict(main)
    check_beside(model, zeropp.ZeroOptimizer(inner, model, make_config(stage=1, **BF16)), hand)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["Adagrad", "Adagrad fused", "AdamW"])
def test_states_of_a_model_that_is_wrapped_again(name: str) -> None:
    run_ranks(2, wrapped_again, name)


def unfrozen_later(name: str) -> None:
    """Unfreeze a parameter whose state was kept while it was frozen: the state has the dtype of main weights."""
    model = model_of(torch.bfloat16)
    model[2].requires_grad_(False)  # type: ignore[operator, index]
    optimizer = zeropp.ZeroOptimizer(made(name, model), model, make_config(**BF16))
    for number in range(3):
        if number == 1:
            model[2].requires_grad_(True)  # type: ignore[operator, index]
        optimizer.backward(loss_of(model, number, dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()
    assert {state["sum"].dtype for state in optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("name", ["Adagrad", "Adagrad fused"])
def test_states_of_frozen_parameters(name: str) -> None:
    run_ranks(2, unfrozen_later, name)


def cast_after_steps() -> None:
    """Wrap a model that was cast to float32 after steps in bf16; plain torch would keep the states in bf16."""
    model = model_of(torch.bfloat16)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model, 0, 0).backward()
    inner.step()
    inner.zero_grad()
    model.float()
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config())
    loss_of(model, 1, dist.get_rank()).backward()
    optimizer.step()
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {torch.float32}


class LowMomentum(torch.optim.SGD):
    """SGD that keeps its momentum in bf16 on purpose."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                state["low"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["low"].mul_(0.5).add_(parameter.grad.to(torch.bfloat16))
            parameter.sub_(state["low"].to(parameter.dtype), alpha=0.1)


def kept_low() -> None:
    model = model_of(torch.float32)
    inner = LowMomentum(model.parameters())
    loss_of(model, 0, 0).backward()
    inner.step()
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config())
    assert {state["low"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("program", [cast_after_steps, kept_low])
def test_the_optimizer_says_which_dtype_a_state_has(program: Any) -> None:
    run_ranks(2, program)
