"""``add_param_group`` after wrapping: gradients of the new group, and invalid groups, which every rank refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config, share
from tests.support.freezing_model import Tower, attempt, batch, check, train, trained
from tests.support.rank_pool import run_ranks

WRONG_GROUPS: dict[str, tuple[Callable[[Tower], object], str]] = {
    "no dict": (lambda m: [m.norm.weight], "TypeError: param_group is"),
    "no params": (lambda m: {"lr": 1.0}, "TypeError: param_group is"),
    "a set": (lambda m: {"params": {m.norm.weight}}, "TypeError: params is a set"),
    "foreign": (lambda m: {"params": [nn.Parameter(torch.ones(1))]}, "ValueError: entry 0 of params, a Parameter"),
    "no parameter": (lambda m: {"params": ["norm.weight"]}, "ValueError: entry 0 of params, a str"),
    "there already": (lambda m: {"params": m.head.parameters()}, "ValueError: parameter 'head.weight' is in a group"),
    "twice": (lambda m: {"params": [m.norm.weight, m.norm.weight]}, "ValueError: parameter 'norm.weight'"),
}


def wrong_groups(ranks: list[int]) -> list[str]:
    model = Tower().double()
    model.norm.requires_grad_(False)
    inner = torch.optim.SGD(trained(model), lr=0.1)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config())
    train(model, optimizer, 1)
    found = []
    for make, _ in WRONG_GROUPS.values():
        wrong = dist.get_rank() in ranks
        group = make(model) if wrong else {"params": [model.norm.weight]}
        found.append(attempt(lambda given=group: optimizer.add_param_group(given)))
    optimizer.add_param_group({"params": [model.norm.weight]})
    model.norm.requires_grad_(True)
    train(model, optimizer, 1)
    return [*found, str(len(inner.param_groups))]


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=["all", "one"])
def test_wrong_groups_are_refused_on_every_rank(ranks: list[int]) -> None:
    for rank, found in enumerate(run_ranks(2, wrong_groups, ranks)):
        assert found.pop() == "2"
        for said, (_, expected) in zip(found, WRONG_GROUPS.values(), strict=True):
            assert said.startswith(expected if rank in ranks else "RuntimeError: ranks [1] called add_param_group()")


def scaled() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Add a group between backward and GradScaler's step, and edit its gradients; return weights and plain torch's."""
    model = Tower().double()
    share(model)
    plain = copy.deepcopy(model)
    made = []
    for each in (model, plain):
        inner = torch.optim.SGD(each.head.parameters(), lr=0.1)
        optimizer = zeropp.ZeroOptimizer(inner, model, make_config()) if each is model else inner
        made.append((each, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)))
    for step in range(3):
        for each, optimizer, scaler in made:
            each.zero_grad()
            scaler.scale(each(batch(step, 0, 0)).square().mean()).backward()
            if step == 1:
                optimizer.add_param_group({"params": each.blocks.parameters()})
                for parameter in optimizer.param_groups[1]["params"]:
                    parameter.grad.mul_(0.5)
            scaler.step(optimizer)
            scaler.update()
    return zeropp.full_state(model), plain.state_dict()


def test_a_group_that_comes_after_backward_has_its_gradients_at_once() -> None:
    check(run_ranks(2, scaled))


def added_early() -> list[bool]:
    """Add groups while there are no gradients: at the start, and between two steps.

    Returns:
        True for each slice that has a gradient right after a group was added.
    """
    model = Tower().double()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.head.parameters(), lr=0.1), model, make_config())
    shown = []
    for added in (model.blocks[0], model.blocks[1]):
        optimizer.add_param_group({"params": added.parameters()})
        shown += [p.grad is not None for group in optimizer.param_groups for p in group["params"]]
        train(model, optimizer, 1)
        optimizer.zero_grad()
    return shown


def test_a_group_that_comes_before_backward_has_no_gradients() -> None:
    for shown in run_ranks(2, added_early):
        assert shown and not any(shown)


def wrong_ways() -> tuple[str, str, str]:
    """Return three errors of wrong calls.

    The calls are the wrapped optimizer's own ``add_param_group``, loading a state with fewer groups, and a step after a
    group was deleted.
    """
    model = Tower().double()
    model.blocks.requires_grad_(False)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.head.parameters(), lr=0.1), model, make_config())
    train(model, optimizer, 1)
    inner = attempt(lambda: optimizer.inner.add_param_group({"params": [model.norm.weight]}))
    before, state = zeropp.full_state(model), optimizer.state_dict()
    optimizer.add_param_group({"params": model.norm.parameters()})
    loaded = attempt(lambda: optimizer.load_state_dict(state))
    assert all(torch.equal(before[name], value) for name, value in zeropp.full_state(model).items())
    del optimizer.param_groups[1]
    model.blocks.requires_grad_(True)
    return inner, loaded, attempt(lambda: train(model, optimizer, 1))


def test_wrong_ways_are_named() -> None:
    for inner, loaded, taken in run_ranks(2, wrong_ways):
        assert "call add_param_group() on that" in inner
        assert "parameter groups of [" in loaded and "before loading" in loaded
        assert "had 2 parameter groups and has 1 now" in taken
