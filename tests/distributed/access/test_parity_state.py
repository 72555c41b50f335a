"""state_dict, full_state and load_state_dict of sharded models equal plain torch's, and training resumes exactly."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.parity import (
    Recipe,
    assert_close,
    build,
    continue_zero,
    make_optimizer,
    micro_batch,
    train_plain,
    train_zero,
)
from tests.support.rank_pool import run_ranks
from tests.support.small_models import MODELS

PERSISTENCE: dict[str, dict[str, object]] = {"all cut": {}, "small kept": {"stage3_param_persistence_threshold": 100}}


def wrap(recipe: Recipe, seed: int = 7) -> tuple[nn.Module, zeropp.ZeroOptimizer]:
    model = build(recipe, seed)
    return model, zeropp.ZeroOptimizer(make_optimizer(recipe, model), model, recipe.config())


def loss_on(recipe: Recipe, model: nn.Module, step: int, rank: int) -> Tensor:
    return MODELS[recipe.model].loss(model, micro_batch(recipe, step, 0, rank))


def take_states(recipe: Recipe) -> tuple[dict[str, Tensor], ...]:
    model, optimizer = wrap(recipe)
    continue_zero(recipe, model, optimizer, range(recipe.steps), dist.get_rank())
    child = next(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    part = model.get_submodule(child).state_dict(prefix=f"{child}.")
    return model.state_dict(), zeropp.full_state(model), part, zeropp.full_state(model, rank0_only=True)


@pytest.mark.every(12)
@pytest.mark.parametrize("persistence", PERSISTENCE)
@pytest.mark.parametrize("model", ["gpt", "raw root", "convolutions", "nested lists", "low rank"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_state_dict_and_full_state(model: str, bf16: bool, persistence: str) -> None:
    top: dict[str, object] = {"bf16": {"enabled": True}} if bf16 else {}
    recipe = Recipe(model, torch.float32, steps=2, top=top, zero=PERSISTENCE[persistence])
    plain = build(recipe)
    trained = {name for name, p in plain.named_parameters(remove_duplicate=False) if p.requires_grad}
    parameters = {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    wanted = plain.state_dict()
    first = None
    for rank, (state, full, part, rank0) in enumerate(run_ranks(2, take_states, recipe)):
        assert list(state) == list(wanted)
        assert full.keys() == wanted.keys()
        for name, value in wanted.items():
            assert state[name].shape == full[name].shape == value.shape, name
            assert state[name].dtype == (torch.bfloat16 if bf16 and name in parameters else value.dtype), name
            if name in trained:
                assert full[name].dtype == torch.float32, name
            assert torch.equal(full[name].to(state[name].dtype), state[name]), name
        assert part and all(torch.equal(part[name], state[name]) for name in part)
        assert rank0.keys() == (full.keys() if rank == 0 else set())
        assert all(torch.equal(rank0[name], full[name]) for name in rank0)
        first = first or full
        assert all(torch.equal(full[name], first[name]) for name in full), "ranks differ"
    if not bf16:
        for name, value in train_plain(recipe, 2)[0].state.items():
            # AdamW turns rounding noise in key biases, whose gradient is zero, into full steps, so the bound is loose.
            assert_close(first[name], value, 1e-3, name)


def load_and_train(recipe: Recipe, state: dict[str, Tensor], steps: int) -> tuple[Any, ...]:
    """Train two steps, load a plain model's state dict, and train on. The optimizer's moments are kept.

    Returns:
        (missing keys, unexpected keys), full_state after the load, and the training run after the load.
    """
    model, optimizer = wrap(recipe, seed=11)
    rank = dist.get_rank()
    continue_zero(recipe, model, optimizer, range(2), rank)
    loaded = model.load_state_dict(state)
    after = zeropp.full_state(model)
    run = continue_zero(recipe, model, optimizer, range(2, 2 + steps), rank)
    return (list(loaded.missing_keys), list(loaded.unexpected_keys)), after, run


@pytest.mark.every(5)
@pytest.mark.parametrize("persistence", PERSISTENCE)
@pytest.mark.parametrize("model", ["gpt", "raw root", "convolutions", "low rank"])
def test_load_state_dict_of_a_plain_model(model: str, persistence: str) -> None:
    recipe = Recipe(model, zero=PERSISTENCE[persistence])
    other = build(recipe, seed=23).state_dict()
    plain = build(recipe, seed=11)
    optimizer = make_optimizer(recipe, plain)
    losses = []
    for step in range(4):
        if step == 2:
            plain.load_state_dict(other)
        optimizer.zero_grad()
        parts = [loss_on(recipe, plain, step, rank) for rank in range(2)]
        losses.append(parts[0].item())
        (sum(parts) / 2).backward()
        optimizer.step()
    for rank, (keys, after, run) in enumerate(run_ranks(2, load_and_train, recipe, other, 2)):
        assert keys == ([], [])
        for name, value in other.items():
            assert torch.equal(after[name], value), name
        if rank == 0:
            assert_close(run.losses, losses[2:], 1e-9, "losses")
        for name, value in plain.state_dict().items():
            assert_close(run.state[name], value, 1e-9, name)


def load_partly(recipe: Recipe, state: dict[str, Tensor], strict: bool) -> tuple[Any, ...]:
    model, optimizer = wrap(recipe)
    loss_before = loss_on(recipe, model, 0, 0).item()
    error = None
    keys: tuple[list[str], list[str]] = ([], [])
    try:
        result = model.load_state_dict(state, strict=strict)
        keys = (sorted(result.missing_keys), sorted(result.unexpected_keys))
    except RuntimeError as problem:
        error = str(problem)
    full = zeropp.full_state(model)
    loss_after = loss_on(recipe, model, 0, 0).item()
    optimizer.backward(loss_on(recipe, model, 0, dist.get_rank()))
    optimizer.step()
    return error, keys, full, loss_before == loss_after


@pytest.mark.parametrize("persistence", PERSISTENCE)
def test_partial_load(persistence: str) -> None:
    recipe = Recipe(zero=PERSISTENCE[persistence])
    whole = build(recipe).state_dict()
    part = {name: value + 1 for name, value in whole.items() if name.startswith("blocks.1") or name == "norm.bias"}
    extra = {**part, "stranger": torch.zeros(3)}
    for error, keys, full, unchanged in run_ranks(2, load_partly, recipe, extra, False):
        assert error is None and not unchanged
        assert keys == (sorted(whole.keys() - part.keys()), ["stranger"])
        for name, value in whole.items():
            assert torch.equal(full[name], part.get(name, value)), name


@pytest.mark.every(2)
@pytest.mark.parametrize("bad", ["shape", "missing", "unexpected"])
def test_refused_load(bad: str) -> None:
    """load_state_dict raises torch's own error, which names the wrong entry.

    No weight changes, and all ranks can train on.
    """
    recipe = Recipe()
    whole = build(recipe).state_dict()
    state, name = dict(whole), "blocks.2.up.weight"
    if bad == "shape":
        state[name] = state[name][1:]
    elif bad == "missing":
        del state[name]
    else:
        name = "stranger"
        state[name] = torch.zeros(3)
    for error, _, full, unchanged in run_ranks(2, load_partly, recipe, state, True):
        assert error is not None and name in error
        assert unchanged
        for key, value in whole.items():
            assert torch.equal(full[key], value), key


def resume(recipe: Recipe, how: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compare four steps in one run with two steps, a save, a load into a new model and optimizer, and two more steps.

    Args:
        recipe: model and optimizer of the run.
        how: "before a step" loads into a new optimizer; otherwise the optimizer has stepped once and is loaded first.

    Returns:
        full_state of the uninterrupted run and of the resumed run.
    """
    rank = dist.get_rank()
    model, optimizer = wrap(recipe)
    continue_zero(recipe, model, optimizer, range(2), rank)
    file = io.BytesIO()
    torch.save({"full": zeropp.full_state(model), "optimizer": optimizer.state_dict()}, file)
    straight = continue_zero(recipe, model, optimizer, range(2, 4), rank)
    optimizer.close()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model, optimizer = wrap(recipe, seed=99)
    if how == "before a step":
        model.load_state_dict(saved["full"])
        optimizer.load_state_dict(saved["optimizer"])
    else:
        continue_zero(recipe, model, optimizer, range(10, 11), rank)
        optimizer.load_state_dict(saved["optimizer"])
        model.load_state_dict(saved["full"])
    for group in optimizer.param_groups:
        assert group["params"] and all(p.ndim == 1 for p in group["params"])
    resumed = continue_zero(recipe, model, optimizer, range(2, 4), rank)
    assert straight.losses == resumed.losses, (straight.losses, resumed.losses)
    return straight.state, resumed.state


