"""Errors of ``zeropp.accumulate``: every rank raises, no rank waits for another, and the next step works."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import Block, Routed, make_config
from tests.support.rank_pool import RankFailure, run_ranks
from tests.support.sharded_and_plain import rows
from zeropp._compat import unguarded

HANG = 4  # seconds


def mean(output: Tensor, target: object) -> Tensor:
    return output.square().mean()


class Setup:
    """A wrapped model, and valid arguments of ``accumulate``; most cases change one of them."""

    def __init__(self, model: nn.Module | None = None, **settings: Any) -> None:
        self.model = Routed(3) if model is None else model
        self.model.double()
        self.optimizer = zeropp.ZeroOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.1), self.model, make_config(hang_timeout=HANG, **settings)
        )
        self.batches: Any = [(rows(0, micro, 0), None) for micro in range(3)]
        self.loss: Any = mean
        self.stages: Any = list(getattr(self.model, "blocks", []))

    def call(self, **changed: Any) -> Tensor:
        arguments = {"model": self.model, "micro_batches": self.batches, "loss_fn": self.loss, "stages": self.stages}
        return zeropp.accumulate(**{**arguments, **changed})


def no_grad(setup: Setup) -> None:
    with torch.no_grad():
        setup.call()


def in_a_pass(setup: Setup) -> None:
    setup.call(stages=[lambda x: setup.call()])


def tied_since(setup: Setup) -> None:
    setup.model.blocks[0].lin.weight = setup.model.blocks[1].lin.weight
    setup.call()


def part(setup: Setup) -> None:
    setup.call(model=setup.model.blocks[0])


def closed(setup: Setup) -> None:
    setup.optimizer.close()
    setup.call()


Case = Callable[[Setup], object]

# By name: the call, the type of the error, and a pattern of its message.
CASES: dict[str, tuple[Case, type[Exception], str]] = {
    "not wrapped": (lambda s: s.call(model=Routed(2)), RuntimeError, "Routed that zeropp does not manage"),
    "no module": (lambda s: s.call(model=[s.model]), TypeError, "got a list as model; expected the module"),
    "a part": (part, ValueError, "Block that is a part of the wrapped model.*stages="),
    "no micro-batches": (lambda s: s.call(micro_batches=[]), ValueError, "no micro-batches; expected one or more"),
    "a tensor of them": (lambda s: s.call(micro_batches=torch.ones(3, 2)), TypeError, "micro_batches is a Tensor"),
    "no pairs": (lambda s: s.call(micro_batches=[torch.ones(2)]), TypeError, "0 is a Tensor; expected a pair"),
    "triples": (lambda s: s.call(micro_batches=[(1, 2, 3)]), TypeError, "is a tuple of 3; expected a pair"),
    "no stages": (lambda s: s.call(stages=None), TypeError, "a Routed does not say in which order.*stages="),
    "empty stages": (lambda s: s.call(stages=[]), ValueError, "got no stages"),
    "stage is no function": (lambda s: s.call(stages=[s.model.blocks[0], 3]), TypeError, "stage 1 is a int"),
    "stages is a module": (lambda s: s.call(stages=s.model), TypeError, "stages is a Routed; expected a list"),
    "no loss function": (lambda s: s.call(loss_fn=None), TypeError, "loss_fn is a NoneType"),
    "loss is no tensor": (lambda s: s.call(loss_fn=lambda x, y: 1.0), TypeError, "returned a float for micro-batch 0"),
    "loss is no scalar": (lambda s: s.call(loss_fn=lambda x, y: x), ValueError, r"shape \(3, 8\) for micro-batch 0"),
    "loss is detached": (lambda s: s.call(loss_fn=lambda x, y: mean(x, y).detach()), ValueError, "0 has no graph"),
    "output is no tensor": (
        lambda s: s.call(stages=[lambda x: {"out": s.model.blocks[0](x)}]), AttributeError, "'dict' object",
    ),
    "a stage without return": (
        lambda s: s.call(stages=[s.model.blocks[0], lambda x: None]), TypeError, "stage 1, .*lambda.* returned None",
    ),
    "a stage fails": (lambda s: s.call(stages=[s.model.blocks[0], lambda x: 1 / 0]), ZeroDivisionError, "division"),
    "without gradients": (no_grad, RuntimeError, "gradients disabled"),
    "inside a pass": (in_a_pass, RuntimeError, "accumulate was called in the middle of a forward"),
}  # fmt: skip
LAST: dict[str, tuple[Case, type[Exception], str]] = {
    "tied since": (tied_since, RuntimeError, "tied to others after the model was wrapped"),
    "closed": (closed, RuntimeError, "accumulate"),
}


def refusals(cases: list[str]) -> dict[str, tuple[str, str, float]]:
    """Return, for each case, the names of the error's classes, the message, and the seconds until the error.

    After each case of CASES, a valid step must succeed, so a refused call leaves no state behind.
    """
    setup, found = Setup(), {}
    for name in cases:
        start = time.monotonic()
        try:
            {**CASES, **LAST}[name][0](setup)
        except Exception as error:
            kinds = "|".join(kind.__name__ for kind in type(error).__mro__)
            found[name] = kinds, " ".join(str(error).split()), time.monotonic() - start
        else:
            found[name] = "nothing", "", 0.0
        if name in CASES:
            setup.optimizer.zero_grad()
            setup.call()
            setup.optimizer.step()
            assert setup.optimizer.step_was_taken, name
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize("world", [1, 2])
def test_every_refusal_names_the_given_and_the_expected_value(world: int) -> None:
    names = [[*CASES], ["tied since"], ["closed"]]
    for cases in names:
        for found in run_ranks(world, refusals, cases):
            for name, (kinds, message, seconds) in found.items():
                _, kind, pattern = {**CASES, **LAST}[name]
                assert kind.__name__ in kinds.split("|") and re.search(pattern, message), f"{name}: {kinds}: {message}"
                assert seconds < HANG, f"{name} took {seconds:.1f} s"


def differing(how: str) -> str:
    """Return the error of this rank when rank 1 passes fewer micro-batches or none; then take a step on both ranks."""
    setup, other = Setup(), dist.get_rank() == 1
    message = ""
    try:
        setup.call(micro_batches=setup.batches[: {"fewer": 2, "none": 0}[how] if other else 3])
    except (RuntimeError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
    setup.call()
    setup.optimizer.step()
    assert setup.optimizer.step_was_taken
    return message


def test_ranks_with_other_numbers_of_micro_batches_are_told() -> None:
    for message in run_ranks(2, differing, "fewer"):
        assert re.search(r"ValueError.*numbers of micro-batches, by rank \{0: 3, 1: 2\}", message)
    first, second = run_ranks(2, differing, "none")
    assert re.search(r"RuntimeError: accumulate was refused on ranks \[1\]", first)
    assert re.search("ValueError: accumulate got no micro-batches", second)


def alone(what: str) -> None:
    """Call ``accumulate`` on rank 0, while rank 1 trains by a loop ("loop") or fails in its call ("fails")."""
    setup = Setup()
    if dist.get_rank() == 1 and what == "loop":
        setup.model(rows(0, 0, 0)).square().mean().backward()
    elif dist.get_rank() == 1:
        setup.call(loss_fn=lambda x, y: 1 / 0)
    else:
        setup.call()
    setup.optimizer.step()


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("loop", "rank 1 was starting a forward with gradients"),
        ("fails", "rank 1 failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_rank_that_does_something_else_is_named(what: str, told: str) -> None:
    start = time.monotonic()
    first, second = run_ranks(2, alone, what, catch=True)
    assert isinstance(first, RankFailure) and isinstance(second, RankFailure)
    assert "no longer in step" in first.message and told in first.message
    assert time.monotonic() - start < 30


def overfull() -> list[str]:
    """Return the errors of calls that exceed a window of four micro-batches: six at once, and two after three.

    A step afterwards begins a new window.
    """
    setup, messages = Setup(gradient_accumulation_steps=4), []
    for counts in ((6,), (3, 2)):
        try:
            for count in counts:
                setup.call(micro_batches=[(rows(0, micro, 0), None) for micro in range(count)])
        except ValueError as error:
            messages.append(str(error))
    setup.call(micro_batches=setup.batches[:1])
    setup.optimizer.step()
    assert setup.optimizer.step_was_taken
    setup.call(micro_batches=[setup.batches[0]] * 4)
    return messages


def test_a_window_takes_no_more_micro_batches_than_it_has_room_for() -> None:
    (messages,) = run_ranks(1, overfull)
    assert "got 6 micro-batches" in messages[0] and "room for 4: 0 came" in messages[0]
    assert "got 2 micro-batches" in messages[1] and "room for 1: 3 came" in messages[1]


class Failing(torch.autograd.Function):
    """Identity function whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("a backward that fails")


