"""A setting that has no effect on a model and its ranks is named in one warning on rank 0."""

from __future__ import annotations

import warnings

import pytest
import torch

import zeropp
from tests.support.branching_models import Routed, make_config
from tests.support.offload_pairs import host_apart
from tests.support.quantized_model import GRADIENTS, WEIGHTS, Model
from tests.support.rank_pool import run_ranks

PLAIN: dict[str, object] = {**GRADIENTS, "gradient_bits": {"local": 16, "cross": 16}}
CROSS: dict[str, object] = {**GRADIENTS, "gradient_bits": {"local": 8, "cross": 16}}
FROZEN: dict[str, object] = {"zero_quantized_nontrainable_weights": True}
LOCO: dict[str, object] = {"zeropp_loco_param": {}}
CODES: dict[str, object] = {"secondary": "codes"}
HPZ_2: dict[str, object] = {"zero_hpz_partition_size": 2}
DEFERRED = "zeropp.defer_cross_reduction has no effect: "
NOR_CODES = ' no effect, nor has zeropp.secondary "codes": '
# Case -> (ranks per node; settings; beginning of the warning, "" for none). There are four ranks.
CASES: dict[str, tuple[int, dict[str, object], str]] = {
    "sums by the backend, codes": (2, {**GRADIENTS, "reduce_scatter": "backend"}, "zeropp.reduce_scatter"),
    "sums by the backend, some codes": (2, {**CROSS, "reduce_scatter": "backend"}, ""),
    "plain, hadamard": (2, {**PLAIN, "hadamard": True}, "zeropp.hadamard has no effect: gradients travel as bf16"),
    "plain, loco": (2, {**PLAIN, **LOCO, "feedback": "both"}, "zeropp_loco_param has no effect"),
    "cross plain, loco": (2, {**CROSS, **LOCO}, "zeropp_loco_param has no effect: gradients travel as bf16 over 2"),
    "cross plain, loco both": (2, {**CROSS, **LOCO, "feedback": "both"}, ""),
    "cross plain, hadamard": (2, {**CROSS, "hadamard": True}, ""),
    "one node, hadamard": (4, {**PLAIN, "hadamard": True}, "zeropp.hadamard has no effect"),
    "one node, bits": (4, CROSS, "zeropp.gradient_bits.local has no effect: gradients take one hop, bf16 over 4"),
    "one node, the same bits": (4, {**GRADIENTS, "gradient_bits": {"local": 4, "cross": 4}}, ""),
    "one node, bits of cross alone": (4, {**GRADIENTS, "gradient_bits": {"cross": 4}}, ""),
    "one node, feedback": (4, {**GRADIENTS, **LOCO, "feedback": "both"}, 'zeropp.feedback "both" has no effect beyond'),
    "two nodes, feedback": (2, {**GRADIENTS, **LOCO, "feedback": "both"}, ""),
    "one node, deferred": (4, {"defer_cross_reduction": True}, "zeropp.defer_cross_reduction has no effect: all 4"),
    "stage 1, deferred": (2, {"defer_cross_reduction": True, "stage": 1}, DEFERRED + "gradients of several"),
    "stage 2, deferred": (2, {"defer_cross_reduction": True, "stage": 2}, ""),
    "two nodes, deferred": (2, {"defer_cross_reduction": True}, ""),
    "hpz of all ranks": (2, {"zero_hpz_partition_size": 4}, "zero_hpz_partition_size 4 has no effect: weights are"),
    "hpz on one node": (
        4,
        {"zero_hpz_partition_size": 4},
        "zero_hpz_partition_size 4 has no effect: weights are spread over 4 ranks, and a second copy over as many "
        "ranks would save nothing; it takes several nodes",
    ),
    "hpz of a MiCS group": (2, {"zero_hpz_partition_size": 2, "mics_shard_size": 2}, "zero_hpz_partition_size 2 has"),
    "hpz of more than all": (2, {"zero_hpz_partition_size": 8}, "zero_hpz_partition_size 8 has no effect: weights are"),
    "hpz without a shard": (2, {"zero_hpz_partition_size": 2, "mics_shard_size": 1}, "zero_hpz_partition_size 2 has"),
    "no hpz, no shard": (2, {"zero_hpz_partition_size": 1, "mics_shard_size": 1}, ""),
    "hpz": (2, {"zero_hpz_partition_size": 2}, ""),
    "MiCS of all ranks": (2, {"mics_shard_size": 4}, "mics_shard_size 4 has no effect"),
    "MiCS hops without MiCS": (2, {"mics_hierarchical_params_gather": True}, "mics_hierarchical_params_gather has no"),
    "MiCS": (1, {"mics_shard_size": 2, "mics_hierarchical_params_gather": True}, ""),
    "MiCS inside nodes": (2, {"mics_shard_size": 2, "mics_hierarchical_params_gather": True}, "mics_hierarchical"),
    "MiCS of one rank": (2, {"mics_shard_size": 1}, ""),
    "MiCS inside nodes, deferred": (2, {"mics_shard_size": 2, "defer_cross_reduction": True}, DEFERRED + "gradients"),
    "MiCS over nodes, deferred": (1, {"mics_shard_size": 2, "defer_cross_reduction": True}, ""),
    "hpz of whole weights": (
        2,
        {"zero_hpz_partition_size": 2, "persist": 10**6},
        "zero_hpz_partition_size 2 has no effect: all parameters are so small",
    ),
    "nothing frozen": (2, FROZEN, "zero_quantized_nontrainable_weights has no effect: the model has no frozen"),
    "nothing frozen, stage 1": (2, {**FROZEN, "stage": 1}, "zero_quantized_nontrainable_weights has no effect"),
    "codes": (2, {**WEIGHTS, **CODES, "zero_hpz_partition_size": 2}, ""),
    "codes of all ranks": (
        2,
        {**WEIGHTS, **CODES, "zero_hpz_partition_size": 4},
        "zero_hpz_partition_size 4 has" + NOR_CODES,
    ),
    "codes of whole weights": (
        2,
        {**WEIGHTS, **CODES, **HPZ_2, "persist": 10**6},
        "zero_hpz_partition_size 2 has" + NOR_CODES,
    ),
}


