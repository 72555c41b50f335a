"""``loss.backward()`` of an engine's losses: divided by the micro-batches of a window, as ``engine.backward`` does."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch.distributed as dist

import zeropp
from tests.support.branching_models import worst
from tests.support.deepspeed_engine import MICRO, STEPS, loss_of, model_of, settings
from tests.support.rank_pool import run_ranks, some


def trained(how: str, zero: dict[str, Any]) -> tuple[dict[str, Any], float]:
    engine, *_ = zeropp.initialize(model=model_of(), config=settings(zero=zero))
    for number in range(STEPS * MICRO):
        # In the model's place, losses of parts of it, and several of one forward, come the same way.
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
    """In float64; the order of a division and a sum may differ."""
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
    """With a ZeroOptimizer alone losses count as they are, as in plain torch."""
    engine, *_ = zeropp.initialize(model=model_of(), config=settings())
    engine.core.reductions.loss_scale.divides_plain = False
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