def fails_in_backward(fails: bool) -> list[Tensor]:
    """Return the whole weights after a step by a loop and a step by ``accumulate``, with bf16.

    Args:
        fails: True to call ``accumulate`` before, with a backward that raises.
    """
    torch.manual_seed(1)
    model = Routed(3)
    settings = make_config(bf16={"enabled": True}, gradient_accumulation_steps=2)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, settings)
    stages, batches = list(model.blocks), [(rows(0, micro, 0).bfloat16(), None) for micro in range(2)]
    if fails:
        with pytest.raises(RuntimeError, match="a backward that fails"):
            zeropp.accumulate(model, batches, mean, stages=[stages[0], Failing.apply, *stages[1:]])
        optimizer.zero_grad()
        # accumulate sums gradients in float32, so the failed call must reset the gradients' dtype.
        with unguarded():
            assert all(parameter.grad_dtype == torch.bfloat16 for parameter in model.parameters())
    for given, target in batches:
        optimizer.backward(mean(model(given), target))
    optimizer.step()
    optimizer.zero_grad()
    zeropp.accumulate(model, batches, mean, stages=stages)
    optimizer.step()
    assert optimizer.step_was_taken
    return list(zeropp.full_state(model).values())


@pytest.mark.parametrize("world", [1, 2])
def test_a_backward_that_fails_leaves_nothing_behind(world: int) -> None:
    after, plain = (run_ranks(world, fails_in_backward, fails) for fails in (True, False))
    for one, other in zip(after, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Reversed(nn.Sequential):
    """Sequential that calls its children in reverse order."""

    def forward(self, x: Tensor) -> Tensor:
        for child in reversed(self):
            x = child(x)
        return x


def subclass() -> str:
    setup = Setup(Reversed(Block(), Block()))
    try:
        setup.call(stages=None)
    except TypeError as error:
        return str(error)
    return ""


def test_a_sequential_with_a_forward_of_its_own_names_its_stages() -> None:
    assert "a Reversed does not say in which order" in run_ranks(1, subclass)[0]
