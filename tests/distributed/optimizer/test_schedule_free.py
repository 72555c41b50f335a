"""Schedule-free optimizers: ``train()`` and ``eval()`` change the weights as in plain torch, on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import schedulefree
import torch
import torch.distributed as dist

import zeropp
from tests.support.branching_models import Routed, make_config
from tests.support.default_recipe import PLACED, RECIPE, backward, loss_of
from tests.support.parity import assert_close, build
from tests.support.rank_pool import run_ranks, spread


def free_of_schedules(cls: str, settings: dict[str, object] | None, world: int | None) -> tuple[Any, ...]:
    """Return losses in eval mode between steps, and weights in both modes.

    Args:
        cls: name of a class in ``schedulefree``.
        settings: settings of the configuration; None for plain torch.
        world: number of ranks whose batches plain torch uses; None for this rank's batches only.
    """
    model = build(RECIPE)
    optimizer: Any = getattr(schedulefree, cls)(model.parameters(), lr=0.05, warmup_steps=2)
    if settings is not None:
        optimizer = zeropp.ZeroOptimizer(optimizer, model, make_config(**settings))
    losses, states = [], []
    for step in range(4):
        optimizer.train()
        optimizer.train()
        optimizer.zero_grad()
        backward(model, step, world)
        optimizer.step()
        if step % 2:
            optimizer.eval()
            with torch.no_grad():
                losses.append(loss_of(model, 50, 0).item())
            states.append(zeropp.full_state(model) if settings is not None else copy.deepcopy(model.state_dict()))
    optimizer.train()
    states.append(zeropp.full_state(model) if settings is not None else dict(model.state_dict()))
    return losses, states


@pytest.mark.every(6)
@pytest.mark.parametrize(("cls", "placement"), spread(["AdamWScheduleFree", "SGDScheduleFree"], PLACED, every=2))
def test_schedule_free_optimizers_switch(cls: str, placement: str) -> None:
    losses, states = free_of_schedules(cls, None, 4)
    for found, own in run_ranks(4, free_of_schedules, cls, PLACED[placement], None, local_world_size=2):
        assert_close(found, losses, 1e-9, "losses in eval mode")
        for state, expected in zip(own, states, strict=True):
            for name, value in expected.items():
                assert_close(state[name], value, 1e-9, name)


def quiet() -> tuple[int, int]:
    """Return the bytes sent for ``train()`` and the next forward: if the mode changes, and if it does not."""
    model = Routed()
    inner = schedulefree.SGDScheduleFree(model.parameters(), lr=0.1)
    optimizer: Any = zeropp.ZeroOptimizer(inner, model, make_config(stage=1))
    sent = []
    for switch in (optimizer.train, optimizer.train):
        before = zeropp.comm_report(optimizer).total_bytes
        switch()
        with torch.no_grad():
            model(torch.ones(1, 8))
        sent.append(zeropp.comm_report(model).total_bytes - before)
    return sent[0], sent[1]


def test_a_mode_that_is_on_already_sends_nothing() -> None:
    for changed, same in run_ranks(2, quiet):
        assert changed > same == 0


def switched_alone() -> str:
    """Return this rank's error when only rank 0 calls ``eval()`` and rank 1 trains on."""
    model = Routed()
    inner = schedulefree.SGDScheduleFree(model.parameters(), lr=0.1)
    optimizer: Any = zeropp.ZeroOptimizer(inner, model, make_config(hang_timeout=3))
    optimizer.train()
    with pytest.raises(RuntimeError) as caught:
        if dist.get_rank() == 0:
            optimizer.eval()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    return str(caught.value)


def test_a_mode_that_one_rank_switches_is_named() -> None:
    for message in run_ranks(2, switched_alone):
        assert message.startswith("rank 0 called eval() of the optimizer alone; it is collective"), message
