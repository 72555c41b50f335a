"""The modules own the engine: a model works without its optimizer, frees all memory, and can be wrapped again."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import Routed, make_config
from tests.support.parity import Recipe, assert_close, build, make_optimizer, micro_batch
from tests.support.rank_pool import RankFailure, run_ranks, spread
from tests.support.small_models import MODELS

PLACED: dict[str, dict[str, object]] = {
    "stage 3": {}, "stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "hpz": {"zero_hpz_partition_size": 2},
    "mics": {"mics_shard_size": 2}, "persistent": {"persist": 10**6}, "kept": {"reuse": 10**9, "prefetch": 10**6},
    "delta4": {"zero_hpz_partition_size": 2, "weight_codec": "delta4", "bf16": {"enabled": True}},
}  # fmt: skip


def steps(recipe: Recipe, model: nn.Module, optimizer: Any, numbers: range, world: int | None = None) -> None:
    """Train a sharded or a plain model.

    Args:
        recipe: recipe of the model and its batches.
        model: the model.
        optimizer: its optimizer.
        numbers: numbers of the steps.
        world: number of ranks whose batches are used; None for the batches of this rank only.
    """
    for step in numbers:
        optimizer.zero_grad()
        for rank in [dist.get_rank()] if world is None else range(world):
            loss = MODELS[recipe.model].loss(model, micro_batch(recipe, step, 0, rank))
            (loss if world is None else loss / world).backward()
        optimizer.step()


def train(model: nn.Module, config: dict[str, object]) -> None:
    """Wrap a model and train two steps. The optimizer is dropped on return, as in a user's function that forgets it."""
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((2, 8), float(step + dist.get_rank()))).square().mean().backward()
        optimizer.step()


def kept(settings: dict[str, object]) -> list[str]:
    """Train a model, drop its optimizer, and use the model in many ways.

    Returns:
        Names of the uses with a wrong result.
    """
    torch.manual_seed(0)
    model, plain, x = Routed(), Routed(), torch.ones(2, 8)
    train(model, make_config(**settings))
    state, wrong = zeropp.full_state(model), []
    if torch.equal(state["blocks.0.lin.weight"], plain.blocks[0].lin.weight):
        wrong.append("nothing was trained")
    plain.load_state_dict(state)
    tolerance = 0.02 if "bf16" in settings else 1e-6
    for name, value in model.state_dict().items():
        if not torch.allclose(value.float(), state[name], rtol=0.01 if "bf16" in settings else 0):
            wrong.append(f"state_dict: {name}")
    for _ in range(3):
        if not torch.allclose(model(x).float(), plain(x), atol=tolerance):
            wrong.append("forward")
    with zeropp.zero.GatheredParameters(model):
        if not torch.equal(model.blocks[1].lin.weight, state["blocks.1.lin.weight"]):
            wrong.append("GatheredParameters")
    model.load_state_dict({name: value * 2 for name, value in state.items()})
    if not torch.equal(zeropp.full_state(model)["blocks.0.lin.bias"], 2 * state["blocks.0.lin.bias"]):
        wrong.append("load_state_dict")
    if zeropp.comm_report(model).total_bytes == 0:
        wrong.append("comm_report")
    block = model.blocks[1]  # each module of the model keeps the engine alive
    del model
    plain.load_state_dict({name: value * 2 for name, value in state.items()})
    if not torch.allclose(block(x).float(), plain.blocks[1](x), atol=tolerance):
        wrong.append("one block")
    return wrong


@pytest.mark.every(5)
@pytest.mark.parametrize("name", PLACED)
def test_a_model_keeps_its_trained_weights_without_the_optimizer(name: str) -> None:
    assert run_ranks(4, kept, PLACED[name], local_world_size=2) == [[]] * 4


