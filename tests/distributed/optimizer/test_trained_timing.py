"""Times at which a parameter may be frozen or unfrozen: between any two passes, but not inside a pass.

Graphs may still need the parameter.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import WIDTH, make_config, share
from tests.support.freezing_model import Tower, attempt, batch, check, train, trained, wrap
from tests.support.rank_pool import RankFailure, run_ranks
from tests.support.sharded_and_plain import Half, Pair
from zeropp.params.unit import UnitState


def forward_given_up() -> None:
    """Unfreeze a parameter of a unit that is kept gathered for a backward that never comes."""
    model = Tower()
    model.norm.requires_grad_(False)
    pair = Pair(model, make_config(), batch=batch)
    for step in range(4):
        pair.zero_grad()
        if step == 2:
            for half in pair.halves:
                half.model(batch(step, 1, pair.rank))
            assert "norm.weight" in kept(pair.optimizer)
            for half in pair.halves:
                half.model.norm.requires_grad_(True)
        pair.backward()
        pair.step()
    pair.check()


def kept(optimizer: zeropp.ZeroOptimizer) -> list[str]:
    units = [unit for unit in optimizer.engine.units if unit.state is not UnitState.SHARDED]
    return [name for unit in units for buffer in unit.buffers for name in buffer.names]


def test_units_kept_for_a_backward_that_never_comes() -> None:
    run_ranks(2, forward_given_up)


def clipped_before() -> None:
    """Unfreeze a block and run the model between clipping and the step."""
    model = Tower()
    model.blocks[1].requires_grad_(False)
    pair = Pair(model, make_config(), batch=batch)
    for step in range(3):
        pair.zero_grad()
        pair.backward()
        pair.optimizer.clip_grad_norm_(0.05)
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
        for half in pair.halves:
            half.model.blocks[1].requires_grad_(step > 0)
            half.model(batch(step, 1, pair.rank))
        pair.step()
    pair.check()


def test_unfrozen_between_clipping_and_the_step() -> None:
    run_ranks(2, clipped_before)


def frozen_for_a_backward() -> None:
    """Freeze a norm after forward and unfreeze it after backward, which brings no gradient to it meanwhile."""
    pair = Pair(Tower(), make_config(reuse=0), batch=batch)

    def backward(half: Half, loss: Tensor) -> None:
        half.model.norm.requires_grad_(half.steps in (0, 1, 3, 6))
        loss.backward()
        half.model.norm.requires_grad_(True)

    for half in pair.halves:
        half.call = partial(backward, half)
    for _ in range(9):
        pair.zero_grad()
        pair.backward()
        pair.step()
    pair.check()


@pytest.mark.parametrize("world", [1, 2])
def test_frozen_during_a_backward_only(world: int) -> None:
    run_ranks(world, frozen_for_a_backward)


def kept_graphs(which: str) -> tuple[dict[str, Tensor], dict[str, Tensor]] | str:
    """Run two forwards with a change of ``requires_grad`` between them, then one backward.

    Args:
        which: "frozen" freezes blocks between the forwards, "unfrozen" unfreezes the norm.

    Returns:
        Weights, and weights of plain torch.
    """
    model = Tower().double()
    model.norm.requires_grad_(False)
    share(model)
    plain = copy.deepcopy(model)
    optimizer = wrap(model)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)

    def change(each: Tower, on: bool) -> None:
        if which == "unfrozen":
            each.norm.requires_grad_(True)
        else:
            each.blocks[:2].requires_grad_(on)  # not block 2: torch refuses this change for checkpointed blocks

    for step in range(4):
        for each, stepper in ((model, optimizer), (plain, reference)):
            stepper.zero_grad()
            first = each(batch(step, 0, 0)).square().mean()
            change(each, on=False)
            second = each(batch(step, 1, 0)).square().mean()
            optimizer.backward(first + second) if each is model else (first + second).backward()
            change(each, on=True)
            stepper.step()
    return zeropp.full_state(model), plain.state_dict()


def test_graphs_from_before_a_parameter_was_frozen_still_have_their_backward() -> None:
    check(run_ranks(2, kept_graphs, "frozen"))


def test_graphs_from_before_a_parameter_was_unfrozen_are_refused() -> None:
    for failure in run_ranks(2, kept_graphs, "unfrozen", catch=True):
        assert isinstance(failure, RankFailure)
        assert "changed since forward" in failure.message and "unfrozen" in failure.message


class Eager(nn.Module):
    """Model that unfreezes one of its own weights during forward."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.requires_grad_(False)
        self.which = which

    def forward(self, x: Tensor) -> Tensor:
        if self.which == "before it is there":
            self.first.weight.requires_grad_(True)
        x = self.first(x)
        return self.last(x)


def in_forward(which: str) -> tuple[str, str, bool]:
    model = Eager(which).double()
    optimizer = wrap(model)
    hook = None
    if which == "while it is there":
        hook = model.first.register_forward_pre_hook(lambda module, _: module.weight.requires_grad_(True))
    first = attempt(lambda: model(batch(0, 0, 0)))
    model.which = "no more"
    if hook is not None:
        hook.remove()
    second = attempt(lambda: train(model, optimizer, 1))
    return first, second, model.first.weight.requires_grad


@pytest.mark.parametrize("which", ["before it is there", "while it is there"])
def test_not_while_the_model_runs(which: str) -> None:
    for first, second, flag in run_ranks(2, in_forward, which):
        assert "requires_grad" in first and "between passes" in first
        assert second == "nothing" and not flag


def lent() -> bool:
    """Unfreeze a block inside GatheredParameters; return True if its weight requires gradients afterwards."""
    model = Tower()
    model.blocks[0].requires_grad_(False)
    pair = Pair(model, make_config(), batch=batch)
    for step in range(3):
        if step == 1:
            with zeropp.zero.GatheredParameters(pair.model.blocks[0]):
                pair.model.blocks[0].requires_grad_(True)
            pair.plain.blocks[0].requires_grad_(True)
        pair.train()
    pair.check()
    return pair.model.blocks[0].lin.weight.requires_grad


def test_inside_gathered_parameters() -> None:
    assert run_ranks(2, lent) == [True, True]


def in_inference_mode(stage: int) -> None:
    """Unfreeze blocks, and run the model and add a group in inference mode before the next training pass."""
    model = Tower()
    model.blocks[:2].requires_grad_(False)
    pair = Pair(model, make_config(stage=stage), optimizer=lambda m: torch.optim.SGD(trained(m), lr=0.1), batch=batch)
    for step in range(3):
        for half in pair.halves if step == 1 else ():
            half.model.blocks[:2].requires_grad_(True)
            with torch.inference_mode():
                half.model(batch(step, 1, pair.rank))
                half.optimizer.add_param_group({"params": half.model.blocks[:2].parameters()})
        pair.train()
    pair.check()


@pytest.mark.every(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_inference_mode_around_changes(stage: int) -> None:
    run_ranks(2, in_inference_mode, stage)
