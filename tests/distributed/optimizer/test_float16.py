"""Training in float16 against plain torch that scales losses and unscales gradients by hand.

The loss scale follows overflows in the same way on every rank.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import WIDTH, Routed, make_config, worst
from tests.support.offload_pairs import host_apart
from tests.support.rank_pool import RankFailure, run_ranks
from zeropp import checkpoint
from zeropp.config import load_config
from zeropp.params.loss_scale import LossScale
from zeropp.setup.choices import choose_loss_scaling

LR, CLIP = 0.05, 0.5


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def make(**settings: Any) -> tuple[nn.Module, zeropp.ZeroOptimizer]:
    torch.manual_seed(0)
    model = Routed(3)
    fp16 = {"enabled": True, "initial_scale_power": 8, **settings.pop("fp16", {})}
    inner = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    return model, zeropp.ZeroOptimizer(inner, model, make_config(fp16=fp16, gradient_clipping=CLIP, **settings))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(batch(step, rank)).float().square().mean()


def trained(settings: dict[str, Any], steps: int, apart: bool) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return this rank's losses and norms of each step, and the whole weights at the end."""
    with host_apart(apart):
        model, optimizer = make(**settings)
        losses, norms = [], []
        for step in range(steps):
            loss = loss_of(model, step, dist.get_rank())
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            norms.append(optimizer.grad_norm)
        assert optimizer.skipped_steps == 0 and optimizer.loss_scale == 256
        return losses, norms, zeropp.full_state(model)


def plain(world: int, steps: int) -> tuple[list[list[float]], list[float], dict[str, Tensor]]:
    """Train float32 weights by hand beside a float16 model; gradients of all ranks are added in float32.

    Returns:
        Losses by rank, norms of each step, and the final weights.
    """
    torch.manual_seed(0)
    model = Routed(3)
    main = copy.deepcopy(model)
    model.half()
    inner = torch.optim.AdamW(main.parameters(), lr=LR, weight_decay=0.1)
    losses: list[list[float]] = [[] for _ in range(world)]
    norms = []
    for step in range(steps):
        for parameter in main.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for rank in range(world):
            model.zero_grad()
            loss = model(batch(step, rank).half()).float().square().mean()
            (loss * 256).backward()
            losses[rank].append(loss.item())
            for parameter, own in zip(main.parameters(), model.parameters(), strict=True):
                parameter.grad += own.grad.float() / (256 * world)
        norms.append(float(nn.utils.clip_grad_norm_(main.parameters(), CLIP)))
        inner.step()
        with torch.no_grad():
            for parameter, own in zip(main.parameters(), model.parameters(), strict=True):
                own.copy_(parameter)
    return losses, norms, main.state_dict()


PLACED: dict[str, tuple[int, dict[str, Any], bool]] = {
    "one rank": (1, {}, False),
    **{f"stage {stage}": (2, {"stage": stage}, False) for stage in range(4)},
    "persistent": (2, {"persist": 1000}, False),
    "hpZ": (2, {"zero_hpz_partition_size": 2}, False),
    "bf16 on the wire": (1, {"communication_data_type": "fp16"}, False),
    "offload_optimizer": (2, {"offload_optimizer": {"device": "cpu"}}, True),
    "a part": (2, {"offload_optimizer": {"device": "cpu", "ratio": 0.4}}, True),
    "both": (2, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, True),
}
# Bounds for weights of about 0.3, because norms are added in another order. In stage 0 gradient sums return to all
# ranks in float16, and the sign of a small gradient determines AdamW's update.
TOLERANCES = {"stage 0": 5e-3}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", PLACED)
def test_trains_as_by_hand(name: str) -> None:
    world, settings, apart = PLACED[name]
    losses, norms, state = plain(world, 6)
    for rank, (found, found_norms, found_state) in enumerate(run_ranks(world, trained, settings, 6, apart)):
        assert found == pytest.approx(losses[rank], rel=1e-3)  # losses are computed from float16 activations
        assert found_norms == pytest.approx(norms, rel=TOLERANCES.get(name, 1e-4))
        assert worst(found_state, state) <= TOLERANCES.get(name, 1e-5)


