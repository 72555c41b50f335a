"""The engine owns as many bytes as ``plan.memory`` says: weights, held gradients, messages in flight, all storages."""

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
    """Compare the bytes that an engine owns with the plan: after wrapping, a step, an evaluation and a state dict.

    Args:
        dtype: dtype of the model.
        freeze: True to freeze some of its weights.
        settings: keys for ``make_config``.

    Returns:
        Descriptions of all differences.
    """
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
            optimizer.engine.release_prefetched()  # units kept for reuse would count as gathered
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
    """Accumulate gradients over one window.

    Args:
        settings: keys for ``make_config``.
        micro: number of micro-batches.

    Returns:
        Bytes of held gradients after each backward, the plan's bytes, and the bytes after the step.
    """
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
    """Run two backwards in which each message waits 0.1 s on some links.

    Args:
        model: wrapped model.
        packed: replacement of ``Gradient.pack``.
        small: replacement of the limit ``_SMALL`` on the bytes in flight.
        links: kinds of links that are slow.
    """
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
    """Return the largest number of gradient messages in flight over a slow network.

    Args:
        small: limit on the bytes in flight. The largest message is the limit if it is larger.
    """
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
    """Two large messages may be in flight, and any number of messages below the limit of 64 MiB.

    With a limit of 0 bytes, the largest message is the limit, and one more message may start at the limit.
    """
    assert run_ranks(2, under_way, 0) == [2, 2]
    assert min(run_ranks(2, under_way, 2**26)) == 6


def onward() -> tuple[int, int, float]:
    """Run backwards whose messages are fast inside a node and slow between nodes.

    Returns:
        Most reductions in flight, most of them with their whole message in memory, and most bytes in flight in units of
        the largest message.
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


def test_reductions_waiting_for_a_slow_link_take_half_a_message() -> None:
    """A reduction that waits for the slow link takes half a message, so two of them and a new message fit in two."""
    for reduced, whole, messages in run_ranks(4, onward, local_world_size=2):
        assert (reduced, whole, messages) == (3, 2, 2.0)


def in_memory(settings: dict[str, object]) -> tuple[int, int, int]:
    """Wrap a model, and count the bytes of all storages of this process.

    Returns:
        Bytes that wrapping has added, without the model's buffer and integer parameter; bytes by the plan; and bytes of
        all parameters of the model.
    """
    before = storages()
    model = Mixed()
    whole = sum(p.nbytes for p in model.parameters())
    config = make_config(**settings)
    plan = zeropp.plan.memory(model, config, dist.get_world_size())
    others = model.seen.nbytes + model.codes.nbytes
    optimizer = trained(model, config)
    optimizer.engine.wait_for_refresh()
    # The thread of a comm stream sets a message's event just before it drops the message, so wait for the drop.
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
    """The model computes with the main weights themselves where they are whole and have the compute dtype.

    This is true in stages 0 to 2 on one rank, and for frozen weights in stage 0 on several ranks.
    """
    for stage in (0, 1, 2):
        terms = zeropp.plan.memory(Mixed(torch.float32, freeze), make_config(stage=stage), 1).terms
        assert terms["persistent_weights"] == 0
    halves = nn.Sequential(*(nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(2)))
    halves[0].requires_grad_(False)
    plan = zeropp.plan.memory(halves, make_config(stage=0), 4)
    # Only the trainable layer has a bf16 copy for computing. The copy has half of the bytes of the float32 gradient.
    assert plan.terms["persistent_weights"] == plan.terms["frozen_weights"] == plan.gradients // 2


def originals() -> tuple[int, int]:
    """Wrap a model whose weights are NumPy arrays.

    Returns:
        Number of arrays that are still alive after wrapping, and number of all arrays.
    """
    model = Routed(3, 16)
    arrays = []
    for parameter in model.parameters():
        array = np.array(parameter.detach().numpy())
        arrays.append(weakref.ref(array))
        parameter.data = torch.from_numpy(array)  # the storage keeps the array alive until the storage is freed
        del array
    optimizer = trained(model, make_config(persist=20))
    assert optimizer.engine.persistent
    return sum(ref() is not None for ref in arrays), len(arrays)


def test_wrapping_frees_the_original_weights() -> None:
    assert run_ranks(2, originals) == [(0, 6)] * 2
