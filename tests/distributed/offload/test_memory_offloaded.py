"""Offloaded bytes equal those of ``plan.memory``: rows in host memory, rows in files, and staging buffers.

A row is a stored tensor with one kind of numbers (main weights, gradients, a state) of one flat buffer's shard.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeropp
from tests.support.all_parameter_kinds import CODED, Mixed
from tests.support.branching_models import Routed, make_config
from tests.support.owned_memory import owned_bytes
from tests.support.rank_pool import run_ranks
from zeropp.offload import tier_choice
from zeropp.offload.storage_tiers import PLACES, HostMemory, Place
from zeropp.offload.swap import SwapFile
from zeropp.optimizer import wrapper
from zeropp.params.gradient import Gradient
from zeropp.params.wire_copy import WireCopy
from zeropp.partition.levels import BLOCK
from zeropp.plan.memory import plan_space
from zeropp.setup.blueprint import Blueprint

SMALL = {"block_size": 1024}
"""A block size in bytes below the smallest row of the model, so that every row may be in a file."""


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Count host memory as separate from the training device's memory, as on a machine with a GPU."""

    def planned(blueprint: Blueprint, **others: Any) -> Mapping[str, int]:
        return plan_space(replace(blueprint, device=torch.device("cuda")), **others)

    host = mock.patch.object(tier_choice, "host_memory", lambda device: HostMemory())
    with host, mock.patch.object(wrapper, "plan_space", planned):
        yield


def offloading(states: str, weights: str, path: str, **weight_keys: object) -> dict[str, Any]:
    """Return the blocks offload_optimizer and offload_param of a configuration, each unless its device is ""."""
    blocks: dict[str, Any] = {}
    for key, device, more in (("offload_optimizer", states, {}), ("offload_param", weights, weight_keys)):
        if device:
            blocks[key] = {"device": device, **({"nvme_path": path} if device == "nvme" else {}), **more}
    return blocks


def make(config: dict[str, Any], freeze: bool, dtype: torch.dtype) -> tuple[Mixed, zeropp.ZeroOptimizer]:
    model = Mixed(dtype, freeze)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return model, zeropp.ZeroOptimizer(optimizer, model, config)


def plan_of(config: dict[str, Any], freeze: bool, dtype: torch.dtype, device: str) -> zeropp.plan.MemoryPlan:
    world = dist.get_world_size() if dist.is_initialized() else 1
    model = Mixed(dtype, freeze, device="meta")
    return zeropp.plan.memory(model, config, world, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), device=device)


def owned(config: dict[str, Any], freeze: bool, dtype: torch.dtype, device: str) -> list[str]:
    """Return a text for each difference in bytes between plan and engine, before any step and after one and two steps.

    Args:
        config: configuration of the engine and of the plan.
        freeze: True to freeze a part of the model.
        dtype: dtype of most of the model's parameters.
        device: device type that the plan is made for. With "cuda", host memory counts as separate.
    """
    plan, wrong = plan_of(config, freeze, dtype, device), []
    files, reserve = dict[SwapFile, int](), SwapFile.reserve

    def reserved(file: SwapFile, nbytes: int) -> None:
        reserve(file, nbytes)
        files[file] = nbytes

    apart = elsewhere() if device == "cuda" else contextlib.nullcontext()
    with apart, mock.patch.object(SwapFile, "reserve", reserved):
        model, optimizer = make(config, freeze, dtype)
        for when in ("fresh", "after a step", "after two"):
            if when != "fresh":
                optimizer.zero_grad()
                model(torch.arange(4)).backward()
                optimizer.step()
            optimizer.engine.wait_for_step()
            optimizer.engine.wait_for_refresh()
            optimizer.engine.release_prefetched()
            wrong += [f"{when}: {each}" for each in differences(plan, optimizer, stepped=when != "fresh")]
        optimizer.close()
    # Disk space is reserved as planned before training, and the space in use at the end equals the reservation.
    found = [(own, file._spaced) for file, own in files.items()]
    if [own for own, _ in found if own] != [*plan.paths.values()] or any(own != used for own, used in found):
        wrong.append(f"planned {plan.paths} below paths; reserved, and in use in the end: {found}")
    return wrong


