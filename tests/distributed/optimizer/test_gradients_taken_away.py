"""Gradients that users set to None or make themselves, parameter by parameter, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config, worst
from tests.support.rank_pool import run_ranks, some, spread
from tests.support.sharded_and_plain import Pair


class Headed(nn.Module):
    """Model of which rank 1 of two has only parts of the head, if the model is one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 60)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(x + torch.tanh(self.second(x)) if both else x)


def head_apart(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, Headed)
    groups = [{"params": [*model.first.parameters(), *model.second.parameters()]}, {"params": model.head.parameters()}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.05)


def rows_of_six(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(31 * step + rank), dtype=torch.float64)


def without_a_group(stage: int, group: int, to_none: bool) -> list[float]:
    """Set the gradients of a group to None in some steps, as DINO does; in some steps ranks do not use a layer.

    Args:
        stage: ZeRO stage.
        group: index of the parameter group.
        to_none: argument ``set_to_none`` of ``zero_grad``.

    Returns:
        The weight difference from plain torch after each step.
    """
    settings = make_config(stage=stage, unit_min_blocks=128)
    pair, off = Pair(Headed(), settings, optimizer=head_apart, batch=rows_of_six), []
    for step, ways in enumerate([(True, True), (False, True), (True, True), (False, False), (False, True)]):
        pair.backward(*ways)
        for optimizer in (pair.optimizer, pair.plain_optimizer) if step in (1, 2) else ():
            for parameter in optimizer.param_groups[group]["params"]:
                parameter.grad = None
        pair.step()
        off.append(pair.difference())
        for each in (pair.optimizer, pair.plain_optimizer):
            each.zero_grad(set_to_none=to_none)
    return off


@pytest.mark.every(6)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("group", [1, 0])
@pytest.mark.parametrize("stage", [3, 2, 0])
def test_gradients_of_a_group_taken_away(stage: int, group: int, to_none: bool) -> None:
    for off in run_ranks(2, without_a_group, stage, group, to_none):
        assert max(off) < 1e-12, off


def by_names(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(model.named_parameters()), lr=0.1, momentum=0.9, weight_decay=0.05)


def take_away(pair: Pair, chosen: Callable[[str], bool]) -> None:
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        for group in optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if chosen(name):
                    parameter.grad = None


# By name: actions in order. A pair is a backward: True for each of two ranks that uses the second layer in it.
TAKEN_AWAY = {
    "a backward without it follows": [(True, True), "take away", (False, False), "step"],
    "two steps": [(True, True), "take away", "step", (False, False), "step"],
    "others are set to zero": [(True, True), "take away", "step", "to zero", (False, False), "step"],
    "taken away after the step": [(True, True), "step", "take away", "to zero", (False, False), "step"],
    "one rank had used it": [(False, True), "take away", (False, False), "step"],
    "the other rank had used it": [(True, False), "take away", (False, False), "step"],
    "one rank uses it again": [(True, True), "take away", (False, True), "step"],
    "the other rank uses it again": [(True, True), "take away", (True, False), "step"],
    "taken away twice": [(True, True), "take away", (False, True), "take away", (False, False), "step"],
    "all but one": [(True, True), "take away all but a bias", (False, False), "step"],
    "all, then backwards of one rank": [(True, True), "take away all", (False, True), "step", "take away all"],
    "all, then held backwards": [(True, True), "step", "take away all", "held", "held", (True, False), "step"],
    "before held backwards": [(True, True), "take away", "held", (False, False), "step"],
    "by the model": [(True, True), "model to none", (False, False), "step"],
    "by the model, from zeros": [(True, True), "step", "to zero", "model to none", "step"],
    "by the model, made by hand": [(True, True), "make", "model to none", "step"],
    "others by the model": [(True, True), "take away", "model to zero", (False, False), "step"],
    "made, then set to zero by the model": [(False, False), "make", "model to zero", "step"],
    "held, then thrown away": [(True, True), "step", "held", "zero by the wrapped one", (False, False), "step"],
    "made where frozen": ["freeze", (True, True), "make", "step", "unfreeze"],
    "from zeros that one rank brought": [
        (True, True),
        "model to none",
        (False, True),
        "to zero",
        "take away",
        "step",
    ],
    "a look between": [(True, True), "take away", "look", (False, True), "look", "step"],
}


