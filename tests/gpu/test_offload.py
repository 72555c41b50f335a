"""Offload on one GPU: losses of training without offload, equal bits on every tier, and the planned bytes pinned."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import zeropp
from tests.gpu.delays import Trained
from tests.gpu.offloads import config_of, counted_locked, make_model, page_locked, train_fused

CARD = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", CARD]
TOLERANCE = {"cpu": 0.0, "cuda": 1e-6}
"""Relative tolerance of losses and norms after ten float32 steps: AdamW on a GPU rounds differently from AdamW on CPU.

On CPU both trainings use the same AdamW, so the results are equal.
"""
_SMALL = {"buffer_count": 3, "buffer_size": 4096}
_SPARE = 1 << 20  # bytes that every engine may pin in any case: a small row of numbers for each step


def ways(folder: Path) -> dict[str, dict[str, Any]]:
    """Return settings for every tier of states and weights, pinned and pageable; all must give the same bits."""
    found: dict[str, dict[str, Any]] = {}
    for place in ("cpu", "nvme"):
        own: dict[str, Any] = {"device": place, **({"nvme_path": str(folder)} if place == "nvme" else {})}
        files: dict[str, Any] = {"aio": {"block_size": 4096}, "sub_group_size": 8192} if place == "nvme" else {}
        for pinned in (False, True):
            states = {"offload_optimizer": {**own, "pin_memory": pinned}, **files}
            more = {"max_in_cpu": 0} if place == "nvme" else {}
            weights = {"offload_param": {**own, **_SMALL, **more, "pin_memory": pinned}}
            name = f"{place}, {'pinned' if pinned else 'pageable'}"
            found[name] = states
            found[f"{name}, eager"] = {**states, "lazy_step": False}
            found[f"{name}, with weights"] = {**states, **weights}
    own = {"device": "nvme", "nvme_path": str(folder), "pipeline_read": True, "pipeline_write": True}
    found["nvme, piped"] = {"offload_optimizer": own, "aio": {"block_size": 4096}, "sub_group_size": 8192}
    found["cpu, in the model's order"] = {"offload_optimizer": {"device": "cpu"}, "overlap_comm": False}
    return found


WAYS = tuple(ways(Path()))


@cache
def trained(device: str, **settings: Any) -> Trained:
    return train_fused(device, settings)


@cache
def offloaded(device: str, bf16: bool = False) -> Trained:
    return train_fused(device, {"offload_optimizer": {"device": "cpu"}, "bf16": {"enabled": bf16}})


def apart(one: Trained, other: Trained) -> float:
    """Return the largest relative difference of the losses (skipped steps included) and of the norms."""
    pairs = [*zip(one.losses, other.losses, strict=True), *zip(one.norms, other.norms, strict=True)]
    # A skipped step has norm None. torch's max returns NaN if any entry is NaN; Python's max may miss it.
    found = torch.tensor([(a, b) for a, b in pairs if a is not None and b is not None], dtype=torch.float64)
    return float(((found[:, 0] - found[:, 1]) / found[:, 1]).abs().max())


@pytest.mark.parametrize("device", DEVICES)
def test_losses_are_those_without_offload(device: str) -> None:
    plain = trained(device)
    assert plain.losses[-1] < plain.losses[0], "it has not learned"
    assert apart(offloaded(device), plain) <= TOLERANCE[device]


# On CPU nothing is pinned, so "pinned" cases would repeat the pageable ones.
EACH = [("cpu", name) for name in WAYS if ", pinned" not in name]
EACH += [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in WAYS]


@pytest.mark.every(4)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("device", "name"), EACH)
def test_the_same_bits_wherever_states_are(device: str, name: str, bf16: bool, tmp_path: Path) -> None:
    """In bf16 the weights have a second, rounded copy, which the device or the host makes; the bits are the same."""
    found = train_fused(device, {**ways(tmp_path / "swap")[name], "bf16": {"enabled": bf16}})
    assert offloaded(device, bf16).differs(found) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ratio", [0.3, 0.8])
def test_a_part_of_the_states(device: str, ratio: float) -> None:
    """On a GPU the device's part and the host's part round differently, so losses agree within a tolerance.

    On CPU the losses are equal.
    """
    found = train_fused(device, {"offload_optimizer": {"device": "cpu", "ratio": ratio}})
    assert apart(found, trained(device)) <= TOLERANCE[device]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", [{"stage": 1, "overlap_comm": True}, {"stage": 2}], ids=str)
def test_lower_stages(device: str, settings: dict[str, Any]) -> None:
    found = train_fused(device, {**settings, "offload_optimizer": {"device": "cpu", "pin_memory": True}})
    assert offloaded(device).differs(found) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["cpu, pinned", "cpu, pinned, with weights", "nvme, pinned, with weights"])
def test_the_planned_bytes_are_pinned(device: str, name: str, tmp_path: Path) -> None:
    settings = ways(tmp_path / "swap")[name]
    plan = zeropp.plan.memory(make_model("cpu" if device == "cpu" else "cuda"), config_of(settings), 1, device="cuda")
    held = [in_use(device)]
    with counted_locked(device) as asked:
        train_fused(device, settings, lambda optimizer: held.append(in_use(device)), steps=2)
    assert sum(asked) == plan.pinned > 0
    # Nothing more is page-locked, by torch's allocator.
    assert held[1] - held[0] <= _SPARE


def in_use(device: str) -> int:
    return page_locked() if device == "cuda" else 0


@pytest.mark.gpu
def test_pageable_memory_is_not_pinned() -> None:
    before, held = page_locked(), []
    train_fused("cuda", {"offload_optimizer": {"device": "cpu"}}, lambda _: held.append(page_locked()), steps=2)
    assert held[0] - before <= _SPARE