def dropped(settings: dict[str, object], model_name: str | None) -> list[str]:
    """Train, and drop the optimizer and then the model while the garbage collector is off.

    Args:
        settings: keys for ``make_config``.
        model_name: key of MODELS; None for a model of blocks.

    Returns:
        Errors: objects that went with the optimizer, and objects, shards and threads that outlive the model.
    """
    recipe = Recipe(model=model_name or "gpt", dtype=torch.float32)
    model = Routed() if model_name is None else build(recipe)
    before = set(threading.enumerate())
    optimizer = zeropp.ZeroOptimizer(make_optimizer(recipe, model), model, make_config(**settings))
    if model_name is None:
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
    else:
        steps(recipe, model, optimizer, range(2))
    engine = optimizer.engine
    things = [optimizer, engine, engine.comm, *engine.units, *engine.buffers, *model.modules()]
    refs = [(type(thing).__name__, weakref.ref(thing)) for thing in things]
    storages = [weakref.ref(buffer.shard) for buffer in engine.buffers]
    del engine, things
    gc.collect()
    gc.disable()
    try:
        del optimizer
        alive = [name for name, ref in refs[1:] if ref() is None]
        wrong = [f"{alive} went with the optimizer"] if alive else []
        wrong += [] if refs[0][1]() is None else ["the optimizer stays"]
        del model
        for thread in set(threading.enumerate()) - before:  # a thread ends after its refresh in flight
            thread.join(timeout=5)
        wrong += [f"{name} stays" for name, ref in refs if ref() is not None]
        wrong += ["a shard stays" for ref in storages if ref() is not None]
        wrong += [f"{thread.name} runs" for thread in set(threading.enumerate()) - before]
    finally:
        gc.enable()
    return wrong


@pytest.mark.every(5)
@pytest.mark.parametrize("name", ["hpz", "stage 3", "stage 0"])
def test_all_goes_with_the_model_without_the_garbage_collector(name: str) -> None:
    assert run_ranks(4, dropped, PLACED[name], None, local_world_size=2) == [[]] * 4


def test_a_transformer_goes_without_the_garbage_collector() -> None:
    assert run_ranks(2, dropped, {}, "gpt") == [[], []]


AGAIN: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "the same": ({}, {}),
    "from 3 to 0": ({}, {"stage": 0}),
    "from 0 to 3": ({"stage": 0}, {}),
    "from hpz to mics": ({"zero_hpz_partition_size": 2}, {"mics_shard_size": 2}),
    "from one unit to several": ({"unit_min_blocks": 128}, {"persist": 40}),
}


def wrapped_again(recipe: Recipe, first: dict[str, object], then: dict[str, object]) -> tuple[dict[str, Tensor], bool]:
    """Train three steps, wrap the model again with other settings, and train three more steps.

    Args:
        recipe: recipe of the model.
        first: keys for ``make_config`` at first.
        then: keys for ``make_config`` of the second wrapping.

    Returns:
        Full weights at the end, and True if the second wrapping changed no bit and no dtype of a weight.
    """
    model = build(recipe)
    optimizer = zeropp.ZeroOptimizer(make_optimizer(recipe, model), model, make_config(**first))
    steps(recipe, model, optimizer, range(3))
    before = zeropp.full_state(model)
    del optimizer
    optimizer = zeropp.ZeroOptimizer(make_optimizer(recipe, model), model, make_config(**then))
    now = zeropp.full_state(model)
    same = all(torch.equal(now[name], value) and now[name].dtype == value.dtype for name, value in before.items())
    steps(recipe, model, optimizer, range(3, 6))
    return zeropp.full_state(model), same


@pytest.mark.every(4)
@pytest.mark.parametrize(("name", "model"), spread(AGAIN, ["gpt", "low rank"], 2))
def test_wrapping_again_takes_the_main_weights_over(name: str, model: str) -> None:
    recipe = Recipe(model=model)
    reference = build(recipe)
    for numbers in (range(3), range(3, 6)):
        steps(recipe, reference, make_optimizer(recipe, reference), numbers, world=4)
    for state, same in run_ranks(4, wrapped_again, recipe, *AGAIN[name], local_world_size=2):
        assert same
        for key, value in reference.state_dict().items():
            assert_close(state[key], value, 1e-9, key)


BF16: dict[str, object] = {"bf16": {"enabled": True}}
ROUNDED: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "bf16": (BF16, BF16),
    "bf16, then float32": (BF16, {}),
    "int8 on the wire": ({"zero_quantized_weights": True}, {"zero_quantized_weights": True}),
    "frozen codes": ({"zero_quantized_nontrainable_weights": True}, {"zero_quantized_nontrainable_weights": True}),
    "frozen codes, then another placement": (
        {"zero_quantized_nontrainable_weights": True},
        {"zero_quantized_nontrainable_weights": True, "zero_hpz_partition_size": 2, "persist": 40},
    ),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ROUNDED)