def overflowing(settings: dict[str, Any], pattern: str) -> tuple[list[float], list[bool], list[bool], int]:
    """Train with an infinite loss on the last rank in each step that is an "x" in the pattern.

    Returns:
        The scale after each step, True for each skipped step, True for each step that changed weights, and the number
        of skipped steps.
    """
    model, optimizer = make(fp16={"initial_scale_power": 6, "loss_scale_window": 3}, **settings)
    last = dist.get_rank() == dist.get_world_size() - 1
    scales, skipped, changed, before = [], [], [], zeropp.full_state(model)
    for step, each in enumerate(pattern):
        loss = loss_of(model, step, dist.get_rank())
        optimizer.backward(loss * float("inf") if each == "x" and last else loss)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(optimizer.loss_scale)
        skipped.append(optimizer.step_was_skipped)
        after = zeropp.full_state(model)
        changed.append(worst(before, after) > 0)
        before = after
    return scales, skipped, changed, optimizer.skipped_steps


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "settings",
    [
        *({"stage": stage} for stage in range(4)),
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        {"zero_quantized_gradients": True, "zeropp_loco_param": {}},
    ],
    ids=str,
)
def test_the_scale_follows_overflows_on_every_rank_alike(settings: dict[str, Any]) -> None:
    pattern = ".x.xx....x"
    config = load_config({"zero_optimization": {"stage": 3}, "fp16": {
        "enabled": True, "initial_scale_power": 6, "loss_scale_window": 3}})  # fmt: skip
    alone = LossScale(choose_loss_scaling(config), 1.0)
    wanted = []
    for each in pattern:
        alone.update(overflow=each == "x")
        wanted.append(alone.value)
    assert len(set(wanted)) > 2
    for scales, skipped, changed, count in run_ranks(2, overflowing, settings, pattern):
        assert scales == wanted
        assert skipped == [each == "x" for each in pattern] and changed == [each != "x" for each in pattern]
        assert count == pattern.count("x")


def at_the_least() -> tuple[str, list[float]]:
    model, optimizer = make(fp16={"initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1})
    scales = []
    with pytest.raises(RuntimeError, match="cannot be lowered any more") as caught:
        for step in range(3):
            optimizer.backward(loss_of(model, step, 0) * float("nan"))
            optimizer.step()
            optimizer.zero_grad()
            scales.append(optimizer.loss_scale)
    # After the error, training can go on.
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 5, 0))
    optimizer.step()
    assert optimizer.step_was_taken
    return str(caught.value), scales


def test_every_rank_hears_of_an_overflow_at_the_least_scale() -> None:
    for message, scales in run_ranks(2, at_the_least):
        assert "fp16.min_loss_scale" in message and scales == [1.0]


def unscaled() -> str:
    model, optimizer = make()
    with pytest.raises(RuntimeError, match="not scaled") as caught:
        loss_of(model, 0, 0).backward()
    optimizer.zero_grad()
    optimizer.scale(loss_of(model, 0, 0)).backward()
    optimizer.step()
    assert optimizer.step_was_taken
    with pytest.raises(RuntimeError, match="not scaled"):
        loss_of(model, 1, 0).backward()  # refused: the scaled loss was that of the previous backward
    optimizer.zero_grad()
    assert torch.isfinite(optimizer.scale(loss_of(model, 2, 0)))  # scaled, but no backward runs through this loss
    with pytest.raises(RuntimeError, match="not scaled"):
        loss_of(model, 2, 0).backward()
    optimizer.zero_grad()
    other = nn.Linear(WIDTH, 1)
    optimizer.scale(other(batch(3, 0)).sum()).backward()  # reaches none of the model's weights
    with pytest.raises(RuntimeError, match="not scaled"):
        loss_of(model, 3, 0).backward()
    optimizer.zero_grad()
    twice = optimizer.scale(loss_of(model, 4, 0))
    twice.backward(retain_graph=True)
    twice.backward()
    optimizer.step()
    assert optimizer.step_was_taken
    return str(caught.value)


def test_losses_that_were_not_scaled_are_refused() -> None:
    for message in run_ranks(2, unscaled):
        assert "optimizer.backward(loss)" in message


