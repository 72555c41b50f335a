"""Training with states, gradients and weights off the device gives the same bits as training without offload.

Random delays of reads, writes, copies and steps do not change the result.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zeropp
from tests.support.branching_models import make_config
from tests.support.offload_pairs import Run, compare, host_apart, run, same
from tests.support.rank_pool import run_ranks
from tests.support.small_models import MODELS
from zeropp.wire import codecs

BF16 = {"bf16": {"enabled": True}}
CODED = {"zero_quantized_gradients": True, "zeropp_loco_param": {}}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 2": {"stage": 2},
    "stage 1": {"stage": 1},
    "stage 3, most parameters persistent": {"persist": 100},
    "bf16": BF16,
    "qwZ": {"zero_quantized_weights": True},
    "qwZ, bf16": {**BF16, "zero_quantized_weights": True},
    "qwZ, bf16, stage 2": {**BF16, "zero_quantized_weights": True, "stage": 2},
    "qgZ with LoCo": CODED,
    "mics": {"mics_shard_size": 1},
    "lossless, stage 1": {**BF16, "stage": 1, "weight_codec": "lossless"},
    "delta4, stage 1": {**BF16, "stage": 1, "weight_codec": "delta4"},
    "no overlap": {"overlap_comm": False},
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation, each backward sends": {"accumulation": 3, "how": "plain"},
    "accumulation, no_sync": {"accumulation": 2, "how": "no_sync"},
    "accumulation 4, configured": {"accumulation": 4},
    "a skipped step": {"skipped": (2,)},
    "resumed": {"resumed": 3},
    "GradScaler": {"scaled": True, "how": "plain"},
    "saved while steps are pending": {"saved": 3},
    "eager": {},
}
CPU = {"offload_optimizer": {"device": "cpu"}}
SMALL_BLOCKS = {"aio": {"block_size": 1024}}


def on_disk(folder: Path, **settings: object) -> dict[str, object]:
    return {"device": "nvme", "nvme_path": str(folder), **settings}


def offloads(folder: Path, stage: int) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return two dicts of offload settings by name: for a host that trains itself, and for a host beside a GPU.

    Args:
        folder: directory of the swap files.
        stage: ZeRO stage. Weights are offloaded in stage 3 only.
    """
    weights = {"offload_param": {"device": "cpu", "buffer_count": 2, "buffer_size": 1000}} if stage == 3 else {}
    spilled = {"offload_param": on_disk(folder, max_in_cpu=0, buffer_count=2, buffer_size=1024)} if stage == 3 else {}
    piped = {"pipeline_read": True, "pipeline_write": True}
    beside = {
        "cpu": CPU,
        "nvme": {**SMALL_BLOCKS, "sub_group_size": 1024, "offload_optimizer": on_disk(folder, **piped)},
        "nvme, small tiles": {
            **SMALL_BLOCKS, **spilled, "sub_group_size": 1024, "offload_optimizer": on_disk(folder, buffer_count=1),
        },
    }  # fmt: skip
    apart = {
        "cpu": {**CPU, **weights},
        "nvme": {**SMALL_BLOCKS, **spilled, "offload_optimizer": on_disk(folder, pipeline_read=True)},
        "optimizer alone": CPU,
        "nvme for weights alone": {**SMALL_BLOCKS, **CPU, **spilled},
    }
    if stage < 3:
        del apart["nvme for weights alone"]
        return beside, apart
    # With a ratio of 0.3 or 0.7, the border between elements that the device steps and elements that the host steps
    # is within a buffer. That buffer's main weights are on the device, also for elements that the host steps.
    beside["a part on the cpu"] = {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}
    beside["a part on nvme"] = {
        **SMALL_BLOCKS, **spilled, "sub_group_size": 1024, "offload_optimizer": on_disk(folder, ratio=0.7, **piped),
    }  # fmt: skip
    apart["a part on the cpu"] = {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}
    apart["a part on nvme"] = {
        **SMALL_BLOCKS, **spilled, "sub_group_size": 1024, "offload_optimizer": on_disk(folder, ratio=0.3),
    }  # fmt: skip
    return beside, apart


# Cases of the short run. Each case takes a third of the offloads, and together the cases take all of them.
TELLING = [("stage 3", "plain", 2), ("bf16", "a skipped step", 2), ("stage 3", "resumed", 1)]


