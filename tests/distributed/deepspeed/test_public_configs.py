"""Public DeepSpeed configurations: warnings about ignored keys, and training as these files specify it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import worst
from tests.support.deepspeed_engine import MICRO, STEPS, loss_of, model_of, settings, train
from tests.support.rank_pool import run_ranks, spread

CPU = {"device": "cpu"}
ADAM = {"lr": 0.1, "betas": [0.7, 0.95], "eps": "1e-6", "weight_decay": 0.2}


def told(config: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zeropp.initialize(model=model_of(), config=config)
    return [
        str(each.message) for each in caught if "gradient_clipping" in str(each.message) or "keys" in str(each.message)
    ]


def without_clipping(**more: Any) -> dict[str, Any]:
    config = settings(**more)
    del config["gradient_clipping"]
    return config


def test_only_the_first_rank_warns_of_ignored_keys_and_no_clipping() -> None:
    config = without_clipping(fp32_allreduce=True, steps_per_print=10, wall_clock_breakdown=False)
    first, *others = run_ranks(2, told, config)
    assert others == [[]]
    keys, clipping = first
    assert keys == "these keys of the configuration have no effect: fp32_allreduce"
    assert clipping.startswith("gradient_clipping is not set, so gradients are not clipped; DeepSpeed clips them")


@pytest.mark.parametrize("value", [1.0, 0.0, "auto"])
def test_clipping_that_is_set_is_no_news(value: object) -> None:
    (found,) = run_ranks(1, told, settings(gradient_clipping=value))
    assert [each for each in found if "clips them" in each] == []
    assert len(found) == (value == "auto")


def test_nobody_is_told_of_clipping_without_an_optimizer() -> None:
    config = without_clipping()
    del config["optimizer"], config["scheduler"]
    assert run_ranks(1, told, config) == [[]]


def strict(config: dict[str, Any], match: str) -> dict[str, Tensor]:
    """Train after an attempt in which warnings are errors, which must raise on every rank.

    Args:
        config: configuration with a warning.
        match: pattern of the warning.

    Returns:
        full_state after training with a configuration without warnings.
    """
    model = model_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=match):
            zeropp.initialize(model=model, config=config)
    engine, *_ = zeropp.initialize(model=model, config=settings())
    train(engine, 0, 1)
    return zeropp.full_state(model)


@pytest.mark.parametrize(
    ("config", "match"), [(without_clipping(), "clips them"), (settings(fp32_allreduce=True), "no effect: fp32_all")]
)
def test_a_warning_that_is_an_error_ends_every_rank_before_anything_is_wrapped(
    config: dict[str, Any], match: str
) -> None:
    one, two = run_ranks(2, strict, config, match)
    assert worst(one, two) == 0


def trained(config: dict[str, Any]) -> dict[str, Tensor]:
    model = model_of()
    engine, *_ = zeropp.initialize(model=model, config=config)
    train(engine, 0, STEPS)
    return zeropp.full_state(model)


def adam_by_hand(world: int, decoupled: bool) -> dict[str, Tensor]:
    """Return the weights of Adam without bias correction, on the batches of all ranks.

    Args:
        world: number of ranks.
        decoupled: True for decoupled weight decay (AdamW).
    """
    model = model_of()
    averages = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    squares = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for step in range(STEPS):
        model.zero_grad()
        for number in range(step * MICRO, (step + 1) * MICRO):
            for rank in range(world):
                (loss_of(model, number, rank) / (MICRO * world)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if value.grad is None:
                    continue
                gradient = value.grad if decoupled else value.grad + 0.2 * value
                averages[name] = 0.7 * averages[name] + 0.3 * gradient
                squares[name] = 0.95 * squares[name] + 0.05 * gradient**2
                change = averages[name] / (squares[name].sqrt() + 1e-6) + (0.2 * value if decoupled else 0)
                value -= 0.1 * change
    return model.state_dict()


PLACED = {
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
    "on the host": {"stage": 2, "offload_optimizer": CPU, "offload_param": CPU},
}


@pytest.mark.parametrize(("place", "decoupled"), spread(PLACED, [True, False], 2))
def test_adam_without_bias_correction(place: str, decoupled: bool) -> None:
    """Weights agree to 1e-12 in float64; only the order of additions differs."""
    optimizer = {"type": "Adam", "params": {**ADAM, "bias_correction": False, "adam_w_mode": decoupled}}
    config = settings(zero=PLACED[place], optimizer=optimizer, scheduler=None)
    expected = adam_by_hand(2, decoupled)
    for weights in run_ranks(2, trained, config):
        assert worst(weights, expected) < 1e-12


@pytest.mark.campaign
def test_weights_on_the_host_below_stage_3_change_nothing() -> None:
    zero = {"stage": 2, "offload_optimizer": CPU}
    plain, asked = (run_ranks(2, trained, settings(zero=zero | more))[0] for more in ({}, {"offload_param": CPU}))
    assert worst(plain, asked) == 0


@pytest.mark.campaign
def test_sub_groups_of_nothing_are_those_of_the_default(tmp_path: Path) -> None:
    states = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    plain, asked = (run_ranks(2, trained, settings(zero={**states, **more}))[0] for more in ({}, {"sub_group_size": 0}))
    assert worst(plain, asked) == 0
