"""torch's GradScaler: an overflow on one rank skips the step on all ranks, and scales stay equal.

Norms are those of unscaled gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.parity import Recipe, assert_close, build, micro_batch
from tests.support.rank_pool import run_ranks, spread
from tests.support.small_models import MODELS


class Tiny(nn.Module):
    """Model so small that some ranks have no slice of the first unit, or no slice at all with four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 3, bias=False), nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def tiny_loss(model: nn.Module, step: int, rank: int, poisoned: bool) -> Tensor:
    """Return a rank's loss; if ``poisoned``, only the first weight's gradient is not finite.

    The infinite input saturates the first tanh, so all values stay finite, but the first weight's gradient is 0 * inf.
    """
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    if poisoned:
        x[0, 0] = float("inf")
    return model(x).square().sum()


def drive_scaler(
    model: nn.Module, optimizer: Any, loss_of: Callable[[int], Tensor], clip: float | None, configured: bool
) -> tuple[list[float], list[float]]:
    """Take five steps with GradScaler.

    Returns:
        The scale after each step, and the norm of each step. With configured clipping there is no norm of step 2.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales, norms = [], []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(step)).backward()
        if clip is not None and not configured:
            scaler.unscale_(optimizer)
            clipped = getattr(optimizer, "clip_grad_norm_", None)
            norm = clipped(clip) if clipped else nn.utils.clip_grad_norm_(model.parameters(), clip)
            norms.append(norm.item())
        scaler.step(optimizer)
        if configured and step != 2:
            norms.append(optimizer.grad_norm)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, norms


def scaled_loss(recipe: Recipe | None, model: nn.Module, step: int, rank: int, poisoned: int) -> Tensor:
    """Return the loss of a recipe's model, or of `Tiny`. In step 2, gradients of rank ``poisoned`` are not finite."""
    if recipe is None:
        return tiny_loss(model, step, rank, step == 2 and rank == poisoned)
    loss = MODELS[recipe.model].loss(model, micro_batch(recipe, step, 0, rank))
    return loss * float("inf") if step == 2 and rank == poisoned else loss


def train_scaled(
    recipe: Recipe | None, poisoned: int, clip: float | None, configured: bool = False, window: int = 1
) -> tuple[Any, ...]:
    rank, config = dist.get_rank(), (recipe or Recipe()).config()
    config |= {"gradient_accumulation_steps": window, "managed_gradient_accumulation": False}
    if configured:
        config["gradient_clipping"] = clip
    torch.manual_seed(3)
    model = Tiny() if recipe is None else build(recipe)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, config)

    def loss(step: int) -> Tensor:
        return scaled_loss(recipe, model, step, rank, poisoned)

    return *drive_scaler(model, optimizer, loss, clip, configured), zeropp.full_state(model)


