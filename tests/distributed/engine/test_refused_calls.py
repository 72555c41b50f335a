"""Calls inside a pass, inside GatheredParameters or after ``close()`` are refused by name, and training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import Routed, make_config, share, worst
from tests.support.rank_pool import run_ranks
from tests.support.refused_arguments import sgd
from zeropp.access.average import Average


class Stepping(nn.Module):
    """A model that calls ``inside`` in its forward, and ``in_backward`` in a hook that backward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.inside: Callable[[], object] = lambda: None
        self.in_backward: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        self.inside()
        y.register_hook(lambda _: (self.in_backward(), None)[1])
        return self.lin(y)


CALLS: dict[str, Callable[[zeropp.ZeroOptimizer, nn.Module], object]] = {
    "step": lambda o, m: o.step(),
    "zero_grad": lambda o, m: o.zero_grad(),
    "clip_grad_norm_": lambda o, m: o.clip_grad_norm_(1.0),
    "no_sync": lambda o, m: o.no_sync().__enter__(),
    "state_dict": lambda o, m: m.state_dict(),
    "load_state_dict": lambda o, m: m.load_state_dict(Stepping().state_dict()),
    "full_state": lambda o, m: zeropp.full_state(m),
}


def call_inside(name: str) -> list[str]:
    """Make one call inside a forward and inside a backward, and take a step afterwards.

    Args:
        name: key of CALLS.

    Returns:
        The two error messages, "" if there was none.
    """
    model = Stepping()
    optimizer = zeropp.ZeroOptimizer(sgd(model), model, make_config(hang_timeout=5))
    messages = []
    for place in ("inside", "in_backward"):
        setattr(model, place, lambda: CALLS[name](optimizer, model))
        try:
            model(torch.ones(2, 8)).sum().backward()
        except RuntimeError as error:
            messages.append(str(error))
        else:
            messages.append("")
        setattr(model, place, lambda: None)
        optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return messages


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CALLS)
def test_calls_in_the_middle_of_a_pass(name: str) -> None:
    for forward, backward in run_ranks(2, call_inside, name, timeout=40):
        assert "in the middle of a forward" in forward, forward
        assert "in the middle of a backward" in backward, backward


def every_call(optimizer: zeropp.ZeroOptimizer, model: nn.Module, average: Average) -> dict[str, Callable[[], object]]:
    """Return all calls that may be refused, by the names that error messages have for them."""
    return {
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0),
        "grad_norms": optimizer.grad_norms,
        "no_sync": lambda: optimizer.no_sync().__enter__(),
        "add_param_group": lambda: optimizer.add_param_group({"params": []}),
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict({}),
        "state_dict()": model.state_dict,
        "load_state_dict()": lambda: model.load_state_dict(Stepping().state_dict()),
        "full_state": lambda: zeropp.full_state(model),
        "ema()": lambda: zeropp.ema(model),
        "update() of an average": average.update,
        "applying an average": lambda: average.applied().__enter__(),
        "state_dict() of an average": average.state_dict,
        "load_state_dict() of an average": lambda: average.load_state_dict({}),
    }


def try_every_call() -> tuple[dict[str, dict[str, str]], float]:
    """Make all calls inside a forward, a backward and GatheredParameters, and after ``close()``.

    Returns:
        A dict: place -> call -> error message; and the largest difference of weights from plain torch after the
        backward and a step.
    """
    model = Stepping().double()
    share(model)
    plain = copy.deepcopy(model)
    optimizer = zeropp.ZeroOptimizer(sgd(model), model, make_config(hang_timeout=5))
    calls = every_call(optimizer, model, zeropp.ema(model))
    said: dict[str, dict[str, str]] = {}

    def try_all(place: str) -> None:
        for name, call in calls.items():
            try:
                call()
            except RuntimeError as error:
                said.setdefault(place, {})[name] = str(error)

    model.inside = lambda: try_all(
        "in the middle of a forward; call it between passes. If Ctrl-C has ended that forward, call "
        "optimizer.engine.recover() first, on every rank"
    )
    model.in_backward = lambda: try_all("in the middle of a backward; call it between passes")
    for each, stepper in ((model, optimizer), (plain, sgd(plain))):
        each(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
        stepper.step()
    far = worst(zeropp.full_state(model), plain.state_dict())
    with zeropp.zero.GatheredParameters(model):
        # Allowed here: each rank may save and load the values that it has gathered.
        taken = {name: calls.pop(name) for name in ("state_dict()", "load_state_dict()")}
        try_all("inside GatheredParameters; leave that first")
        calls |= taken
        model.load_state_dict(plain.state_dict())  # equal values on both ranks, so the engine takes them over
    for taken_off in ("state_dict()", "load_state_dict()", "full_state", "ema()"):
        # Left out after close(). The errors of model.state_dict() and load_state_dict() name other calls there.
        del calls[taken_off]
    optimizer.close()
    try_all(
        "after close(), engine.destroy() or another wrapping of the model had ended this engine; Accelerate's "
        "free_memory() destroys the engine, too, and transformers' Trainer.train() calls it at its start. Wrap the "
        "model again; after close(), wrap a model that has its values"
    )
    return said, far


def test_every_call_is_refused_where_it_may_not_be_made() -> None:
    for said, far in run_ranks(2, try_every_call, timeout=40):
        assert far <= 1e-12 and [len(each) for each in said.values()] == [16, 16, 14, 12]
        for place, messages in said.items():
            assert messages == {name: f"{name} was called {place}" for name in messages}


def late_calls() -> list[str]:
    model = Routed()
    optimizer = zeropp.ZeroOptimizer(sgd(model), model, make_config())
    messages = []
    for call in (
        lambda: model.to(torch.float64),
        lambda: model.load_state_dict({**model.state_dict(), "blocks.0.lin.bias": torch.ones(3)}),
        lambda: model.load_state_dict({}),
    ):
        try:
            call()
        except RuntimeError as error:
            messages.append(str(error))
        else:
            messages.append("")
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return messages


def test_calls_that_come_too_late() -> None:
    for move, shape, missing in run_ranks(2, late_calls):
        assert "before wrapping" in move
        assert "size mismatch for blocks.0.lin.bias" in shape
        assert "Missing key" in missing
