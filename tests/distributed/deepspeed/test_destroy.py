"""``engine.destroy()`` leaves the weights in the model, which can be wrapped again.

In stages 0 to 2 the model is usually a plain model afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import worst
from tests.support.deepspeed_engine import batch, loss_of, model_of, settings
from tests.support.rank_pool import run_ranks

CPU = {"device": "cpu"}


def engine_of(model: nn.Module, stage: int, **more: Any) -> Any:
    zero = {"stage": stage, **more.pop("zero", {})}
    config = settings(gradient_accumulation_steps=1, zero=zero, **more)
    del config["scheduler"]  # The warm-up starts with learning rates of 0, which would change no weight.
    return zeropp.initialize(model=model, config=config)[0]


def train(engine: Any, first: int, steps: int) -> None:
    for number in range(first, first + steps):
        engine.backward(loss_of(engine, number, dist.get_rank()))
        engine.step()


def destroyed(stage: int, more: dict[str, Any]) -> tuple[float, float, float]:
    """Destroy an engine after two steps, and train the model on in a new engine.

    Args:
        stage: ZeRO stage.
        more: further configuration.

    Returns:
        Three differences from a plain model with the same weights: of the weights left in the model, of a forward, and
        of the weights after two more steps.
    """
    bf16 = bool(more.get("bf16"))
    model, plain = model_of(), model_of()
    model, plain = (each.to(torch.bfloat16 if bf16 else torch.float64) for each in (model, plain))
    engine = engine_of(model, stage, **copy.deepcopy(more))
    train(engine, 0, 2)
    main = zeropp.full_state(model)
    engine.destroy()
    engine.destroy()  # a second call does nothing
    values = {name: value.to(model.state_dict()[name].dtype) for name, value in main.items()}
    left = worst(dict(model.state_dict()), values)
    plain.load_state_dict(values)
    assert all(type(each) is nn.Parameter and each.grad is None for each in model.parameters())
    assert worst(values, dict(model_of().to(next(plain.parameters()).dtype).state_dict())) > 0.01, "it was trained"
    x = batch(7, 0).to(next(plain.parameters()).dtype)
    forward = float((model(x) - plain(x)).abs().max())
    # Plain torch can copy and move the model, and zero its gradients.
    copy.deepcopy(model).to("cpu").zero_grad()
    train(engine_of(model, stage, **copy.deepcopy(more)), 2, 2)
    train(engine_of(plain, stage, **copy.deepcopy(more)), 2, 2)
    return left, forward, worst(zeropp.full_state(model), zeropp.full_state(plain))


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (1, {}),
        (0, {}),
        (2, {"bf16": {"enabled": True}, "zero": {"offload_optimizer": CPU}}),
        (2, {}),
        (1, {"bf16": {"enabled": True}}),
    ],
    ids=str,
)
def test_weights_stay_where_every_rank_has_them(stage: int, more: dict[str, Any]) -> None:
    for distances in run_ranks(2, destroyed, stage, more):
        assert distances == (0.0, 0.0, 0.0)


def runs_out(_: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def short_of_memory(stage: int, first: bool) -> float:
    """Let a backward run out of memory, destroy the engine, and train the model in another engine.

    transformers' ``auto_find_batch_size`` does so.

    Args:
        stage: ZeRO stage.
        first: True if the failing step is the first one.

    Returns:
        Largest difference from a model that starts with the same weights.
    """
    model, plain = model_of(), model_of()
    # With one unit for the whole model, a failed backward leaves some gradients of the unit. In stage 3 such a unit
    # would stay unsharded, so there each block is a unit.
    engine = engine_of(model, stage, zeropp={"unit_min_blocks": 0 if stage == 3 else 100, "hang_timeout": 20})
    if not first:
        train(engine, 0, 1)
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    hook = layer.register_forward_hook(lambda module, args, output: output.register_hook(runs_out) and None)
    with pytest.raises(torch.OutOfMemoryError):
        engine.backward(loss_of(engine, 1, dist.get_rank()))
    hook.remove()
    engine.destroy()
    if stage < 3:  # in stages below 3 destroy() leaves a plain model
        assert all(parameter.grad is None for parameter in model.parameters())
    plain.load_state_dict(zeropp.full_state(model) if stage == 3 else model.state_dict())
    train(engine_of(model, stage), 1, 2)
    train(engine_of(plain, stage), 1, 2)
    return worst(zeropp.full_state(model), zeropp.full_state(plain))


@pytest.mark.every(20)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("stage", [3, 1, 2])
def test_another_engine_after_one_that_failed(stage: int, first: bool) -> None:
    assert max(run_ranks(2, short_of_memory, stage, first)) == 0.0


def stays_partitioned(more: dict[str, Any], how: str) -> tuple[float, float, float]:
    """Destroy a stage 3 engine, and train the model on in a new engine.

    Args:
        more: further configuration.
        how: "after a step", "a window's middle" (after a backward without a step), or "states away" (after
            offload_states()).

    Returns:
        Three differences: of a forward after destroy() from a plain model's (0 for "states away", without a forward),
        of the main weights that the new engine takes over, and of the weights after two more steps.
    """
    kind = torch.bfloat16 if more.get("bf16") else torch.float64
    model, plain = model_of().to(kind), model_of().to(kind)
    engine = engine_of(model, 3, **copy.deepcopy(more))
    train(engine, 0, 2)
    if how == "a window's middle":
        engine.backward(loss_of(engine, 9, dist.get_rank()))
    if how == "states away":
        engine.offload_states()
    engine.destroy()
    engine.destroy()
    trains: dict[str, Any] = {
        "engine": engine.step, "optimizer": engine.optimizer.step, "zero_grad": engine.zero_grad,
        "loss": lambda: engine.backward(torch.zeros(())), "state": engine.optimizer.state_dict,
    }  # fmt: skip
    for call in trains.values():
        with pytest.raises(RuntimeError, match=r"engine.destroy\(\) or another wrapping"):
            call()
    main = zeropp.full_state(model)
    assert worst(main, dict(model_of().state_dict())) > 0.01, "it was trained"
    plain.load_state_dict(main)
    x = batch(7, 0).to(kind)
    with torch.no_grad():
        forward = 0.0 if how == "states away" else float((model(x) - plain(x)).abs().max())
    again = engine_of(model, 3, **copy.deepcopy(more))
    kept = worst(zeropp.full_state(model), main)
    engine.destroy()  # old engine: its model belongs to the new engine now, so this call must do nothing
    # Load the main weights in float32, because bfloat16 would round them.
    plain = plain.float() if kind == torch.bfloat16 else plain
    plain.load_state_dict(main)
    train(again, 2, 2)
    train(engine_of(plain, 3, **copy.deepcopy(more)), 2, 2)
    return forward, kept, worst(zeropp.full_state(model), zeropp.full_state(plain))


@pytest.mark.every(6)
@pytest.mark.parametrize("how", ["after a step", "a window's middle", "states away"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"zero": {"stage3_param_persistence_threshold": 50}},
        {"bf16": {"enabled": True}, "zero": {"offload_optimizer": CPU, "offload_param": CPU}},
        {"zero": {"zero_hpz_partition_size": 2}},
    ],
    ids=str,
)
def test_a_model_of_stage_3_stays_partitioned(more: dict[str, Any], how: str) -> None:
    for distances in run_ranks(2, stays_partitioned, more, how):
        assert distances == (0.0, 0.0, 0.0)


def away(how: str) -> tuple[float, float]:
    """Destroy a stage 2 engine that cannot hand over whole weights at that moment.

    Args:
        how: "frozen codes" (frozen weights are quantized), "lent" (inside GatheredParameters), or "states away".

    Returns:
        Two differences: of the weights left from the main weights, and after two more steps from a plain model.
    """
    model, plain = model_of(), model_of()
    if how == "frozen codes":
        for each in (model, plain):
            cast(Any, each).blocks[1].requires_grad_(False)
    zero = {"zero_quantized_nontrainable_weights": how == "frozen codes"}
    engine = engine_of(model, 2, zero=dict(zero))
    train(engine, 0, 2)
    main = zeropp.full_state(model)
    if how == "states away":
        engine.offload_states()
        engine.destroy()
    elif how == "lent":
        with zeropp.zero.GatheredParameters(list(model.parameters())):
            engine.destroy()
    else:
        engine.destroy()
    left = worst(zeropp.full_state(model), main)
    plain.load_state_dict(main)
    for each in (model, plain):
        train(engine_of(each, 2, zero=dict(zero)), 2, 2)
    return left, worst(zeropp.full_state(model), zeropp.full_state(plain))


@pytest.mark.every(2)
@pytest.mark.parametrize("how", ["frozen codes", "lent", "states away"])
def test_values_that_are_not_at_hand_stay_with_the_engine(how: str) -> None:
    """If destroy() cannot hand over whole weights, the model stays partitioned and keeps its main weights.

    With frozen codes training may differ by 0.05, because the plain model encodes the decoded weights once more, which
    may give other codes.
    """
    for left, gone_on in run_ranks(2, away, how):
        assert left == 0.0 and gone_on < (0.05 if how == "frozen codes" else 1e-12)


def begins_again(stage: int) -> float:
    """Train, destroy the engine, load the initial weights, and train again, as for another fold of a cross-validation.

    Returns:
        Largest difference of weights from a model that was trained only once.
    """
    model, plain = model_of(), model_of()
    initial = copy.deepcopy(model.state_dict())
    engine = engine_of(model, stage)
    train(engine, 0, 2)
    engine.destroy()
    model.load_state_dict(initial)
    for each in (model, plain):
        train(engine_of(each, stage), 2, 2)
    return worst(zeropp.full_state(model), zeropp.full_state(plain))


@pytest.mark.every(2)
@pytest.mark.parametrize("stage", [3, 2])
def test_other_weights_may_be_loaded_between_two_engines(stage: int) -> None:
    assert run_ranks(2, begins_again, stage) == [0.0, 0.0]


def of_inference(stage: int) -> float:
    """Evaluate a model with an engine, destroy the engine, and train the model in stage 2.

    Returns:
        Largest difference of weights from a model that was not evaluated before.
    """
    model, plain = model_of(), model_of()
    first = settings(gradient_accumulation_steps=1, zero={"stage": stage})
    del first["optimizer"], first["scheduler"]
    for each in (model, plain):
        next(each.parameters()).requires_grad_(False)
    engine = zeropp.initialize(model=model, config=first)[0]
    with torch.no_grad():
        engine(batch(0, 0))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    engine.destroy()
    for each in (model, plain):
        train(engine_of(each, 2), 0, 2)
    return worst(zeropp.full_state(model), zeropp.full_state(plain))


@pytest.mark.every(2)
@pytest.mark.parametrize("stage", [3, 0])
def test_a_model_that_was_evaluated(stage: int) -> None:
    """After destroy() of an inference engine, the same parameters require gradients as before the engine was made."""
    assert max(run_ranks(2, of_inference, stage)) == 0.0


def chosen_meanwhile(how: str) -> list[str]:
    """Return the names of parameters that require gradients after inference engines are destroyed.

    A first inference engine fails to be made.

    Args:
        how: "twice" makes two inference engines; "adapter" adds an adapter after the first engine; "adapter, twice"
            does both.
    """
    model = model_of()
    only = settings(gradient_accumulation_steps=1)
    del only["optimizer"], only["scheduler"]
    with pytest.raises(ValueError, match="hpz"):
        zeropp.initialize(model=model, config={**only, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}})
    assert all(parameter.requires_grad for parameter in model.parameters())
    engines = [zeropp.initialize(model=model, config=only)[0]]
    if how != "twice":
        model.adapter = nn.Linear(2, 2).double()
    if how != "adapter":
        engines.append(zeropp.initialize(model=model, config=only)[0])
    for engine in engines:
        engine.destroy()
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_destroy_makes_parameters_frozen_by_inference_trainable_again() -> None:
    names = [name for name, _ in model_of().named_parameters()]
    assert run_ranks(2, chosen_meanwhile, "twice") == [names] * 2
    for how in ("adapter", "adapter, twice"):
        assert run_ranks(2, chosen_meanwhile, how) == [["adapter.weight", "adapter.bias"]] * 2


def rounded_elsewhere(how: str) -> tuple[float, float]:
    """Destroy a stage 2 engine whose computed weights differ from the main weights.

    Args:
        how: "autocast" (weights are rounded for computation), or "average" (an average is applied).

    Returns:
        Two differences from the main weights: after destroy(), and after the model is wrapped again.
    """
    model = model_of().float()
    more = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if how == "autocast" else {}
    engine = engine_of(model, 2, **more)
    average = zeropp.ema(model, decay=0.5)
    for number in range(2):
        engine.backward(engine(batch(number, dist.get_rank()).float()).float().square().mean())
        engine.step()
        average.update()
    main = zeropp.full_state(model)
    with average.applied() if how == "average" else contextlib.nullcontext():
        engine.destroy()
    with torch.no_grad():
        model(batch(0, 0).float())
    left = worst(zeropp.full_state(model), main)
    engine_of(model, 2)
    return left, worst(zeropp.full_state(model), main)


@pytest.mark.every(2)
@pytest.mark.parametrize("how", ["autocast", "average"])
def test_weights_that_are_not_the_main_ones_are_not_left_behind(how: str) -> None:
    assert run_ranks(2, rounded_elsewhere, how) == [(0.0, 0.0)] * 2


def holders(stage: int) -> tuple[bool, bool]:
    """Destroy an engine, and drop the model afterwards.

    Returns:
        True if the core engine is freed by destroy(), and True if it is freed once the model is dropped.
    """
    engine = engine_of(model_of(), stage)
    train(engine, 0, 1)
    model, core, optimizer = engine.module, weakref.ref(engine.core), weakref.ref(engine.optimizer)
    engine.destroy()
    del engine
    gc.collect()
    gone = core() is None
    assert optimizer() is None
    del model
    gc.collect()
    return gone, core() is None


@pytest.mark.parametrize("stage", [1, 3])
def test_who_holds_the_engine(stage: int) -> None:
    assert run_ranks(2, holders, stage) == [(stage == 1, True)] * 2
