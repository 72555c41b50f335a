"""``offload_states``: names of kinds, memory that cannot be moved, and engines that end in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zeropp
from tests.support.branching_models import WIDTH, Routed, make_config
from tests.support.offload_pairs import states_of
from tests.support.owned_memory import owned_bytes
from tests.support.rank_pool import run_ranks
from tests.support.states_off_device import BF16, Place, StateType, made, rows, told, train
from zeropp._compat import unguarded

# Names of kinds, and the memory of each kind.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"include": ["optimizer"]}, "include has ['optimizer']; expected some of ['optim_states', 'hp_params'"),
        ({"include": [StateType.lp_grads, 3]}, "include has [3]"),
        ({"include": 5}, "include is 5; expected some of ['optim_states'"),
        ({"device": "nvme"}, "device is 'nvme'; states go to the memory of the host"),
        ({"device": Place.nvme}, "device is 'nvme'"),
    ],
)
def test_other_names_are_refused(arguments: dict[str, Any], words: str) -> None:
    _, optimizer = made()
    assert words in told(lambda: optimizer.offload_states(**arguments))
    assert not optimizer.engine.parking.kinds


def test_names_add_up() -> None:
    """Kinds of several calls add up. Gradients that were cleared take no host memory."""
    model, optimizer = made(persist=1000, **BF16)
    train(model, optimizer, 0)
    kinds = []
    for include in ("optim_states", [StateType.lp_params], [], ["lp_params", "lp_grads"], None):
        optimizer.offload_states(include)
        kinds.append(sorted(optimizer.engine.parking.kinds))
    assert kinds == [
        ["optim_states"],
        ["lp_params", "optim_states"],
        ["lp_params", "optim_states"],
        ["lp_grads", "lp_params", "optim_states"],
        ["hp_params", "lp_grads", "lp_params", "optim_states"],
    ]
    host = _on_host(optimizer)
    assert host["lp_grads"] > 0
    optimizer.reload_states()
    optimizer.zero_grad()
    optimizer.offload_states()
    assert _on_host(optimizer) == {kind: nbytes for kind, nbytes in host.items() if kind != "lp_grads"}


def _on_host(optimizer: Any) -> dict[str, int]:
    parked = optimizer.engine.parking._parked
    return {kind: sum(0 if p._host is None else p._host.nbytes for p in each) for kind, each in parked.items()}


def left_gathered(name: str) -> tuple[int, int, list[str]]:
    """Return gathered bytes before and after a call, and names of weights that differ from training without the call.

    Args:
        name: method of the optimizer that is called between forward and backward.
    """
    runs: list[tuple[int, int, dict[str, Tensor]]] = []
    for called in (True, False):
        model, optimizer = made(reuse=10**6, prefetch=10**6)
        before = after = 0
        for step in range(4):
            optimizer.zero_grad()
            loss = model(rows(step)).square().mean()
            if called:
                before = owned_bytes(optimizer)["gathered"]
                call = getattr(optimizer, name)
                call("lp_params") if name == "offload_states" else call()
                after = owned_bytes(optimizer)["gathered"]
                optimizer.reload_states()
            loss.backward()
            optimizer.step()
        runs.append((before, after, zeropp.full_state(model)))
    (before, after, one), (_, _, two) = runs
    return before, after, [name for name in one if not torch.equal(one[name], two[name])]


@pytest.mark.parametrize("name", ["offload_states", "empty_partition_cache"])
@pytest.mark.parametrize("world", [1, 2])
def test_weights_that_stayed_gathered_are_released(world: int, name: str) -> None:
    for before, after, wrong in run_ranks(world, left_gathered, name):
        assert before > 0 and after == 0 and not wrong


def test_calls_in_a_pass_or_a_loan_are_refused() -> None:
    model, optimizer = made()
    found: list[str] = []
    both = (optimizer.offload_states, optimizer.reload_states)
    model.blocks[1].register_forward_hook(lambda *_: found.extend(map(told, both)))
    train(model, optimizer, 0)
    with zeropp.zero.GatheredParameters(model.parameters()):
        found += map(told, both)
    with zeropp.ema(model).applied():
        found.append(told(optimizer.offload_states))
    assert [text.split(" was called ")[1].split(";")[0] for text in found] == [
        *["in the middle of a forward"] * 2,
        *["inside GatheredParameters"] * 2,
        "while an average of the weights is applied",
    ]


def test_gradients_of_no_sum_are_refused_by_name() -> None:
    model, optimizer = made()
    train(model, optimizer, 0)
    with unguarded():
        model.blocks[0].lin.weight.grad = torch.ones(WIDTH, WIDTH)
    assert "call step() or zero_grad() first" in told(optimizer.offload_states)
    optimizer.offload_states(["optim_states"])  # allowed: a backward does not change optimizer states
    optimizer.reload_states()


def test_states_that_something_else_refers_to_stay() -> None:
    """A state whose storage another tensor uses stays on the device, because the other tensor must not become empty."""
    model, optimizer = made()
    train(model, optimizer, 0)
    state = next(iter(optimizer.state.values()))
    alias = state["exp_avg"].view(-1)
    with pytest.warns(UserWarning, match=r"\['exp_avg of blocks.0.lin.weight'\] stay on the device"):
        optimizer.offload_states()
    assert alias.sum().isfinite() and torch.equal(state["exp_avg"], alias)
    assert state["exp_avg_sq"].untyped_storage().nbytes() == 0
    optimizer.reload_states()


def test_states_of_frozen_parameters_go_and_come_back() -> None:
    torch.manual_seed(3)
    model = Routed(3)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(rows()).square().mean().backward()
    inner.step()
    inner.zero_grad()
    model.blocks[0].requires_grad_(False)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config())
    waiting = {name: {k: v.clone() for k, v in s.items()} for name, s in optimizer.slices.frozen_states().items()}
    assert waiting
    optimizer.offload_states()
    assert all(s["exp_avg"].untyped_storage().nbytes() == 0 for s in optimizer.slices.frozen_states().values())
    optimizer.reload_states()
    model.blocks[0].requires_grad_(True)
    model(rows())
    for name, states in waiting.items():
        assert torch.equal(states_of(optimizer)[f"{name}:0"]["exp_avg"], states["exp_avg"].flatten())


# Engines that end while memory is off the device.


def test_close_while_states_are_away() -> None:
    """Slices and states stay usable after ``close()``, so ``reload_states`` still restores them."""
    model, optimizer = made()
    train(model, optimizer, 0)
    before = states_of(optimizer)
    optimizer.offload_states()
    optimizer.close()
    assert "reload_states() first" in told(lambda: optimizer.state)
    assert "close()" in told(lambda: model(rows()))
    optimizer.reload_states()
    after = states_of(optimizer)
    assert all(torch.equal(before[n][k], after[n][k]) for n in before for k in before[n])


def wrapped_again() -> list[str]:
    """Drop an optimizer while its memory is on the host, wrap the model again, and return names of changed weights."""
    model, optimizer = made()
    train(model, optimizer, 0)
    before = zeropp.full_state(model)
    optimizer.offload_states()
    del optimizer
    again = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model, make_config())
    after = zeropp.full_state(model)
    train(model, again, 1)
    return [name for name in before if not torch.equal(before[name], after[name])]


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_is_wrapped_again_with_weights_from_the_host(world: int) -> None:
    assert run_ranks(world, wrapped_again) == [[]] * world
