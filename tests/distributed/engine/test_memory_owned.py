"""What the engine owns is what the plan says: weights, held gradients, messages under way, and the whole process."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.all_parameter_kinds import CODED, Mixed
from tests.support.branching_models import Routed, make_config
from tests.support.owned_memory import owned_bytes
from tests.support.rank_pool import run_ranks
from tests.support.tensor_memory import SHARED_NAN, storages, trained
from zeropp.comm.hops import Hop
from zeropp.order import reductions
from zeropp.params.gradient import Gradient


def owned(dtype: torch.dtype, freeze: bool, settings: dict[str, object]) -> list[str]:
    """What differs between the plan and the engine, fresh and after two steps."""
    config = make_config(**settings)
    model = Mixed(dtype, freeze)
    world = dist.get_world_size() if dist.is_initialized() else 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    plan = zeropp.plan.memory(model, config, world, local)
    wrong = []
    if zeropp.plan.memory(Mixed(dtype, freeze, device="meta"), config, world, local) != plan:
        wrong.append("the plan of a meta model differs")
    optimizer = trained(model, config)
    groups = len(optimizer.engine.comm._groups) + (world > 1)
    planned = zeropp.plan.memory(model, config, world, local, device="cpu").communicators
    if groups != len(planned):
        wrong.append(f"{groups} process groups, planned {planned}")
    for when in ("fresh", "after a step", "after an eval", "after a state dict"):
        if when == "after a step":
            model(torch.arange(4)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if when == "after an eval":
            with torch.no_grad():
                model(torch.arange(4))
        if when == "after a state dict":
            model.state_dict()
            zeropp.full_state(model)
        optimizer.engine.wait_for_refresh()
        if when == "after an eval":
            optimizer.engine.release_prefetched()  # kept for reuse, within max_live_parameters
        bytes_now = owned_bytes(optimizer)
        wanted = {**plan.terms, "held_gradients": 0, "gathered": 0}
        if bytes_now != wanted:
            wrong.append(f"{when}: owned {bytes_now}, planned {wanted}")
    sizes = {unit.name: sum(buffer.nbytes for buffer in unit.buffers) for unit in optimizer.engine.units}
    if sizes != {unit.name: unit.gathered for unit in plan.units}:
        wrong.append(f"gathered sizes {sizes}, planned {plan.units}")
    return wrong


OWNED = {
    "fp32": (torch.float32, False, {}),
    "fp32-frozen": (torch.float32, True, {}),
    "fp64-frozen": (torch.float64, True, {}),
    "bf16": (torch.float32, False, {"bf16": {"enabled": True}}),
    "bf16-frozen-persistent": (torch.float32, True, {"bf16": {"enabled": True}, "persist": 100}),
    "defaults": (torch.float32, True, {"persist": 100_000, "unit_min_blocks": 128}),
    "merged": (torch.float32, True, {"unit_min_blocks": 2, "persist": 30}),
    "stage 0": (torch.float32, True, {"stage": 0}),
    "stage 1": (torch.float32, True, {"stage": 1, "bf16": {"enabled": True}}),
    "stage 2": (torch.float64, True, {"stage": 2, "persist": 100}),
    "mics": (torch.float32, True, {"mics_shard_size": 1, "persist": 100}),
    "hpz": (torch.float32, True, {"zero_hpz_partition_size": 2, "persist": 100}),
    "hpz-bf16": (torch.float32, False, {"zero_hpz_partition_size": 2, "bf16": {"enabled": True}}),
    "fp32-wire": (torch.float32, True, {"bf16": {"enabled": True}, "communication_data_type": "fp32"}),
    "feedback": (torch.float32, True, {**CODED, "zeropp_loco_param": {}, "feedback": "both", "persist": 100}),
    "feedback-cross": (torch.float32, True, {**CODED, "zeropp_loco_param": {}, "bf16": {"enabled": True}}),
    "hpz-codes": (torch.float32, True, {**CODED, "zero_hpz_partition_size": 2, "secondary": "codes"}),
    "frozen-codes": (torch.float32, True, {"zero_quantized_nontrainable_weights": True, "persist": 100}),
}


@pytest.mark.every(14)
@pytest.mark.parametrize("name", OWNED)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_owned_bytes_equal_the_plan(world: int, name: str) -> None:
    for rank, wrong in enumerate(run_ranks(world, owned, *OWNED[name], local_world_size=min(world, 2))):
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_parameter_group_has_markers(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype))
    plan = zeropp.plan.memory(model, make_config(), 1, groups=3)
    inner = torch.optim.SGD([{"params": list(layer.parameters())} for layer in model], lr=0.1)
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config())
    assert owned_bytes(optimizer) == {**plan.terms, "held_gradients": 0, "gathered": 0}
    assert plan.terms["edit_markers"] == 3 * 2 * 2 * 2 * dtype.itemsize


def held(settings: dict[str, object], micro: int) -> tuple[list[int], int, int]:
    """Bytes of held gradients after each backward of one step; the plan's; those that were held by then."""
    model = Mixed(torch.float32, False)
    config = make_config(**settings, gradient_accumulation_steps=micro)
    plan = zeropp.plan.memory(model, config, dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]))
    optimizer = trained(model, config)
    found = []
    for _ in range(micro):
        optimizer.backward(model(torch.arange(4)))
        found.append(owned_bytes(optimizer)["held_gradients"])
    optimizer.step()
    return found, plan.held_gradients, owned_bytes(optimizer)["held_gradients"]