def cases() -> list[Any]:
    """Return (placement, way, ranks, True for all offloads): a few cases, and the full product for the campaign."""
    every = itertools.product(PLACEMENTS, WAYS, (1, 2))
    return [
        *((*case, False) for case in TELLING),
        *(pytest.param(*case, True, marks=pytest.mark.campaign) for case in every),
    ]


@pytest.mark.parametrize(("placement", "way", "world", "whole"), cases())
def test_same_bits(placement: str, way: str, world: int, whole: bool, tmp_path: Path) -> None:
    """AdamW's fused kernel steps both models with the same arithmetic in the same order, so no tolerance is needed."""
    settings = dict(PLACEMENTS[placement])
    # Runs whose states come from a checkpoint do not clip, because unclipped steps show a wrong state soonest.
    settings |= {"gradient_clipping": 0.3} if way not in ("resumed", "saved while steps are pending") else {}
    settings |= {"lazy_step": False} if way == "eager" else {}
    run = Run(settings, folder=str(tmp_path / "checkpoint"), **WAYS[way])
    turn = list(PLACEMENTS).index(placement) + list(WAYS).index(way) + world
    for number, some in enumerate(offloads(tmp_path / "swap", settings.get("stage", 3))):
        chosen = list(some) if whole else sorted(some)[(turn + number) % 3 :: 3]
        for found in run_ranks(world, compare, run, {name: some[name] for name in chosen}, number == 1):
            for name, (wrong, seen) in found.items():
                assert wrong == [], (name, wrong)
                # Every rank stepped some units on the host, and every configuration with files read from them.
                assert seen["step"] > 0 and ("nvme" not in name or seen["read"] > 0), (name, seen)


@pytest.mark.every(2)
@pytest.mark.parametrize("way", ["accumulation, each backward sends", "accumulation 4, configured"])
def test_same_bits_where_means_are_not_exact(way: str, tmp_path: Path) -> None:
    """The mean over three ranks is rounded before it is added to earlier micro-batches, with offload and without."""
    run = Run({"stage": 2, "gradient_clipping": 0.3}, steps=4, **WAYS[way])
    some = {"nvme": {"offload_optimizer": on_disk(tmp_path), **SMALL_BLOCKS, "sub_group_size": 1024}}
    for found in run_ranks(3, compare, run, some, False):
        assert [wrong for wrong, _ in found.values()] == [[]]


TWO_NODES: dict[str, dict[str, Any]] = {
    "hpz": {"zero_hpz_partition_size": 2},
    "hpz, bf16, qwZ": {**BF16, "zero_hpz_partition_size": 2, "zero_quantized_weights": True},
    "deferred": {"defer_cross_reduction": True},
    "mics of a node": {"mics_shard_size": 2},
    "qgZ with LoCo": CODED,
    "lossless, stage 1": {**BF16, "stage": 1, "weight_codec": "lossless"},
}