def differences(plan: zeropp.plan.MemoryPlan, optimizer: zeropp.ZeroOptimizer, *, stepped: bool) -> list[str]:
    """Return a text for each difference in bytes, by place and term. Optimizer states count only if ``stepped``."""
    wrong = []
    planned: dict[Place, dict[str, int]] = {"device": plan.terms, "host": plan.host, "disk": plan.disk}
    staging = rings(optimizer)
    states, slack = states_of(optimizer) if stepped else ({}, {})
    if stepped and not any(states.values()):
        wrong.append("nothing has states after a step")
    for place in PLACES:
        found = Counter(owned_bytes(optimizer, place))
        expected = Counter(planned[place])
        own = expected.pop("optimizer_states", 0)
        if place == "host":
            found.update(staging)
        if place == "device":
            own = plan.device_states
            expected["gradients"] += plan.gradients if stepped else 0  # they stay until zero_grad()
        if stepped and not states[place] <= own <= states[place] + slack[place]:
            wrong.append(f"{place}: {states[place]} bytes of states, planned {own}, at most {slack[place]} of padding")
        if +found != +expected:
            wrong.append(f"{place} has {dict(+found)}, planned {dict(+expected)}")
    return wrong


def rings(optimizer: zeropp.ZeroOptimizer) -> dict[str, int]:
    own = optimizer.engine.maker.tiers
    reads = own.reader.ring if own.reader is not None else None
    host = optimizer._optimizer_step._host
    uploads = None if host is None else host._upload_ring
    found = {"upload_staging": uploads, "step_staging": own.ring, "gather_staging": reads}
    return {name: ring.count * ring.nbytes for name, ring in found.items() if ring is not None}


def states_of(optimizer: zeropp.ZeroOptimizer) -> tuple[dict[Place, int], dict[Place, int]]:
    """Return the bytes of optimizer states in each place, and the most bytes that padding may add to them in the plan.

    A state has one row per flat buffer if the main weights are in a file, or if they are on the device and the host
    steps them. Otherwise each slice has state tensors of its own.
    """
    found: dict[Place, int] = dict.fromkeys(PLACES, 0)
    slack = found.copy()
    host = optimizer._optimizer_step._host
    for buffer in optimizer.engine.trainable_buffers:
        parts = [part for part in optimizer.slices.stepped if part.buffer is buffer and optimizer.state[part.parameter]]
        place = buffer.main.place
        if place == "disk" and parts:
            assert host is not None
            assert [row.nbytes for row in host._states[buffer].values()] == [buffer.main.nbytes] * 2
            found["disk"] += 2 * buffer.main.nbytes
            continue
        if host is not None and buffer in host._states:
            rows = host._states[buffer].values()
            left = buffer.main.tensor.numel() - buffer.tiers.device_numel
            assert [row.tensor.numel() for row in rows] == [left] * 2
            for row in rows:
                found[row.place] += row.nbytes
            parts = [part for part in parts if not part.on_host]
        # A buffer has no states if its shard is all padding, or if no rank uses its parameters. The plan counts states
        # for the whole shard, so all of them are slack.
        slack[place] += 2 * (BLOCK * (len(parts) + 1) * buffer.main_dtype.itemsize if parts else buffer.main.nbytes)
        states = [item for part in parts for item in optimizer.state[part.parameter].items()]
        found[place] += sum(value.nbytes for key, value in states if key != "step")
    return found, slack


