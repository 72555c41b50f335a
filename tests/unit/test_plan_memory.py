"""plan.memory equals numbers computed by hand and an independent formula."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zeropp
from zeropp.partition.levels import BLOCK
from zeropp.plan import MemoryPlan, memory

SPREAD = {"zeropp": {"unit_min_blocks": 0}}
"""Configuration part that keeps short units from being merged or made persistent."""


def config(persistent: int = 0, **keys: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": persistent}, **SPREAD, **keys}


def padded(numels: list[int], world: int) -> int:
    """Return the elements of one flat buffer: parameters start on blocks, and the end is padded for the ranks."""
    blocks = sum(math.ceil(numel / BLOCK) for numel in numels)
    return max(math.ceil(blocks / world), 1) * world * BLOCK


MARKERS = 2 * 2 * 2 * 4  # bytes of a group's edit markers: two float32 tensors of two elements, with gradients


def two_layers() -> nn.Sequential:
    """Return two units of 600 weights (3 blocks) and 20 biases (1 block) each."""
    return nn.Sequential(nn.Linear(30, 20), nn.Linear(30, 20))


@pytest.mark.parametrize(("world", "numel"), [(1, 1024), (2, 1024), (3, 1536), (4, 1024), (5, 1280), (8, 2048)])
def test_fp32_by_hand(world: int, numel: int) -> None:
    plan = memory(two_layers(), config(), world)
    shard = 2 * numel // world * 4
    assert plan.terms == {
        "main_weights": shard, "gradients": 0, "gradient_norms": 2 * (numel // world // BLOCK * 4 + 4),
        "frozen_weights": 0, "wire_weights": 0, "secondary_weights": 0, "persistent_weights": 0, "feedback": 0,
        "edit_markers": MARKERS,
    }  # fmt: skip
    assert [(u.name, u.persistent, u.gathered, u.message) for u in plan.units] == [
        ("0", False, numel * 4, numel * 4),
        ("1", False, numel * 4, numel * 4),
    ]
    assert (plan.total, plan.largest_unit) == (shard + plan.terms["gradient_norms"] + MARKERS, numel * 4)
    assert plan.gradients == shard and [unit.gradient for unit in plan.units] == [shard // 2] * 2


def test_gradients_are_held_only_where_they_are_summed_before_they_go_on() -> None:
    assert memory(two_layers(), config(), 4, 2).held_gradients == 0
    deferred = {"zeropp": {**SPREAD["zeropp"], "defer_cross_reduction": True}}
    assert memory(two_layers(), {**config(), **deferred}, 4, 2).held_gradients == 2 * 1024 // 2 * 4


def test_bf16_halves_gathered_bytes_and_keeps_main_weights() -> None:
    plan = memory(two_layers(), config(bf16={"enabled": True}), 2)
    assert plan.terms["main_weights"] == plan.gradients == 2 * 512 * 4
    assert [(u.gathered, u.message) for u in plan.units] == [(2048, 2048)] * 2


def test_fp64_is_fp64_throughout() -> None:
    plan = memory(two_layers().double(), config(), 2)
    assert plan.terms["main_weights"] == plan.gradients == 2 * 512 * 8
    assert [(u.gathered, u.message) for u in plan.units] == [(8192, 8192)] * 2
    wire = memory(two_layers().double(), config(communication_data_type="bf16"), 2)
    assert wire == plan, "float64 gradients must be sent as float64"


def test_a_bf16_model_has_fp32_main_weights() -> None:
    plan = memory(two_layers().bfloat16(), config(), 2)
    assert plan == memory(two_layers(), config(bf16={"enabled": True}), 2)


@pytest.mark.parametrize(("name", "bytes_each"), [("bf16", 2), ("fp32", 4), (None, 4)])
def test_the_wire_has_a_dtype_of_its_own(name: str | None, bytes_each: int) -> None:
    keys = {} if name is None else {"communication_data_type": name}
    plan = memory(two_layers(), config(**keys), 2)
    assert [(u.gathered, u.message) for u in plan.units] == [(4096, 1024 * bytes_each)] * 2


def test_frozen_weights_have_no_gradients_and_buffers_of_their_own() -> None:
    model = two_layers()
    model[0].weight.requires_grad_(False)
    plan = memory(model, config(), 2)
    # Unit 0 has two buffers: the frozen weight's 3 blocks are padded to 4 for two ranks, the bias's 1 block to 2. Unit
    # 1 has one buffer of 4 blocks.
    assert plan.terms["frozen_weights"] == 4 * BLOCK // 2 * 4
    assert plan.terms["main_weights"] == plan.gradients == (2 + 4) * BLOCK // 2 * 4
    assert [(u.gathered, u.message) for u in plan.units] == [(6 * BLOCK * 4, 2 * BLOCK * 4), (4096, 4096)]
    half = memory(model, config(bf16={"enabled": True}), 2)
    assert half.terms["frozen_weights"] == 4 * BLOCK // 2 * 4, "frozen weights must keep their own dtype"


def test_all_frozen() -> None:
    plan = memory(two_layers().requires_grad_(False), config(), 4)
    assert plan.terms == {
        "main_weights": 0, "gradients": 0, "gradient_norms": 0, "frozen_weights": 2 * 1024, "wire_weights": 0,
        "secondary_weights": 0, "persistent_weights": 0, "feedback": 0, "edit_markers": MARKERS,
    }  # fmt: skip
    assert all(unit.message == 0 for unit in plan.units)


def test_mixed_dtypes_in_one_unit() -> None:
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(30, 20))
    model[0].bias = nn.Parameter(model[0].bias.detach().bfloat16())
    plan = memory(model, config(), 2)
    assert plan.units[0].gathered == plan.units[0].message == 4 * BLOCK * 4 + 2 * BLOCK * 2
    assert plan.terms["main_weights"] == (4 + 2 + 4) * BLOCK // 2 * 4
    deferred = {"zeropp": {**SPREAD["zeropp"], "defer_cross_reduction": True}}
    assert memory(model, {**config(), **deferred}, 4, 2).units[0].held == (4 + 4) * BLOCK // 2 * 4


def test_persistent_weights_are_whole_in_compute_dtype() -> None:
    plan = memory(two_layers(), config(persistent=20, bf16={"enabled": True}), 2)
    # Both biases share a buffer of 2 blocks that each rank keeps unsharded. Their main weights are sharded
    # nevertheless.
    assert plan.terms["persistent_weights"] == 2 * BLOCK * 2
    assert plan.terms["main_weights"] == (4 + 4 + 2) * BLOCK // 2 * 4
    assert [(u.name, u.persistent, u.gathered) for u in plan.units] == [
        ("0", False, 4 * BLOCK * 2),
        ("1", False, 4 * BLOCK * 2),
        ("persistent.0", True, 2 * BLOCK * 2),
    ]
    assert plan.largest_unit == 4 * BLOCK * 2
    assert plan.total == sum(plan.terms.values())


def test_everything_persistent() -> None:
    plan = memory(two_layers(), config(persistent=10**6), 2)
    assert plan.largest_unit == 0 and plan.terms["persistent_weights"] == 8 * BLOCK * 4


def test_tied_weights_count_once_and_integers_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    alone = memory(model, config(), 1)
    assert alone.terms["main_weights"] == 2 * BLOCK * 4
    model[1].weight = model[0].weight
    model[0].codes = nn.Parameter(torch.zeros(5000, dtype=torch.int8), requires_grad=False)
    assert memory(model, config(), 1).terms["main_weights"] == BLOCK * 4


def test_meta_models_of_any_size() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(30)))
    plan = memory(model, {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, 64)
    numel = 30 * 8192**2
    assert plan.terms == {
        "main_weights": numel * 4 // 64,
        "gradients": 0,
        "gradient_norms": numel // BLOCK * 4 // 64 + 30 * 4,
        "frozen_weights": 0,
        "wire_weights": 0,
        "secondary_weights": 0,
        "persistent_weights": 0,
        "feedback": 0,
        "edit_markers": MARKERS,
    }
    assert plan.largest_unit == 8192**2 * 2 and plan.gradients == numel * 4 // 64


def test_the_model_is_left_alone() -> None:
    model = two_layers()
    before = [(p.data_ptr(), type(p), p.detach().clone()) for p in model.parameters()]
    memory(model, config(), 2)
    assert all(
        (p.data_ptr(), type(p)) == (pointer, kind) and torch.equal(p, values)
        for p, (pointer, kind, values) in zip(model.parameters(), before, strict=True)
    )
    assert not model[0]._forward_pre_hooks


def test_printed() -> None:
    assert "NCCL" not in str(memory(two_layers(), config(), 2, device="cpu"))
    text = str(memory(two_layers(), config(), 2))
    *lines, total, first, second = text.splitlines()
    assert total == "2 NCCL communicators, outside of torch's own: about 1,442,840,576 bytes (not measured)"
    assert first == "  reduce and world, 2 ranks local (all_reduce, broadcast, reduce_scatter): about 721,420,288 bytes"
    assert second == "  gather, 2 ranks local (all_gather): about 721,420,288 bytes"
    assert [(line[:24].rstrip(), line[24:].strip()) for line in lines] == [
        ("main weights", "4,096 bytes"),
        ("gradients", "0 bytes"),
        ("gradient norms", "24 bytes"),
        ("frozen weights", "0 bytes"),
        ("wire weights", "0 bytes"),
        ("secondary weights", "0 bytes"),
        ("persistent weights", "0 bytes"),
        ("feedback", "0 bytes"),
        ("edit markers", "32 bytes"),
        ("total between steps", "4,152 bytes"),
        ("gradients in a step", "4,096 bytes"),
        ("largest unit, gathered", "4,096 bytes"),
    ]


# Offload: bytes of host memory and of disks.


def offloaded(states: str = "none", weights: str = "none", **keys: object) -> dict[str, Any]:
    """Return a configuration with both offload blocks; ``keys`` go into the block for weights."""
    own = config(bf16={"enabled": True}, aio={"block_size": 1})
    where = {"nvme_path": "/nowhere"}
    blocks = {"offload_optimizer": {"device": states, **where}, "offload_param": {"device": weights, **where, **keys}}
    return {**own, "zero_optimization": {**own["zero_optimization"], **blocks}}


ROW = 2 * 512  # elements of the shards of both units, for one of two ranks
PAGE = 4096


def test_offloaded_states_leave_wire_weights_on_the_device() -> None:
    plan = memory(two_layers(), offloaded("cpu"), 2)
    assert +Counter(plan.terms) == {"gradient_norms": 2 * 12, "wire_weights": ROW * 2, "edit_markers": MARKERS}
    ring = 2 * PAGE  # two buffers for the new weights of the larger shard, in bfloat16
    assert plan.host == {
        "gradients": ROW * 4,
        "main_weights": ROW * 4,
        "optimizer_states": ROW * 8,
        "upload_staging": ring,
    }
    assert (plan.disk, plan.device_states) == ({}, 0)
    assert plan.host_total == ROW * 16 + ring and plan.total == 24 + MARKERS + ROW * 2
    assert [unit.arriving for unit in plan.units] == [512 * 4] * 2


def test_weights_on_the_host_leave_nothing() -> None:
    plan = memory(two_layers(), offloaded("cpu", "cpu"), 2)
    assert plan.total == 24 + MARKERS and plan.host["wire_weights"] == ROW * 2
    assert not {"upload_staging", "step_staging", "gather_staging"} & plan.host.keys()
    assert plan.pinned == 0 and plan.device_states == 0


def test_rows_that_the_device_copies_are_page_locked() -> None:
    settings = offloaded("cpu", pin_memory=True)
    settings["zero_optimization"]["offload_optimizer"]["pin_memory"] = True
    assert memory(two_layers(), settings, 2).pinned == ROW * 4 + 2 * PAGE
    settings["zero_optimization"]["offload_param"]["device"] = "cpu"
    assert memory(two_layers(), settings, 2).pinned == ROW * 4 + ROW * 2
    assert memory(two_layers(), settings, 2, device="cpu").pinned == 0


def test_weights_alone_stay_if_they_are_stepped_on_the_device() -> None:
    model = two_layers()
    model[1].requires_grad_(False)
    plan = memory(model, offloaded("none", "cpu"), 2)
    assert plan.terms["main_weights"] == 512 * 4 and plan.device_states == 512 * 8
    assert plan.terms["frozen_weights"] == 0 and plan.host["frozen_weights"] == 512 * 4


def test_rows_of_files_are_whole_pages() -> None:
    plan = memory(two_layers(), offloaded("nvme", "nvme", max_in_cpu=0), 2)
    assert plan.disk == {
        "gradients": 2 * PAGE, "main_weights": 2 * PAGE, "optimizer_states": 4 * PAGE, "wire_weights": 2 * PAGE,
    }  # fmt: skip
    assert plan.disk_total == 10 * PAGE and set(plan.host) == {"step_staging", "gather_staging"}


def test_each_path_has_its_own() -> None:
    settings = offloaded("nvme", "nvme", max_in_cpu=0)
    (path,) = {block["nvme_path"] for key, block in settings["zero_optimization"].items() if "offload" in key}
    assert memory(two_layers(), settings, 2).paths == {path: 10 * PAGE}
    settings["zero_optimization"]["offload_param"]["nvme_path"] = "/another"
    assert memory(two_layers(), settings, 2).paths == {path: 8 * PAGE, "/another": 2 * PAGE}
    assert memory(two_layers(), offloaded("cpu", "cpu"), 2).paths == {}


def test_small_rows_are_in_memory() -> None:
    settings = offloaded("nvme", "nvme", max_in_cpu=0)
    for block, in_files in ((512 * 4, {"gradients", "main_weights", "optimizer_states"}), (512 * 4 + 1, set())):
        plan = memory(two_layers(), {**settings, "aio": {"block_size": block}}, 2)
        assert set(plan.disk) == in_files and plan.host["wire_weights"] == ROW * 2


@pytest.mark.parametrize(("most", "kept"), [(0, []), (511, []), (1023, [0]), (1024, [0, 2]), (10**6, [0, 1, 2])])
def test_weights_stay_in_memory_while_there_is_room(most: int, kept: list[int]) -> None:
    """Whole rows (512, 2304 and 512 elements) stay in memory in the order of the model, while there is room."""
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(62, 64), nn.Linear(30, 20))
    rows, pages = [512 * 2, 2304 * 2, 512 * 2], [1, 2, 1]
    plan = memory(model, offloaded("nvme", "nvme", max_in_cpu=most), 2)
    assert plan.host.get("wire_weights", 0) == sum(rows[index] for index in kept)
    assert plan.disk.get("wire_weights", 0) == PAGE * sum(pages[index] for index in {0, 1, 2} - {*kept})


def test_weights_that_are_stepped_in_files_are_kept_in_memory_while_there_is_room() -> None:
    """A copy for gathers is kept although gathers could read the main weights in files, which have the same dtype."""
    for most, kept in ((10**6, 2 * 512 * 4), (0, 0)):
        settings = {**offloaded("nvme", "nvme", max_in_cpu=most), "bf16": {"enabled": False}}
        assert memory(two_layers(), settings, 2).host.get("wire_weights", 0) == kept, most


def test_rings_hold_the_largest_shard_or_the_configured_size() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    settings = offloaded("nvme", "nvme")
    assert memory(model, settings, 2).host["step_staging"] == 4 * 2**19 * 4
    assert memory(model, settings, 2).host["gather_staging"] == 5 * 2**19 * 4
    settings["zero_optimization"].update(sub_group_size=100_000)
    settings["zero_optimization"]["offload_param"].update(buffer_size=100_000, buffer_count=2, pin_memory=True)
    plan = memory(model, settings, 2)
    each = -(-400_000 // PAGE) * PAGE
    assert (plan.host["step_staging"], plan.host["gather_staging"]) == (4 * each, 2 * each)
    # Weights stay in host memory up to max_in_cpu, and the device reads them there.
    assert plan.pinned == 2 * each + plan.host["wire_weights"] and plan.host["wire_weights"] == 4 * 2**19 * 2
    assert memory(model, settings, 2, device="cpu").pinned == 0


def test_other_optimizers_keep_more_or_less() -> None:
    for states in (0, 1, 3):
        plan = memory(two_layers(), offloaded("nvme"), 2, states=states)
        assert plan.disk.get("optimizer_states", 0) == states * 2 * PAGE
        assert memory(two_layers(), config(), 2, states=states).device_states == states * ROW * 4


def test_new_weights_wait_for_the_wire_or_are_encoded_one_by_one() -> None:
    own = offloaded("cpu")
    stage1 = {**own, "zero_optimization": {**own["zero_optimization"], "stage": 1}}
    assert memory(two_layers(), stage1, 2).new_weights == ROW * 2
    assert memory(two_layers(), own, 2).new_weights == 0, "new weights must go directly into kept rows"
    own["zero_optimization"]["zero_quantized_weights"] = True
    assert memory(two_layers(), own, 2).new_weights == ROW // 2 * 4, "units must be encoded one at a time"


def test_where_the_cpu_trains_all_of_it_is_the_host_s() -> None:
    plan = memory(two_layers(), offloaded("cpu", "cpu"), 2, device="cpu")
    plain = memory(two_layers(), offloaded(), 2, device="cpu")
    assert plan.on_host and plan.host == plain.host == {}
    # A step on the host may run until the next backward, so its gradients stay.
    assert plan.total == plain.total + plain.gradients and plain.gradients == plan.terms["gradients"] == ROW * 4
    assert plan.host_total == plain.host_total == plan.total + ROW * 8 + plan.largest_unit
    assert not memory(two_layers(), offloaded("cpu"), 2).on_host


def test_printed_by_place() -> None:
    text = str(memory(two_layers(), offloaded("nvme", "nvme", max_in_cpu=0), 2))
    rows = {line[:24].rstrip(): line[24:].strip() for line in text.splitlines() if ": " in line}
    assert rows["disk: optimizer states"] == "16,384 bytes" and rows["disk: total"] == "40,960 bytes"
    assert rows["host: total"] == f"{(4 * 5 + 5) * PAGE:,} bytes"
    assert "disk: " not in (plan := str(memory(two_layers(), config(), 2))) and "host: " not in plan


@pytest.mark.parametrize("world", [0, -1])
def test_no_ranks(world: int) -> None:
    with pytest.raises(ValueError, match=rf"world is {world}; expected the number of ranks, at least 1"):
        memory(two_layers(), config(), world)


def test_a_wrong_configuration_is_refused() -> None:
    with pytest.raises(zeropp.config.ConfigError, match="stag"):
        memory(two_layers(), {"zero_optimization": {"stag": 3}}, 2)


@pytest.mark.parametrize(
    ("zeropp_block", "zero", "bf16", "said"),
    [
        ({"weight_codec": "delta4"}, {"zero_hpz_partition_size": 4}, True, "makes none"),
        ({"weight_codec": "lossless"}, {"zero_hpz_partition_size": 2}, False, "has the compute dtype fp32"),
        ({}, {"stage": 0, "offload_optimizer": {"device": "cpu"}}, True, "needs stage 1, 2 or 3, got stage 0"),
    ],
)
@pytest.mark.parametrize("plan", [zeropp.plan.memory, zeropp.plan.traffic])
def test_settings_that_the_optimizer_refuses_have_no_plan(
    plan: Callable[..., object], zeropp_block: dict[str, object], zero: dict[str, object], bf16: bool, said: str
) -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, **zero},
        "bf16": {"enabled": bf16},
        "zeropp": zeropp_block,
    }
    with pytest.raises(ValueError, match=said):
        plan(two_layers(), settings, 4, 2)


def test_plans_are_found_where_the_readme_says() -> None:
    assert zeropp.plan.memory is memory
    assert isinstance(zeropp.plan.memory(two_layers(), config(), 1), MemoryPlan)


# An independent formula.


@given(
    st.lists(st.tuples(st.integers(1, 900), st.booleans(), st.booleans()), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, 8]),
    st.booleans(),
    st.sampled_from([0, 300]),
)
@settings(max_examples=60)
def test_formula(layers: list[tuple[int, bool, bool]], world: int, bf16: bool, persistent: int) -> None:
    """The model's layers have one weight each; some are frozen, some are float64."""

    class Layer(nn.Module):
        def __init__(self, numel: int, frozen: bool, double: bool) -> None:
            super().__init__()
            dtype = torch.float64 if double else torch.float32
            self.weight = nn.Parameter(torch.zeros(numel, dtype=dtype), requires_grad=not frozen)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.ModuleList(Layer(*layer) for layer in [*layers, (1000, False, False), (1000, False, False)])
    plan = memory(model, config(persistent=persistent, bf16={"enabled": bf16}), world)
    expected = dict.fromkeys(plan.terms, 0)
    whole: dict[tuple[int, int, bool], list[int]] = {}  # persistent parameters share buffers
    alone: list[tuple[int, int, bool, int]] = []
    for numel, frozen, double in [*layers, (1000, False, False), (1000, False, False)]:
        own = 8 if double else 4
        size = 2 if bf16 else own
        main = own if frozen else max(size, 4)
        if numel <= persistent:
            whole.setdefault((size, main, frozen), []).append(numel)
        else:
            alone.append((size, main, frozen, padded([numel], world)))
    buffers = alone + [(*key, padded(numels, world)) for key, numels in whole.items()]
    for _, main, frozen, numel in buffers:
        expected["frozen_weights" if frozen else "main_weights"] += numel // world * main
        if not frozen:
            expected["gradient_norms"] += numel // world // BLOCK * main + 4
    expected["persistent_weights"] = sum(
        padded(numels, world) * size
        for (size, main, _), numels in whole.items()
        if world > 1 or size != main  # otherwise modules use the main weights directly
    )
    # Markers have the dtype of the first trainable buffer's main weights.
    expected["edit_markers"] = 8 * next(main for _, main, frozen, _ in buffers if not frozen)
    assert plan.terms == expected and plan.gradients == expected["main_weights"]
    assert plan.largest_unit == max(size * numel for size, _, _, numel in alone)
