"""``loss.backward()`` on an engine's loss divides by the micro-batches of a window, as ``engine.backward`` does."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.branching_models import worst
from tests.support.deepspeed_engine import MICRO, STEPS, loss_of, model_of, settings
from tests.support.rank_pool import run_ranks, some
from tests.support.two_models import LOSSES, models, rows


def trained(how: str, zero: dict[str, Any]) -> tuple[dict[str, Any], float]:
    engine, *_ = zeropp.initialize(model=model_of(), config=settings(zero=zero))
    for number in range(STEPS * MICRO):
        # "held": all micro-batches of a window but the last run inside no_sync().
        holding = how == "held" and (number + 1) % MICRO
        with engine.no_sync() if holding else contextlib.nullcontext():
            loss = loss_of(engine, number, dist.get_rank())
            if how == "engine":
                engine.backward(loss)
            elif how == "scale":
                engine.scale(loss).backward()
            elif how == "two losses":
                (0.25 * loss).backward(retain_graph=True)
                (0.75 * loss).backward()
            else:
                loss.backward()
        if not holding:
            engine.step() if how != "held" else (engine.set_gradient_accumulation_boundary(True), engine.step())
    return zeropp.full_state(engine.module), engine.get_global_grad_norm()


@pytest.mark.parametrize("zero", some([{"stage": 3}, {"stage": 1}], 2), ids=["stage 3", "stage 1"])
def test_all_ways_give_the_same(zero: dict[str, Any]) -> None:
    """Weights agree to 1e-12 in float64; only the order of divisions and sums differs."""
    wanted, norm = run_ranks(2, trained, "engine", zero)[0]
    for how in ("plain", "scale", "two losses", "held"):
        for found, other in run_ranks(2, trained, how, zero):
            assert worst(found, wanted) < 1e-12 and other == pytest.approx(norm, rel=1e-12), how


def mixed() -> str:
    engine, *_ = zeropp.initialize(model=model_of(), config=settings())
    engine.backward(loss_of(engine, 0, dist.get_rank()))
    engine.step()
    with pytest.raises(RuntimeError) as caught:
        loss_of(engine, 1, dist.get_rank()).backward()
    return str(caught.value)


def test_two_ways_in_one_window_are_refused() -> None:
    assert all("take one of the two" in text for text in run_ranks(2, mixed))


def by_hand() -> float:
    """Return the gradient norm without the division of plain losses, relative to the norm with it.

    Without an engine, a ZeroOptimizer does not divide losses either.
    """
    engine, *_ = zeropp.initialize(model=model_of(), config=settings())
    engine.core.loss_scale.averages_unscaled = False
    for number in range(MICRO):
        loss_of(engine, number, dist.get_rank()).backward()
        engine.step()
    whole = engine.get_global_grad_norm()
    again, *_ = zeropp.initialize(model=model_of(), config=settings())
    for number in range(MICRO):
        loss_of(again, number, dist.get_rank()).backward()
        again.step()
    return float(whole / again.get_global_grad_norm())


def test_the_division_is_the_engines() -> None:
    assert run_ranks(2, by_hand) == [pytest.approx(MICRO)] * 2


def two_engines(name: str, stage: int) -> float:
    """Train two engines with a loss that uses both models.

    Args:
        name: key of LOSSES.
        stage: ZeRO stage.

    Returns:
        Largest difference of weights from plain torch on all ranks' batches.
    """
    steps, micros, loss_of, own, twins = 3, 2, LOSSES[name], models(), models()
    config = {"gradient_accumulation_steps": micros, "zero_optimization": {"stage": stage}}
    first, second = (
        zeropp.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.2), config=config)[0]
        for model in own
    )
    plain = torch.optim.SGD([p for twin in twins for p in twin.parameters()], lr=0.2)
    for step in range(steps):
        plain.zero_grad()
        for number in range(step * micros, (step + 1) * micros):
            # The second engine calls backward for both models; the first engine only steps.
            second.backward(loss_of(first, second, rows(number, dist.get_rank())))
            second.step()
            first.step()
            for rank in range(2):
                (loss_of(*twins, rows(number, rank)) / (2 * micros)).backward()
        plain.step()
    return max(worst(zeropp.full_state(model), twin.state_dict()) for model, twin in zip(own, twins, strict=True))


@pytest.mark.every(2)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_of_two_engines_is_divided_once(name: str, stage: int) -> None:
    """Weights agree to 1e-6 with windows of two micro-batches; float32 sums have another order."""
    assert max(run_ranks(2, two_engines, name, stage)) < 1e-6
