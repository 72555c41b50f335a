"""float16 gradients whose sum over ranks exceeds float16 have a correct mean, because sums are scaled down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks

SLOPE = 40_000.0  # the largest float16 is 65504
RATE = 2.0**-16
TWICE: dict[str, object] = {"gradient_accumulation_steps": 2}
PLACED: dict[str, dict[str, object]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1, **TWICE},
    "stage 3": {},
    "deferred": {"defer_cross_reduction": True, **TWICE},
    "hpz": {"zero_hpz_partition_size": 2},
    "mics": {"mics_shard_size": 2},
    "mics, held": {"mics_shard_size": 2, **TWICE},
}


class Steep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(300, dtype=torch.float16))

    def forward(self) -> Tensor:
        return (self.weight.float() * SLOPE).sum()


def stepped(settings: dict[str, object], backwards: int, divided: bool = True) -> tuple[int, Tensor]:
    """Train two steps.

    Args:
        settings: keys for ``make_config``.
        backwards: number of backwards per step.
        divided: True if a step's loss is the mean over its backwards; False for their sum.

    Returns:
        The number of skipped steps, and the weights.
    """
    model = Steep()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, make_config(**settings))
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(backwards):
            optimizer.backward(model()) if divided else model().backward()
        optimizer.step()
    return optimizer.skipped_steps, zeropp.full_state(model)["weight"]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", PLACED)
def test_a_mean_that_float16_can_hold_is_finite(name: str) -> None:
    settings, expected = PLACED[name], torch.full((300,), 1 - 2 * RATE * SLOPE)
    backwards = 2 if TWICE.items() <= settings.items() else 1
    for skipped, weight in run_ranks(4, stepped, settings, backwards, local_world_size=2):
        assert skipped == 0
        torch.testing.assert_close(weight, expected, rtol=2**-10, atol=0)  # one rounding to float16 per hop


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["stage 1", "deferred", "mics, held"])
def test_a_sum_of_backwards_beyond_float16_may_be_held(name: str) -> None:
    """Held gradients are sums over backwards, or over backwards and the ranks of a node.

    They are scaled down by the number of summands before they are sent in float16.
    """
    expected = torch.full((300,), 1 - 4 * RATE * SLOPE)
    for skipped, weight in run_ranks(4, stepped, PLACED[name], 2, False, local_world_size=2):
        assert skipped == 0
        torch.testing.assert_close(weight, expected, rtol=2**-9, atol=0)


def many_groups() -> Tensor:
    """Take a step of sixteen times two backwards whose gradients of ``2**-22`` are reduced in pairs.

    The smallest float16 is ``2**-24``.
    """
    model = Steep()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=2.0**14), model, make_config())
    for _ in range(16):
        with optimizer.no_sync():
            (model() / SLOPE * 2.0**-22).backward()
        (model() / SLOPE * 2.0**-22).backward()
    optimizer.step()
    return zeropp.full_state(model)["weight"]


def test_scaling_depends_only_on_backwards_reduced_together() -> None:
    """The scaling depends on the backwards that are reduced together, and not on earlier ones of the step.

    With every further reduction, small gradients would otherwise be scaled down more, and become zero.
    """
    for weight in run_ranks(4, many_groups, local_world_size=2):
        torch.testing.assert_close(weight, torch.full((300,), 1 - 16 * 2.0**-7), rtol=0, atol=2.0**-12)
