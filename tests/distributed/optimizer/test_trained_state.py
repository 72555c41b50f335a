"""Weights and optimizer states of parameters that are frozen or unfrozen keep every bit, and are saved and loaded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import zeropp
from tests.support.branching_models import WIDTH, make_config, share
from tests.support.freezing_model import Tower, attempt, batch, check, train, wrap
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Pair


def precision() -> tuple[Tensor, Tensor]:
    """Return a frozen float32 weight of a model that computes in bf16, before and after it is unfrozen."""
    model = Tower()
    model.blocks.requires_grad_(False)
    share(model)
    before = model.blocks[0].lin.weight.detach().clone()
    optimizer = wrap(model, bf16={"enabled": True})
    train(model, optimizer, 1)
    model.blocks.requires_grad_(True)
    model(torch.ones(1, WIDTH))
    assert all(buffer.trainable for buffer in optimizer.engine.buffers)
    return before, zeropp.full_state(model)["blocks.0.lin.weight"]


def test_an_unfrozen_weight_keeps_every_bit() -> None:
    for before, after in run_ranks(2, precision):
        assert torch.equal(before, after)


def with_history() -> tuple[Tower, torch.optim.Optimizer]:
    """Return a model that has been trained for one step, and its optimizer, which has moments of every block."""
    model = Tower().double()
    share(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(batch(90, 0, 0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def adam_with_history() -> None:
    """Wrap with moments of a block that is frozen, unfreeze the block later, and compare with plain torch."""
    model, first = with_history()
    moments = copy.deepcopy(first.state_dict())

    def resumed(each: Tower) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        optimizer.load_state_dict(moments)
        return optimizer

    model.blocks[1].requires_grad_(False)
    pair = Pair(model, make_config(), optimizer=resumed, batch=batch)
    for step in range(4):
        if step == 2:
            for half in pair.halves:
                half.model.blocks[1].requires_grad_(True)
        pair.train()
    pair.check()


def test_state_of_a_frozen_parameter_waits_for_it() -> None:
    run_ranks(2, adam_with_history)


def wholly_frozen(unfrozen_before_loading: str) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """Unfreeze and train a model that was wholly frozen, and load its state into another model.

    Args:
        unfrozen_before_loading: time at which the other model is unfrozen: "before wrapping" or "before loading".

    Returns:
        The error of loading ("nothing" for none), and the weights of both models after one more step.
    """
    model = Tower().double().requires_grad_(False)
    share(model)
    optimizer = wrap(model)
    model.requires_grad_(True)
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())  # without a copy, both optimizers would share their moments
    other = Tower().double().requires_grad_(unfrozen_before_loading == "before wrapping")
    wrapped = wrap(other)
    other.requires_grad_(True)
    said = attempt(lambda: wrapped.load_state_dict(state))
    for each, stepper in ((model, optimizer), (other, wrapped)):
        train(each, stepper, 1)
    return said, zeropp.full_state(model), zeropp.full_state(other)


@pytest.mark.every(2)
@pytest.mark.parametrize("when", ["before wrapping", "before loading"])
def test_a_state_goes_on_where_the_same_was_unfrozen(when: str) -> None:
    for said, weights, found in run_ranks(2, wholly_frozen, when):
        assert said == "nothing"
        assert all(torch.equal(weights[name], found[name]) for name in weights)


def history_saved() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Unfreeze a block that had moments when it was frozen, without and with saving and loading in between.

    Returns:
        The weights after training on, in both cases.
    """
    states = []
    for saved in (False, True):
        model, optimizer = with_history()
        model.blocks[1].requires_grad_(False)
        wrapped = zeropp.ZeroOptimizer(optimizer, model, make_config())
        if saved:
            state, fresh = copy.deepcopy(wrapped.state_dict()), Tower().double()
            fresh.load_state_dict(zeropp.full_state(model))
            fresh.blocks[1].requires_grad_(False)
            inner = torch.optim.AdamW(fresh.parameters(), lr=0.01)
            model, wrapped = fresh, zeropp.ZeroOptimizer(inner, fresh, make_config())
            wrapped.load_state_dict(state)
        model.blocks[1].requires_grad_(True)
        train(model, wrapped, 2)
        states.append(zeropp.full_state(model))
    return states[0], states[1]


def test_waiting_states_are_saved() -> None:
    check(run_ranks(2, history_saved))


def saved(late: bool) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """Save a state after a block was unfrozen, and load it into another model.

    Args:
        late: True to wrap the other model with the block frozen, False to wrap it with the block trainable.

    Returns:
        The error of loading ("nothing" for none), the saved weights, and the other model's weights after loading.
    """
    model = Tower().double()
    share(model)
    model.blocks[3].requires_grad_(False)
    optimizer = wrap(model)
    train(model, optimizer, 1)
    model.blocks[3].requires_grad_(True)
    train(model, optimizer, 2)
    state, weights = optimizer.state_dict(), zeropp.full_state(model)
    other = Tower().double()
    other.blocks[3].requires_grad_(not late)
    wrapped = wrap(other)
    said = attempt(lambda: wrapped.load_state_dict(state))
    return said, weights, zeropp.full_state(other)


@pytest.mark.every(2)
@pytest.mark.parametrize("late", [False, True])
def test_saved_states_record_which_parameters_were_unfrozen(late: bool) -> None:
    for said, weights, found in run_ranks(2, saved, late):
        if late:
            assert "another partition" in said and "unfrozen" in said
        else:
            assert said == "nothing"
            assert all(torch.equal(weights[name], found[name]) for name in weights)


def rolled_back() -> tuple[str, dict[str, Tensor], dict[str, Tensor], bool]:
    """Load a state from before a block was unfrozen, before the next forward applies the unfreezing.

    Returns:
        The error of loading ("nothing" for none), the saved weights, the weights after loading, and True if the block
        is trained afterwards.
    """
    model = Tower().double()
    share(model)
    model.blocks[3].requires_grad_(False)
    optimizer = wrap(model)
    train(model, optimizer, 1)
    state, weights = copy.deepcopy(optimizer.state_dict()), zeropp.full_state(model)
    train(model, optimizer, 1)
    model.blocks[3].requires_grad_(True)
    said = attempt(lambda: optimizer.load_state_dict(state))
    found = zeropp.full_state(model)
    train(model, optimizer, 1)
    name = "blocks.3.lin.weight"
    return said, weights, found, not torch.equal(zeropp.full_state(model)[name], weights[name])


def test_a_fitting_state_is_loaded_before_a_pending_unfreezing() -> None:
    for said, weights, found, trained in run_ranks(2, rolled_back):
        assert said == "nothing" and trained
        assert all(torch.equal(weights[name], found[name]) for name in weights)
