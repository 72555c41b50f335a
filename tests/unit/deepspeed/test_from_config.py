"""Optimizers and schedulers named in the JSON configuration: their classes and arguments, and refused ones."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeropp.config import ConfigError
from zeropp.config.blocks import OptimizerConfig, SchedulerConfig
from zeropp.config.foreign_keys import ARGUMENTS
from zeropp.deepspeed.json_optimizers import Lion, UncorrectedAdam, make_optimizer, make_scheduler
from zeropp.deepspeed.schedulers import SCHEDULERS, WarmupLR
from zeropp.optimizer.checks import check_elementwise


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
        ("adam", {"adam_w_mode": "false", "weight_decay": "1e-1"}, torch.optim.Adam, 0.1),
        ("adamw", {"bias_correction": "False", "amsgrad": False}, UncorrectedAdam, 0.0),
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
        ("AdamW", {"bias_correction": False, "amsgrad": True}, "neither with torch_adam nor with amsgrad"),
        ("AdamW", {"fp32_optimizer_states": False}, "set bf16.bf16_master_weights_and_grads"),
        ("AdamW", {"eps": "small"}, r'^.*: optimizer.params.eps: got "small"; expected a number \(default 1e-08\)$'),
        ("AdamW", {"lr": None}, "params.lr: got null; expected a number"),
        ("AdamW", {"lr": [0.1, 0.2]}, r"params.lr: got \[0.1, 0.2\]; expected a number"),
        ("AdamW", {"weight_decay": True}, "params.weight_decay: got true; expected a number"),
        ("AdamW", {"betas": 0.9}, r"params.betas: got 0.9; expected a list of 2 numbers \(default \[0.9, 0.999\]\)"),
        ("AdamW", {"betas": [0.9]}, "expected a list of 2 numbers"),
        ("Lion", {"betas": [0.9, "x"]}, "expected a list of 2 numbers"),
        ("AdamW", {"adam_w_mode": "maybe"}, r"adam_w_mode: got .maybe.; expected true or false \(default true\)"),
        ("SGD", {"nesterov": 0.5}, "nesterov: got 0.5; expected true or false"),
        ("AdamW", {"learning_rate": 1.0}, "learning_rate: set optimizer.params.lr instead$"),
        ("Lion", {"epsilon": 1.0}, r"'weight_decay'\]$"),
        ("AdamW", {"weigth_decay": 1.0}, "weigth_decay: did you mean 'weight_decay'.$"),
        ("AdamW", {"adamw_mod": True}, "adamw_mod: did you mean 'adam_w_mode'.$"),
        ("SGD", {"nestorov": True}, "nestorov: did you mean 'nesterov'.$"),
        ("SGD", {"beta": 0.9}, r"'weight_decay'\]$"),
        ("SGD", {"differentiable": True}, "params.differentiable: true is not in zeropp"),
        ("SGD", {"params": [1]}, r"has \['params'\], which SGD does not take"),
        ("AdamW", {"rate": 1.0}, r"has \['rate'\], which AdamW does not take; it takes .*'lr'"),
        ("AdamW", {"lr": -1.0}, "optimizer.params of AdamW: Invalid learning rate"),
        ("OneBitAdam", {}, "'OneBitAdam' is not in zeropp: use AdamW"),
        ("Lamb", {}, "norms of whole parameters"),
        ("Muon", {}, "whole matrices"),
        ("AdaZ", {}, "'AdaZ' is unknown; set one of ASGD, .*AdamW"),
        ("torch.optim.NAdam", {}, "'torch.optim.NAdam' is unknown; did you mean 'NAdam'. Else set one of "),
        ("AdmW", {}, "'AdmW' is unknown; did you mean 'AdamW'. Else set one of "),
        ("FusedLamb", {}, "norms of whole parameters"),
        ("Adafactor", {}, "factors second moments .* use AdamW"),
        ("LBFGS", {}, "one direction over all parameters, .* use AdamW"),
        ("SparseAdam", {}, "sparse gradients, .* use AdamW"),
    ],
)
def test_unusable_optimizers_and_arguments_are_refused(kind: str | None, params: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        made(kind, **params)


@pytest.mark.parametrize(
    ("kind", "meant"),
    [
        ("FusedAdam", "Adam"),
        ("DeepSpeedCPUAdam", "Adam"),
        ("cpu_adam", "Adam"),
        ("adam_8bit", "Adam"),
        ("adamw_torch", "AdamW"),
        ("AdamW8bit", "AdamW"),
        ("adamw_torch_fused", "AdamW"),
        ("paged_adamw_32bit", "AdamW"),
        ("DecoupledAdamW", "AdamW"),
        ("FusedAdamW", "AdamW"),
        ("FusedLion", "Lion"),
        ("DeepSpeedCPULion", "Lion"),
        ("DeepSpeedCPUAdagrad", "Adagrad"),
        ("momentum_sgd", "SGD"),
        ("torch.optim.AdamW", "AdamW"),
        ("deepspeed.ops.adam.FusedAdam", "Adam"),
    ],
)
def test_a_class_of_an_optimizer_leads_to_its_type(kind: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(kind, lr=0.1)
    (problem,) = caught.value.problems
    assert problem.partition(" (")[0] == f'optimizer.type {kind!r} is unknown; set "{meant}"'
    assert ("adam_w_mode" in problem) == (meant == "Adam")
    assert made(meant, lr=0.1)


def listed(kind: str, block: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        if block == "optimizer":
            made(kind)
        else:
            make_scheduler(SchedulerConfig(type=kind), made("AdamW", lr=0.1))
    return caught.value.problems[0].partition("set one of ")[2].split(", ")


def test_every_type_that_is_listed_trains() -> None:
    assert {"AdamW", "Lion", "SGD"} < {*listed("?", "optimizer")}
    for kind in listed("?", "optimizer"):
        weight = nn.Parameter(torch.ones(4))
        optimizer = make_optimizer(OptimizerConfig(type=kind, params={"lr": 0.1}), [weight])
        check_elementwise(optimizer)
        weight.grad = torch.ones(4)
        optimizer.step()
        assert weight.detach().max() < 1, kind
    needed: dict[str, dict[str, Any]] = {
        "StepLR": {"step_size": 1}, "MultiStepLR": {"milestones": [1]}, "ExponentialLR": {"gamma": 0.5},
        "CosineAnnealingLR": {"T_max": 5}, "CosineAnnealingWarmRestarts": {"T_0": 5},
        "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2}, "OneCycleLR": {"max_lr": 0.2, "total_steps": 5},
        "WarmupDecayLR": {"total_num_steps": 5}, "WarmupCosineLR": {"total_num_steps": 5},
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    }  # fmt: skip
    assert {*needed} < {*listed("?", "scheduler")}
    for kind in listed("?", "scheduler"):
        make_scheduler(SchedulerConfig(type=kind, params=needed.get(kind, {})), made("AdamW", lr=0.1)).step()


def test_schedulers() -> None:
    optimizer = made("AdamW", lr=0.1)
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 1.0, "warmup_num_steps": 4}
    assert type(make_scheduler(SchedulerConfig(type="WarmupLR", params=params), optimizer)) is WarmupLR
    torch_s = make_scheduler(SchedulerConfig(type="StepLR", params={"step_size": 2}), optimizer)
    assert type(torch_s) is torch.optim.lr_scheduler.StepLR
    for kind, given, told in (
        (None, {}, "scheduler.type is missing"),
        ("WarmupLR", {"warmup_num_steps": "auto"}, '"auto" for warmup_num_steps'),
        ("Sinus", {}, "'Sinus' is unknown; set one of LRRangeTest, .*, OneCycleLR$"),
        ("WarmUpLR", {}, 'set "WarmupLR"$'),
        ("linear", {}, 'set "WarmupDecayLR"$'),
        ("cosine_with_warmup", {}, 'set "WarmupCosineLR"$'),
        ("StepRL", {}, "did you mean 'StepLR'. Else set one of "),
        ("WarmupDecayLR", {}, "total_num_steps is missing; set it for WarmupDecayLR: iterations until the end of the"),
        ("OneCycle", {}, "cycle_min_lr is missing; set it for OneCycle: rate at both .*\n.*cycle_max_lr is missing"),
        ("StepLR", {}, "params.step_size is missing; set it for StepLR: Period of learning rate decay$"),
        ("WarmupLR", {"steps": 3}, r"has \['steps'\], which WarmupLR does not take"),
        ("WarmupLR", {"warmup_steps": 3}, "warmup_steps: set scheduler.params.warmup_num_steps instead"),
        ("WarmupLR", {"warmup_num_steps": "many"}, 'warmup_num_steps: got "many"; expected a number'),
        ("WarmupLR", {"warmup_max_lr": "abc"}, 'scheduler.params.warmup_max_lr: got "abc"; expected a number$'),
        ("WarmupLR", {"warmup_max_lr": ["abc"]}, r'warmup_max_lr: got \["abc"\]; expected a number$'),
        ("WarmupCosineLR", {"total_num_steps": "abc"}, 'total_num_steps: got "abc"; expected a number$'),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_second_step_size": "abc"}, "expected a number$"),
    ):
        with pytest.raises(ConfigError, match=told):
            make_scheduler(SchedulerConfig(type=kind, params=given), optimizer)


def test_arguments_that_are_known_are_those_that_are_taken() -> None:
    weight = nn.Parameter(torch.ones(4))
    for kind, arguments in ARGUMENTS.items():
        if kind in SCHEDULERS:
            assert arguments == set(inspect.signature(SCHEDULERS[kind]).parameters) - {"optimizer"}, kind
            continue
        for argument in arguments:
            default = {"lr": 0.1, "betas": [0.9, 0.99], "fp32_optimizer_states": True}.get(argument, 0)
            make_optimizer(OptimizerConfig(type=kind, params={"lr": 0.1, argument: default}), [weight])
        every = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop, "lion": Lion}
        assert arguments >= set(inspect.signature(every.get(kind, torch.optim.AdamW)).parameters) - {"params"}, kind


def test_a_list_of_rates_is_one_for_each_group() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)]
    optimizer = make_optimizer(OptimizerConfig(type="AdamW", params={"lr": 0.1}), groups)
    block = SchedulerConfig(type="WarmupLR", params={"warmup_min_lr": ["1e-3", 0.2], "warmup_num_steps": "4"})
    assert make_scheduler(block, optimizer).get_last_lr() == [0.001, 0.2]


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
    """Steps equal the paper's formula. In float64, two ways to write the average differ by about 1e-16 per step."""
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


def test_uncorrected_adam() -> None:
    """The first step is ``(1 - beta1) / sqrt(1 - beta2)`` times Adam's. Saved states can be loaded."""
    weights = [nn.Parameter(torch.zeros(20, dtype=torch.float64)) for _ in range(2)]
    optimizers = [torch.optim.Adam([weights[0]], lr=0.1, eps=0.0), UncorrectedAdam([weights[1]], lr=0.1, eps=0.0)]
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = torch.linspace(-1, 1, 20, dtype=torch.float64)
        optimizer.step()
    assert (weights[1] - weights[0] * 0.1 / 0.001**0.5).abs().max() < 1e-12
    optimizers[1].load_state_dict(optimizers[1].state_dict())
    assert set(optimizers[1].state[weights[1]]) == {"exp_avg", "exp_avg_sq"}
    for wrong in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -0.1}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="Adam got lr"):
            UncorrectedAdam(weights, **wrong)  # type: ignore[arg-type]
