"""Models with uncommon parameters, hooks or control flow train as in plain torch in every kind of placement."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeropp
from tests.support.branching_models import make_config, share
from tests.support.parity import assert_close
from tests.support.rank_pool import run_ranks, spread
from tests.support.uncommon_models import UNCOMMON, WIDTH, Uncommon

# Placement -> (ranks, ranks per node, settings).
PLACED: dict[str, tuple[int, int, dict[str, object]]] = {
    "stage 3": (2, 2, {}),
    "stage 3 bare": (2, 2, {"prefetch": 0, "reuse": 0, "live": 0, "overlap_comm": False}),
    "defaults": (2, 2, {"persist": 100_000, "unit_min_blocks": 128}),
    "stage 1": (2, 2, {"stage": 1}),
    "hpz": (4, 2, {"zero_hpz_partition_size": 2}),
    "mics": (4, 2, {"mics_shard_size": 2, "persist": 20}),
}


def rows(step: int, rank: int) -> Tensor:
    """Return a rank's batch of 4 rows. From step 3 on, the last rank has 2 rows only, as at the end of an epoch."""
    count = 4 if rank < dist.get_world_size() - 1 or step < 3 else 2
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(50 * step + rank), dtype=torch.float64)


def made(uncommon: Uncommon) -> torch.nn.Module:
    model = uncommon.make()
    return model if uncommon.dtype is None else model.to(uncommon.dtype)


def train(name: str, settings: dict[str, object], steps: int) -> tuple[list[float], list[float], dict, dict, list[str]]:
    """Train a model, and plain torch on the batches of all ranks.

    Args:
        name: key of UNCOMMON.
        settings: keys for ``make_config``.
        steps: number of steps.

    Returns:
        This rank's losses in the sharded model and in plain torch, full weights of both, and the names of parameters.
    """
    uncommon = UNCOMMON[name]
    torch.manual_seed(11)
    model = made(uncommon)
    share(model)
    # One plain copy per rank, because each rank has its own buffers. The copies share their parameters.
    copies = [made(uncommon) for _ in range(dist.get_world_size())]
    for other in copies:
        other.load_state_dict(model.state_dict())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(trained, lr=0.05, momentum=0.9), model, make_config(**settings))
    plain = copies[0]
    for other in copies[1:]:
        for (_, p), (path, _) in zip(plain.named_parameters(), other.named_parameters(), strict=True):
            _share_parameter(other, path, p)
    reference = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    rank, world = dist.get_rank(), dist.get_world_size()
    losses, expected = [], []
    for step in range(steps):
        optimizer.zero_grad()
        reference.zero_grad()
        loss = uncommon.loss(model, rows(step, rank))
        optimizer.backward(loss)
        for other in range(world):
            own = uncommon.loss(copies[other], rows(step, other))
            (own / world).backward()
            if other == rank:
                expected.append(own.item())
        losses.append(loss.item())
        optimizer.step()
        reference.step()
    return losses, expected, zeropp.full_state(model), plain.state_dict(), [n for n, _ in model.named_parameters()]


def _share_parameter(module: torch.nn.Module, path: str, parameter: torch.nn.Parameter) -> None:
    """Replace a parameter of a copy by another copy's parameter object, so that both copies train the same one."""
    parent, _, name = path.rpartition(".")
    module.get_submodule(parent)._parameters[name] = parameter


@pytest.mark.every(20)
@pytest.mark.parametrize(("name", "placement"), spread(UNCOMMON, PLACED, every=2))
def test_trains_as_plain_torch(name: str, placement: str) -> None:
    world, local, settings = PLACED[placement]
    tolerance = UNCOMMON[name].tolerance
    for losses, expected, state, plain, names in run_ranks(world, train, name, settings, 5, local_world_size=local):
        assert_close(losses, expected, tolerance, "losses")
        for key in names:
            if plain[key].is_complex() or not plain[key].is_floating_point():
                assert torch.equal(state[key], plain[key]), key
            else:
                assert_close(state[key], plain[key], tolerance, key)
