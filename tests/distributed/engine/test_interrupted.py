"""A forward that Ctrl-C or SystemExit ends, without torch's hooks: the next forward or ``recover()`` gives it up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import WIDTH, Routed, make_config, worst
from tests.support.rank_pool import run_ranks
from zeropp import checkpoint

SETTINGS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 1": {"stage": 1},
    "hpz": {"zero_hpz_partition_size": 2},
    "offloaded": {"offload_optimizer": {"device": "cpu"}},
}


def batch(step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def step(model: nn.Module, optimizer: zeropp.ZeroOptimizer, number: int) -> float:
    loss = model(batch(number)).square().mean()
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def interrupt(model: nn.Module, kind: type[BaseException], *, before: bool, graph: bool) -> None:
    """Run one forward that is interrupted at its third block.

    Args:
        model: model of four blocks.
        kind: class of the exception that interrupts.
        before: True to raise before the block; False after it.
        graph: True to enable gradients.
    """

    def stop(*_: object) -> None:
        raise kind("in the middle")

    block = model.blocks[2]
    handle = (block.register_forward_pre_hook if before else block.register_forward_hook)(stop)
    with pytest.raises(kind, match="in the middle"), torch.set_grad_enabled(graph):
        model(batch(99))
    handle.remove()


Run = tuple[list[float], dict[str, Tensor]]


def trained(settings: dict[str, Any], kind: type[BaseException] | None, before: bool, graph: bool) -> Run:
    torch.manual_seed(0)
    model = Routed(4)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**settings))
    losses = []
    for number in range(4):
        if kind is not None and number % 2:
            interrupt(model, kind, before=before, graph=graph)
            # The next forward gives up the first interrupted pass, and recover() the second one.
            if number == 3:
                optimizer.engine.recover()
                optimizer.zero_grad(now=True)
        losses.append(step(model, optimizer, number))
    return losses, zeropp.full_state(model)


CASES: list[tuple[str, type[BaseException], bool, bool]] = [
    ("stage 3", KeyboardInterrupt, False, True),
    ("stage 3", SystemExit, True, True),
    ("stage 3", KeyboardInterrupt, False, False),
    ("stage 1", KeyboardInterrupt, True, True),
    ("hpz", GeneratorExit, False, True),
    ("offloaded", KeyboardInterrupt, False, True),
]


@pytest.mark.every(20)
@pytest.mark.parametrize(("name", "kind", "before", "graph"), CASES)
def test_training_goes_on_with_the_same_bits(name: str, kind: type[BaseException], before: bool, graph: bool) -> None:
    plain = run_ranks(2, trained, SETTINGS[name], None, before, graph)
    for (wanted, state), (losses, found) in zip(
        plain, run_ranks(2, trained, SETTINGS[name], kind, before, graph), strict=True
    ):
        assert losses == wanted and worst(found, state) == 0


def gathered(model: nn.Module) -> None:
    with zeropp.zero.GatheredParameters(model):
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def saved(folder: Path) -> list[str]:
    """Interrupt forwards, and save the state, as a program that catches Ctrl-C does.

    ``full_state`` and ``save`` are refused until ``recover()`` was called.

    Args:
        folder: folder for the checkpoint.

    Returns:
        Errors of calls after ``recover()``.
    """
    model = Routed(4)
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05), model, make_config())
    step(model, optimizer, 0)
    calls: dict[str, Callable[[], object]] = {
        "full_state": lambda: zeropp.full_state(model),
        "save": lambda: checkpoint.save(folder / "here", model, optimizer),
        "gathered": lambda: gathered(model),
    }
    refused = []
    for name, call in calls.items():
        interrupt(model, KeyboardInterrupt, before=False, graph=True)
        if name != "gathered":
            with pytest.raises(RuntimeError, match=r"in the middle of a forward.*optimizer\.engine\.recover\(\)"):
                call()
        optimizer.engine.recover()
        try:
            call()
        except RuntimeError as error:
            refused.append(f"{name}: {error}")
    return refused


def test_the_state_can_be_saved(tmp_path: Path) -> None:
    assert run_ranks(2, saved, tmp_path) == [[], []]
    assert (tmp_path / "here" / "metadata.json").is_file()


def inside() -> list[str]:
    """Call ``full_state`` in a hook of a running forward.

    Returns:
        Errors of the calls.
    """
    model = Routed(4)
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    found: list[str] = []

    def ask(*_: object) -> None:
        with pytest.raises(RuntimeError) as caught:
            zeropp.full_state(model)
        found.append(str(caught.value))

    model.blocks[1].register_forward_hook(ask)
    model(batch(0))
    return found


def test_a_forward_that_runs_is_not_taken_for_one_that_is_over() -> None:
    for messages in run_ranks(2, inside):
        assert len(messages) == 1 and "full_state was called in the middle of a forward" in messages[0]


class Nested(nn.Module):
    """A module that runs itself twice more inside its forward, as a recursion over a tree does.

    Args:
        how: "call" for ``self(...)``, which runs hooks; another string for ``self.forward(...)``.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(self.lin(x))
        if depth and self.how == "call":
            x = self(x, depth - 1)
        elif depth:
            x = self.forward(x, depth - 1)
        return x


def nested(how: str, wrapped: bool, by_engine: bool = False) -> list[float]:
    """Train a module that runs itself for three steps, with plain torch or with zeropp.

    Args:
        how: argument of `Nested`.
        wrapped: True to wrap the module with zeropp.
        by_engine: True to call it by ``engine.call_model``.

    Returns:
        Loss of each step.
    """
    torch.manual_seed(0)
    model = Nested(how)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if wrapped:
        optimizer = zeropp.ZeroOptimizer(optimizer, model, make_config())
    losses = []
    for number in range(3):
        output = optimizer.engine.call_model(model, batch(number)) if by_engine else model(batch(number))
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_model_that_calls_itself_is_told_of_forward() -> None:
    """A call of the model inside its forward looks like the first call after Ctrl-C, and is refused.

    The error names ``self.forward(...)``, which runs no hooks and works.
    """
    for failure in run_ranks(2, nested, "call", True, catch=True):
        assert "was called inside its own forward" in failure.message and "self.forward(...)" in failure.message
    (found,) = run_ranks(1, nested, "forward", True)
    (plain,) = run_ranks(1, nested, "forward", False)
    assert found == plain


def test_a_model_that_the_engine_calls_may_call_itself() -> None:
    """``call_model`` notices an interruption itself, so it allows a model to call itself, as models of Lightning do.

    The engine of ``zeropp.initialize`` calls its model in this way.
    """
    (found,) = run_ranks(1, nested, "call", True, True)
    (plain,) = run_ranks(1, nested, "call", False)
    assert found == plain


def interrupted_call() -> list[str]:
    """Interrupt a forward of the model and then a call by ``engine.call_model``, and read the full weights after each.

    ``call_model`` gives up its own pass at once, so ``full_state`` is allowed without ``recover()``.

    Returns:
        Names of weights that have changed.
    """
    model = Routed(4)
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05), model, make_config())
    step(model, optimizer, 0)
    before = zeropp.full_state(model)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for call in (model, lambda x: optimizer.engine.call_model(model, x)):
        handle = model.blocks[2].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            call(batch(1))
        handle.remove()
        if call is model:
            # The next call_model gives up the forward that was interrupted without call_model.
            optimizer.engine.call_model(model, batch(2))
            zeropp.full_state(model)
    return [name for name, value in zeropp.full_state(model).items() if not torch.equal(value, before[name])]


def test_a_call_by_the_engine_is_over_at_once() -> None:
    assert run_ranks(2, interrupted_call) == [[], []]