def by_the_model(pair: Pair, act: str) -> None:
    for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
        if act == "model to zero":
            model.zero_grad(set_to_none=False)
        elif act == "model to none":
            for parameter in model.second.parameters():
                parameter.grad = None
        else:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    if name.startswith("second"):
                        parameter.grad = 0.3 * parameter.detach()


def taken_away(stage: int, how: str, blocks: int) -> list[float]:
    """Return the weight difference from plain torch after each step of a program in TAKEN_AWAY.

    Args:
        stage: ZeRO stage.
        how: key of TAKEN_AWAY.
        blocks: ``unit_min_blocks`` of the configuration.
    """
    settings = make_config(stage=stage, unit_min_blocks=blocks)
    pair, off = Pair(Headed(), settings, optimizer=by_names, batch=rows_of_six), []
    for act in ["step", *TAKEN_AWAY[how], "zero", *TAKEN_AWAY[how], "zero", (True, True), "step"]:
        if isinstance(act, tuple):
            pair.backward(*act)
        elif act == "step":
            pair.step()
            off.append(pair.difference())
        elif act == "look":
            pair.optimizer.grad_norms()
        elif act == "held":
            with pair.optimizer.no_sync():
                pair.backward(True, True)
        elif act in ("zero", "to zero"):
            for each in (pair.optimizer, pair.plain_optimizer):
                each.zero_grad(set_to_none=act == "zero")
        elif act == "zero by the wrapped one":
            pair.optimizer.inner.zero_grad()
            pair.plain_optimizer.zero_grad()
        elif act.endswith("freeze"):
            for model in (pair.model, pair.plain):
                model.second.requires_grad_(act == "unfreeze")  # type: ignore[operator]
        elif act.startswith("model") or act == "make":
            by_the_model(pair, act)
        else:
            kept = {"take away": ("first", "head"), "take away all": ()}.get(act, ("first.bias",))
            take_away(pair, lambda name, kept=kept: not name.startswith(kept))  # type: ignore[misc]
    return off


# By name: the stage, and unit_min_blocks. With 0 each layer is a unit; with 128 the model is one unit.
TAKEN_IN: dict[str, tuple[int, int]] = {
    "stage 3": (3, 0),
    "stage 2, one unit": (2, 128),
    "stage 0": (0, 0),
    "stage 3, one unit": (3, 128),
    "stage 2": (2, 0),
    "stage 0, one unit": (0, 128),
}


@pytest.mark.every(3)
@pytest.mark.parametrize(("how", "place"), spread(TAKEN_AWAY, TAKEN_IN, 6))
def test_gradients_taken_away_stay_away_until_a_rank_uses_them(how: str, place: str) -> None:
    stage, blocks = TAKEN_IN[place]
    for off in run_ranks(2, taken_away, stage, how, blocks):
        assert max(off) < 1e-12, off


def clipped_by_layer(stage: int) -> float:
    """Clip each gradient by its own norm, in a loop over the groups' names and tensors; return weight differences."""
    pair = Pair(Headed(), make_config(stage=stage), optimizer=by_names, batch=rows_of_six)
    for _ in range(2):
        pair.backward(True, True)
        norms = pair.optimizer.grad_norms()
        for group in pair.optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                parameter.grad.mul_(min(1, 0.02 / norms[name]))
        for parameter in pair.plain.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(min(1, 0.02 / float(parameter.grad.norm())))
        pair.step()
        pair.zero_grad()
    with pytest.raises(KeyError):
        norms["no such name"]
    return pair.difference()


