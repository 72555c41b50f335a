"""Backends that have collectives but no cheap sends: the code that runs with NCCL, here over a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests import staged
from tests.distributed.harness import run_ranks
from tests.distributed.shapes import Pair, Routed, chain, make_config
from tests.distributed.test_sequence import ALL, BRANCHES, follow


def over(fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn`` in a world whose backend is the staged one."""
    staged.register()
    dist.init_process_group(staged.NAME)
    return fn(*args)


STEPS = {
    "opposite orders": [BRANCHES] * 3,
    "changing orders": [BRANCHES, BRANCHES, BRANCHES[::-1], BRANCHES],
    "parts": [[ALL], [ALL, chain(0, 3)], [chain(0, 2), chain(1, 3)], [((3,),), ALL]],
}


@pytest.mark.parametrize("settings", [{}, {"reuse": 0, "prefetch": 0}, {"overlap_comm": False}, {"persist": 1000}])
@pytest.mark.parametrize("steps", STEPS)
def test_collectives_in_one_order(steps: str, settings: dict[str, object]) -> None:
    run_ranks(2, over, follow, STEPS[steps], settings, init=False)


def test_two_nodes() -> None:
    run_ranks(4, over, follow, [BRANCHES * 2] * 3, {}, init=False, local_world_size=2)


def weights(dtype: torch.dtype, settings: dict[str, object]) -> tuple[str, dict[str, torch.Tensor]]:
    """The backend in use and the weights after four steps."""
    pair = Pair(Routed(), make_config(**settings), dtype=dtype)
    for _ in range(4):
        pair.train(ALL)
    return pair.engine.comm.backend, zeropp.full_state(pair.model)


@pytest.mark.parametrize("settings", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("local", [2, 4])
def test_bits_are_those_of_sends_and_receives(local: int, settings: dict[str, object]) -> None:
    (name, expected), *_ = run_ranks(4, weights, torch.float32, settings, local_world_size=local)
    (other, found), *_ = run_ranks(4, over, weights, torch.float32, settings, init=False, local_world_size=local)
    assert (name, other) == ("gloo", staged.NAME)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
