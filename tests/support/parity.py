"""Recipes for parity tests: the sharded half runs on ranks, and the plain half runs once in the parent process.

One plain run serves all ranks, which keeps the large table of parity tests fast. :mod:`tests.support.sharded_and_plain`
defines the halves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.optimizers import OPTIMIZERS
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Half
from tests.support.small_models import MODELS

__all__ = [
    "Recipe",
    "Trained",
    "assert_close",
    "build",
    "check",
    "compare",
    "continue_zero",
    "make_optimizer",
    "micro_batch",
    "train_plain",
    "train_zero",
]


@dataclass(frozen=True)
class Recipe:
    """One training run, the same on the ranks and in the reference.

    Attributes:
        model: key of MODELS.
        dtype: dtype of the model's parameters.
        accumulation: micro-batches per step.
        how: "optimizer.backward", "loss.backward", or a use of ``no_sync``: "no_sync" (all micro-batches but the last
            are inside), "no_sync mixed" (only the second) or "no_sync only" (all).
        clip: largest gradient norm in the configuration; None for no clipping.
        clip_call: largest gradient norm given to ``clip_grad_norm_``; None for no call.
        optimizer: key of OPTIMIZERS.
        evaluate: True to evaluate between steps, in eval mode or under no_grad, and to compare those losses.
        zero: entries of the zero_optimization block; by default everything is partitioned.
        extension: entries of the zeropp block.
        top: entries at the top level of the configuration.
        steps: number of optimizer steps.
    """

    model: str = "gpt"
    dtype: torch.dtype = torch.float64
    accumulation: int = 1
    how: str = "optimizer.backward"
    clip: float | None = None
    clip_call: float | None = None
    optimizer: str = "AdamW"
    evaluate: bool = False
    zero: dict[str, object] = field(default_factory=dict)
    extension: dict[str, object] = field(default_factory=dict)
    top: dict[str, object] = field(default_factory=dict)
    steps: int = 10

    def config(self) -> dict[str, object]:
        """Return the configuration of ZeroOptimizer. By default even the smallest parameters are partitioned."""
        config: dict[str, object] = {
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **self.zero},
            "zeropp": {"unit_min_blocks": 0, "hang_timeout": 30, **self.extension},
            **self.top,
        }
        if self.clip is not None:
            config["gradient_clipping"] = self.clip
        if self.how == "optimizer.backward":
            config["gradient_accumulation_steps"] = self.accumulation
        return config


@dataclass
class Trained:
    """The results of a run.

    Attributes:
        losses: losses of each micro-batch in order, with evaluation losses among them.
        norms: gradient norm of each step before clipping.
        state: full main weights and buffers at the end.
        parameters: names of parameters; a tied parameter has several.
    """

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    parameters: list[str]


def micro_batch(recipe: Recipe, step: int, micro: int, rank: int) -> tuple[Tensor, ...]:
    """Return one rank's micro-batch, different for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(1 + step * 1009 + micro * 101 + rank)
    batch = MODELS[recipe.model].batch(generator)
    return tuple(tensor.to(recipe.dtype) if tensor.is_floating_point() else tensor for tensor in batch)