def warned(settings: dict[str, object], model: Model | None = None) -> list[str]:
    model = model or Model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**settings))
    return [str(each.message) for each in caught if "has no effect" in str(each.message)]


@pytest.mark.every(14)
@pytest.mark.parametrize("name", CASES)
def test_a_setting_with_nothing_to_do_is_named(name: str) -> None:
    local, settings, expected = CASES[name]
    found, *others = run_ranks(4, warned, settings, local_world_size=local)
    assert len(found) == bool(expected) and others == [[]] * 3, "on the first rank alone"
    assert all(text.startswith(expected) for text in found)


def frozen_apart() -> list[list[str]]:
    """Freeze single parameters, each in a new model, and wrap the model with quantized frozen weights.

    Returns:
        The warnings of each wrapping.
    """
    found = []
    for name in [name for name, _ in Model().named_parameters()][::2]:
        model = Model()
        model.get_parameter(name).requires_grad_(False)
        found.append(warned(FROZEN, model))
    return found


def test_one_frozen_parameter_is_enough_wherever_it_lies() -> None:
    for found in run_ranks(2, frozen_apart):
        assert found and not any(found)


def strict() -> int:
    """Wrap a model while warnings are errors, which fails, and wrap it again with settings that lead to no warning.

    Returns:
        Number of elements of the full weights.
    """
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="hadamard has no effect"):
            zeropp.ZeroOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**PLAIN, hadamard=True)
            )
    _optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    return sum(value.numel() for value in zeropp.full_state(model).values())


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was() -> None:
    assert run_ranks(2, strict) == [sum(p.numel() for p in Model().parameters())] * 2


def test_one_rank_sends_nothing_and_is_not_warned() -> None:
    assert run_ranks(1, warned, {**PLAIN, "hadamard": True}) == [[]]


def without_states(states: bool) -> list[str]:
    offload = {"offload_param": {"device": "cpu"}, **({"offload_optimizer": {"device": "cpu"}} if states else {})}
    with host_apart():
        return warned(offload)


@pytest.mark.every(2)
@pytest.mark.parametrize("world", [1, 2])
def test_trained_weights_leave_with_their_states_only(world: int) -> None:
    text = 'offload_param.device "cpu" has no effect on weights that are trained: they are stepped on the device'
    found, *others = run_ranks(world, without_states, False)
    assert len(found) == 1 and found[0].startswith(text) and not any(others)
    assert run_ranks(world, without_states, True) == [[]] * world


def test_a_place_that_is_not_said_is_named() -> None:
    forgotten = {"offload_optimizer": {"nvme_path": "/tmp", "buffer_count": 5}, "offload_param": {"pin_memory": True}}
    assert run_ranks(1, warned, forgotten) == [
        [
            "offload_optimizer.buffer_count, nvme_path has no effect: offload_optimizer.device is not given; set it to "
            '"cpu" or "nvme"',
            'offload_param.pin_memory has no effect: offload_param.device is not given; set it to "cpu" or "nvme"',
        ]
    ]
    meant = {"offload_optimizer": {"device": "none", "nvme_path": "/tmp"}, "offload_param": {}}
    assert run_ranks(1, warned, meant) == [[]]


def odd_leaf() -> list[str]:
    model = Routed()
    config = make_config()
    config["zero_optimization"]["leaf_module"] = {"names": ["blocks.0", "nosuch"]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    return [str(warning.message) for warning in caught if "leaf_module" in str(warning.message)]


def test_a_leaf_that_is_not_there_is_named() -> None:
    [message], silent = run_ranks(2, odd_leaf)
    assert silent == []
    assert "'nosuch'" in message and "blocks.0" not in message
