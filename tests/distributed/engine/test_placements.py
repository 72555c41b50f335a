"""Every placement trains like plain torch: stages, hpZ, MiCS, persistent parameters, deferred cross reduction."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.parity import Recipe, check
from tests.support.rank_pool import some
from tests.support.setting_pairs import CORE, SETTINGS, pairwise

NODES = {"1x4": (4, 1), "2x2": (4, 2), "4x1": (4, 4)}
DEFER: dict[str, object] = {"defer_cross_reduction": True}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero": {"stage": 0}},
    "stage 1": {"zero": {"stage": 1}},
    "stage 2": {"zero": {"stage": 2, "overlap_comm": True}},
    "stage 2 deferred": {"zero": {"stage": 2}, "extension": DEFER},
    "stage 3 deferred": {"extension": DEFER},
    "hpz": {"zero": {"zero_hpz_partition_size": 2}},
    "hpz deferred": {"zero": {"zero_hpz_partition_size": 2}, "extension": DEFER},
    "mics 1": {"zero": {"mics_shard_size": 1}},
    "mics 2": {"zero": {"mics_shard_size": 2}},
    "mics 2 by hops": {"zero": {"mics_shard_size": 2, "mics_hierarchical_params_gather": True}},
    "mics 4": {"zero": {"mics_shard_size": 4}},
}
ROWS = {
    "nodes": list(NODES),
    "placement": list(PLACEMENTS),
    "how": ["1 plain", "3 backward()", "3 mixed"],
    "clip": list(SETTINGS["clip"]),
    "persistence": list(SETTINGS["persistence"]),
    "model": list(CORE[:3]),
}


def recipe_of(case: tuple[str, ...], **more: Any) -> Recipe:
    fields: dict[str, Any] = {"zero": {}, "extension": {}}
    for row, value in zip(ROWS, case, strict=True):
        chosen = PLACEMENTS[value] if row == "placement" else SETTINGS[row][value] if row != "nodes" else {}
        for key, entry in chosen.items():
            fields[key] = {**fields[key], **entry} if key in ("zero", "extension") else entry
    return Recipe(**{**fields, **more})


# Few cases run by default, because test_parity.py covers pairs of the other settings.
@pytest.mark.every(12)
@pytest.mark.parametrize("case", some(pairwise(ROWS), 2), ids=" | ".join)
def test_steps_of_adamw_in_fp64(case: tuple[str, ...]) -> None:
    world, nodes = NODES[case[0]]
    check(recipe_of(case, steps=5), world, nodes=nodes)


@pytest.mark.campaign
@pytest.mark.parametrize("model", CORE)
@pytest.mark.parametrize("how", SETTINGS["how"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("nodes", NODES)
def test_every_placement_with_every_model(nodes: str, placement: str, how: str, model: str) -> None:
    world, count = NODES[nodes]
    check(recipe_of((nodes, placement, how, "config clip", "small kept", model)), world, nodes=count)


# Name -> (ranks, nodes, arguments of Recipe). Groups are smaller than a node, a whole node, or several nodes.
LARGER: dict[str, tuple[int, int, dict[str, Any]]] = {
    "2x4 stage 0": (8, 2, {"zero": {"stage": 0}}),
    "2x4 hpz 2": (8, 2, {"zero": {"zero_hpz_partition_size": 2}}),
    "2x4 hpz 4 deferred": (8, 2, {"zero": {"zero_hpz_partition_size": 4}, "extension": DEFER}),
    "2x4 mics 2": (8, 2, {"zero": {"mics_shard_size": 2}}),
    "2x4 mics 4 hpz 2": (8, 2, {"zero": {"mics_shard_size": 4, "zero_hpz_partition_size": 2}}),
    "4x2 hpz 4": (8, 4, {"zero": {"zero_hpz_partition_size": 4}}),
    "4x2 mics 4": (8, 4, {"zero": {"mics_shard_size": 4}}),
    "4x2 mics 4 by hops": (8, 4, {"zero": {"mics_shard_size": 4, "mics_hierarchical_params_gather": True}}),
    "3x2 stage 1": (6, 3, {"zero": {"stage": 1}}),
    "3x2 hpz 2": (6, 3, {"zero": {"zero_hpz_partition_size": 2}}),
    "3x2 mics 2": (6, 3, {"zero": {"mics_shard_size": 2}}),
    "2x3 hpz 3 deferred": (6, 2, {"zero": {"zero_hpz_partition_size": 3}, "extension": DEFER}),
    "2x3 mics 3": (6, 2, {"zero": {"mics_shard_size": 3}}),
}


@pytest.mark.campaign
@pytest.mark.every(2)
@pytest.mark.parametrize("name", some(LARGER, 8))
def test_more_ranks_than_two_by_two(name: str) -> None:
    world, nodes, fields = LARGER[name]
    check(Recipe(**fields, accumulation=2, clip=0.3, steps=4), world, nodes=nodes)
