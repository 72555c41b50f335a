"""What ``engine.destroy()`` leaves: in stages 0 to 2 a plain model with its weights, which can be wrapped again."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.distributed.engines import batch, loss_of, model_of, settings
from tests.distributed.harness import run_ranks
from tests.distributed.shapes import worst

CPU = {"device": "cpu"}


def engine_of(model: nn.Module, stage: int, **more: Any) -> Any:
    zero = {"stage": stage, **more.pop("zero", {})}
    return zeropp.initialize(model=model, config=settings(gradient_accumulation_steps=1, zero=zero, **more))[0]


def train(engine: Any, first: int, steps: int) -> None:
    for number in range(first, first + steps):
        engine.backward(loss_of(engine, number, dist.get_rank()))
        engine.step()


def destroyed(stage: int, more: dict[str, Any]) -> tuple[float, float, float]:
    """Distances: of the weights left, of a forward with them, and of a training that goes on with them."""
    bf16 = bool(more.get("bf16"))
    model, plain = model_of(), model_of()
    model, plain = (each.to(torch.bfloat16 if bf16 else torch.float64) for each in (model, plain))
    engine = engine_of(model, stage, **copy.deepcopy(more))
    train(engine, 0, 2)
    main = zeropp.full_state(model)
    engine.destroy()
    engine.destroy()  # twice is no harm
    values = {name: value.to(model.state_dict()[name].dtype) for name, value in main.items()}
    left = worst(dict(model.state_dict()), values)
    plain.load_state_dict(values)
    assert all(type(each) is nn.Parameter and each.grad is None for each in model.parameters())
    x = batch(7, 0).to(next(plain.parameters()).dtype)
    forward = float((model(x) - plain(x)).abs().max())
    # Plain torch can step it, move it, copy it.
    copy.deepcopy(model).to("cpu").zero_grad()
    train(engine_of(model, stage, **copy.deepcopy(more)), 2, 2)
    train(engine_of(plain, stage, **copy.deepcopy(more)), 2, 2)
    return left, forward, worst(zeropp.full_state(model), zeropp.full_state(plain))


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (0, {}),
        (1, {}),
        (2, {}),
        (1, {"bf16": {"enabled": True}}),
        (2, {"bf16": {"enabled": True}, "zero": {"offload_optimizer": CPU}}),
    ],
    ids=str,
)
def test_weights_stay_where_every_rank_has_them(stage: int, more: dict[str, Any]) -> None:
    for distances in run_ranks(2, destroyed, stage, more):
        assert distances == (0.0, 0.0, 0.0)


def runs_out(_: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def short_of_memory(stage: int) -> float:
    """As transformers' ``auto_find_batch_size``: a backward fails, the engine is destroyed, another one trains."""
    model, plain = model_of(), model_of()
    engine = engine_of(model, stage)
    train(engine, 0, 1)
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    hook = first.register_forward_hook(lambda module, args, output: output.register_hook(runs_out) and None)
    with pytest.raises(torch.OutOfMemoryError):
        engine.backward(loss_of(engine, 1, dist.get_rank()))
    hook.remove()
    engine.destroy()
    plain.load_state_dict(model.state_dict())
    train(engine_of(model, stage), 1, 2)
    train(engine_of(plain, stage), 1, 2)
    return worst(zeropp.full_state(model), zeropp.full_state(plain))


@pytest.mark.parametrize("stage", [1, 2])
def test_another_engine_after_one_that_failed(stage: int) -> None:
    assert max(run_ranks(2, short_of_memory, stage)) == 0.0


def of_stage_3() -> tuple[str, bool]:
    model = model_of()
    engine = engine_of(model, 3)
    train(engine, 0, 1)
    engine.destroy()
    with pytest.raises(ValueError, match="values were given up") as caught:
        engine_of(model, 3)
    # Nothing of a stage that keeps them holds the engine, either.
    other = engine_of(model_of(), 1)
    model, core = other.module, weakref.ref(other.core)
    other.destroy()
    del other
    gc.collect()
    return str(caught.value), core() is None and model is not None


def test_values_are_given_up_in_stage_3() -> None:
    for said, gone in run_ranks(2, of_stage_3):
        assert "by close()" in said and gone
