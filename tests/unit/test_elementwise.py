"""Optimizers that may step slices of parameters: accepted or refused by class, or by a trial step."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zeropp.optimizer.checks import check_elementwise


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)), nn.Parameter(torch.ones(3))]


class Lion(Optimizer):
    """An optimizer that steps by the sign of an interpolated momentum (Chen et al. 2023, algorithm 2)."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                m = state["momentum"]
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(torch.sign(fast * m + (1 - fast) * p.grad), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - slow)


class Renamed(torch.optim.AdamW):
    """A subclass of a known optimizer, which is tried because it may change the step."""


class Delegating(torch.optim.AdamW):
    """A subclass whose step calls the base class's step, which runs hooks."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step(closure)


class TrustRatio(Optimizer):
    """An unknown optimizer that scales the step by the norms of a layer, as LAMB and LARS do."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * float(p.norm() / p.grad.norm().clamp(min=1e-9)))


class MatrixAware(Optimizer):
    """An optimizer that is elementwise for vectors only: rows of a matrix share a scale, as in Adafactor and Muon."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad
                if p.ndim > 1:
                    update = update / update.norm(dim=-1, keepdim=True)
                p.add_(update, alpha=-group["lr"])


class Settings(Lion):
    """An optimizer that stores a setting as an attribute instead of in its groups, as many published optimizers do."""

    def __init__(self, params: Any, power: float = 1.0):
        super().__init__(params)
        self.power = power

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.sign() * p.grad.abs() ** self.power, alpha=-group["lr"])


class Annealing(Lion):
    """An optimizer that changes its learning rate in place during the step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5  # in place if lr is a tensor


class Broken(Optimizer):
    def __init__(self, params: Any):
        super().__init__(params, {"lr": 1.0})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        raise ArithmeticError("cannot step without a curvature")


class Noisy(Optimizer):
    """An optimizer that adds random noise, so that no two steps are equal."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=-group["lr"])


class Clipping(Optimizer):
    """An optimizer that clips each gradient by its norm, so that it looks elementwise until a norm is large."""

    def __init__(self, params: Any, most: float = 1.0):
        super().__init__(params, {"lr": 0.1, "most": most})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                norm = math.sqrt(float(p.grad.double().square().sum()))
                p.add_(p.grad, alpha=-group["lr"] * min(1.0, group["most"] / max(norm, 1e-12)))


# Accepted.


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.Adam,
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
        Lion,
        Renamed,
        Settings,
    ],
)
def test_accepted(make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    check_elementwise(make(weights()))


def test_a_scheduler_s_patch_of_step_is_no_obstacle() -> None:
    optimizer = Lion(weights())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    check_elementwise(optimizer)


def test_hooks_do_not_run_in_the_trial() -> None:
    calls: list[str] = []
    optimizer = Lion(weights())
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    try:
        check_elementwise(optimizer)
    finally:
        handle.remove()
    assert calls == []


def test_an_optimizer_s_own_hooks_do_not_run_through_its_base_class() -> None:
    torch.optim.AdamW(weights())  # torch wraps the step of AdamW when the first one is constructed
    calls: list[str] = []
    optimizer = Delegating(weights())
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    check_elementwise(optimizer)
    assert calls == []


# Refused.


def named(name: str, base: type[Optimizer] = Lion) -> Optimizer:
    return type(name, (base,), {})(weights())


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "LAMB", "Lamb", "LARS", "Shampoo", "SOAP", "GaLoreAdamW"])
def test_refused_by_name(name: str) -> None:
    """Classes with these names, and their subclasses, are refused without a trial: slices cannot give their results."""
    with pytest.raises(TypeError, match=rf"^{name} .*; not in this version\. Use an elementwise optimizer"):
        check_elementwise(named(name))
    with pytest.raises(TypeError, match=r"^Mine "):
        check_elementwise(type("Mine", (type(named(name)),), {})(weights()))


def test_torch_s_own_are_refused() -> None:
    with pytest.raises(TypeError, match="LBFGS searches along one direction"):
        check_elementwise(torch.optim.LBFGS(weights()))
    with pytest.raises(TypeError, match="SparseAdam needs sparse gradients"):
        check_elementwise(torch.optim.SparseAdam(weights()))
    with pytest.raises(TypeError, match="Adafactor factors second moments"):
        check_elementwise(torch.optim.Adafactor(weights()))
    with pytest.raises(TypeError, match="Muon orthogonalises"):
        check_elementwise(torch.optim.Muon(weights()[:1]))


@pytest.mark.parametrize("kind", [TrustRatio, Noisy, Clipping])
def test_refused_by_trial(kind: type[Optimizer]) -> None:
    with pytest.raises(TypeError, match=f"a trial step of {kind.__name__} .* is not elementwise"):
        check_elementwise(kind(weights()))


def test_refused_by_trial_for_matrices() -> None:
    """Slices are one-dimensional, so the elements of a matrix row would no longer share a scale."""
    with pytest.raises(TypeError, match="not elementwise"):
        check_elementwise(MatrixAware(weights()))


def test_a_warm_up_from_zero_hides_nothing() -> None:
    """The scheduler has set the learning rate to 0 before the check, and the trial step uses another one."""
    optimizer = TrustRatio(weights())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    assert optimizer.param_groups[0]["lr"] == 0
    with pytest.raises(TypeError, match="not elementwise"):
        check_elementwise(optimizer)


def test_a_trial_that_fails_is_a_refusal() -> None:
    with pytest.raises(TypeError, match=r"Broken is unknown, .* failed with ArithmeticError: cannot step") as caught:
        check_elementwise(Broken(weights()))
    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_a_name_alone_does_not_convince() -> None:
    """A class named AdamW that is not torch's AdamW is tried."""
    impostor = type("AdamW", (TrustRatio,), {})
    with pytest.raises(TypeError, match="not elementwise"):
        check_elementwise(impostor(weights()))


# The trial leaves no trace.


@pytest.mark.parametrize("kind", [Lion, Settings, Annealing, TrustRatio, Broken, Renamed])
def test_the_trial_leaves_no_trace(kind: type[Optimizer]) -> None:
    parameters = weights()
    optimizer = kind([{"params": parameters[:1], "lr": torch.tensor(0.5)}, {"params": parameters[1:]}])
    for p in parameters:
        p.grad = torch.full_like(p, 3.0)
    groups = optimizer.param_groups
    before = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in groups]
    values = [p.detach().clone() for p in parameters]
    attributes = set(vars(optimizer))
    defaults = copy.deepcopy(optimizer.defaults)
    random_state = torch.get_rng_state()
    refused = pytest.raises(TypeError) if kind in (TrustRatio, Broken) else contextlib.nullcontext()
    with refused:
        check_elementwise(optimizer)
    assert optimizer.param_groups is groups
    assert [[id(p) for p in group["params"]] for group in groups] == [[id(parameters[0])], [id(parameters[1])]]
    assert [{k: v for k, v in group.items() if k != "params"} for group in groups] == before
    assert optimizer.state == {} and optimizer.defaults == defaults and set(vars(optimizer)) == attributes
    assert all(torch.equal(p, v) for p, v in zip(parameters, values, strict=True))
    assert all(torch.equal(p.grad, torch.full_like(p, 3.0)) for p in parameters)
    assert torch.equal(torch.get_rng_state(), random_state)