@pytest.mark.every(12)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("placement", TWO_NODES)
def test_same_bits_on_two_nodes(placement: str, whole: bool, tmp_path: Path) -> None:
    settings = {**TWO_NODES[placement], "gradient_clipping": 0.3}
    run, turn = Run(settings, accumulation=2, how="plain", steps=10 if whole else 4), list(TWO_NODES).index(placement)
    for number, some in enumerate(offloads(tmp_path / "swap", settings.get("stage", 3))):
        if not whole and number != turn % 2:
            continue
        chosen = list(some) if whole else sorted(some)[turn % 3 :: 3]
        asked = {name: some[name] for name in chosen}
        for found in run_ranks(4, compare, run, asked, number == 1, local_world_size=2):
            assert {name: wrong for name, (wrong, _) in found.items()} == {name: [] for name in chosen}


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"lr": 3e-2, "fused": True}),
        (torch.optim.SGD, {"lr": 3e-2, "momentum": 0.9, "nesterov": True, "fused": True}),
        (torch.optim.Adagrad, {"lr": 3e-2, "fused": True}),
        (torch.optim.Adam, {"lr": 3e-3, "amsgrad": True, "fused": True}),
    ],
    ids=["SGD", "SGD with momentum", "Adagrad", "Adam with amsgrad"],
)
def test_other_fused_optimizers(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any], tmp_path: Path
) -> None:
    run = Run({"gradient_clipping": 0.3}, optimizer=optimizer, options=options, steps=4)
    beside, _ = offloads(tmp_path / "swap", 3)
    for found in run_ranks(2, compare, run, {name: beside[name] for name in ("cpu", "nvme, small tiles")}, False):
        assert {name: wrong for name, (wrong, _) in found.items()} == {"cpu": [], "nvme, small tiles": []}


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_an_optimizer_without_a_fused_kernel(whole: bool, tmp_path: Path) -> None:
    """RMSprop steps with its own code, on tensors that map files, and its states go to files as well."""
    run = Run({"gradient_clipping": 0.3}, optimizer=torch.optim.RMSprop, options={"lr": 3e-3, "momentum": 0.5})
    for offloads_here, apart in zip(offloads(tmp_path / "swap", 3), (False, True), strict=True):
        names = {"a part on nvme"} if not apart else {"cpu"}
        some = {name: blocks for name, blocks in offloads_here.items() if whole or name in names}
        for found in run_ranks(2, compare, run, some, apart):
            assert {name: wrong for name, (wrong, _) in found.items()} == {name: [] for name in some}


def by_one_kernel(how: dict[str, Any], folder: str) -> tuple[list[str], float, int]:
    """Train with gradient sums in a file, to which one kernel adds on the device, and measures the result.

    Returns:
        The differences from training without offload (norms excluded), the largest relative difference of norms, and
        the number of kernel calls.
    """
    plain, called = run(Run(**how)), 0
    block = {"offload_optimizer": on_disk(Path(folder)), **SMALL_BLOCKS, "sub_group_size": 1024}
    kernel = codecs.gather_

    def counted(*arguments: Any, **named: Any) -> None:
        nonlocal called
        called += 1
        kernel(*arguments, **named)

    with (
        host_apart(),
        mock.patch.object(codecs, "summed_by_kernels", lambda out: True),
        mock.patch.object(codecs, "gather_", counted),
    ):
        other = run(Run(**{**how, "settings": block}))
    apart = max(abs(a - b) / b for a, b in zip(other.norms, plain.norms, strict=True) if a is not None and b)
    other.norms = plain.norms
    return same(plain, other), apart, called


def test_sums_are_added_by_one_kernel(tmp_path: Path) -> None:
    """One kernel adds a stored sum to that of a later micro-batch and measures the result, as on a GPU.

    The kernel squares in float32, so norms agree within 1e-6 only. Without clipping nothing else depends on the norms,
    so all other results have the same bits.
    """
    how = {"accumulation": 3, "how": "plain", "steps": 4}
    for wrong, apart, called in run_ranks(2, by_one_kernel, how, str(tmp_path)):
        assert wrong == [] and apart < 1e-6 and called >= 4 * 2


def kinds_of_memory(folder: str) -> set[bool]:
    """Return the set of answers to "is the state in a file?", for RMSprop states of slices with weights in a file.

    A state is in a file if its address lies in a mapping of a swap file in this process.
    """
    torch.manual_seed(3)
    model = MODELS["gpt"].build().float()
    config = make_config(offload_optimizer=on_disk(Path(folder)), **SMALL_BLOCKS)
    optimizer = zeropp.ZeroOptimizer(torch.optim.RMSprop(model.parameters(), lr=1e-3), model, config)
    for step in range(2):
        kind = MODELS["gpt"]
        optimizer.backward(kind.loss(model, kind.batch(torch.Generator().manual_seed(step))))
        optimizer.step()
        optimizer.zero_grad()
    mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "swap" in line]
    places = [(int(begin, 16), int(end, 16)) for begin, end in mapped]
    found = {
        any(begin <= state["square_avg"].data_ptr() < end for begin, end in places)
        for part in optimizer.slices.all
        if (state := optimizer.state[part.parameter]) and part.buffer is not None and not part.buffer.main.in_memory
    }
    optimizer.close()
    return found


def test_states_that_the_optimizer_makes_are_in_files(tmp_path: Path) -> None:
    assert run_ranks(2, kinds_of_memory, str(tmp_path / "swap")) == [{True}, {True}]
