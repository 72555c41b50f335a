"""Every placement trains like plain torch: stages, hpZ, MiCS, persistent parameters, deferred cross reduction."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.parity import Recipe, check
from tests.distributed.test_parity import CORE, SETTINGS, pairwise

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
    "how": list(SETTINGS["how"]),
    "clip": list(SETTINGS["clip"]),
    "persistence": list(SETTINGS["persistence"]),
    "model": list(CORE),
}


def recipe_of(case: tuple[str, ...], **more: Any) -> Recipe:
    fields: dict[str, Any] = {"zero": {}, "extension": {}}
    for row, value in zip(ROWS, case, strict=True):
        chosen = PLACEMENTS[value] if row == "placement" else SETTINGS[row][value] if row != "nodes" else {}
        for key, entry in chosen.items():
            fields[key] = {**fields[key], **entry} if key in ("zero", "extension") else entry
    return Recipe(**{**fields, **more})


@pytest.mark.parametrize("case", list(pairwise(ROWS)), ids=" | ".join)
def test_ten_steps_of_adamw_in_fp64(case: tuple[str, ...]) -> None:
    world, nodes = NODES[case[0]]
    check(recipe_of(case), world, nodes=nodes)
