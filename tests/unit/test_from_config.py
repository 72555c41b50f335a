"""Optimizers and schedulers that the JSON names: which class, with which arguments, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeropp.config import ConfigError
from zeropp.config.runtime import OptimizerConfig, SchedulerConfig
from zeropp.training.from_config import make_optimizer, make_scheduler
from zeropp.training.elementwise import Lion
from zeropp.training.schedulers import WarmupLR


def made(kind: str | None, **params: Any) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.ones(4))
    return make_optimizer(OptimizerConfig(type=kind, params=params), [weight])


@pytest.mark.parametrize(
    ("kind", "params", "wanted", "decay"),
    [
        ("Adam", {}, torch.optim.AdamW, 0.0),
        ("adam", {"weight_decay": 0.3}, torch.optim.AdamW, 0.3),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, 0.0),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("adamw", {"bias_correction": True, "set_grad_none": True}, torch.optim.AdamW, 0.0),
        ("Lion", {"weight_decay": 0.2}, Lion, 0.2),
        ("Adagrad", {}, torch.optim.Adagrad, 0.0),
        ("sgd", {"momentum": 0.9}, torch.optim.SGD, 0.0),
        ("RMSprop", {}, torch.optim.RMSprop, 0.0),
    ],
)  # fmt: skip
def test_classes_and_decay(kind: str, params: dict[str, Any], wanted: type, decay: float) -> None:
    optimizer = made(kind, lr=0.1, **params)
    assert type(optimizer) is wanted
    assert optimizer.defaults["weight_decay"] == decay and optimizer.defaults["lr"] == 0.1


def test_steps_are_fused_unless_it_is_said_otherwise() -> None:
    for kind in ("AdamW", "SGD", "Adagrad"):
        assert made(kind, lr=0.1).defaults["fused"]
    assert made("AdamW", fused=False).defaults["fused"] is False
    assert not made("AdamW", foreach=True).defaults["fused"]


@pytest.mark.parametrize(
    ("kind", "params", "told"),
    [
        (None, {}, "optimizer.type is missing"),
        ("AdamW", {"lr": "auto", "eps": "auto"}, '"auto" for lr, eps'),
        ("AdamW", {"max_grad_norm": 1.0}, 'set "gradient_clipping"'),
        ("AdamW", {"bias_correction": False}, "bias_correction false is not in zeropp"),
        ("AdamW", {"rate": 1.0}, r"has \['rate'\], which AdamW does not take; it takes .*'lr'"),
        ("AdamW", {"lr": -1.0}, "optimizer.params of AdamW: Invalid learning rate"),
        ("OneBitAdam", {}, "'OneBitAdam' is not in zeropp: use AdamW"),
        ("Lamb", {}, "norms of whole parameters"),
        ("Muon", {}, "whole matrices"),
        ("AdamZ", {}, "neither Lion nor one of torch.optim's: .*AdamW"),
    ],
)
def test_what_is_refused(kind: str | None, params: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        made(kind, **params)


def test_schedulers() -> None:
    optimizer = made("AdamW", lr=0.1)
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 1.0, "warmup_num_steps": 4}
    assert type(make_scheduler(SchedulerConfig(type="WarmupLR", params=params), optimizer)) is WarmupLR
    torch_s = make_scheduler(SchedulerConfig(type="StepLR", params={"step_size": 2}), optimizer)
    assert type(torch_s) is torch.optim.lr_scheduler.StepLR
    for kind, given, told in (
        (None, {}, "scheduler.type is missing"),
        ("WarmupLR", {"warmup_num_steps": "auto"}, '"auto" for warmup_num_steps'),
        ("Sinus", {}, "'Sinus' is none of LRRangeTest, .* or of torch.optim.lr_scheduler's classes"),
        ("WarmupDecayLR", {}, "scheduler.params of WarmupDecayLR: .*total_num_steps"),
        ("WarmupLR", {"steps": 3}, r"has \['steps'\], which WarmupLR does not take"),
    ):
        with pytest.raises(ConfigError, match=told):
            make_scheduler(SchedulerConfig(type=kind, params=given), optimizer)


def lion_by_hand(
    weight: Tensor, gradients: list[Tensor], lr: float, betas: tuple[float, float], decay: float
) -> Tensor:
    average = torch.zeros_like(weight)
    for gradient in gradients:
        direction = torch.sign(betas[0] * average + (1 - betas[0]) * gradient)
        weight = weight - lr * (direction + decay * weight)
        average = betas[1] * average + (1 - betas[1]) * gradient
    return weight


def test_lion() -> None:
    """As in the paper; weights in float64, where the two ways to write an average are apart by 1e-16."""
    torch.manual_seed(0)
    start = torch.randn(50, dtype=torch.float64)
    gradients = [torch.randn(50, dtype=torch.float64) for _ in range(6)]
    weight = nn.Parameter(start.clone())
    optimizer = Lion([weight], lr=0.1, betas=(0.8, 0.95), weight_decay=0.3)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step(lambda: None)
    assert (weight - lion_by_hand(start, gradients, 0.1, (0.8, 0.95), 0.3)).abs().max() < 1e-12
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert optimizer.state[weight]["exp_avg"].shape == (50,)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}])
def test_lion_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Lion got lr"):
        Lion([nn.Parameter(torch.ones(1))], **wrong)
