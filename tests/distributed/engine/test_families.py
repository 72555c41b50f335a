"""Models of transformers and peft train as in plain torch, through the plain ZeroOptimizer."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.branching_models import make_config, share
from tests.support.model_families import FAMILIES, Batch
from tests.support.parity import assert_close
from tests.support.rank_pool import run_ranks, spread

pytest.importorskip("transformers", reason="the dev extra installs transformers and peft")

STEPS = 3
# Placement -> (ranks, ranks per node, settings).
PLACED: dict[str, tuple[int, int, dict[str, object]]] = {
    "stage 1": (2, 2, {"stage": 1}),
    "stage 2": (2, 2, {"stage": 2}),
    "stage 3": (2, 2, {}),
    "stage 3, defaults": (2, 2, {"persist": 100_000, "unit_min_blocks": 128}),
    "hpz": (4, 2, {"zero_hpz_partition_size": 2}),
    "hpz, defaults": (4, 2, {"zero_hpz_partition_size": 2, "persist": 100_000, "unit_min_blocks": 128}),
}


def batch_of(name: str, step: int, rank: int) -> Batch:
    return FAMILIES[name].batch(torch.Generator().manual_seed(100 * step + rank))


def train(name: str, settings: dict[str, object]) -> tuple[list[float], list[float]]:
    """Train a model, and plain torch on the batches of all ranks.

    Args:
        name: key of FAMILIES.
        settings: keys for ``make_config``.

    Returns:
        This rank's losses in the sharded model, and in plain torch.
    """
    torch.manual_seed(7)
    model = FAMILIES[name].make().train()
    share(model)
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = copy.deepcopy(model)
    # In sharded training each rank has its own buffers, so plain torch swaps them in for the batch of each rank.
    buffers = {r: {n: b.clone() for n, b in plain.named_buffers()} for r in range(world)}
    rate = FAMILIES[name].rate
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=rate), model, make_config(**settings))
    reference = torch.optim.AdamW(plain.parameters(), lr=rate)
    losses, expected = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        reference.zero_grad()
        loss = model(**batch_of(name, step, rank)).loss
        optimizer.backward(loss)
        losses.append(loss.item())
        for other in range(world):
            for key, buffer in plain.named_buffers():
                buffer.copy_(buffers[other][key])
            its = plain(**batch_of(name, step, other)).loss
            (its / world).backward()
            buffers[other] = {n: b.clone() for n, b in plain.named_buffers()}
            if other == rank:
                expected.append(its.item())
        optimizer.step()
        reference.step()
    return losses, expected


@pytest.mark.every(40)
@pytest.mark.parametrize(("name", "placement"), spread(FAMILIES, PLACED, every=3))
def test_losses_are_those_of_plain_torch(name: str, placement: str) -> None:
    """Losses agree within a relative 1e-5 in float32, because sums over ranks are rounded in another order."""
    world, local, settings = PLACED[placement]
    for losses, expected in run_ranks(world, train, name, settings, local_world_size=local, timeout=100):
        for found, wanted in zip(losses, expected, strict=True):
            assert_close(found / wanted, 1.0, 1e-5, f"losses {losses} against {expected}")
        assert len(set(losses)) == STEPS, "the losses do not move"
