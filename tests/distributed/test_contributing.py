"""CONTRIBUTING.md's recipes, followed: a codec, a placement and a key of the configuration."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest
import torch
from torch import Tensor

import zeropp
from tests.distributed.harness import run_ranks
from tests.distributed.pair import Pair
from tests.distributed.shapes import Routed, chain, make_config
from zeropp.config.extension import Bits, ExtensionConfig
from zeropp.config.support import SUPPORT, Kind
from zeropp.config.zero import ZeroConfig
from zeropp.partition.levels import HopSpec, Mode, choose_mode
from zeropp.partition.topology import build_chain
from zeropp.wire.codecs import Codec, Feedback, PlainCodec
from zeropp.wire.encoding import Encoding
from zeropp_kernels.wire import GROUPS

ROOT = Path(__file__).resolve().parents[2]


# A codec: values cut to the upper half of their float32, the sign, exponent and seven bits.


@dataclass(frozen=True)
class CutCodec(PlainCodec):
    """float32 with its lower 16 bits left out: bfloat16, rounded towards zero."""

    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return "cut16"

    def encode_(self, messages: Tensor, values: Tensor, *, count: int = 1, feedback: Feedback | None = None) -> None:
        bits = values.float().view(torch.int32) & -65536
        super().encode_(messages, bits.view(torch.float32), count=count, feedback=feedback)


class Cutting(Encoding):
    """Cuts gradients on every hop, and weights if it is told to."""

    def gradient_codecs(self, path: Sequence[HopSpec], wire_dtype: torch.dtype) -> list[Codec]:
        return [CutCodec() for _ in path]


def with_a_codec(kind: str) -> tuple[float, dict[str, int], dict[str, int]]:
    """The difference to plain torch, and bytes of a gather or reduction in the ledger, and as they should be."""
    weights = CutCodec() if kind == "gather" else None
    with mock.patch("zeropp.params.build.choose_encoding", lambda config: Cutting(weights=weights)):
        pair = Pair(Routed(3), make_config(), dtype=torch.float32)
        for _ in range(4):
            pair.train(chain(3))
    rows = [row for row in zeropp.comm_report(pair.model).rows if row.kind == kind]
    assert {row.codec for row in rows} == {"cut16"}
    # Of a call: as many steps have other numbers of gathers than of reductions.
    sent = {row.unit: row.bytes // row.calls for row in rows}
    return pair.difference(), sent, {unit.name: unit.numel * 2 // 2 for unit in pair.engine.units}


@pytest.mark.parametrize("kind", ["reduce", "gather"])
def test_a_codec(kind: str) -> None:
    for difference, sent, expected in run_ranks(2, with_a_codec, kind):
        assert 0 < difference < 0.02  # seven bits of mantissa: what travels is off by 2**-7 of itself at most
        assert sent == expected


# A placement: states over a node, gradients of several micro-batches over a pair of it.


def pairs(config: object, world: int, local: int) -> Mode:
    chain = build_chain(world, [2, 4])
    return Mode(chain, states=4, cached=2, gradients=2)


def with_a_placement() -> float:
    with mock.patch("zeropp.wire.encoding.choose_mode", pairs):
        pair = Pair(Routed(3), make_config())
        for _ in range(4):
            pair.train(chain(3))
        assert pair.engine.mode.cached == 2 and pair.engine.mode.held_level == 2
    return pair.difference()


def test_a_placement() -> None:
    assert all(difference <= 1e-12 for difference in run_ranks(4, with_a_placement, local_world_size=4))


def test_a_placement_of_a_configuration_is_levels_and_nothing_else() -> None:
    config = zeropp.load_config(make_config(zero_hpz_partition_size=2))
    mode = choose_mode(config, 4, 2)
    assert choose_mode(config, 4, 2) == mode and mode.cached == 2  # a value: no state, no process


# A key.


def names_read() -> set[str]:
    """Attributes that the code outside of the configuration reads."""
    found = set()
    for path in (ROOT / "zeropp").rglob("*.py"):
        if "config" not in path.relative_to(ROOT).parts[:2]:
            found |= {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    return found


@pytest.mark.parametrize("model", [ExtensionConfig, ZeroConfig])
def test_a_key(model: type[ExtensionConfig | ZeroConfig]) -> None:
    """It has a docstring, an entry, a row in the reference; and if it has an effect, somebody reads it."""
    reference, read = (ROOT / "docs" / "configuration.md").read_text(), names_read()
    assert SUPPORT[model].keys() == model.model_fields.keys()
    for name, field in model.model_fields.items():
        assert field.description, f"{name} has no docstring"
        assert re.search(rf"\| `(stage3_)?{name}`", reference), f"{name} is not in docs/configuration.md"
        if SUPPORT[model][name].kind in (Kind.EFFECT, Kind.BLOCK) and not name.startswith("offload_"):
            assert name in read, f"{name} is said to have an effect, and nobody reads it"


# A width of codes: what tells one from another is in few files.

_WIDTH = re.compile(r"\b(bits|BITS|source_bits)\b *(==|!=|//|in \()|\bGROUPS\b.* = \{|Literal\[4, 8")


def test_a_configuration_has_every_width() -> None:
    widths = {width for part in get_args(Bits) for width in get_args(part)}
    assert widths == {16, 32, *GROUPS}  # plain values, and codes


def test_few_files_tell_widths_apart() -> None:
    sources = [path for room in ("zeropp", "kernels") for path in (ROOT / room).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in sources if _WIDTH.search(path.read_text())}
    recipe = (ROOT / "CONTRIBUTING.md").read_text().split("### A width of codes")[1].split("###")[0]
    named = set(re.findall(r"`((?:zeropp|kernels)/[\w/.]+\.py)`", recipe))
    assert found <= named and len(named) <= 5, f"widths are told apart in {found}, the recipe names {named}"