WHERE = ("", "cpu", "nvme")
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"stage {stage}, {states or 'none'}/{weights or 'none'}, {'bf16' if bf16 else 'fp32'}": (
        states, weights, {"stage": stage, "bf16": {"enabled": bf16}}
    )
    for stage, states, weights, bf16 in itertools.product((1, 3), WHERE, WHERE, (False, True))
    if (stage == 3 or not weights) and (states or weights)
}  # fmt: skip
CASES |= {
    "qwZ": ("nvme", "nvme", {**CODED, "bf16": {"enabled": True}}),
    "qwZ, weights on the host": ("cpu", "cpu", {**CODED, "persist": 100}),
    "qwZ, weights on the device": ("cpu", "", {**CODED, "bf16": {"enabled": True}}),
    "qwZ in stage 2": ("nvme", "", {**CODED, "stage": 2}),
    "frozen codes": ("nvme", "nvme", {"zero_quantized_nontrainable_weights": True, "persist": 100}),
    "frozen codes on the host": ("", "cpu", {"zero_quantized_nontrainable_weights": True, "persist": 100}),
    "persistent": ("nvme", "nvme", {"persist": 100, "bf16": {"enabled": True}}),
    "a part on the host": ("cpu", "", {"ratio": 0.3}),
    "a part on the host, bf16": ("cpu", "cpu", {"ratio": 0.6, "bf16": {"enabled": True}}),
    "a part in files": ("nvme", "nvme", {"ratio": 0.45, "bf16": {"enabled": True}}),
    "nothing on the host": ("cpu", "", {"ratio": 0}),
    "lossless": ("cpu", "", {"stage": 1, "bf16": {"enabled": True}, "weight_codec": "lossless"}),
}
# Each case runs on one rank or on two, alternately. The campaign runs the other number of ranks.
TURNS = [
    pytest.param(world, name, marks=() if number % 2 == world % 2 else pytest.mark.campaign)
    for number, name in enumerate(CASES)
    for world in (1, 2)
]


def config_of(name: str, path: Path, **weight_keys: object) -> dict[str, Any]:
    states, weights, settings = CASES[name]
    blocks = offloading(states, weights, str(path), **weight_keys)
    if states:
        blocks["offload_optimizer"]["ratio"] = settings.get("ratio", 1.0)
    settings = {key: value for key, value in settings.items() if key != "ratio"}
    return make_config(**settings, **blocks, aio=SMALL)


@pytest.mark.every(8)
@pytest.mark.parametrize(("world", "name"), TURNS)
def test_offloaded_bytes_are_in_the_planned_places(world: int, name: str, tmp_path: Path) -> None:
    for rank, wrong in enumerate(run_ranks(world, owned, config_of(name, tmp_path), True, torch.float32, "cuda")):
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.every(2)
@pytest.mark.parametrize("secondary", ["weights", "codes"])
def test_weights_cached_by_hpz_are_on_the_device(secondary: str, tmp_path: Path) -> None:
    coded = {**CODED, "secondary": secondary} if secondary == "codes" else {}
    keys = {"zero_hpz_partition_size": 2, "bf16": {"enabled": True}, "persist": 100, **coded}
    config = make_config(**keys, **offloading("nvme", "nvme", str(tmp_path)), aio=SMALL)
    for rank, wrong in enumerate(run_ranks(4, owned, config, False, torch.float32, "cuda", local_world_size=2)):
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("most", [0, 700, 3000, 10**9])
def test_rows_stay_in_memory_in_the_order_in_which_they_are_made(most: int, tmp_path: Path) -> None:
    """Rows stay in memory while they fit into ``max_in_cpu`` elements in total.

    A later and smaller row may fit where an earlier one did not.
    """
    config = config_of("stage 3, nvme/nvme, bf16", tmp_path, max_in_cpu=most)
    for wrong in run_ranks(2, owned, config, True, torch.float64, "cuda"):
        assert not wrong


