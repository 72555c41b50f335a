"""Training over a backend with collectives but without cheap sends, as NCCL; the staged backend runs it on the CPU."""

from __future__ import annotations

import pytest
import torch

from bench.common import staged
from tests.support.branch_routes import BRANCHES, follow
from tests.support.rank_pool import run_ranks
from tests.support.staged_worlds import SETTINGS, STEPS, over, weights


@pytest.mark.every(4)
@pytest.mark.parametrize("settings", [{}, {"reuse": 0, "prefetch": 0}, {"overlap_comm": False}, {"persist": 1000}])
@pytest.mark.parametrize("steps", STEPS)
def test_collectives_in_one_order(steps: str, settings: dict[str, object]) -> None:
    run_ranks(2, over, follow, STEPS[steps], settings, init=False)


def test_two_nodes() -> None:
    run_ranks(4, over, follow, [BRANCHES * 2] * 3, {}, init=False, local_world_size=2)


# Settings that also run with all four ranks on one node (one hop) by default; the others do so in the campaign.
ONE_HOP = ("fp32", "zero++", "both hops", "delta4")
ROUTES = [(2, "zero++"), *((2, name) for name in SETTINGS if name != "zero++"), *((4, name) for name in ONE_HOP)]
ROUTES += [pytest.param(4, name, marks=pytest.mark.campaign) for name in SETTINGS if name not in ONE_HOP]


@pytest.mark.every(32)
@pytest.mark.parametrize(("local", "name"), ROUTES)
def test_bits_are_those_of_sends_and_receives(local: int, name: str) -> None:
    """Weights are equal bit for bit over gloo's sends and over collectives, for each codec, with one or two hops."""
    settings = SETTINGS[name]
    if local == 4:
        settings = {key: value for key, value in settings.items() if key != "zero_hpz_partition_size"}
        settings = {**settings, "stage": 1} if "weight_codec" in settings else settings
    (backend, expected), *_ = run_ranks(4, weights, torch.float32, settings, local_world_size=local)
    (other, found), *_ = run_ranks(4, over, weights, torch.float32, settings, init=False, local_world_size=local)
    assert (backend, other) == ("gloo", staged.NAME)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