@pytest.mark.every(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_clipped_by_layer(stage: int) -> None:
    assert max(run_ranks(2, clipped_by_layer, stage)) < 1e-12


def made_beside_carried_errors() -> tuple[bool, float]:
    """Set the gradient of one bias by hand, while error feedback has errors for other parameters, and step.

    Returns:
        True if the bias moved, and the largest change of any other weight.
    """
    settings = make_config(stage=2, zero_quantized_gradients=True, zeropp_loco_param={"err_beta": 0.8, "reset_T": 4})
    pair = Pair(Headed(), settings, optimizer=by_names, batch=rows_of_six)
    pair.backward(True, True)
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    before = zeropp.full_state(pair.model)
    for group in pair.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if name == "first.bias":
                parameter.grad = torch.ones_like(parameter)
    pair.optimizer.step()
    after = zeropp.full_state(pair.model)
    moved = not torch.equal(after.pop("first.bias"), before.pop("first.bias"))
    return moved, worst(after, before)


def test_gradients_made_beside_carried_errors() -> None:
    assert run_ranks(2, made_beside_carried_errors) == [(True, 0.0)] * 2


class Clearing(torch.optim.SGD):
    """SGD whose ``step`` clears gradients at its end, and whose ``zero_grad`` counts its calls."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.zero_grad()
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


def cleared_by_the_step(settings: dict[str, Any]) -> int:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Clearing(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)

    pair = Pair(Headed(), make_config(**settings), optimizer=make, batch=rows_of_six)
    for both in (True, True, False, True):
        pair.backward(both)
        pair.step()
        pair.check()
    pair.optimizer.inner.zero_grad()
    return int(pair.optimizer.inner.calls)


@pytest.mark.parametrize(
    "settings", some([{"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"stage": 3}, {"stage": 0}], 3)
)
def test_gradients_cleared_by_the_wrapped_step(settings: dict[str, Any]) -> None:
    assert run_ranks(2, cleared_by_the_step, settings) == [1, 1]


def replaced_beside_carried_errors() -> list[bool]:
    """Return, for each step, True if the second layer moved.

    In every second step no rank uses the layer. Then it must not move, even if gradients are replaced, because error
    feedback alone is no gradient.
    """
    settings = make_config(stage=2, zero_quantized_gradients=True, zeropp_loco_param={"err_beta": 0.8, "reset_T": 40})
    pair, moved = Pair(Headed(), settings, optimizer=by_names, batch=rows_of_six), []
    for step in range(4):
        before = zeropp.full_state(pair.model)["second.weight"]
        pair.sharded.backward(step % 2 == 0)
        for parameter in parameters_of(pair.optimizer):
            if parameter.grad is not None:
                parameter.grad = 0.5 * parameter.grad
        pair.sharded.step()
        moved.append(not torch.equal(zeropp.full_state(pair.model)["second.weight"], before))
        pair.sharded.zero_grad()
    return moved


@pytest.mark.campaign
def test_gradients_replaced_beside_carried_errors() -> None:
    assert run_ranks(2, replaced_beside_carried_errors) == [[True, False] * 2] * 2


def taken_away_in_a_window(stage: int) -> list[bool]:
    """Set all gradients but one bias's to None after the first of two micro-batches.

    Returns:
        For each ``step()`` call, True if a step was taken. All ranks must take it at the same call.
    """
    settings = make_config(stage=stage, gradient_accumulation_steps=2)
    pair, taken = Pair(Headed(), settings, optimizer=by_names, batch=rows_of_six, micros=2), []
    for _ in range(3):
        for micro in range(2):
            pair.backward(True, True)
            if micro == 0:
                take_away(pair, lambda name: name != "first.bias")
            pair.optimizer.step()
            taken.append(pair.optimizer.step_was_taken)
            pair.optimizer.zero_grad()
        pair.plain_optimizer.step()
        pair.plain_optimizer.zero_grad()
        pair.advance()
    pair.check()
    return taken


@pytest.mark.every(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_taken_away_in_a_window(stage: int) -> None:
    assert run_ranks(2, taken_away_in_a_window, stage) == [[False, True] * 3] * 2


def parameters_of(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def made_by_hand(stage: int, how: str) -> float:
    """Step gradients that no backward has made, and return the weight difference from plain torch.

    Args:
        stage: ZeRO stage.
        how: "merged" mixes a term into a scaled gradient, "a term" adds it, "alone" replaces gradients by it, and
            "given again" sets gradients to None before it replaces them.
    """
    pair = Pair(Headed(), make_config(stage=stage, unit_min_blocks=0), optimizer=head_apart, batch=rows_of_six)
    both = (pair.optimizer, pair.plain_optimizer)
    kept = [parameters_of(optimizer) for optimizer in both]  # taken once, as some libraries do
    for step in range(4):
        pair.backward(how != "merged" and step % 2 == 0)
        for optimizer, parameters in zip(both, kept, strict=True):
            gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
            if how != "a term":
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            for group in optimizer.param_groups if how == "given again" else ():
                for parameter in group["params"]:
                    parameter.grad = None
            for parameter, gradient in zip(parameters, gradients, strict=True):
                term = 0.1 * parameter.detach()
                if how == "merged":
                    parameter.grad = term if gradient is None else 0.7 * gradient + term
                elif how == "a term":
                    parameter.grad = term if parameter.grad is None else parameter.grad + term
                else:
                    parameter.grad = term
        pair.step()
        pair.zero_grad()
    return pair.difference()


@pytest.mark.every(2)
@pytest.mark.parametrize(("how", "stage"), spread(["merged", "a term", "alone", "given again"], [3, 2, 0], 3))
def test_gradients_made_by_hand(stage: int, how: str) -> None:
    assert max(run_ranks(2, made_by_hand, stage, how)) < 1e-12


def clipped_by_hand(stage: int, without_backward: bool) -> float:
    """Clip gradients that the user has set by the norm of the whole model, and return weight differences."""
    pair = Pair(Headed(), make_config(stage=stage), optimizer=head_apart, batch=rows_of_six)
    for _ in range(3):
        if not without_backward:
            pair.backward(True)
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            for parameter in parameters_of(optimizer):
                parameter.grad = parameter.detach().clone() if parameter.grad is None else parameter.grad * 2
        pair.optimizer.clip_grad_norm_(0.05)
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
        pair.step()
        for each in (pair.optimizer, pair.plain_optimizer):
            each.zero_grad()
    return pair.difference()


@pytest.mark.every(5)
@pytest.mark.parametrize("without_backward", [False, True])
@pytest.mark.parametrize("stage", [3, 2, 0])
def test_gradients_put_in_place_are_clipped(stage: int, without_backward: bool) -> None:
    assert max(run_ranks(2, clipped_by_hand, stage, without_backward)) < 1e-7


def some_taken_away(stage: int, how: str) -> float:
    """Change some gradients between backward and step, and return the weight difference from plain torch.

    Args:
        stage: ZeRO stage.
        how: "all but one" sets all gradients but one to None. "zeros" sets gradients of zeros to None. "frozen" sets
            gradients of a layer and freezes the layer. "set to zero" sets gradients, then clears them to zero.
    """
    settings = make_config(stage=stage, unit_min_blocks=128)
    pair = Pair(Headed(), settings, optimizer=named_apart, batch=rows_of_six)
    both = (pair.optimizer, pair.plain_optimizer)
    for _ in range(3):
        pair.backward(True)
        for optimizer in both:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    zero = parameter.grad is None or not (parameter.grad != 0).any()
                    unwanted = name != "head.bias" if how == "all but one" else zero
                    if how in ("all but one", "zeros") and unwanted:
                        parameter.grad = None
                    elif how == "frozen" and parameter.requires_grad and name.startswith("first"):
                        parameter.grad = parameter.detach().clone()
            if how == "set to zero":
                for parameter in parameters_of(optimizer):
                    parameter.grad = parameter.detach().clone()
                optimizer.zero_grad(set_to_none=False)
        pair.step()
        for optimizer in both:
            optimizer.zero_grad()
        for model in (pair.model, pair.plain) if how == "frozen" else ():
            model.get_submodule("first").requires_grad_(False)
    return pair.difference()


def named_apart(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(model.named_parameters()), lr=0.1, momentum=0.9, weight_decay=0.05)


@pytest.mark.every(2)
@pytest.mark.parametrize(("how", "stage"), spread(["zeros", "all but one", "set to zero", "frozen"], [3, 2, 0], 3))
def test_some_gradients_taken_away(stage: int, how: str) -> None:
    assert max(run_ranks(2, some_taken_away, stage, how)) < 1e-12


class Scaled(nn.Module):
    """Two blocks, a unit each, and a scale with one element, which only one rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        for block in self.blocks if whole else ():
            x = x + torch.tanh(block(x))
        return x * self.scale


def added_to_nothing(stage: int) -> float:
    """Add a term to all gradients, also after backwards without any gradient for this rank's slices.

    Returns:
        The largest weight difference from plain torch.
    """
    pair = Pair(Scaled(), make_config(stage=stage), batch=rows_of_six)
    for step in range(3):
        pair.backward(step == 1)
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            for parameter in parameters_of(optimizer):
                term = 0.3 * parameter.detach()
                parameter.grad = term if parameter.grad is None else parameter.grad + term
        pair.step()
        pair.zero_grad()
    return pair.difference()


@pytest.mark.parametrize("stage", some([3, 2, 0], 3))
def test_a_term_where_no_gradient_has_come(stage: int) -> None:
    assert max(run_ranks(2, added_to_nothing, stage)) < 1e-12
