"""After learning, a unit is reduced before the next unit but one receives a gradient, wherever the unit is."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import zeropp
from tests.support.branching_models import WIDTH, Route, Routed, chain, make_config
from tests.support.rank_pool import run_ranks
from zeropp.order.reductions import Reductions

SENT = "sent"


def events(route: Route, settings: dict[str, object]) -> list[tuple[str, int]]:
    """Run four steps, and record the events of the last backward.

    Args:
        route: order of the blocks in forward.
        settings: keys for ``make_config``.

    Returns:
        ("gradient", unit) for each gradient and (SENT, unit) for each reduction, in order.
    """
    model = Routed(4)
    config = make_config(**settings)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    found: list[tuple[str, int]] = []
    count, issue = Reductions.count_gradient, Reductions._issue

    def counted(self: Reductions, index: int, position: int) -> bool:
        found.append(("gradient", index))
        return count(self, index, position)

    def issued(self: Reductions, index: int, uses: int, **kwargs: bool | None) -> None:
        found.append((SENT, index))
        issue(self, index, uses, **kwargs)

    with mock.patch.object(Reductions, "count_gradient", counted), mock.patch.object(Reductions, "_issue", issued):
        for _ in range(4):
            found.clear()
            model(torch.ones(1, WIDTH), route).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "settings", [{}, {"reuse": 0, "prefetch": 0}, {"stage": 1}], ids=["default", "bare", "stage 1"]
)
@pytest.mark.parametrize("route", [chain(4), chain(3, 2, 1, 0), chain(1, 0, 3, 2)], ids=["down", "up", "mixed"])
def test_a_unit_is_sent_before_the_next_but_one_is_complete(route: Route, settings: dict[str, object]) -> None:
    backward = [stage[0] for stage in reversed(route)]
    for found in run_ranks(2, events, route, settings):
        assert [unit for kind, unit in found if kind == SENT] == backward
        for unit, later in zip(backward, backward[2:], strict=False):
            assert found.index((SENT, unit)) < found.index(("gradient", later)), f"unit {unit} waits: {found}"
