"""docs/sizing.md and offload.md: the formulas hold, and the settings are accepted.

tests/unit/deepspeed checks the printed numbers.
"""

from __future__ import annotations

import itertools
import json
import re

import pytest

import zeropp
from docs.sizing import DOCUMENT, LADDER, SHAPES, Shape, build, device_bytes
from zeropp.config import load_config, require_supported
from zeropp.config.base import spellings
from zeropp.config.describe import blocks
from zeropp.config.top import Config
from zeropp.plan import MemoryPlan

TEXT = DOCUMENT.with_name("offload.md").read_text()


def plan(name: str, setting: str, ranks: int) -> MemoryPlan:
    config = {"zero_optimization": {"stage": 3, **LADDER[setting]}, "bf16": {"enabled": True}}
    return zeropp.plan.memory(build(SHAPES[name]), config, ranks)


@pytest.mark.parametrize("ranks", [1, 8])
def test_the_formulas_hold(ranks: int) -> None:
    """The formulas are within 1 % of the plan; padding, norms and persistent parameters are not in them."""
    parameters = sum(p.numel() for p in build(SHAPES["7B"]).parameters())
    unit = sum(p.numel() for p in build(SHAPES["7B"]).blocks[0].parameters())  # type: ignore[union-attr, index]
    own = plan("7B", "both on nvme, lean", ranks)
    assert own.disk_total * ranks == pytest.approx(18 * parameters, rel=0.01)
    shard = unit / ranks
    staging = 4 * 4 * (min(100e6, shard) + min(50e6, shard))
    assert own.host_total == pytest.approx(staging, rel=0.01)
    plain = plan("7B", "nothing", ranks)
    assert plain.total + plain.gradients + plain.device_states == pytest.approx(16 * parameters / ranks, rel=0.01)
    assert device_bytes(own) == pytest.approx(8 * (unit + shard) + parameters / 64 / ranks, rel=0.01)


def test_the_ladder_needs_less_of_a_card_or_of_the_host() -> None:
    plans = [plan("13B", setting, 8) for setting in LADDER]
    for one, other in itertools.pairwise(plans):
        assert device_bytes(other) < device_bytes(one) or other.host_total < one.host_total


def test_settings_are_accepted() -> None:
    shown = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)]
    climbed = [{"zero_optimization": {"stage": 3, **blocks}} for blocks in LADDER.values()]
    assert shown
    for config in shown + climbed:
        require_supported(load_config(config))


def test_keys_in_its_tables_exist() -> None:
    known = {key for _, model in blocks(Config) for name, field in model.model_fields.items()
             for key in spellings(name, field)}  # fmt: skip
    table = TEXT.split("## Every setting")[1].split("\n## ")[0]
    for row in table.split("|---|---|---|\n")[1].splitlines():
        if row.startswith("|"):
            for quoted in re.findall(r"`([^`]+)`", row.split("|")[1]):
                names = re.findall(r"[a-z_0-9]{6,}", quoted.replace("false", ""))
                assert names and set(names) <= known, quoted


def test_a_shape_is_a_decoder_of_its_size() -> None:
    sizes = {name: sum(p.numel() for p in build(shape).parameters()) for name, shape in SHAPES.items()}
    assert sizes == {"7B": 6_738_415_616, "13B": 13_015_864_320, "70B": 68_976_648_192}
    units = zeropp.plan.memory(build(Shape(512, 2, 1024, 8, 2)), {"zero_optimization": {"stage": 3}}, 1).units
    assert [unit.name for unit in units if unit.name.startswith("blocks")] == ["blocks.0", "blocks.1"]
