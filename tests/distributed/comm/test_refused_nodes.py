"""Impossible node sizes, a group without this rank, and meta tensors are refused on every rank."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist
from torch import nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks
from tests.support.refused_arguments import Args, attempt, check, plain, sgd


def nodes(value: str, everywhere: bool, settings: dict[str, object]) -> tuple[str, str, float]:
    """Wrap a model with a given LOCAL_WORLD_SIZE.

    Args:
        value: value of LOCAL_WORLD_SIZE.
        everywhere: True to set the value on all ranks, False to set it on the last rank only.
        settings: configuration.

    Returns:
        Class names, message and seconds of the error.
    """
    if everywhere or dist.get_rank() == dist.get_world_size() - 1:
        os.environ["LOCAL_WORLD_SIZE"] = value
    return attempt(lambda m, r: plain(m, **settings))


NODES: dict[str, tuple[int, str, dict[str, object], str]] = {
    "no number": (2, "two", {}, "LOCAL_WORLD_SIZE is 'two'.*torchrun.*local_world_size"),
    "zero": (2, "0", {}, "LOCAL_WORLD_SIZE is '0'"),
    "uneven": (4, "3", {}, "same number of ranks.*LOCAL_WORLD_SIZE.*local_world_size"),
    "uneven in the config": (4, "4", {"local_world_size": 3}, "same number of ranks.*local_world_size"),
}


@pytest.mark.parametrize("name", NODES)
def test_nodes_that_cannot_be(name: str) -> None:
    world, value, settings, pattern = NODES[name]
    check(run_ranks(world, nodes, value, True, settings, timeout=40), "ValueError", pattern)


def test_nodes_that_one_rank_sees_differently() -> None:
    """A LOCAL_WORLD_SIZE that differs on one rank is refused.

    That rank would make other process groups, and hang all ranks.
    """
    results = run_ranks(4, nodes, "2", False, {}, timeout=40)
    check(results, "ValueError|RuntimeError", "LOCAL_WORLD_SIZE|local_world_size")


def no_member() -> tuple[str, str, float]:
    group = dist.new_group([0])
    return attempt(lambda m, r: Args(sgd(m), m, make_config(hang_timeout=5), group))


def test_a_group_without_this_rank() -> None:
    member, outsider = run_ranks(2, no_member, timeout=40)
    assert member[0] == "nothing"
    check([outsider], "TypeError|ValueError", "this rank.*(belong|member)")


def local_only() -> tuple[str, str, float]:
    """Wrap a meta model in a process that has not started torch.distributed.

    Returns:
        Class name, message and seconds of the error.
    """
    start = time.monotonic()
    model = nn.Linear(3, 3, device="meta")
    with pytest.raises(ValueError, match="meta device") as caught:
        zeropp.ZeroOptimizer(sgd(model), model, make_config())
    return type(caught.value).__name__, str(caught.value), time.monotonic() - start


def test_refusals_need_no_process_group() -> None:
    check(run_ranks(1, local_only, init=False), "ValueError", "materialize")