@pytest.mark.every(5)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Lion"])
@pytest.mark.parametrize("how", ["before a step", "after a step"])
def test_resume_from_this_ranks_state(how: str, optimizer: str) -> None:
    recipe = Recipe("frozen middle", torch.float32, optimizer=optimizer, zero=PERSISTENCE["small kept"])
    for straight, resumed in run_ranks(2, resume, recipe, how):
        for name, value in straight.items():
            assert torch.equal(value, resumed[name]), name


def resume_bf16(recipe: Recipe, model_first: bool) -> bool:
    """Resume a bf16 model from optimizer.state_dict() and model.state_dict(), in either order.

    The optimizer's state has the fp32 main weights, the model's state dict has them rounded to bf16. load_state_dict of
    the model keeps a main weight that rounds to the loaded value.

    Returns:
        True if losses and weights equal those of the uninterrupted run bit for bit.
    """
    rank = dist.get_rank()
    model, optimizer = wrap(recipe)
    continue_zero(recipe, model, optimizer, range(2), rank)
    saved, weights = copy.deepcopy(optimizer.state_dict()), model.state_dict()
    straight = continue_zero(recipe, model, optimizer, range(2, 4), rank)
    optimizer.close()
    model, optimizer = wrap(recipe, seed=99)
    if model_first:
        model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    if not model_first:
        model.load_state_dict(weights)
    resumed = continue_zero(recipe, model, optimizer, range(2, 4), rank)
    same = all(torch.equal(value, resumed.state[name]) for name, value in straight.state.items())
    return same and straight.losses == resumed.losses


