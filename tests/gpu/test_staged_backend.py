"""Two and four ranks on one GPU: streams, events and the order of collectives, over a backend that uses gloo."""

from __future__ import annotations

import pytest
import torch

from tests.support.branch_routes import BRANCHES, follow
from tests.support.rank_pool import run_ranks
from tests.support.staged_worlds import SETTINGS, STEPS, over, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("settings", [{}, {"reuse": 0, "prefetch": 0}, {"live": 0}, {"overlap_comm": False}])
@pytest.mark.parametrize("steps", STEPS)
def test_two_ranks(steps: str, settings: dict[str, object]) -> None:
    run_ranks(2, over, follow, STEPS[steps], settings, True, "cuda", init=False, timeout=120)


def test_four_ranks_as_two_nodes() -> None:
    run_ranks(4, over, follow, [BRANCHES * 2] * 3, {}, True, "cuda", init=False, local_world_size=2, timeout=120)


@pytest.mark.parametrize("name", SETTINGS)
def test_codecs_beside_the_model_give_the_bits_of_codecs_in_its_stream(name: str) -> None:
    """With ``overlap_comm`` false no comm streams exist, so equal bits show that streams and events order all work."""
    results = []
    for overlap in (True, False):
        settings = {**SETTINGS[name], "overlap_comm": overlap}
        (_, found), *_ = run_ranks(
            4, over, weights, torch.float32, settings, "cuda", init=False, local_world_size=2, timeout=120
        )
        results.append(found)
    for key, value in results[0].items():
        assert torch.equal(results[1][key], value), key
