"""Each process group is used by one thread only.

With two threads, ranks could issue its collectives in different orders.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.branching_models import Routed, make_config
from tests.support.rank_pool import run_ranks, some
from zeropp.comm.hops import Hop

QUANTIZED: dict[str, object] = {"zero_quantized_gradients": True, "zero_quantized_weights": True}
TWICE: dict[str, object] = {"gradient_accumulation_steps": 2}
ACCUMULATED: dict[str, object] = {**TWICE, "defer_cross_reduction": True}
# By name: number of ranks, ranks per node, settings.
PLACED: dict[str, tuple[int, int, dict[str, object]]] = {
    "2x2 stage 3": (4, 2, ACCUMULATED),
    "2x2 hpz, quantized": (4, 2, {**ACCUMULATED, **QUANTIZED, "zero_hpz_partition_size": 2}),
    "2x2 lossless": (4, 2, {"zero_hpz_partition_size": 2, "weight_codec": "lossless", "bf16": {"enabled": True}}),
    "2x2 stage 1": (4, 2, {**ACCUMULATED, "stage": 1, "overlap_comm": True}),
    "2x2 mics 2": (4, 2, {**ACCUMULATED, "mics_shard_size": 2}),
    "4x2 mics 4": (8, 2, {**TWICE, "mics_shard_size": 4}),
    "4x2 mics 4, quantized": (8, 2, {**TWICE, **QUANTIZED, "mics_shard_size": 4}),
}


def threads_of_groups(settings: dict[str, object], local: int) -> tuple[list[int], int]:
    """Train two steps of two backwards each, and record which thread uses which process group.

    Only the second backward of each step uses the last block. So a reduction of that block finds no held gradient of an
    earlier micro-batch to be sent with.

    Returns:
        Number of threads that used each group, and number of threads that used any group.
    """
    used: defaultdict[object, set[int]] = defaultdict(set)

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Hop, *args: object, **kwargs: object) -> object:
            used[self.group].add(threading.get_ident())
            return method(self, *args, **kwargs)

        return call

    torch.manual_seed(3)
    model = Routed()
    config = make_config(local_world_size=local, **settings)
    with (
        mock.patch.object(Hop, "all_gather", noted(Hop.all_gather)),
        mock.patch.object(Hop, "all_to_all", noted(Hop.all_to_all)),
    ):
        optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
        for _ in range(2):
            optimizer.zero_grad()
            for route in (((0,), (1,), (2,)), None):
                optimizer.backward(model(torch.full((2, 8), float(dist.get_rank())), route).square().mean())
            optimizer.step()
        optimizer.engine.wait_for_refresh()
    return [len(threads) for threads in used.values()], len(set().union(*used.values()))


@pytest.mark.every(8)
@pytest.mark.parametrize("name", some(PLACED, 2))
def test_each_group_belongs_to_one_thread(name: str) -> None:
    world, local, settings = PLACED[name]
    for each, in_all in run_ranks(world, threads_of_groups, settings, local):
        assert set(each) == {1}
        assert in_all > 1, "all groups were used by the same thread"