@pytest.mark.every(2)
@pytest.mark.parametrize("persist", [0, 100])
def test_rows_that_are_smaller_than_a_request_stay_in_memory(persist: int, tmp_path: Path) -> None:
    """A row with fewer bytes than ``block_size`` stays in memory.

    On two ranks most rows of main weights have 2048 bytes, and most bf16 rows that gathers read have 1024 bytes. So a
    block size of 1025 keeps the bf16 rows in memory, and 2049 keeps both kinds.
    """
    offload = offloading("nvme", "nvme", str(tmp_path), max_in_cpu=0)
    for block in (1025, 2049):
        config = make_config(**offload, bf16={"enabled": True}, persist=persist, aio={"block_size": block})
        for wrong in run_ranks(2, owned, config, False, torch.float32, "cuda"):
            assert not wrong


@pytest.mark.every(4)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("stage 3") and "nvme" in name])
def test_files_of_a_cpu_that_trains(name: str, tmp_path: Path) -> None:
    for wrong in run_ranks(2, owned, config_of(name, tmp_path), True, torch.float32, "cpu"):
        assert not wrong
    (wrong,) = run_ranks(1, owned, config_of(name, tmp_path), False, torch.float32, "cpu")
    assert not wrong


def test_a_cpu_offloads_nothing_to_its_own_memory() -> None:
    config = make_config(**offloading("cpu", "cpu", ""))
    (wrong,) = run_ranks(1, owned, config, True, torch.float32, "cpu")
    assert not wrong
    plain = zeropp.plan.memory(Mixed(), make_config(), 1, device="cpu")
    plan = zeropp.plan.memory(Mixed(), config, 1, device="cpu")
    # A step on the host may run until the next backward, so its gradients stay.
    assert plan.terms == {**plain.terms, "gradients": plain.gradients} and plan.gradients == 0
    assert plan.host == {} and plan.host_total == plain.host_total > plain.total


def passing(config: dict[str, Any]) -> tuple[int, int, dict[str, int], dict[str, int]]:
    """Take one step while refreshes may not free new weights before all new weights are on the device.

    Returns:
        Largest number of bytes of new weights on the device, the planned number, bytes of each unit's gradient sums on
        the way to the host, and the planned bytes by unit.
    """
    model, sums = Routed(3, 24), Counter[str]()
    plan = zeropp.plan.memory(model, config, dist.get_world_size())
    drop, empty, most, stepped = WireCopy.drop_new, Gradient._empty_sum, 0, False

    def late(source: WireCopy) -> None:
        nonlocal most
        until = time.monotonic() + 5
        # The first refresh, while the model is wrapped, sends weights that no step has written, so it does not wait.
        while stepped and most < plan.new_weights and time.monotonic() < until:
            most = max(most, new_nbytes())
            time.sleep(0.005)
        drop(source)

    def summed(gradient: Gradient) -> Tensor:
        total = empty(gradient)
        sums[gradient.unit] += total.nbytes
        return total

    with elsewhere(), mock.patch.object(WireCopy, "drop_new", late), mock.patch.object(Gradient, "_empty_sum", summed):
        inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        optimizer = zeropp.ZeroOptimizer(inner, model, config)

        def new_nbytes() -> int:
            return owned_bytes(optimizer).get("new_weights", 0)

        optimizer.engine.wait_for_refresh()
        stepped = True
        model(torch.ones(2, 24)).sum().backward()
        optimizer.step()
        optimizer.engine.wait_for_refresh()
        optimizer.close()
    return most, plan.new_weights, dict(sums), {unit.name: unit.arriving for unit in plan.units}


@pytest.mark.every(2)
@pytest.mark.parametrize("keys", [{"stage": 1}, {"stage": 1, "bf16": {"enabled": True}}, {"persist": 100}], ids=str)
def test_new_weights_and_gradient_sums_in_flight_equal_the_plan(keys: dict[str, Any]) -> None:
    config = make_config(**keys, **offloading("cpu", "", ""))
    for most, planned, sums, arriving in run_ranks(2, passing, config):
        assert most == planned > 0
        assert sums == arriving