def plain_scaled(recipe: Recipe | None, world: int, poisoned: int, clip: float | None) -> tuple[Any, ...]:
    torch.manual_seed(3)
    model = Tiny() if recipe is None else build(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(step: int) -> Tensor:
        return torch.stack([scaled_loss(recipe, model, step, rank, poisoned) for rank in range(world)]).mean()

    return *drive_scaler(model, optimizer, loss, clip, False), dict(model.state_dict())


def check_scaled(runs: list[tuple[Any, ...]], plain: tuple[Any, ...]) -> None:
    scales, norms, state = plain
    for rank, (found_scales, found_norms, found_state) in enumerate(runs):
        assert found_scales == scales, f"rank {rank}: {found_scales}, expected {scales}"
        for found, expected in zip(found_norms, norms, strict=True):
            if expected == expected and expected != float("inf"):
                assert_close(found, expected, 1e-5, f"rank {rank}: norm")
            else:
                assert not torch.isfinite(torch.tensor(found))
        for name, value in state.items():
            assert_close(found_state[name], value, 1e-5, f"rank {rank}: {name}")


@pytest.mark.every(8)
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("poisoned", [-1, 0, 1])
def test_grad_scaler_skips_everywhere(poisoned: int, clip: float | None) -> None:
    recipe = Recipe(dtype=torch.float32)
    check_scaled(run_ranks(2, train_scaled, recipe, poisoned, clip), plain_scaled(recipe, 2, poisoned, clip))


@pytest.mark.every(2)
@pytest.mark.parametrize("poisoned", [-1, 1])
def test_grad_scaler_with_configured_clipping(poisoned: int) -> None:
    """``step()`` unscales gradients before it clips them."""
    recipe = Recipe(dtype=torch.float32)
    scales, norms, state = plain_scaled(recipe, 2, poisoned, 0.2)
    del norms[2]
    check_scaled(run_ranks(2, train_scaled, recipe, poisoned, 0.2, True), (scales, norms, state))


@pytest.mark.every(2)
@pytest.mark.parametrize("poisoned", [0, 1])
def test_grad_scaler_after_a_window_cut_short(poisoned: int) -> None:
    """Without managed accumulation, the user decides when to step, so zeropp cannot see which backward is the last."""
    runs = run_ranks(2, train_scaled, None, poisoned, None, False, 4)
    check_scaled(runs, plain_scaled(None, 2, poisoned, None))


@pytest.mark.every(12)
@pytest.mark.parametrize("poisoned", [1, -1, 0])
@pytest.mark.parametrize("world", [2, 4])
def test_grad_scaler_where_a_rank_owns_nothing(poisoned: int, world: int) -> None:
    """On two ranks, rank 1 has no slice of the first unit. On four ranks, ranks 2 and 3 have no slices."""
    runs = run_ranks(world, train_scaled, None, poisoned, None)
    check_scaled(runs, plain_scaled(None, world, poisoned, None))


class Parts(nn.Module):
    """Model with a gate, a layer, and a weight whose gradient alone can be made infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(16, 16)
        self.spare = nn.Parameter(torch.zeros(256))

    def forward(self, x: Tensor, spoil: bool) -> Tensor:
        loss = (self.layer(x) * self.gate.sum()).square().mean()
        return loss + torch.sqrt(self.spare).sum() if spoil else loss


def scale_part(part: str, spoil: bool) -> tuple[int, float]:
    """Take two steps with an optimizer over one part of the model.

    Args:
        part: "gate" or "layer", the part that the optimizer has.
        spoil: True to make the gradient of a third part infinite.

    Returns:
        Number of steps that zeropp skipped, and the scale at the end.
    """
    torch.manual_seed(0)
    model = Parts()
    mine = [parameter for name, parameter in model.named_parameters() if name.startswith(part)]
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(mine, lr=0.05), model, make_config(hang_timeout=10))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 16) * (1 + dist.get_rank()), spoil)).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
    return optimizer.skipped_steps, scaler.get_scale()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("spoil", [True, False])
@pytest.mark.parametrize("part", ["gate", "layer"])
def test_grad_scaler_with_an_optimizer_over_a_part(part: str, spoil: bool, world: int) -> None:
    """A rank may have no slice in the optimizer, and the overflow may be in a parameter outside the optimizer."""
    assert run_ranks(world, scale_part, part, spoil) == [(0, 1.0 if spoil else 4.0)] * world


PLACED = {
    "stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "stage 2": {"stage": 2},
    "hpz": {"zero_hpz_partition_size": 2}, "mics": {"mics_shard_size": 2},
}  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize(("placement", "overflow"), spread(PLACED, ["of rank 3", "none"], every=2))
def test_grad_scaler_in_every_placement(placement: str, overflow: str) -> None:
    recipe, poisoned = Recipe(dtype=torch.float32, zero=PLACED[placement]), {"none": -1}.get(overflow, 3)
    runs = run_ranks(4, train_scaled, recipe, poisoned, 0.2, local_world_size=2)
    check_scaled(runs, plain_scaled(recipe, 4, poisoned, 0.2))
