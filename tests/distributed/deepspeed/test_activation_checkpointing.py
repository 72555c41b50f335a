"""``zeropp.deepspeed.checkpointing`` gives the gradients of plain torch without activation checkpoints.

On the CPU all inputs are in host memory. `moved` makes checkpointing treat them as tensors of a GPU, so that it copies
them to the host.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zeropp
from tests.support.branching_models import WIDTH, Block, logged, make_config, worst
from tests.support.rank_pool import run_ranks
from zeropp.deepspeed import checkpointing
from zeropp.deepspeed.checkpointing import checkpoint, configure

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "host": {"checkpoint_in_cpu": True},
}


@contextlib.contextmanager
def moved(way: dict[str, Any]) -> Iterator[None]:
    lies, checkpointing._lies_on_host = checkpointing._lies_on_host, lambda tensor: False
    configure(None, **way)
    try:
        yield
    finally:
        checkpointing._lies_on_host = lies
        configure(None)


class Layers(nn.Module):
    """A model of nested checkpointed segments.

    They have tensor, string, None and keyword arguments, dropout and frozen weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen, self.last = (Block() for _ in range(4))
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.recompute = False

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return (checkpoint if self.recompute else lambda f, *a, **k: f(*a, **k))(function, *args, **kwargs)

    def outer(self, x: Tensor, mask: Tensor | None, *, how: str, bias: Tensor) -> tuple[Tensor, str, Tensor]:
        x = functional.dropout(self.run(self.second, x), 0.3)
        if mask is not None:
            x = x * mask
        return self.frozen(x) + bias, how, x

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(lambda value: functional.dropout(self.first(value), 0.5), x.t().contiguous().t())
        mask = torch.arange(WIDTH, dtype=x.dtype) % 2
        a, how, b = self.run(self.outer, x, mask, how="a word", bias=x.sum(0))
        assert how == "a word"
        c, _, _ = self.run(self.outer, a, None, how="", bias=b)
        # A parameter is passed as an argument. Its values are released before backward uses it again.
        d = self.run(lambda value, weight: functional.linear(value, weight), b, self.scale.weight)
        result: Tensor = self.last(c) + d * self.scale(b)
        return result


def data(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    # The seed determines the dropout masks.
    torch.manual_seed(100 * step + rank)
    loss: Tensor = model(data(step, rank)).square().mean()
    return loss


def built() -> Layers:
    torch.manual_seed(3)
    return Layers().double()


def trained(way: str, stage: int) -> tuple[dict[str, Tensor], list[float]]:
    """Train three steps with checkpointed segments on this rank's batches.

    Args:
        way: arguments of ``configure``: a key of WAYS.
        stage: ZeRO stage.

    Returns:
        Weights, and the loss without gradients after each step.
    """
    model, rank = built(), torch.distributed.get_rank()
    model.recompute = True
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(stage=stage))
    losses = []
    with moved(WAYS[way]):
        for step in range(3):
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(loss_of(model, step, 0).item())
        return zeropp.full_state(model), losses


def plain() -> tuple[dict[str, Tensor], list[float]]:
    model, losses = built(), []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for step in range(3):
        for rank in range(2):
            (loss_of(model, step, rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_of(model, step, 0).item())
    return model.state_dict(), losses


@pytest.mark.parametrize(
    ("way", "stage"),
    [*((way, 3) for way in WAYS), pytest.param("host", 1, marks=pytest.mark.campaign)],
)
def test_segments_train_as_plain_torch_without_them(way: str, stage: int) -> None:
    """Weights and losses are equal bit for bit.

    Dividing by two ranks is exact, and a sum of two numbers does not depend on their order.
    """
    weights, losses = plain()
    for found, again in run_ranks(2, trained, way, stage):
        assert worst(found, weights) == 0 and again == losses


def test_inputs_leave_and_come_back() -> None:
    """With checkpoint_in_cpu, no reference to a segment's input remains on the device after the forward."""
    with moved(WAYS["host"]):
        leaf = torch.randn(4, WIDTH, requires_grad=True)
        gone = []
        x = leaf * 1
        for _ in range(3):
            gone.append(weakref.ref(x))
            x = checkpoint(torch.tanh, x)
        gc.collect()
        assert [each() for each in gone] == [None] * 3
        x.sum().backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.autograd.grad(leaf.tanh().tanh().tanh().sum(), leaf)[0])


