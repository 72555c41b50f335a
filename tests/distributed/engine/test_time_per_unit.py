"""Time is reported by unit: ``comm_report`` has the time that the model waits, a profile has the issued collectives."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

import zeropp
from tests.support.branching_models import Routed, make_config
from tests.support.rank_pool import run_ranks
from zeropp.comm.hops import Hop, TrafficKey

SLOW = 0.6  # seconds, more than the delays of ranks on a busy machine


def waited(kind: str, method: str, settings: dict[str, object], steps: int) -> dict[tuple[str, str], float]:
    """Train while one hop of unit blocks.2 is slow once.

    Args:
        kind: kind of traffic of the slow hop.
        method: method of Hop that is slow.
        settings: keys for ``make_config``.
        steps: number of steps.

    Returns:
        A dict: (unit, kind) -> exposed seconds.
    """
    model = Routed()
    config = make_config(reuse=0, **settings)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    slept = 0
    usual = getattr(Hop, method)

    def slow(self: Hop, first: object, *args: object, **kwargs: object) -> object:
        nonlocal slept
        keys = [each for each in args if isinstance(each, TrafficKey)]
        if [key.unit for key in keys] == ["blocks.2"] and self.kind == kind and not slept:
            slept += 1
            time.sleep(SLOW)
        return usual(self, first, *args, **kwargs)

    optimizer.engine.wait_for_refresh()  # wrapping has issued the first refreshes
    with mock.patch.object(Hop, method, slow):
        for _ in range(steps):
            optimizer.backward(model(torch.ones(2, 8)).square().mean())
            optimizer.step()
        optimizer.engine.wait_for_refresh()
    assert slept
    found: Counter[tuple[str, str]] = Counter()
    for row in zeropp.comm_report(model).rows:
        found[row.unit, row.kind] += row.exposed  # type: ignore[assignment]  # a Counter of floats
    return dict(found)


CASES: dict[str, tuple[str, str, dict[str, object], int]] = {
    "gather": ("gather", "all_gather", {}, 1),
    "reduce": ("reduce", "all_to_all", {}, 1),
    "refresh of a second copy": ("refresh", "all_gather", {"zero_hpz_partition_size": 2}, 2),
    "refresh of whole weights": ("refresh", "all_gather", {"stage": 2, "overlap_comm": True}, 2),
    "refresh that is waited for before weights change": ("refresh", "all_gather", {"zero_hpz_partition_size": 2}, 1),
    "gather, no overlap": ("gather", "all_gather", {"overlap_comm": False}, 1),
    "reduce, no overlap": ("reduce", "all_to_all", {"overlap_comm": False}, 1),
    "refresh, no overlap": ("refresh", "all_gather", {"overlap_comm": False, "zero_hpz_partition_size": 2}, 1),
}


@pytest.mark.every(20)
@pytest.mark.parametrize("case", CASES)
def test_reports_name_the_unit_and_kind_of_the_longest_wait(case: str) -> None:
    kind, *_ = CASES[case]
    for found in run_ranks(4, waited, *CASES[case], local_world_size=2):
        assert found["blocks.2", kind] > 0.7 * SLOW
        assert max(found, key=lambda key: found[key]) == ("blocks.2", kind)


def profiled() -> set[str]:
    """Return the names of zeropp's ranges in a profile of the third step."""
    model = Routed(3)
    optimizer = zeropp.ZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(zero_hpz_partition_size=2)
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()
    usual = Hop.all_gather

    def slow(self: Hop, *args: Any) -> None:
        time.sleep(0.03)
        usual(self, *args)

    # The model waits, and has a range for it, only if values are not there yet.
    slowed = mock.patch.object(Hop, "all_gather", slow)
    with slowed, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()
        optimizer.engine.wait_for_refresh()
    return {event.key for event in profile.key_averages() if event.key.startswith("zeropp::")}


def test_a_profile_names_the_collectives_of_each_unit() -> None:
    for found in run_ranks(4, profiled, local_world_size=2):
        for what in ("gather", "wait", "pack", "reduce", "refresh"):
            assert {f"zeropp::{what} blocks.{number}" for number in range(3)} <= found