def in_windows(how: str) -> dict[str, Tensor]:
    """Return the whole weights after two windows of three micro-batches.

    Args:
        how: "loop", "deferred" (a loop with ``defer_cross_reduction``), or "accumulate".
    """
    model, optimizer = make(gradient_accumulation_steps=3, defer_cross_reduction=how == "deferred")
    rank = dist.get_rank()
    for window in range(2):
        steps = range(3 * window, 3 * window + 3)
        if how == "accumulate":
            pairs = [(batch(step, rank), None) for step in steps]
            stages = list(model.blocks)
            zeropp.accumulate(model, pairs, lambda out, _: out.float().square().mean(), stages=stages)
        else:
            for step in steps:
                optimizer.backward(loss_of(model, step, rank))
        optimizer.step()
        optimizer.zero_grad()
    return zeropp.full_state(model)


@pytest.mark.parametrize("how", ["deferred", "accumulate"])
def test_windows(how: str) -> None:
    """Weights equal those of a loop within 1e-3, because gradients of micro-batches are added in another order."""
    wanted = run_ranks(2, in_windows, "loop")
    for one, other in zip(run_ranks(2, in_windows, how), wanted, strict=True):
        assert worst(one, other) <= 1e-3  # gradients are float16, and the sign of a small one determines AdamW's update


def norms_around_a_window(stage: int) -> list[float]:
    """Return the norms of steps with one, two and one backwards. The learning rate is 0, so weights do not change."""
    model, optimizer = make(stage=stage)
    for group in optimizer.param_groups:
        group.update(lr=0.0)
    norms = []
    for backwards in (1, 2, 1):
        for number in range(backwards):
            with optimizer.no_sync() if number + 1 < backwards else contextlib.nullcontext():
                optimizer.backward(loss_of(model, 0, dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return norms


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_after_a_window_is_scaled_as_the_one_before_it(stage: int) -> None:
    """Sums of several micro-batches are scaled down in float16 messages, and sums of one micro-batch are not."""
    for first, both, last in run_ranks(2, norms_around_a_window, stage):
        assert last == first
        assert both == pytest.approx(2 * first, rel=1e-3)


def saved(folder: Path, way: str) -> list[float]:
    """Return the scale after each of ten steps. After five steps, a new optimizer takes over.

    Args:
        folder: directory of the checkpoint.
        way: "checkpoint", "state_dict", or "" to keep the optimizer.
    """
    pattern, scales = "...x.x..x.", []
    settings: dict[str, Any] = {"fp16": {"loss_scale_window": 2}}
    model, optimizer = make(**settings)
    for step, each in enumerate(pattern):
        if step == 5 and way:
            if way == "checkpoint":
                checkpoint.save(folder, model, optimizer)
                model, optimizer = make(**settings)
                checkpoint.load(folder, model, optimizer)
            else:
                state = optimizer.state_dict()
                model, optimizer = make(**settings)
                optimizer.load_state_dict(state)
        optimizer.backward(loss_of(model, step, 0) * (float("inf") if each == "x" else 1))
        optimizer.step()
        optimizer.zero_grad()
        scales.append(optimizer.loss_scale)
    return scales


@pytest.mark.every(2)
@pytest.mark.parametrize("way", ["checkpoint", "state_dict"])
def test_the_scale_is_saved(way: str, tmp_path: Path) -> None:
    plainly = run_ranks(2, saved, tmp_path, "")
    assert len(set(plainly[0])) > 2
    assert run_ranks(2, saved, tmp_path / "here", way) == plainly


def of_another_dtype() -> None:
    model, config = Routed(1), make_config(communication_data_type="fp16")
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)


def test_float16_on_the_wire_needs_a_scale() -> None:
    for failure in run_ranks(2, of_another_dtype, catch=True):
        assert isinstance(failure, RankFailure) and "needs a loss scale" in failure.message


def one_is_late(rank: int) -> None:
    model, optimizer = make(hang_timeout=5)
    loss = loss_of(model, 0, rank)
    if dist.get_rank() == 1:
        loss.backward()
    optimizer.backward(loss)
    optimizer.step()


def test_a_rank_that_is_refused_keeps_no_other_waiting() -> None:
    first, second = run_ranks(2, one_is_late, 0, catch=True)
    assert isinstance(second, RankFailure) and "not scaled" in second.message
    assert isinstance(first, RankFailure)
