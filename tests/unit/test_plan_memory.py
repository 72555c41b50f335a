"""plan.memory against numbers worked out by hand, and against a formula of its own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zeropp
from zeropp.partition.layout import BLOCK
from zeropp.plan import MemoryPlan, memory

SPREAD = {"zeropp": {"unit_min_blocks": 0}}
"""Nothing merges, nothing becomes persistent because it is short."""


def config(persistent: int = 0, **keys: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": persistent}, **SPREAD, **keys}


def padded(numels: list[int], world: int) -> int:
    """Elements of one flat buffer: parameters on blocks, the end filled up for the ranks."""
    blocks = sum(math.ceil(numel / BLOCK) for numel in numels)
    return max(math.ceil(blocks / world), 1) * world * BLOCK


def two_layers() -> nn.Sequential:
    """Two units of 30 x 20 weights and 20 biases, 600 + 20 elements: 3 blocks + 1 block each."""
    return nn.Sequential(nn.Linear(30, 20), nn.Linear(30, 20))


@pytest.mark.parametrize(("world", "numel"), [(1, 1024), (2, 1024), (3, 1536), (4, 1024), (5, 1280), (8, 2048)])
def test_fp32_by_hand(world: int, numel: int) -> None:
    plan = memory(two_layers(), config(), world)
    shard = 2 * numel // world * 4
    assert plan.terms == {
        "main_weights": shard, "gradients": shard, "gradient_norms": 2 * (numel // world // BLOCK * 4 + 4),
        "frozen_weights": 0, "secondary_weights": 0, "persistent_weights": 0, "feedback": 0,
    }  # fmt: skip
    assert [(u.name, u.persistent, u.gathered, u.message) for u in plan.units] == [
        ("0", False, numel * 4, numel * 4),
        ("1", False, numel * 4, numel * 4),
    ]
    assert (plan.total, plan.largest_unit) == (2 * shard + plan.terms["gradient_norms"], numel * 4)


def test_gradients_are_held_only_where_they_are_summed_before_they_go_on() -> None:
    assert memory(two_layers(), config(), 4, 2).held_gradients == 0
    deferred = {"zeropp": {**SPREAD["zeropp"], "defer_cross_reduction": True}}
    assert memory(two_layers(), {**config(), **deferred}, 4, 2).held_gradients == 2 * 1024 // 2 * 4


def test_bf16_halves_what_is_gathered_and_keeps_main_weights() -> None:
    plan = memory(two_layers(), config(bf16={"enabled": True}), 2)
    assert plan.terms["main_weights"] == plan.terms["gradients"] == 2 * 512 * 4
    assert [(u.gathered, u.message) for u in plan.units] == [(2048, 2048)] * 2


def test_fp64_is_fp64_throughout() -> None:
    plan = memory(two_layers().double(), config(), 2)
    assert plan.terms["main_weights"] == plan.terms["gradients"] == 2 * 512 * 8
    assert [(u.gathered, u.message) for u in plan.units] == [(8192, 8192)] * 2
    wire = memory(two_layers().double(), config(communication_data_type="bf16"), 2)
    assert wire == plan, "float64 is never narrowed on the wire"


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
    # unit 0: weight 3 blocks -> 4, bias 1 block -> 2; unit 1: 4 blocks
    assert plan.terms["frozen_weights"] == 4 * BLOCK // 2 * 4
    assert plan.terms["main_weights"] == plan.terms["gradients"] == (2 + 4) * BLOCK // 2 * 4
    assert [(u.gathered, u.message) for u in plan.units] == [(6 * BLOCK * 4, 2 * BLOCK * 4), (4096, 4096)]
    half = memory(model, config(bf16={"enabled": True}), 2)
    assert half.terms["frozen_weights"] == 4 * BLOCK // 2 * 4, "kept in their own dtype"


def test_all_frozen() -> None:
    plan = memory(two_layers().requires_grad_(False), config(), 4)
    assert plan.terms == {
        "main_weights": 0, "gradients": 0, "gradient_norms": 0, "frozen_weights": 2 * 1024, "secondary_weights": 0,
        "persistent_weights": 0, "feedback": 0,
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
    # both biases in one buffer of 2 blocks, whole on each rank; their main weights are spread all the same
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
        "gradients": numel * 4 // 64,
        "gradient_norms": numel // BLOCK * 4 // 64 + 30 * 4,
        "frozen_weights": 0,
        "secondary_weights": 0,
        "persistent_weights": 0,
        "feedback": 0,
    }
    assert plan.largest_unit == 8192**2 * 2


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
    text = str(memory(two_layers(), config(), 2))
    *lines, communicators = text.splitlines()
    # One to gather, one to reduce, one for what is small and for all.
    assert " ".join(communicators.split()) == "3 NCCL communicators, about 2,164,260,864 bytes, outside of torch's own"
    assert [(line[:24].rstrip(), line[24:].strip()) for line in lines] == [
        ("main weights", "4,096 bytes"),
        ("gradients", "4,096 bytes"),
        ("gradient norms", "24 bytes"),
        ("frozen weights", "0 bytes"),
        ("secondary weights", "0 bytes"),
        ("persistent weights", "0 bytes"),
        ("feedback", "0 bytes"),
        ("total between steps", "8,216 bytes"),
        ("largest unit, gathered", "4,096 bytes"),
    ]


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
        ({"weight_codec": "lossless"}, {"zero_hpz_partition_size": 2}, False, "computed with in fp32"),
    ],
)
@pytest.mark.parametrize("plan", [zeropp.plan.memory, zeropp.plan.traffic])
def test_what_the_optimizer_would_refuse_has_no_plan(
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


# a formula of its own


@given(
    st.lists(st.tuples(st.integers(1, 900), st.booleans(), st.booleans()), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, 8]),
    st.booleans(),
    st.sampled_from([0, 300]),
)
@settings(max_examples=60)
def test_formula(layers: list[tuple[int, bool, bool]], world: int, bf16: bool, persistent: int) -> None:
    """Layers of one weight each; some frozen, some in float64."""

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
    whole: dict[tuple[int, int, bool], list[int]] = {}  # persistent ones share buffers
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
        for term in ["frozen_weights"] if frozen else ["main_weights", "gradients"]:
            expected[term] += numel // world * main
        if not frozen:
            expected["gradient_norms"] += numel // world // BLOCK * main + 4
    expected["persistent_weights"] = sum(
        padded(numels, world) * size
        for (size, main, _), numels in whole.items()
        if world > 1 or size != main  # else the model sees the main weights
    )
    assert plan.terms == expected
    assert plan.largest_unit == max(size * numel for size, _, _, numel in alone)
