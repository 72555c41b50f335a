"""Steps against plain torch: optimizers, schedulers, hooks, closures, reduction factors and process groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_post_hook

import zeropp
from tests.support.optimizers import OPTIMIZERS
from tests.support.parity import (
    Recipe,
    Trained,
    assert_close,
    build,
    check,
    compare,
    make_optimizer,
    micro_batch,
    train_plain,
    train_zero,
)
from tests.support.rank_pool import run_ranks
from tests.support.small_models import MODELS


def loss_on(recipe: Recipe, model: nn.Module, step: int, rank: int) -> Tensor:
    return MODELS[recipe.model].loss(model, micro_batch(recipe, step, 0, rank))


def wrap(recipe: Recipe, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer, zeropp.ZeroOptimizer]:
    model = build(recipe)
    inner = make_optimizer(recipe, model)
    return model, inner, zeropp.ZeroOptimizer(inner, model, recipe.config(), **more)


# Optimizers.


@pytest.mark.every(4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str) -> None:
    check(Recipe(optimizer=optimizer, accumulation=2, clip=0.5), 2)


@pytest.mark.every(2)
@pytest.mark.parametrize("optimizer", ["Lion", "Adagrad"])
def test_optimizers_over_two_nodes(optimizer: str) -> None:
    check(Recipe("frozen middle", optimizer=optimizer), 4, nodes=2)


# Schedulers and edits of the learning rate.


def drive_rate(how: str, optimizer: Any) -> Callable[[int], None]:
    """Return a function of the step's number that changes the learning rate after the step."""
    if how == "StepLR":
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    elif how == "LambdaLR":
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: 1 / (1 + t), lambda t: 0.9**t])
    elif how == "OneCycleLR":
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)  # changes betas, too
    else:

        def edit(step: int) -> None:
            optimizer.param_groups[step % 2]["lr"] *= 0.7
            optimizer.param_groups[1]["weight_decay"] = 0.01 * step

        return edit
    return lambda step: scheduler.step()


def train_with_rate(recipe: Recipe, how: str, when: str) -> Trained:
    model = build(recipe)
    inner = make_optimizer(recipe, model)
    before = drive_rate(how, inner) if when == "before" else None
    optimizer = zeropp.ZeroOptimizer(inner, model, recipe.config())
    change = before or drive_rate(how, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if a scheduler cannot see that the optimizer has stepped
        trained = run_steps(recipe, model, optimizer, change)
    trained.norms = []  # the plain run records no norms
    return trained


def run_steps(
    recipe: Recipe, model: nn.Module, optimizer: zeropp.ZeroOptimizer, change: Callable[[int], object] | None = None
) -> Trained:
    """Train for the recipe's steps, calling ``change`` after each."""
    losses, norms = [], []
    for step in range(recipe.steps):
        optimizer.zero_grad()
        loss = loss_on(recipe, model, step, dist.get_rank())
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
        norms.append(optimizer.grad_norm)
        if change is not None:
            change(step)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return Trained(losses, norms, zeropp.full_state(model), names)


def plain_with_rate(recipe: Recipe, how: str, world: int) -> Trained:
    model = build(recipe)
    optimizer = make_optimizer(recipe, model)
    change = drive_rate(how, optimizer)
    losses = []
    for step in range(recipe.steps):
        optimizer.zero_grad()
        parts = [loss_on(recipe, model, step, rank) for rank in range(world)]
        losses.append(parts[0].item())
        (sum(parts) / world).backward()
        optimizer.step()
        change(step)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return Trained(losses, [], dict(model.state_dict()), names)


@pytest.mark.every(4)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["StepLR", "LambdaLR", "OneCycleLR", "edits"])
def test_learning_rate_schedules(how: str, when: str) -> None:
    recipe = Recipe(steps=6)
    run = run_ranks(2, train_with_rate, recipe, how, when)[0]
    compare(run, plain_with_rate(recipe, how, 2), 1e-9)


# Hooks and closures.


