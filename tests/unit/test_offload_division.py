"""The elements that are stepped on the device if the host steps only a part of them (``ratio``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zeropp.config import load_config
from zeropp.offload.storage_tiers import HostMemory, Memory
from zeropp.offload.tier_choice import ALL, Tiers, at_device, divide_steps
from zeropp.setup.choices import choose_tier_options

NEAR, FAR = Memory(torch.device("cpu")), HostMemory()


def divide(numels: list[int], **block: Any) -> list[Tiers]:
    offload = {"device": "cpu", **block}
    config = load_config({"zero_optimization": {"stage": 3, "offload_optimizer": offload}})
    tiers = Tiers(FAR, FAR, FAR, FAR, device_numel=0) if config.steps_on_host else at_device(NEAR.device)
    return [tiers.divided(part, NEAR) for part in divide_steps(choose_tier_options(config), numels)]


def on_device(found: list[Tiers], numels: list[int]) -> list[int]:
    return [min(tiers.device_numel, numel) for tiers, numel in zip(found, numels, strict=True)]


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (1, [0, 0, 0]),
        (0.75, [1024, 0, 0]),
        (0.5, [1024, 1024, 0]),
        (0.3, [1024, 1792, 0]),  # 2867 of 4096 elements, and the border rounded down to a multiple of 256
        (0.25, [1024, 2048, 0]),
        (0.2, [1024, 2048, 0]),  # 3277 of 4096 elements, of which 205 are left: less than a block
        (0, [1024, 2048, 1024]),
    ],
)
def test_the_device_has_its_part_of_the_first(ratio: float, expected: list[int]) -> None:
    numels = [1024, 2048, 1024]
    assert on_device(divide(numels, ratio=ratio), numels) == expected


def test_a_buffer_at_the_border_has_its_states_elsewhere() -> None:
    near, border, far = divide([1024, 2048, 1024], ratio=0.5)
    assert (near.main, near.states, near.gradients, near.device_numel) == (NEAR, NEAR, NEAR, ALL)
    assert (border.main, border.states, border.gradients) == (NEAR, FAR, NEAR)
    assert (far.main, far.states, far.gradients, far.device_numel) == (FAR, FAR, FAR, 0)


def test_a_ratio_does_not_move_weights_used_in_forward() -> None:
    for tiers in divide([1024, 2048], ratio=0.5):
        assert tiers.weights == FAR


def test_without_offload_everything_is_the_device_s() -> None:
    for block in ({"device": "none"}, {"ratio": 0}):
        assert divide([1024, 2048], **block) == [at_device(NEAR.device)] * 2
