"""Weights that every rank caches can be read between passes, as DeepSpeed scripts do. Edits are refused."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import zeropp
from tests.support.deepspeed_stand_in import ADAMW, EPSILON, LR, Net, data, distance, loss_of, plain, steps, zero3
from tests.support.rank_pool import run_ranks

WHOLE: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, states on the host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "stage 3, small ones": {"stage": 3, "stage3_param_persistence_threshold": 10_000},
}


def averaged(zero: dict[str, Any]) -> tuple[float, float]:
    """Keep an average of a model's weights in another model, updated after each step, as OpenRLHF does below stage 3.

    Args:
        zero: zero_optimization block.

    Returns:
        Differences from plain torch: of the average, and of the norm of the weights.
    """
    model = Net()
    engine, *_ = zeropp.initialize(model=model, config=zero3(optimizer=ADAMW, zero=zero))
    average = Net()
    average.head.weight = copy.deepcopy(model.head.weight)
    assert type(average.head.weight) is nn.Parameter and average.head.weight.requires_grad
    for step in range(4):
        steps(engine, step, step + 1)
        for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
            kept.data.mul_(0.5).add_(parameter.data.to("cpu"), alpha=0.5)
    with torch.no_grad():
        norm = torch.stack([parameter.norm() for parameter in model.parameters()]).norm()
    return distance(average.state_dict(), wanted_average()), abs(float(norm) - float(norm_of(plain(4))))


def norm_of(model: nn.Module) -> torch.Tensor:
    return torch.stack([parameter.detach().norm() for parameter in model.parameters()]).norm()


def wanted_average() -> nn.Module:
    model, average = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(model, step, rank) / 2).backward()
        optimizer.step()
        for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
            kept.data.mul_(0.5).add_(parameter.data, alpha=0.5)
    return average


@pytest.mark.every(3)
@pytest.mark.parametrize("name", WHOLE)
def test_an_average_below_stage_3(name: str) -> None:
    for apart, norms in run_ranks(2, averaged, WHOLE[name]):
        assert apart < EPSILON and norms < EPSILON


def edited(zero: dict[str, Any]) -> list[str]:
    """Try edits that would be lost, and train on.

    Args:
        zero: zero_optimization block.

    Returns:
        Names of the refused operations.
    """
    model = Net()
    engine, *_ = zeropp.initialize(model=model, config=zero3(optimizer=ADAMW, zero=zero))
    steps(engine, 0, 1)
    weight, bias = model.head.weight, model.head.bias
    tried = {
        "mul_": lambda: weight.data.mul_(2),
        "__setitem__": lambda: weight.data.__setitem__(0, 1.0),
        "__iadd__": lambda: weight.detach().__iadd__(1),
        "zero_": lambda: weight[0].zero_(),
        "add_": lambda: weight.add_(1),
        "_foreach_add_": lambda: torch._foreach_add_([weight.data, bias.data], 1.0),
        "add": lambda: torch.add(weight, 1, out=weight.data),
        "__set__": lambda: setattr(weight, "data", torch.zeros(12, 8).double()),
        "normal_": lambda: nn.init.normal_(weight),
    }
    said = []
    for name, call in tried.items():
        with torch.no_grad(), pytest.raises(RuntimeError) as caught:
            call()
        assert "GatheredParameters" in str(caught.value), name
        said.append(name)
    # Copies and computed tensors may be edited.
    weight.data.clone().mul_(2)
    (weight.data + 1).mul_(2)
    copy.deepcopy(weight.data).mul_(2)
    file = io.BytesIO()
    torch.save({"weight": weight.data.cpu(), "bias": bias.detach()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["weight"]) is torch.Tensor and torch.equal(loaded["weight"], weight.data)
    # A backward through a weight that was read between passes would reach no gradient, so it is refused.
    assert torch.allclose(weight, weight) and float(weight.norm()) > 0
    with pytest.raises(RuntimeError, match="weights that were read between passes"):
        weight.float().square().sum().backward()
    steps(engine, 1, 3)
    assert distance(zeropp.full_state(model), plain(3)) < EPSILON
    return said


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["stage 2", "stage 3, small ones"])
def test_edits_are_refused(name: str) -> None:
    assert all(len(said) == 9 for said in run_ranks(2, edited, WHOLE[name]))


def elsewhere() -> list[bool]:
    """Read a weight after each of several calls.

    Returns:
        True for each refused read: after a step, after offload_states(), after reload_states(), after an edit and a
        step, and after destroy().
    """
    model = Net()
    engine, *_ = zeropp.initialize(model=model, config=zero3(optimizer=ADAMW, zero={"stage": 2}))
    steps(engine, 0, 1)
    refused = []

    def look() -> None:
        try:
            model.head.weight.data.sum()
            refused.append(False)
        except RuntimeError:
            refused.append(True)

    look()
    engine.offload_states()
    look()
    engine.reload_states()
    look()
    with zeropp.zero.GatheredParameters(model.parameters(), modifier_rank=0):
        model.head.weight.data.fill_(0.25)
    assert float(model.head.weight.detach().sum()) == 24.0, "on every rank, from the next look on"
    steps(engine, 1, 2)
    look()
    engine.destroy()
    look()
    return refused


def let_go() -> bool:
    """Return True if the engine is freed after one of its weights was read."""
    model = Net()
    engine, *_ = zeropp.initialize(model=model, config=zero3(optimizer=ADAMW, zero={"stage": 2}))
    model.head.weight.data.sum()
    gone = weakref.ref(engine.core)
    del engine, model, _
    gc.collect()
    return gone() is None


def test_only_present_and_current_weights_can_be_read() -> None:
    # After destroy() the model is a plain model with its weights.
    assert run_ranks(2, elsewhere) == [[False, True, False, False, False]] * 2
    assert run_ranks(2, let_go) == [True] * 2


def alone() -> str:
    """Return the error of reading a small stage 3 weight of a ZeroOptimizer.

    Only training engines permit such reads.
    """
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    wrapped = zeropp.ZeroOptimizer(optimizer, model, zero3(zero=WHOLE["stage 3, small ones"]))
    with pytest.raises(RuntimeError) as caught:
        model.head.weight.data.sum()
    assert wrapped is not None
    return str(caught.value)


def test_it_is_the_training_engine_that_shows_small_ones() -> None:
    assert all("Outside forward and backward" in said for said in run_ranks(2, alone))


def kept_in_an_engine(bf16: bool) -> list[float]:
    """Keep an average in a second engine, as OpenRLHF and DeepSpeed-Chat do below stage 3.

    Args:
        bf16: True if the engine of the average computes in bf16.

    Returns:
        Differences from a plain model: of full_state, of state_dict, and of a forward.
    """
    model, average = Net(), Net()
    engine, *_ = zeropp.initialize(model=model, config=zero3(optimizer=ADAMW, zero={"stage": 2}))
    ema, *_ = zeropp.initialize(model=average, config={"zero_optimization": {"stage": 0}, "bf16": {"enabled": bf16}})
    twin = Net().to(torch.bfloat16) if bf16 else Net()
    steps(engine, 0, 2)
    for kept, own, parameter in zip(average.parameters(), twin.parameters(), model.parameters(), strict=True):
        for each in (kept, own):
            each.data.mul_(0.5).add_(parameter.data.to(each.dtype), alpha=0.5)
            each.data[:1].copy_(torch.zeros_like(each[:1]))
    found = [distance(zeropp.full_state(average), twin), distance(dict(average.state_dict()), twin)]
    with torch.no_grad():
        ids, _ = data(0, 0)
        found.append(float((ema(ids) - twin(ids)).abs().max()))
    with pytest.raises(RuntimeError, match="the edit would reach neither"):
        next(model.parameters()).data.zero_()
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize("bf16", [False, True])
def test_an_average_in_an_engine_of_its_own_is_edited(bf16: bool) -> None:
    assert run_ranks(2, kept_in_an_engine, bf16) == [[0.0, 0.0, 0.0]] * 2