def count_hooks(recipe: Recipe) -> tuple[dict[str, int], list[float], list[float]]:
    counts = dict.fromkeys(("inner pre", "inner post", "outer pre", "outer post", "global", "closure"), 0)

    def counter(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            counts[name] += 1

        return hook

    model = build(recipe)
    inner = make_optimizer(recipe, model)
    inner.register_step_pre_hook(counter("inner pre"))
    inner.register_step_post_hook(counter("inner post"))
    optimizer = zeropp.ZeroOptimizer(inner, model, recipe.config())
    optimizer.register_step_pre_hook(counter("outer pre"))
    optimizer.register_step_post_hook(counter("outer post"))
    everywhere = register_optimizer_step_post_hook(counter("global"))
    given, returned = [], []
    try:
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                counts["closure"] += 1
                optimizer.zero_grad()
                loss = loss_on(recipe, model, step, dist.get_rank())
                given.append(loss.item())
                loss.backward()
                return loss

            with torch.no_grad():  # step() must enable gradients for its closure
                value = optimizer.step(closure)
            assert value is not None
            returned.append(value.item())
    finally:
        everywhere.remove()
    return counts, given, returned


def test_hooks_and_closures_run_once_a_step() -> None:
    recipe = Recipe(steps=3)
    for rank, (counts, given, returned) in enumerate(run_ranks(2, count_hooks, recipe)):
        assert counts == dict.fromkeys(counts, 3)
        assert given == returned
        assert_close(given, train_plain(recipe, 2)[rank].losses, 1e-9, "losses under closures")


# Norms and clipping after gradients were edited.


def clip_after_edit(recipe: Recipe, factor: float) -> tuple[float, float, float]:
    model, _, optimizer = wrap(recipe)
    optimizer.backward(loss_on(recipe, model, 0, dist.get_rank()))
    first = optimizer.clip_grad_norm_(1e9).item()
    for group in optimizer.param_groups:
        for piece in group["params"]:
            piece.grad.mul_(factor)
    second = optimizer.clip_grad_norm_(1e9).item()
    optimizer.step()
    return first, second, optimizer.grad_norm


def test_norm_sees_edited_gradients() -> None:
    for first, second, last in run_ranks(2, clip_after_edit, Recipe(), 0.25):
        assert_close(second, first / 4, 1e-9, "clip_grad_norm_ after the gradients were scaled by 1/4")
        assert_close(last, first / 4, 1e-9, "grad_norm after the gradients were scaled by 1/4")


@pytest.mark.every(2)
@pytest.mark.parametrize("bounds", [(0.4, 0.1), (0.1, 0.2)], ids=["again", "once"])
def test_clipped_by_hand_and_by_the_configuration(bounds: tuple[float, float]) -> None:
    """The configured clipping acts on gradients that ``clip_grad_norm_`` has clipped before.

    SGD is used because its steps depend on the size of gradients.
    """
    by_hand, configured = bounds
    recipe = Recipe(optimizer="SGD", clip_call=by_hand, clip=configured)
    check(recipe, 2, tolerance=1e-5)  # each clipping divides by the norm plus 1e-6


def step_twice_without_zero_grad(recipe: Recipe) -> dict[str, Tensor]:
    model, _, optimizer = wrap(recipe)
    for step in range(2):
        optimizer.backward(loss_on(recipe, model, step, dist.get_rank()))
        optimizer.step()
    return zeropp.full_state(model)


def test_gradients_stay_until_zero_grad() -> None:
    """As in torch, the second step without ``zero_grad()`` uses the sum of both backwards."""
    recipe = Recipe(optimizer="SGD")
    model = build(recipe)
    optimizer = make_optimizer(recipe, model)
    for step in range(2):
        (sum(loss_on(recipe, model, step, rank) for rank in range(2)) / 2).backward()
        optimizer.step()
    state = run_ranks(2, step_twice_without_zero_grad, recipe)[0]
    for name, value in model.state_dict().items():
        assert_close(state[name], value, 1e-9, name)


def train_with_forwards_in_between(recipe: Recipe, optimizer: Any, model: nn.Module, ranks: list[int]) -> list[float]:
    """Run forwards without a backward before and after each step, and after new weights were loaded; return losses."""
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        parts = [loss_on(recipe, model, step, rank) for rank in ranks]
        (sum(parts) / len(ranks)).backward()
        losses += [loss_on(recipe, model, step, ranks[0]).item() for _ in range(1 + step % 2)]
        optimizer.step()
        losses.append(loss_on(recipe, model, 50 + step, ranks[0]).item())
        if step == 2:
            model.load_state_dict(build(recipe, seed=31).state_dict())
            losses.append(loss_on(recipe, model, 60 + step, ranks[0]).item())
    return losses


def train_zero_with_forwards_in_between(recipe: Recipe) -> list[float]:
    model, _, optimizer = wrap(recipe)
    return train_with_forwards_in_between(recipe, optimizer, model, [dist.get_rank()])


@pytest.mark.every(2)
@pytest.mark.parametrize("model", ["gpt", "repeated blocks"])
def test_forwards_without_backward_see_new_weights(model: str) -> None:
    recipe = Recipe(model)
    plain = build(recipe)
    expected = train_with_forwards_in_between(recipe, make_optimizer(recipe, plain), plain, [0, 1])
    assert_close(run_ranks(2, train_zero_with_forwards_in_between, recipe)[0], expected, 1e-9, "losses")


# Factors of the reduction.


@pytest.mark.every(2)
@pytest.mark.parametrize("nodes", [1, 2])
def test_sum_in_place_of_mean(nodes: int) -> None:
    recipe = Recipe(optimizer="SGD", steps=3, top={"gradient_allreduce_op": "sum"}, accumulation=2)
    runs = run_ranks(4, train_zero, recipe, local_world_size=4 // nodes)
    for run, plain in zip(runs, train_plain(recipe, 4, scale=1.0), strict=True):
        compare(run, plain, 1e-9)


def train_with_factor(recipe: Recipe, factor: float) -> Trained:
    model, _, optimizer = wrap(recipe, gradient_scale=factor)
    return run_steps(recipe, model, optimizer)


@pytest.mark.every(2)
@pytest.mark.parametrize("top", [{}, {"gradient_allreduce_op": "sum"}])
def test_given_factor(top: dict[str, object]) -> None:
    """A given ``gradient_scale`` replaces the mean or sum over ranks; it is not applied in addition."""
    recipe = Recipe(optimizer="SGD", steps=3, top=top)
    runs = run_ranks(2, train_with_factor, recipe, 0.37)
    for run, plain in zip(runs, train_plain(recipe, 2, scale=0.37), strict=True):
        compare(run, plain, 1e-9)


# Process groups of two of the four ranks. Each group trains a model of its own.


def train_in_group(recipe: Recipe, how: str) -> tuple[int, Trained]:
    rank = dist.get_rank()
    if how == "groups":
        # The two groups train at the same time, each at its own speed.
        made = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group: Any = made[rank // 2]
        team, member = rank // 2, rank % 2
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        group = mesh[how]
        team, member = (rank // 2, rank % 2) if how == "inner" else (rank % 2, rank // 2)
    return team, train_zero(recipe, group=group, rank=member)


@pytest.mark.every(12)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("how", ["groups", "inner", "outer"])
def test_two_teams(how: str, nodes: int) -> None:
    recipe = Recipe(steps=4, accumulation=2, clip=0.3, evaluate=True)
    runs = run_ranks(4, train_in_group, recipe, how, local_world_size=4 // nodes)
    plain = train_plain(recipe, 2)
    members = {0: 0, 1: 0}
    for team, run in runs:
        compare(run, plain[members[team]], 1e-9, f"team {team}")
        members[team] += 1


def train_two_models(recipe: Recipe) -> list[Trained]:
    """Train two wrapped models in one process, stepped in turn; return the results of both."""
    wrapped = [wrap(recipe) for _ in range(2)]
    losses: list[list[float]] = [[], []]
    norms: list[list[float]] = [[], []]
    for step in range(recipe.steps):
        for index, (model, _, optimizer) in enumerate(wrapped):
            optimizer.zero_grad()
            loss = loss_on(recipe, model, step, dist.get_rank())
            losses[index].append(loss.item())
            optimizer.backward(loss)
        for index, (_, _, optimizer) in enumerate(wrapped):
            optimizer.step()
            norms[index].append(optimizer.grad_norm)
    names = [name for name, _ in wrapped[0][0].named_parameters(remove_duplicate=False)]
    return [Trained(losses[i], norms[i], zeropp.full_state(model), names) for i, (model, _, _) in enumerate(wrapped)]


def test_two_models_side_by_side() -> None:
    recipe = Recipe(steps=4)
    plain = train_plain(recipe, 2)
    for rank, runs in enumerate(run_ranks(2, train_two_models, recipe)):
        for run in runs:
            compare(run, plain[rank], 1e-9)


def train_by_triple(triple: dict[str, int]) -> float:
    """Return a weight after one step whose accumulation window follows from the batch sizes."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    config = {"zero_optimization": {"stage": 3}, **triple}
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, config)
    for _ in range(4):
        optimizer.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    return float(zeropp.full_state(model)["weight"])


def test_accumulation_follows_from_the_batch_sizes() -> None:
    """A train_batch_size of 16 is 2 x 2 ranks x 4 micro-batches, so the gradient is the sum of four quarters."""
    triple = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}
    assert run_ranks(2, train_by_triple, triple) == [0.0, 0.0]
    for failure in run_ranks(2, train_by_triple, triple | {"gradient_accumulation_steps": 3}, catch=True):
        assert failure.is_a(zeropp.ConfigError)


def step_behind_the_back() -> tuple[float, float]:
    model = nn.Linear(1, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = zeropp.ZeroOptimizer(inner, model, Recipe().config())
    before = float(zeropp.full_state(model)["weight"])
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match="call step\\(\\) on that one"):
        inner.step()
    optimizer.clip_grad_norm_(0.1)
    model.zero_grad()  # no gradient is left, so step() must change nothing
    optimizer.step()
    return before, float(zeropp.full_state(model)["weight"])


def test_no_step_behind_the_back_and_none_after_zero_grad() -> None:
    for before, after in run_ranks(2, step_behind_the_back):
        assert before == after
