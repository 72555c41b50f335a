"""A loss through the models of two engines is divided and scaled once, by the optimizer that runs backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.support.rank_pool import run_ranks
from tests.support.two_models import LOSSES, models, rows

MICRO, STEPS = 2, 3


def wrapped(models: Sequence[nn.Module], config: dict[str, Any]) -> list[zeropp.ZeroOptimizer]:
    return [zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.2), model, config) for model in models]


def together(name: str, config: dict[str, Any]) -> float:
    """Train the models of two engines with one common loss.

    Args:
        name: key of LOSSES.
        config: configuration of both engines.

    Returns:
        Largest difference of weights from plain torch on the batches of all ranks.
    """
    loss_of, own, twins = LOSSES[name], models(), models()
    half = config.get("fp16", {}).get("enabled", False)
    first, second = own
    optimizers = wrapped(own, config)
    plain = torch.optim.SGD([p for twin in twins for p in twin.parameters()], lr=0.2)
    for step in range(STEPS):
        plain.zero_grad()
        for micro in range(MICRO):
            number = step * MICRO + micro
            x = rows(number, dist.get_rank())
            # The second optimizer runs backward through both models. The first one only steps.
            optimizers[1].backward(loss_of(first, second, x.half() if half else x))
            for optimizer in reversed(optimizers):
                optimizer.step()
            for rank in range(2):
                (loss_of(*twins, rows(number, rank)) / (2 * MICRO)).backward()
        plain.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return max(
        float((zeropp.full_state(model)[name] - value).abs().max())
        for model, twin in zip(own, twins, strict=True)
        for name, value in twin.state_dict().items()
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_of_two_engines_is_divided_once(name: str, stage: int) -> None:
    """Weights agree within 1e-6 after windows of two micro-batches: float32 sums are rounded in another order."""
    config = {"gradient_accumulation_steps": MICRO, "zero_optimization": {"stage": stage}}
    assert max(run_ranks(2, together, name, config)) < 1e-6


@pytest.mark.every(2)
@pytest.mark.parametrize("scale", [512, 0])
def test_a_loss_of_two_engines_is_scaled_once(scale: float) -> None:
    """Weights agree within 3e-3, because float16 rounds weights and activations by up to 1e-3 of their values.

    A ``loss_scale`` of 0 stands for a dynamic scale.
    """
    fp16 = {"enabled": True, "loss_scale": scale, "initial_scale_power": 9}
    config = {"gradient_accumulation_steps": MICRO, "fp16": fp16, "zero_optimization": {"stage": 2}}
    assert max(run_ranks(2, together, "chain", config)) < 3e-3


def adversaries(config: dict[str, Any]) -> list[float]:
    """Train a generator and a discriminator: two losses for the discriminator, one through it for the generator.

    Returns:
        Loss of the generator in each step.
    """
    generator, discriminator = models()
    makes, judges = wrapped((generator, discriminator), config)
    losses = []
    for step in range(STEPS):
        judges.zero_grad()
        x = rows(step, dist.get_rank())
        x = x.half() if config["fp16"]["enabled"] else x
        judges.backward((discriminator(x).float() - 1).square().mean())
        made = generator(x)
        judges.backward(discriminator(made.detach()).float().square().mean())
        judges.step()
        loss = (discriminator(made).float() - 1).square().mean()
        makes.backward(loss)
        makes.step()
        makes.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_generator_and_a_discriminator() -> None:
    """Losses in float16 with a dynamic scale are within 2 % of those in float32."""
    plain, half = (
        run_ranks(
            2, adversaries, {"fp16": {"enabled": on, "initial_scale_power": 8}, "zero_optimization": {"stage": 3}}
        )
        for on in (False, True)
    )
    for wanted, found in zip(plain, half, strict=True):
        assert found == pytest.approx(wanted, rel=0.02) and wanted[-1] != wanted[0]


def one_after_the_other() -> str:
    """Let the backward of a scaled loss fail, and run a backward of an unscaled loss through the other model.

    Returns:
        The error of the second backward. The scale of the failed backward must not count for it.
    """
    first, second = models()
    config = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    optimizers = wrapped((first, second), config)
    x = rows(0, dist.get_rank()).half()
    loss = first(x).float().sum()
    loss.register_hook(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        optimizers[0].backward(loss)
    try:
        second(x).float().sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_plain_loss_after_a_failed_one_is_refused() -> None:
    assert all("not scaled" in said for said in run_ranks(2, one_after_the_other))