def test_only_activations_of_outer_segments_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only activations that enter outer segments are copied to the host.

    Parameters are not copied, nor the inputs of nested segments, because recomputing the outer segment gives these
    inputs again.
    """
    copied: list[torch.Size] = []

    class Watched(checkpointing._SavedOnHost):
        def __init__(self, tensor: Tensor) -> None:
            copied.append(tensor.shape)
            super().__init__(tensor)

    monkeypatch.setattr(checkpointing, "_SavedOnHost", Watched)
    with moved(WAYS["host"]):
        x, weight, mask = torch.randn(4, WIDTH).t().requires_grad_(), nn.Parameter(torch.randn(100, 4)), torch.ones(4)

        def outer(value: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
            return checkpoint(torch.tanh, functional.linear(value * mask, weight))

        checkpoint(outer, x, weight=weight, mask=mask).sum().backward()
        assert copied == [x.shape]
        wanted = torch.autograd.grad(functional.linear(x, weight).tanh().sum(), [x, weight])
        for tensor, gradient in zip([x, weight], wanted, strict=True):
            assert tensor.grad is not None and torch.equal(tensor.grad, gradient)


@pytest.mark.parametrize("way", ["plain", "host"])
def test_an_input_edited_before_backward(way: str) -> None:
    """backward raises an error if an input that is not copied to the host, here a mask, is edited after the forward."""
    with moved(WAYS[way]):
        leaf, mask = torch.randn(2, WIDTH, requires_grad=True), torch.ones(WIDTH)
        x = leaf * 1
        loss = checkpoint(torch.mul, torch.tanh(x), mask).sum()
        mask.add_(1)
        with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
            loss.backward()


def test_profile_and_synchronize(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    waits: list[int] = []
    monkeypatch.setattr(checkpointing, "_synchronize", lambda: waits.append(1))
    caplog.set_level("INFO", "zeropp")
    x = torch.randn(2, WIDTH, requires_grad=True)
    for said, count in ({}, 0), ({"synchronize": True}, 4), ({"profile": True}, 4):
        waits.clear()
        with moved(said), logged() as messages:
            checkpoint(torch.tanh, x).sum().backward()
        assert len(waits) == count
        phases = [message.split()[2] for message in messages]
        assert phases == (["forward", "recomputation"] if "profile" in said else [])


class Mpu:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def get_model_parallel_world_size(self) -> int:
        return self.ranks


def test_configured_by_arguments_and_files(tmp_path: Path) -> None:
    block = {"cpu_checkpointing": True, "number_checkpoints": 4, "partition_activations": True}
    path = tmp_path / "zero.json"
    path.write_text('{"zero_optimization": {"stage": 3}, "activation_checkpointing": {"profile": true}}')
    try:
        configure(Mpu(1), {"zero_optimization": {"stage": 3}, "activation_checkpointing": block})
        assert checkpointing.is_configured() and checkpointing._process.block.cpu_checkpointing
        configure(None, {"zero_optimization": {"stage": 3}, "activation_checkpointing": block}, checkpoint_in_cpu=False)
        assert not checkpointing._process.block.cpu_checkpointing
        configure(None, deepspeed_config=path)
        assert checkpointing._process.block.profile and not checkpointing._process.block.cpu_checkpointing
        with pytest.raises(ValueError, match="model-parallel size of 2"):
            configure(Mpu(2))
        # A refused call changes no setting.
        assert checkpointing._process.block.profile
    finally:
        configure(None)
