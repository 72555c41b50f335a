"""``optimizer.state`` with the model's parameters as keys, whose states are spread over slices of several ranks.

Further tests: ``state_dict()`` calls on some ranks only, and states of slices in a plain optimizer.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.support.model_and_twin import PLACES, TOLERANCE, Both
from tests.support.rank_pool import run_ranks, some
from zeropp import checkpoint

State = Any  # ``state`` of an optimizer


def forgotten(settings: dict[str, Any], folder: str) -> float:
    """After each of three steps, delete the states of a different third of the parameters, as ReLoRA does.

    Returns:
        The largest weight difference from plain torch.
    """
    both = Both(settings, folder)
    for number in range(4):
        both.backward()
        both.step()
        for place, (_, mine, plain) in enumerate(both.pairs()):
            if place % 3 == number:
                del both.optimizer.state[mine]
                both.plain_optimizer.state.pop(plain, None)
    both.backward()
    both.step()
    return both.difference()


@pytest.mark.every(8)
@pytest.mark.parametrize("name", PLACES)
def test_states_of_named_parameters_are_forgotten(name: str, tmp_path: Path) -> None:
    """Later steps equal those of plain torch with the same states deleted."""
    assert max(run_ranks(4, forgotten, PLACES[name], str(tmp_path), local_world_size=2)) < TOLERANCE


def looped(settings: dict[str, Any], folder: str) -> float:
    """In loops over all tensors of the groups, set a state to zero, and later delete states.

    Returns:
        The largest weight difference from plain torch.
    """
    both = Both(settings, folder)
    optimizers = (both.optimizer, both.plain_optimizer)
    for number in range(3):
        both.backward()
        both.step()
        for optimizer in optimizers:
            every = [each for group in optimizer.param_groups for each in group["params"]]
            for parameter in [each for each in every if each.requires_grad]:
                if number == 0:
                    optimizer.state[parameter]["exp_avg"].zero_()
                else:
                    del optimizer.state[parameter]
    both.backward()
    both.step()
    return both.difference()


@pytest.mark.parametrize("name", some(["offloaded", *(name for name in PLACES if name != "offloaded")], len(PLACES)))
def test_loops_over_all_tensors_of_groups_reach_their_states(name: str, tmp_path: Path) -> None:
    assert max(run_ranks(4, looped, PLACES[name], str(tmp_path), local_world_size=2)) < TOLERANCE


def refill(state: State, parameter: nn.Parameter) -> None:
    state[parameter] = {}


USES: dict[str, Callable[[State, nn.Parameter], object]] = {
    "read": lambda state, parameter: state[parameter],
    "get": lambda state, parameter: state.get(parameter),
    "in": lambda state, parameter: parameter in state,
    "pop": lambda state, parameter: state.pop(parameter, None),
    "setdefault": lambda state, parameter: state.setdefault(parameter, {}),
    "set": refill,
}


def told(state: State, parameter: nn.Parameter) -> set[str]:
    """Return the uses of a parameter as a key whose error names the parameter and the function to call instead."""
    found = set()
    for use, run in USES.items():
        with pytest.raises(RuntimeError, match=r"parameter '0\.weight', .*slices.*safe_get_full_optimizer_state.*del "):
            run(state, parameter)
        found.add(use)
    return found


def used(stage: int, folder: Path) -> None:
    """Check the errors of USES before the first step, after steps and loads, and inside GatheredParameters.

    Both optimizers' ``state`` must raise them.
    """
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    inner = torch.optim.AdamW(model.parameters())
    optimizer = zeropp.ZeroOptimizer(inner, model, {"zero_optimization": {"stage": stage}})

    def check() -> None:
        for state in (optimizer.state, inner.state):
            assert told(state, model[0].weight) == USES.keys()
        # The refused uses have created no entry.
        assert len(optimizer.state_dict()["state"]) == len(optimizer.state)

    check()
    optimizer.backward(model(torch.ones(2, 16)).sum())
    optimizer.step()
    check()
    optimizer.load_state_dict(optimizer.state_dict())
    check()
    checkpoint.save(folder / "here", model, optimizer)
    checkpoint.load(folder / "here", model, optimizer)
    check()
    with zeropp.zero.GatheredParameters(model):
        assert told(optimizer.state, model[0].weight) == USES.keys()
        del optimizer.state[model[0].weight]
    # A second deletion is accepted although no state is left, because a rank cannot know the slices of other ranks.
    del inner.state[model[0].weight]
    for part in optimizer.slices.stepped:
        own = part.parameter
        assert optimizer.state[own] is optimizer.state.get(own), "slices are keys as of any dict"
    other = nn.Parameter(torch.zeros(2))
    assert other not in optimizer.state
    with pytest.raises(KeyError):
        del optimizer.state[other]


@pytest.mark.parametrize("stage", some([3, 0, 2], 3))
def test_refused_uses_name_the_function_to_call(stage: int, tmp_path: Path) -> None:
    run_ranks(2, used, stage, tmp_path)


def of_frozen_and_foreign_parameters() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    inner = torch.optim.AdamW(model[1].parameters())
    for parameter in model[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    inner.step()
    inner.zero_grad()
    model[1].requires_grad_(False)
    optimizer = zeropp.ZeroOptimizer(inner, model, {"zero_optimization": {"stage": 2}})
    assert len(optimizer.state_dict()["zeropp"]["waiting"]) == 2
    del optimizer.state[model[1].weight]
    assert [*optimizer.state_dict()["zeropp"]["waiting"]] == ["1.bias"]
    with pytest.raises(KeyError, match="in none of the optimizer's groups"):
        del optimizer.state[model[0].weight]


def test_states_that_wait_for_frozen_parameters() -> None:
    run_ranks(2, of_frozen_and_foreign_parameters)


def asked(who: str) -> tuple[list[str], float]:
    """Call ``state_dict()`` twice on some ranks; return this rank's warnings, and the seconds of its last call.

    Args:
        who: ranks that call it: "all", "one a little later" (rank 1), "rank 0 alone", or "all at first".
    """
    model = nn.Linear(4, 4)
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters()), model, {"zero_optimization": {"stage": 2}})
    rank = dist.get_rank()
    took = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in range(2):
            if who == "one a little later" and rank == 1:
                time.sleep(0.3)
            if who in ("all", "one a little later") or rank == 0 or (who == "all at first" and call == 0):
                begin = time.monotonic()
                optimizer.state_dict()
                took = time.monotonic() - begin
            dist.barrier()
    return [str(each.message) for each in caught], took


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("who", "told"), [("all", 0), ("one a little later", 0), ("rank 0 alone", 1), ("all at first", 1)]
)
def test_rank_0_alone_is_warned_when_it_asks_for_its_state(who: str, told: int) -> None:
    """Rank 0 warns once, because it waits a moment for the other ranks. The other ranks do not wait."""
    (warned, took), *others = run_ranks(3, asked, who)
    assert len(warned) == told and all(messages == [] for messages, _ in others)
    assert all("called on 1 of 3 ranks" in text and "zeropp.checkpoint.save" in text for text in warned)
    if who == "rank 0 alone":
        assert took < 1, "the second call has not waited"


def loaded_early(stage: int, kind: str) -> str:
    """Load a state of slices into a plain optimizer, which torch accepts if the numbers of parameters agree.

    Args:
        stage: ZeRO stage in which the state is made.
        kind: model and state: "of all parameters", "of one" parameter, or "of rank 0" on every rank.

    Returns:
        The error of wrapping the plain optimizer.
    """

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(16, 16, bias=kind == "of all parameters")
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    model, inner = made()
    optimizer = zeropp.ZeroOptimizer(inner, model, {"zero_optimization": {"stage": stage}})
    optimizer.backward(model(torch.ones(2, 16)).sum())
    optimizer.step()
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, optimizer.state_dict())
    optimizer.close()
    model, inner = made()
    inner.load_state_dict(states[0 if kind == "of rank 0" else dist.get_rank()])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ZeroOptimizer\.load_state_dict") as caught:
        zeropp.ZeroOptimizer(inner, model, {"zero_optimization": {"stage": stage}})
    return str(caught.value)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("stage", "kind"), [(0, "of all parameters"), (2, "of one"), (2, "of rank 0"), (3, "of rank 0")]
)
def test_a_state_of_slices_loaded_before_wrapping_is_refused(stage: int, kind: str) -> None:
    for text in run_ranks(2, loaded_early, stage, kind):
        assert "state 'momentum_buffer' of parameter 0 of group 0" in text