@pytest.mark.every(2)
@pytest.mark.parametrize("model_first", [False, True])
def test_resume_bf16_from_both_states(model_first: bool) -> None:
    recipe = Recipe(dtype=torch.float32, top={"bf16": {"enabled": True}})
    assert all(run_ranks(2, resume_bf16, recipe, model_first))


def load_coarse(recipe: Recipe) -> dict[str, Tensor]:
    model, optimizer = wrap(recipe)
    coarse = {name: value.bfloat16() for name, value in model.state_dict().items()}
    continue_zero(recipe, model, optimizer, range(1), dist.get_rank())
    model.load_state_dict(coarse)
    model.load_state_dict({name: value.to(torch.float8_e5m2) for name, value in coarse.items()})
    model.load_state_dict(coarse)
    return {name: value - coarse[name] for name, value in zeropp.full_state(model).items()}


def test_values_of_a_coarser_dtype_are_loaded_as_they_are() -> None:
    for off in run_ranks(2, load_coarse, Recipe(dtype=torch.float32)):
        assert not any(value.any() for value in off.values())


# Several wraps in one process.


def wrap_again_and_again(recipe: Recipe, times: int) -> list[list[float]]:
    return [train_zero(recipe).losses for _ in range(times)]


@pytest.mark.campaign
@pytest.mark.parametrize("world", [2, 4])
def test_wrap_train_close_and_wrap_again(world: int) -> None:
    recipe = Recipe(steps=1)
    for runs in run_ranks(world, wrap_again_and_again, recipe, 8, local_world_size=2):
        assert all(losses == runs[0] for losses in runs)


def train_after_other_groups(recipe: Recipe) -> list[float]:
    """Train in a process group of ranks 0 and 1, and then on all four ranks.

    Ranks belong to different numbers of groups.
    """
    dist.new_group([2, 3])
    group = dist.new_group([0, 1])
    dist.new_group([0, 1])
    if dist.get_rank() < 2:
        train_zero(recipe, group=group)
    return train_zero(recipe).losses


def test_ranks_may_belong_to_different_numbers_of_groups() -> None:
    recipe = Recipe(steps=1)
    runs = run_ranks(4, train_after_other_groups, recipe, timeout=40)
    for rank, plain in enumerate(train_plain(recipe, 4)):
        assert_close(runs[rank], plain.losses, 1e-9, f"rank {rank}")


def wrap_without_numpy() -> int:
    """Wrap and train a model while torch's ``all_gather_object`` raises, as it does without NumPy.

    Returns:
        Number of entries in full_state.
    """

    def unavailable(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Numpy is not available")

    kept = dist.all_gather_object
    dist.all_gather_object = unavailable
    try:
        model = torch.nn.Linear(3, 3)
        optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return len(zeropp.full_state(model))
    finally:
        dist.all_gather_object = kept


def test_wrapping_and_training_need_no_numpy() -> None:
    assert run_ranks(2, wrap_without_numpy) == [2, 2]


def saved_in_inference_mode() -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    with torch.inference_mode():
        inside = [model.state_dict(), zeropp.full_state(model)]
    outside = [model.state_dict(), zeropp.full_state(model)]
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return all(torch.equal(a[name], b[name]) for a, b in zip(inside, outside, strict=True) for name in b)


def test_saving_in_inference_mode() -> None:
    assert all(run_ranks(2, saved_in_inference_mode))


def closed() -> list[str]:
    model = nn.Linear(8, 8)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    optimizer.close()
    optimizer.close()
    said = []
    for use in (optimizer.step, model.state_dict, lambda: zeropp.full_state(model), lambda: model(torch.ones(1, 8))):
        with pytest.raises(RuntimeError) as caught:
            use()
        said.append(str(caught.value))
    return said


def test_use_after_close_is_refused() -> None:
    for said in run_ranks(2, closed):
        assert len(said) == 4 and all("was called after close()" in text for text in said), said


def loads_another_precision(ranks: tuple[int, ...]) -> tuple[str, bool]:
    """Load an optimizer state of another precision on some ranks.

    Args:
        ranks: ranks that load the state of an fp32 run; the other ranks load their own bf16 state.

    Returns:
        The error message, and True if no weight changed.
    """
    states = {}
    for precision in ("fp32", "bf16"):
        recipe = Recipe(dtype=torch.float32, top={"bf16": {"enabled": precision == "bf16"}})
        model = build(recipe)
        optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, recipe.config())
        states[precision] = optimizer.state_dict()
        for value in states[precision]["zeropp"]["main_weights"].values():
            value += 1
    before = zeropp.full_state(model)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        optimizer.load_state_dict(states["fp32" if dist.get_rank() in ranks else "bf16"])
    after = zeropp.full_state(model)
    return str(caught.value), all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.every(2)
