"""Steps of a training engine equal plain torch's: discarded gradients, late momentum, and the smallest loss scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import WIDTH, Routed, chain, make_config, worst
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import mean_square

SETTINGS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, "dampening": 0.3}
ROUTES = [chain(0, 2), chain(0, 1), chain(4), chain(2)]


def in_an_engine(stage: int) -> float:
    torch.manual_seed(0)
    model = Routed()
    plain = Routed()
    plain.load_state_dict(model.state_dict())
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}
    sgd = torch.optim.SGD(plain.parameters(), **settings)
    config = make_config(stage=stage, train_micro_batch_size_per_gpu=3)
    inner = torch.optim.SGD(model.parameters(), **settings)
    engine = zeropp.initialize(model=model, optimizer=inner, config=config)[0]
    x = torch.ones(3, 8)
    for route in (chain(4), chain(0, 1), chain(0, 1)):
        engine.backward(engine(x, route).square().mean())
        plain(x, route).square().mean().backward()
        engine.step()
        sgd.step()
        # The engine's step discards gradients, so zero_grad(set_to_none=False) finds none to set to zero. Unused
        # parameters must not get a zero gradient, which would change them by weight decay and momentum.
        engine.zero_grad(set_to_none=False)
        sgd.zero_grad()
    return worst(zeropp.full_state(model), plain.state_dict())


@pytest.mark.every(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_has_forgotten_gradients_when_its_step_ends(stage: int) -> None:
    assert max(run_ranks(2, in_an_engine, stage)) < 1e-6


def in_an_engine_of_the_json(config: dict[str, Any], folder: str) -> float:
    torch.manual_seed(0)
    model = Routed()
    plain = Routed()
    plain.load_state_dict(model.state_dict())
    sgd = torch.optim.SGD(plain.parameters(), **SETTINGS)
    config = {**config, "train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": SETTINGS}}
    engine = zeropp.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    for number, route in enumerate(ROUTES):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))
        engine.backward(mean_square(engine, x, route))
        engine.step()
        sgd.zero_grad()
        mean_square(plain, x, route).backward()
        sgd.step()
        if number == 0:
            engine.save_checkpoint(folder, tag="first")
            engine.load_checkpoint(folder, tag="first")
    return worst(zeropp.full_state(model), plain.state_dict())


@pytest.mark.every(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_whose_json_names_it(stage: int, tmp_path: Path) -> None:
    assert max(run_ranks(2, in_an_engine_of_the_json, make_config(stage=stage), str(tmp_path))) < 1e-6


SLOPE = 40_000.0  # close to the largest float16, 65504, so that gradients are finite at a loss scale of 1 only
RATE = 2.0**-16


class Steep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(300, dtype=torch.float16))

    def forward(self) -> Tensor:
        return (self.weight.float() * SLOPE).sum()


def at_the_floor(stage: int) -> tuple[list[bool], Tensor]:
    """Take four steps at the smallest loss scale. The second step overflows on rank 1.

    Args:
        stage: ZeRO stage.

    Returns:
        For each step True if it was taken, and the weights at the end.
    """
    model = Steep()
    fp16 = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1, "min_loss_scale": 1}
    config = {"train_micro_batch_size_per_gpu": 1, "fp16": fp16, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine = zeropp.initialize(model=model, optimizer=optimizer, config=config)[0]
    taken = []
    for step in range(4):
        engine.backward(engine() * (float("inf") if (step, dist.get_rank()) == (1, 1) else 1))
        try:
            engine.step()
        except RuntimeError as error:
            assert "not finite at a loss scale of 1" in str(error)
        taken.append(engine.was_step_applied())
    return taken, zeropp.full_state(model)["weight"]


@pytest.mark.every(5)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_who_goes_on_at_the_floor_of_the_scale_has_a_new_window(stage: int) -> None:
    for taken, weight in run_ranks(2, at_the_floor, stage):
        assert taken == [True, False, True, True]
        torch.testing.assert_close(weight, torch.full((300,), 1 - 3 * RATE * SLOPE), rtol=2**-10, atol=0)
