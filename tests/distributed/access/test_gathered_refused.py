"""A wrong use of GatheredParameters raises an error on every rank that names the cause, and changes no weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.gathered_model import Stack, data, lent
from tests.support.rank_pool import RankFailure, run_ranks
from zeropp.zero import GatheredParameters


def without_modifier(model: Stack, optimizer: Any) -> None:
    with GatheredParameters(model):
        if dist.get_rank() == 1:
            model.conv.weight.data[0, 0, 0, 0] += 1


def in_the_model(model: Stack, optimizer: Any) -> None:
    with GatheredParameters(model.conv):
        model(data(0, 0))


def around_a_step(model: Stack, optimizer: Any) -> None:
    model(data(0, 0)).sum().backward()
    with GatheredParameters(model.conv):
        optimizer.step()


def backward_inside(model: Stack, optimizer: Any) -> None:
    loss = model(data(0, 0)).sum()
    with GatheredParameters(model.conv):
        loss.backward()


def twice(model: Stack, optimizer: Any) -> None:
    with GatheredParameters(model.blocks), GatheredParameters(model.conv), GatheredParameters(model.conv.bias, 1):
        pass


def no_such_rank(model: Stack, optimizer: Any) -> None:
    with GatheredParameters(model, modifier_rank=7):
        pass


def no_parameters(model: Stack, optimizer: Any) -> None:
    GatheredParameters("conv.bias")  # type: ignore[arg-type]


def other_shape(model: Stack, optimizer: Any) -> None:
    with GatheredParameters(model, modifier_rank=0):
        model.conv.bias.data = torch.zeros(7, dtype=torch.float64)


def editing_inside_a_pass(model: Stack, optimizer: Any) -> None:
    def hook(*_: object) -> None:
        with GatheredParameters(model.conv, modifier_rank=0):
            pass

    handle = model.blocks[1].register_forward_hook(hook)
    try:
        model(data(0, 0))
    finally:
        handle.remove()


def failing_body(model: Stack, optimizer: Any) -> None:
    with GatheredParameters(model, modifier_rank=0):
        model.conv.bias.data.fill_(5.0)
        raise KeyError("the user's own")


REFUSED: dict[str, tuple[Callable[[Stack, Any], None], str]] = {
    "an edit that nobody keeps": (without_modifier, r"ranks \[1\] are lost.*modifier_rank=0"),
    "the model inside": (in_the_model, "the model was called inside GatheredParameters"),
    "a step inside": (around_a_step, "step was called inside GatheredParameters"),
    "a backward inside": (backward_inside, "backward was called inside GatheredParameters"),
    "gathered already": (twice, r"\['conv.bias'\] are gathered already"),
    "no such rank": (no_such_rank, r"modifier_rank is 7; expected one of the model's ranks \[0, 1\]"),
    "no parameters": (no_parameters, "params holds 'c', a str; expected a module"),
    "another shape": (other_shape, r"conv.bias of shape \(4,\) was given \(7,\)"),
    "an edit inside a pass": (editing_inside_a_pass, "modifier_rank 0 inside a forward or backward"),
    "the user's error": (failing_body, "the user's own"),
}


def refuse(name: str) -> list[str]:
    """Make one refused call, and compare the model with plain torch afterwards.

    Returns:
        Names of weights that differ, and a text if the output differs.
    """
    pair = lent({})
    work, message = REFUSED[name]
    wrong = []
    with pytest.raises((RuntimeError, ValueError, KeyError, TypeError), match=message):
        work(pair.model, pair.optimizer)
    pair.zero_grad()
    if not torch.allclose(pair.model(data(1, 0)), pair.plain(data(1, 0)), rtol=0, atol=1e-12):
        wrong.append("output differs afterwards")
    state = zeropp.full_state(pair.model)
    return wrong + [key for key, value in pair.plain.state_dict().items() if not torch.equal(state[key], value)]


@pytest.mark.every(5)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_on_every_rank_and_nothing_is_changed(name: str) -> None:
    assert run_ranks(2, refuse, name) == [[], []]


def alone(_: int) -> None:
    pair = lent({"hang_timeout": 3})
    model = pair.model
    if dist.get_rank() == 0:
        with GatheredParameters(model):
            pass
    else:
        model(data(0, 0))


def test_a_rank_that_gathers_alone_is_told_so() -> None:
    for failure in run_ranks(2, alone, 0, catch=True, timeout=40):
        assert isinstance(failure, RankFailure) and "no longer in step" in failure.message
