"""Settings that change no bit of the result on one topology: units, prefetch, reuse, persistence and overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.parity import Recipe, Trained, train_zero
from tests.support.rank_pool import run_ranks

BLOCK = 5_600  # approximate number of elements of a block of width 25
HUGE = 10**12

ZERO = "zero"
EXTENSION = "extension"

# Each set of settings is compared with the default configuration.
VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    # Forming of units.
    "all cut, blocks": {},
    "cut below blocks": {EXTENSION: {"unit_numel": 2_000}},
    "single modules": {EXTENSION: {"unit_numel": 1}},
    "merged to 20 blocks a rank": {EXTENSION: {"unit_min_blocks": 20}},
    "merged into one": {EXTENSION: {"unit_min_blocks": 10_000}},
    "leaf class": {ZERO: {"leaf_module": {"classes": ["Attention", "MultiheadAttention"]}}},
    "leaf name": {ZERO: {"leaf_module": {"names": ["blocks", "layers.1", "blocks.0.norm1"]}}},
    "fine modules are leaves": {ZERO: {"stage3_module_granularity_threshold": 1_000}},
    "everything is one leaf": {ZERO: {"stage3_module_granularity_threshold": 10**9}},
    # Persistent parameters.
    "small kept": {ZERO: {"stage3_param_persistence_threshold": 100}},
    "all kept": {ZERO: {"stage3_param_persistence_threshold": HUGE}},
    "few kept": {ZERO: {"stage3_param_persistence_threshold": HUGE, "stage3_model_persistence_threshold": 3_000}},
    # Prefetch and release of units.
    "no prefetch": {ZERO: {"stage3_prefetch_bucket_size": 0}},
    "tiny prefetch": {ZERO: {"stage3_prefetch_bucket_size": BLOCK + 600}},
    "huge prefetch": {ZERO: {"stage3_prefetch_bucket_size": HUGE}},
    "nothing live": {ZERO: {"stage3_max_live_parameters": 0}},
    "one and a half units live": {ZERO: {"stage3_max_live_parameters": 3 * BLOCK // 2}},
    "all live": {ZERO: {"stage3_max_live_parameters": HUGE, "stage3_max_reuse_distance": HUGE}},
    "no reuse": {ZERO: {"stage3_max_reuse_distance": 0}},
    "some reuse": {ZERO: {"stage3_max_reuse_distance": 4 * BLOCK}},
    "no prefetch, no reuse": {ZERO: {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}},
    "prefetch, but nothing live": {ZERO: {"stage3_prefetch_bucket_size": HUGE, "stage3_max_live_parameters": 1}},
    # Overlap of communication and computation.
    "no overlap": {ZERO: {"overlap_comm": False}},
    "no overlap, no reuse": {ZERO: {"overlap_comm": False, "stage3_max_reuse_distance": 0}},
}


def changed(base: Trained, other: Trained) -> list[str]:
    """Return the numbers of losses and the names of weights that differ in any bit."""
    found = [f"loss {i}" for i, (a, b) in enumerate(zip(base.losses, other.losses, strict=True)) if a != b]
    assert base.state.keys() == other.state.keys()
    return found + [name for name, value in base.state.items() if not torch.equal(value, other.state[name])]


def train_variants(fields: dict[str, Any], names: list[str]) -> dict[str, list[str]]:
    """Train with default settings and with some variants.

    In evaluation, torch's encoder layers run a fused kernel if all their weights are gathered, and other operations in
    another order if not. The choice depends on the units, so the fused kernel is switched off.

    Args:
        fields: arguments of `Recipe`.
        names: keys of VARIANTS.

    Returns:
        A dict: variant -> losses and weights that differ from the run with default settings.
    """
    torch.backends.mha.set_fastpath_enabled(False)
    extension: dict[str, object] = {"unit_min_blocks": 128}
    base = train_zero(Recipe(**fields, zero={"stage3_param_persistence_threshold": 100_000}, extension=extension))
    return {name: changed(base, train_zero(Recipe(**fields, **VARIANTS[name]))) for name in names}


def check_variants(world: int, nodes: int, fields: dict[str, Any], names: list[str] | None = None) -> None:
    results = run_ranks(world, train_variants, fields, names or list(VARIANTS), local_world_size=world // nodes)
    for rank, result in enumerate(results):
        assert not any(result.values()), f"rank {rank}: {result}"


TELLING = ["cut below blocks", "merged into one", "leaf name", "few kept", "one and a half units live"]
TELLING += ["some reuse", "no overlap"]
TWICE = [
    ("gpt", torch.float32, TELLING),
    *(
        pytest.param(*case, list(VARIANTS), marks=pytest.mark.campaign)
        for case in (("gpt", torch.float32), ("repeated blocks", torch.float64))
    ),
]


@pytest.mark.parametrize(("model", "dtype", "names"), TWICE, ids=["gpt", "gpt, all", "repeated blocks, all"])
def test_settings_change_nothing(model: str, dtype: torch.dtype, names: list[str]) -> None:
    check_variants(2, 1, {"model": model, "dtype": dtype, "steps": 2, "accumulation": 2, "evaluate": True}, names)


MODELS = ["nested lists", "encoder", "frozen middle, segments recomputed", "tied segments, reentrant", "low rank"]
FEW = [("frozen middle, segments recomputed", 2), ("gpt", 1)]  # test_all_settings_everywhere runs the other models


@pytest.mark.campaign
@pytest.mark.parametrize(("model", "nodes"), FEW)
def test_settings_change_nothing_on_four_ranks(model: str, nodes: int) -> None:
    names = ["all cut, blocks", "single modules", "merged to 20 blocks a rank", "small kept", "nothing live"]
    names += ["one and a half units live", "huge prefetch", "no prefetch, no reuse", "no overlap"]
    check_variants(4, nodes, {"model": model, "dtype": torch.float32, "steps": 3}, names)


BF16 = [name for name in VARIANTS if "kept" in name or "live" in name or "modules" in name]


@pytest.mark.parametrize(
    ("how", "steps", "names"),
    [
        ("no_sync", 2, ["single modules", "all kept", "nothing live"]),
        pytest.param("no_sync", 3, BF16, marks=pytest.mark.campaign),
        pytest.param("loss.backward", 3, BF16, marks=pytest.mark.campaign),
    ],
    ids=["no_sync", "no_sync, all", "loss.backward, all"],
)
def test_settings_change_nothing_in_bf16(how: str, steps: int, names: list[str]) -> None:
    top: dict[str, object] = {"bf16": {"enabled": True}}
    fields = {"model": "gpt", "dtype": torch.float32, "steps": steps, "how": how, "accumulation": steps, "top": top}
    check_variants(2, 1, fields, names)


@pytest.mark.campaign
@pytest.mark.parametrize("optimizer", ["AdamW fused", "SGD nesterov", "Lion"])
def test_settings_change_nothing_under_other_optimizers(optimizer: str) -> None:
    names = ["single modules", "merged into one", "small kept", "no prefetch, no reuse"]
    check_variants(2, 1, {"dtype": torch.float32, "optimizer": optimizer, "steps": 3}, names)


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_settings_change_nothing_under_clipping(dtype: torch.dtype) -> None:
    names = ["all cut, blocks", "single modules", "merged to 20 blocks a rank", "small kept", "few kept"]
    check_variants(2, 1, {"dtype": dtype, "optimizer": "SGD", "clip": 0.3, "steps": 6}, names)


@pytest.mark.campaign
@pytest.mark.timeout(600)  # each case trains 24 variants
@pytest.mark.parametrize("topology", [(1, 1), (2, 1), (4, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("how", ["optimizer.backward", "no_sync mixed"])
@pytest.mark.parametrize("model", [*MODELS, "gpt", "gpt tied by use", "repeated blocks", "raw root", "convolutions"])
def test_all_settings_everywhere(model: str, how: str, topology: tuple[int, int]) -> None:
    fields = {"model": model, "dtype": torch.float32, "steps": 3, "how": how, "accumulation": 3, "evaluate": True}
    names = list(VARIANTS)
    for start in range(0, len(names), 6):
        check_variants(*topology, fields, names[start : start + 6])