def test_wrapping_again_rounds_nothing(name: str) -> None:
    for _, same in run_ranks(4, wrapped_again, Recipe("low rank", torch.float32), *ROUNDED[name], local_world_size=2):
        assert same


def extended() -> tuple[bool, bool, float]:
    """Train a model, add a head, wrap the model again, and train one step.

    Returns:
        True if old parameters have kept their values, True if the head's weight has rank 0's values, and the largest
        change of the head's weight in the step.
    """
    model = Routed()
    train(model, make_config())
    before = zeropp.full_state(model)
    model.head = nn.Linear(8, 8)
    nn.init.constant_(model.head.weight, 1.0 + dist.get_rank())
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(unit_min_blocks=1))
    state = zeropp.full_state(model)
    model.head(model(torch.ones(2, 8))).sum().backward()
    optimizer.step()
    changed = (zeropp.full_state(model)["head.weight"] - state["head.weight"]).abs().max()
    old = all(torch.equal(state[name], value) for name, value in before.items())
    return old, bool((state["head.weight"] == 1.0).all()), float(changed)


def test_parameters_that_came_in_between_have_rank_0s_values() -> None:
    for old, new, changed in run_ranks(2, extended):
        assert old and new and changed > 0


def late_backward(beside: bool) -> str:
    """Run a backward through a graph that was made before the model was wrapped again.

    Args:
        beside: True to add the loss of a graph made after that, whose weights are gathered.

    Returns:
        The error of the backward.
    """
    model = Routed()
    config = make_config(reuse=10**6, hang_timeout=5)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    loss = model(torch.ones(2, 8)).square().mean()
    del optimizer
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    if beside:
        loss = loss + model(torch.ones(2, 8)).square().mean()
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return str(caught.value)


@pytest.mark.every(2)
@pytest.mark.parametrize("beside", [False, True])
def test_a_graph_from_before_is_refused(beside: bool) -> None:
    for message in run_ranks(2, late_backward, beside):
        assert "modified by an inplace operation" in message


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.one(x))
        return y


def refused(how: str) -> None:
    model: nn.Module = nn.Linear(8, 8, bias=False) if how == "of one parameter" else Two()
    wrapped = model
    group = dist.new_group([0, 1])
    if how == "other ranks":
        dist.new_group([0])
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    if how == "closed":
        optimizer.close()
    if how not in ("still there", "of one parameter"):
        del optimizer
    if how == "a part":
        wrapped = model.one
    if how == "other ranks":
        group = dist.distributed_c10d.new_group([1, 0], sort_ranks=False)
    zeropp.ZeroOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1), wrapped, make_config(), process_group=group)


REFUSED = {
    "still there": "already managed by a ZeroOptimizer.*del optimizer",
    "of one parameter": "already managed by a ZeroOptimizer.*del optimizer",
    "a part": r"a part of the model.*\['two.weight', 'two.bias'\]; wrap the whole model again",
    "closed": r"given up by close\(\)",
    "other ranks": r"sharded the model over ranks \[0, 1\], and process_group has ranks \[1, 0\]",
}


@pytest.mark.parametrize("how", REFUSED)
def test_wrapping_a_managed_model_again_is_refused(how: str) -> None:
    for failure in run_ranks(2, refused, how, catch=True, timeout=40):
        assert isinstance(failure, RankFailure) and failure.type_name == "ValueError"
        assert re.search(REFUSED[how], failure.message), failure.message


def outlived() -> bool:
    """Register a model's parameter as external on a module outside of the model, and drop the model.

    Returns:
        True if the module outside still runs.
    """
    model, outside, x = nn.Linear(8, 8), nn.Identity(), torch.ones(2, 8)
    train(model, make_config())
    zeropp.zero.register_external_parameter(outside, model.weight)
    outside(x)
    del model
    gc.collect()
    return torch.equal(outside(x), x)


def test_a_module_outside_outlives_the_model() -> None:
    assert all(run_ranks(2, outlived))