@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=str)
def test_a_state_of_another_precision_is_refused_by_all(ranks: tuple[int, ...]) -> None:
    for rank, (said, unchanged) in enumerate(run_ranks(2, loads_another_precision, ranks)):
        expected = "precision or unit settings" if rank in ranks else f"the states given to ranks {list(ranks)}"
        assert expected in said and unchanged


def loads_a_wrong_file(settings: dict[str, object], plain: bool) -> tuple[str, bool]:
    """Load a bad optimizer state on rank 1: one of another partition, or one without zeropp's entry.

    Args:
        settings: entries of the zero_optimization block.
        plain: True for a state without the "zeropp" entry.

    Returns:
        The error message, and True if no weight changed.
    """
    recipe = Recipe(steps=1, zero=settings)
    model = build(recipe)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, recipe.config())
    saved = optimizer.state_dict()
    with torch.no_grad():
        for name in saved["zeropp"]["main_weights"]:
            saved["zeropp"]["main_weights"][name] += 1
    before = zeropp.full_state(model)
    if dist.get_rank() == 1 and plain:
        del saved["zeropp"]
    elif dist.get_rank() == 1:
        saved["zeropp"]["layout"] = "another"
    with pytest.raises((ValueError, RuntimeError)) as caught:
        optimizer.load_state_dict(saved)
    after = zeropp.full_state(model)
    return str(caught.value), all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("plain", "said"), [(False, "this state is of another partition"), (True, "the state has no 'zeropp' entry")]
)
@pytest.mark.parametrize("settings", [{}, {"stage": 1}], ids=["stage 3", "stage 1"])
def test_a_wrong_file_on_one_rank_is_loaded_on_none(settings: dict[str, object], plain: bool, said: str) -> None:
    first, second = run_ranks(2, loads_a_wrong_file, settings, plain)
    assert "the states given to ranks [1] do not fit; nothing was loaded" in first[0] and first[1]
    assert said in second[0] and second[1]


def load_state_of(saver: int, world: int) -> tuple[str, str]:
    """Load one rank's optimizer state on all ranks.

    Args:
        saver: rank whose state is loaded.
        world: world size recorded in the state.

    Returns:
        Type and message of the error on this rank; empty strings if the load succeeds.
    """
    _, optimizer = wrap(Recipe())
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, optimizer.state_dict())
    state: Any = states[saver]
    if world != dist.get_world_size():
        state["zeropp"].update(world=world, layout="another")
    try:
        optimizer.load_state_dict(state)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_state_that_one_rank_saved_for_all_is_named() -> None:
    first, second = run_ranks(2, load_state_of, 0, 2)
    assert second[0] == "ValueError" and "saved by rank 0 of 2; this is rank 1: each rank saves its own" in second[1]
    assert first[0] == "RuntimeError" and "ranks [1] do not fit" in first[1]
    for kind, message in run_ranks(2, load_state_of, 1, 8):
        assert kind == "ValueError" and "saved by rank 1 of 8, and there are 2 ranks now" in message


def load_released(other: bool) -> tuple[str, bool]:
    """Load released parameters (named_parameters() of a sharded model) as a state dict.

    Args:
        other: True if the parameters belong to another model than the one that loads them.

    Returns:
        The error message, and True if all weights are finite afterwards.
    """
    model, _ = wrap(Recipe())
    source, _ = wrap(Recipe(), seed=8)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(dict((source if other else model).named_parameters()))
    return str(caught.value), all(bool(value.isfinite().all()) for value in zeropp.full_state(model).values())


@pytest.mark.every(2)
@pytest.mark.parametrize("other", [False, True])
def test_released_parameters_are_no_state_dict(other: bool) -> None:
    for message, finite in run_ranks(2, load_released, other):
        assert "zeropp keeps its values elsewhere" in message and finite