def build(recipe: Recipe, seed: int = 7) -> nn.Module:
    """Return the model; with the default seed it has the weights of rank 0."""
    torch.manual_seed(seed)
    return MODELS[recipe.model].build().to(recipe.dtype)


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups: matrices, and vectors at twice the rate without decay.

    Frozen parameters are in the groups, too.
    """
    cls, settings = OPTIMIZERS[recipe.optimizer]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.03}, {"params": others, "lr": 2 * settings["lr"]}]
    return cls(groups, **settings)


def evaluations(recipe: Recipe, model: nn.Module, step: int, rank: int) -> list[float]:
    """Return losses of evaluations between steps: in training mode under no_grad, and in eval mode with and without."""
    if not recipe.evaluate:
        return []
    loss, batch, found = MODELS[recipe.model].loss, micro_batch(recipe, step, 90, rank), []
    with torch.no_grad():
        found.append(loss(model, batch).item())
    model.eval()
    if step % 2:
        found.append(loss(model, batch).item())
    with torch.inference_mode() if step % 3 == 2 else torch.no_grad():
        found.append(loss(model, batch).item())
    model.train()
    return found


def train(recipe: Recipe, half: Half, steps: range, step: Callable[[], float]) -> list[Trained]:
    """Train a half, and return its results for each of its ranks, which differ only in losses.

    Args:
        recipe: the recipe.
        half: the half.
        steps: numbers of the steps.
        step: takes the optimizer step and returns the gradient norm.
    """
    losses: list[list[float]] = [[] for _ in half.ranks]
    norms = []
    for number in steps:
        half.steps = number
        half.zero_grad()
        for micro in range(recipe.accumulation):
            with accumulating(recipe, half.optimizer, micro):
                for own, loss in zip(losses, half.backward(), strict=True):
                    own.append(loss)
        norms.append(step())
        for own, rank in zip(losses, half.ranks, strict=True):
            own += evaluations(recipe, half.model, number, rank)
    names = [name for name, _ in half.model.named_parameters(remove_duplicate=False)]
    state = half.state()
    return [Trained(own, norms, state, names) for own in losses]


@contextlib.contextmanager
def accumulating(recipe: Recipe, optimizer: Any, micro: int) -> Iterator[None]:
    """Enter ``no_sync`` if the recipe says so. Plain torch needs no such context."""
    inside = {
        "no_sync": micro < recipe.accumulation - 1,
        "no_sync mixed": micro == 1,
        "no_sync only": True,
    }.get(recipe.how, False)
    sharded = isinstance(optimizer, zeropp.ZeroOptimizer)
    with optimizer.no_sync() if inside and sharded else contextlib.nullcontext():
        yield


def train_zero(recipe: Recipe, group: Any = None, rank: int | None = None) -> Trained:
    """Train the sharded half on this rank.

    Ranks other than 0 start from other weights, which wrapping must replace by those of rank 0.
    """
    rank = dist.get_rank() if rank is None else rank
    model = build(recipe, seed=7 + 100 * rank)
    inner = make_optimizer(recipe, model)
    optimizer = zeropp.ZeroOptimizer(inner, model, recipe.config(), process_group=group)
    run = continue_zero(recipe, model, optimizer, range(recipe.steps), rank)
    optimizer.close()
    return run


def continue_zero(
    recipe: Recipe, model: nn.Module, optimizer: zeropp.ZeroOptimizer, steps: range, rank: int
) -> Trained:
    """Continue to train the sharded half, perhaps with a new optimizer."""
    half = Half(model, optimizer, [rank], partial(micro_batch, recipe), MODELS[recipe.model].loss)
    if recipe.how == "optimizer.backward":
        half.call = optimizer.backward
    else:
        half.divisor = recipe.accumulation

    def step() -> float:
        norm = None if recipe.clip_call is None else optimizer.clip_grad_norm_(recipe.clip_call).item()
        half.step()
        return optimizer.grad_norm if norm is None else norm

    (run,) = train(recipe, half, steps, step)
    return run


def train_plain(recipe: Recipe, world: int, scale: float | None = None) -> list[Trained]:
    """Train the plain half, and return one result per rank.

    Args:
        recipe: the recipe.
        world: number of ranks.
        scale: factor of gradients that are summed over ranks; None for the mean.
    """
    model = build(recipe)
    half = Half(
        model, make_optimizer(recipe, model), range(world), partial(micro_batch, recipe), MODELS[recipe.model].loss
    )
    half.divisor = recipe.accumulation * (world if scale is None else 1 / scale)
    bound = min(recipe.clip or float("inf"), recipe.clip_call or float("inf"))

    def step() -> float:
        norm = nn.utils.clip_grad_norm_(model.parameters(), bound).item()
        half.step()
        return norm

    return train(recipe, half, range(recipe.steps), step)


def check(recipe: Recipe, world: int, *, nodes: int = 1, tolerance: float = 1e-9) -> None:
    """Run a recipe on ranks and in the reference, and compare losses, norms and weights of every rank."""
    runs = run_ranks(world, train_zero, recipe, local_world_size=world // nodes)
    for rank, (run, plain) in enumerate(zip(runs, train_plain(recipe, world), strict=True)):
        compare(run, plain, tolerance, f"rank {rank}")


def compare(
    run: Trained, plain: Trained, tolerance: float, where: str = "", *, names: Iterable[str] | None = None
) -> None:
    """Compare losses, norms and weights within a tolerance relative to max(1, |expected|).

    Args:
        run: results of the sharded half.
        plain: results of the plain half.
        tolerance: the tolerance.
        where: beginning of error messages.
        names: parameters to compare; None for all.
    """
    assert_close(run.losses, plain.losses, tolerance, f"{where}: losses")
    assert_close(run.norms, plain.norms, tolerance, f"{where}: gradient norms")
    assert run.state.keys() == plain.state.keys(), where
    assert run.parameters == plain.parameters, where
    for name in run.parameters if names is None else names:
        assert run.state[name].shape == plain.state[name].shape, f"{where}: {name}"
        assert_close(run.state[name], plain.state[name], tolerance, f"{where}: {name}")


def assert_close(found: Any, expected: Any, tolerance: float, what: str) -> None:
    """Assert that |found - expected| <= tolerance * max(1, |expected|) for each element; NaN always fails."""
    a, b = torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    assert a.shape == b.shape, f"{what}: {tuple(a.shape)} against {tuple(b.shape)}"
    if a.numel():
        error = ((a - b).abs() / b.abs().clamp(min=1)).max().item()
        assert error <= tolerance, f"{what}: off by {error:.3g}, more than {tolerance:g}"
