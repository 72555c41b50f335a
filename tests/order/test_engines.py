"""Every rank gives each communicator the same collectives, and all communicators' collectives have one common order.

With offload, threads of comm streams launch collectives. The common order then holds only within each communicator.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.golden.runs import CASES
from tests.order.engines import run_engines
from tests.support.branching_models import WIDTH, Block
from tests.support.parity import Recipe, make_optimizer
from zeropp.order.reductions import Reductions
from zeropp.order.schedule import Transitions

Route = Callable[[int, int], tuple[int, ...]]  # (rank, step) -> numbers of the blocks

OFFLOAD: dict[str, object] = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
# Stage 0 supports no offload.
SETTINGS = {**CASES, **{
    f"{name}, offloaded": replace(recipe, zero={**recipe.zero, **OFFLOAD})
    for name, recipe in CASES.items() if name != "stage 0"
}}  # fmt: skip


class Failing(Block):
    """A block that raises an error after its computation if ``fails`` is set."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.fails:
            raise ArithmeticError
        return x


class Forgiving(nn.Module):
    """A model that runs the blocks of a route and skips a block that raises an error."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Failing(WIDTH) for _ in range(4))

    def forward(self, x: Tensor, route: tuple[int, ...]) -> Tensor:
        for index in route:
            with contextlib.suppress(ArithmeticError):
                x = self.blocks[index](x)
        return x


def everyone(number: int, step: int) -> tuple[int, ...]:
    """Return the same route for every rank and every step."""
    return (0, 1, 2, 3)


def opposite(number: int, step: int) -> tuple[int, ...]:
    """Return a route that alternates between ranks and between steps."""
    return (0, 1 + (number + step) % 2, 3)


def backwards(number: int, step: int) -> tuple[int, ...]:
    """Return the blocks in reverse order for every second rank."""
    return (0, 1, 2, 3)[:: -1 if number % 2 else 1]


def train(recipe: Recipe, route: Route, fails: int | None, number: int) -> None:
    """Train four steps on one rank, with evaluations between them; block 2 of rank ``fails`` fails in step 2."""
    torch.manual_seed(7)
    model = Forgiving()
    config = recipe.config()
    config["zeropp"] = {**config["zeropp"], "local_world_size": 2}  # type: ignore[dict-item]
    optimizer = zeropp.ZeroOptimizer(make_optimizer(recipe, model), model, config)
    for step in range(4):
        for micro in range(recipe.accumulation):
            holds = recipe.how == "no_sync" and micro + 1 < recipe.accumulation
            with optimizer.no_sync() if holds else contextlib.nullcontext():
                model.blocks[2].fails = number == fails and step == 2  # type: ignore[assignment]
                loss = model(torch.ones(2, WIDTH), route(number, step)).float().square().mean()
                model.blocks[2].fails = False  # type: ignore[assignment]
                optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()(torch.ones(2, WIDTH), route(number, step + 1))
            model.train()
    optimizer.close()


def check(size: int, recipe: Recipe, route: Route = everyone, fails: int | None = None) -> None:
    logs = run_engines(size, partial(train, recipe, route, fails))
    groups = {group for log in logs for group in log.by_group}
    assert all(len(log.by_group) > 1 and len(log.calls) > 10 for log in logs), f"only {groups} received collectives"
    for kind, members in groups:
        first, *others = [logs[member].by_group.get((kind, members)) for member in members]
        assert all(calls == first for calls in others), f"members {members} of {kind!r} received different things"
    if "offload_optimizer" not in recipe.zero:
        assert all(log.calls == logs[0].calls for log in logs), "ranks have launched in different orders"


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:zero_optimization.offload_param.device")
@pytest.mark.parametrize(
    "size", [4, pytest.param(8, marks=pytest.mark.campaign), pytest.param(64, marks=pytest.mark.campaign)]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting(name: str, size: int) -> None:
    check(size, SETTINGS[name])


@pytest.mark.parametrize(
    "name", ["stage 3", "stage 3, offloaded", "qwZ, qgZ, rotated", "stage 3, small ones persistent, no_sync"]
)
def test_two_ranks(name: str) -> None:
    check(2, SETTINGS[name])


@pytest.mark.every(3)
@pytest.mark.parametrize("fails", [None, 1])
@pytest.mark.parametrize("route", [opposite, backwards])
@pytest.mark.parametrize("name", ["stage 3", "stage 3, offloaded", "hpZ, bf16, lossless", "MiCS, accumulated"])
def test_ranks_that_differ(name: str, route: Route, fails: int | None) -> None:
    """Neighbouring ranks take different routes, and one rank may meet an error that its model catches."""
    check(4, SETTINGS[name], route, fails)


@pytest.mark.parametrize("size", [16, pytest.param(64, marks=pytest.mark.campaign)])
def test_many_ranks(size: int) -> None:
    check(size, replace(CASES["hpZ, bf16"], accumulation=1), opposite, 1)


def test_a_rank_that_sends_more_is_seen() -> None:
    """The check is sensitive: rank 1 gathers a unit once more than the other ranks, and the check fails."""
    issue, ranks = Transitions.issue_gather, dict[int, int]()

    def once_more(transitions: Transitions) -> None:
        issue(transitions)
        number = dist.get_rank()
        ranks[number] = ranks.get(number, 0) + 1
        if number == 1 and ranks[1] == 20:
            issue(transitions)

    patched = mock.patch.object(Transitions, "issue_gather", once_more)
    with patched, pytest.raises(AssertionError, match="different things"):
        check(4, CASES["stage 3"])


def test_a_rank_in_another_order_is_seen() -> None:
    """The check is sensitive: rank 1 issues the same reductions only at the end of a backward, and the check fails."""
    before_use = Reductions.before_use

    def at_the_end(reductions: Reductions, uses: float) -> None:
        if dist.get_rank() != 1 or uses == math.inf:
            before_use(reductions, uses)

    with (
        mock.patch.object(Reductions, "before_use", at_the_end),
        mock.patch.object(Reductions, "send_complete", lambda reductions: None),
        pytest.raises(AssertionError, match="different orders"),
    ):
        check(4, CASES["stage 3, nothing ahead"])