@pytest.mark.every(2)
@pytest.mark.parametrize("settings", [{"stage": 1}, {"defer_cross_reduction": True}, {"mics_shard_size": 2}], ids=str)
def test_held_gradients_equal_the_plan_and_are_gone_with_the_last_backward(settings: dict[str, object]) -> None:
    for found, planned, after in run_ranks(4, held, settings, 3, local_world_size=2):
        assert found == [planned, planned, 0] and planned > 0 and after == 0


def backwards_over_slow_links(
    model: nn.Module, packed: Callable[..., Tensor | None], small: int, links: Sequence[str]
) -> None:
    """Two backwards with ``packed`` in place of Gradient.pack, ``small`` bytes counting as few, and slow ``links``."""
    all_to_all = Hop.all_to_all

    def slow(hop: Hop, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1 if hop.spec.link in links else 0.0)
        return all_to_all(hop, *args, **kwargs)

    with (
        mock.patch.object(reductions, "_SMALL", small),
        mock.patch.object(Gradient, "pack", packed),
        mock.patch.object(Hop, "all_to_all", slow),
    ):
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()


def under_way(small: int) -> int:
    """Most messages of gradients at one time over a slow network, if ``small`` bytes count as few."""
    model = Routed(6)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    most, pack = 0, Gradient.pack

    def packed(gradient: Gradient, scale: float, *, hold: bool) -> Tensor | None:
        nonlocal most
        most = max(most, len(optimizer.engine._reductions._in_flight) + 1)
        return pack(gradient, scale, hold=hold)

    backwards_over_slow_links(model, packed, small, ("local", "cross"))
    optimizer.zero_grad()
    return most


def test_a_slow_network_piles_up_no_more_than_two_large_messages() -> None:
    """Many small ones are no burden, and a link need not wait for one slow rank."""
    assert run_ranks(2, under_way, 0) == [2, 2]
    assert min(run_ranks(2, under_way, 2**26)) == 6


def onward() -> tuple[int, int, float]:
    """Most reductions, whole messages and bytes under way at one time, in messages of the largest unit.

    Links inside a node are fast and those between nodes slow.
    """
    model = Routed(6)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    under_way, found, pack = optimizer.engine._reductions, [(0, 0, 0)], Gradient.pack

    def packed(gradient: Gradient, scale: float, *, hold: bool) -> Tensor | None:
        message = pack(gradient, scale, hold=hold)
        assert message is not None
        sent = under_way._in_flight
        whole = sum(each.message is not None for each in sent) + 1
        found.append((len(sent) + 1, whole, sum(each.nbytes for each in sent) + message.nbytes))
        return message

    backwards_over_slow_links(model, packed, 0, ("cross",))
    optimizer.zero_grad()
    reduced, whole, nbytes = (max(column) for column in zip(*found, strict=True))
    return reduced, whole, nbytes / under_way._largest


def test_what_goes_on_over_a_slow_link_does_not_hold_up_whole_messages() -> None:
    """A unit's half that waits for the slow link takes half of a message, so three of them and one more fit in two."""
    for reduced, whole, messages in run_ranks(4, onward, local_world_size=2):
        assert (reduced, whole, messages) == (3, 2, 2.0)


def in_memory(settings: dict[str, object]) -> tuple[int, int, int]:
    """Bytes that wrapping leaves in this process beside the model's buffers; the plan's; the whole model's."""
    before = storages()
    model = Mixed()
    whole = sum(p.nbytes for p in model.parameters())
    config = make_config(**settings)
    plan = zeropp.plan.memory(model, config, dist.get_world_size())
    others = model.seen.nbytes + model.codes.nbytes
    optimizer = trained(model, config)
    optimizer.engine.wait_for_refresh()
    # A comm stream's thread tells that a message has arrived just before it lets go of it.
    until = time.monotonic() + 5
    while (found := sum(n for key, n in storages().items() if key not in before) - others) > plan.total + SHARED_NAN:
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return found, plan.total, whole


@pytest.mark.every(2)
@pytest.mark.parametrize("settings", [{}, {"persist": 100}, {"stage": 0}, {"stage": 2}], ids=str)
def test_the_process_holds_no_more_than_the_plan(settings: dict[str, object]) -> None:
    for found, planned, whole in run_ranks(2, in_memory, settings):
        assert planned <= found <= planned + SHARED_NAN
        assert whole > 0


@pytest.mark.parametrize("freeze", [False, True])
def test_whole_main_weights_in_the_compute_dtype_are_there_once(freeze: bool) -> None:
    """Stages 0 to 2 on one rank, and frozen ones in stage 0: the model computes with the main weights themselves."""
    for stage in (0, 1, 2):
        terms = zeropp.plan.memory(Mixed(torch.float32, freeze), make_config(stage=stage), 1).terms
        assert terms["persistent_weights"] == 0
    halves = nn.Sequential(*(nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(2)))
    halves[0].requires_grad_(False)
    terms = zeropp.plan.memory(halves, make_config(stage=0), 4).terms
    assert terms["persistent_weights"] == terms["frozen_weights"] == terms["gradients"] // 2  # of the trainable ones


def originals() -> tuple[int, int]:
    """Original storages that are still there after wrapping, of how many."""
    model = Routed(3, 16)
    arrays = []
    for parameter in model.parameters():
        array = np.array(parameter.detach().numpy())
        arrays.append(weakref.ref(array))
        parameter.data = torch.from_numpy(array)  # the storage holds the array, and frees it at its own end
        del array
    optimizer = trained(model, make_config(persist=20))
    assert optimizer.engine.persistent
    return sum(ref() is not None for ref in arrays), len(arrays)


def test_wrapping_frees_the_original_weights() -> None:
    assert run_ranks(2, originals) == [(0, 6)] * 2
