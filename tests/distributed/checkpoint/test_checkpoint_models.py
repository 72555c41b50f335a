"""A checkpoint of any model and placement loads in any other: weights, buffers and states equal bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeropp
from tests.support.checkpoint_training import CONFIGS, moments
from tests.support.odd_dtype_models import OddModel
from tests.support.rank_pool import run_ranks
from zeropp import checkpoint

States = dict[str, dict[str, Any]]
# Configurations by (number of ranks, ranks per node).
LAYOUTS = {
    (1, 1): ["stage 0", "stage 3"],
    (2, 1): ["stage 1", "stage 2 bf16", "stage 3 small kept", "one unit"],
    (3, 3): ["stage 0", "stage 2 bf16", "stage 3", "one unit"],
    (4, 2): ["stage 1", "stage 3", "stage 3 small kept", "mics", "hpz loco bf16", "hpz lossless", "hpz delta4"],
    (6, 2): ["stage 3", "mics", "hpz loco bf16", "hpz delta4"],
}
Layout = tuple[int, int]


def wrapped(seed: int, name: str) -> tuple[OddModel, zeropp.ZeroOptimizer]:
    model = OddModel(seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, zeropp.ZeroOptimizer(torch.optim.AdamW(trained, lr=1e-2, foreach=False), model, CONFIGS[name])


def step(model: OddModel, optimizer: zeropp.ZeroOptimizer, number: int) -> None:
    rank = dist.get_rank()
    optimizer.backward(model(torch.linspace(0, 1 + rank, 6).reshape(2, 3) + number))
    optimizer.step()
    optimizer.zero_grad()


def config_of(layout: Layout, seed: int) -> str:
    return random.Random(f"{layout} {seed}").choice(LAYOUTS[layout])


def saved(root: Path, layout: Layout, seeds: list[int]) -> list[tuple[dict[str, Tensor], Any]]:
    found = []
    for seed in seeds:
        model, optimizer = wrapped(seed, config_of(layout, seed))
        for number in range(2):
            step(model, optimizer, number)
        checkpoint.save(root / str(seed), model, optimizer, file_nbytes=1 << 16)
        found.append((zeropp.full_state(model), moments(optimizer)))
    return found


def loaded(root: Path, layout: Layout, seeds: list[int]) -> list[tuple[dict[str, Tensor], Any]]:
    found = []
    for seed in seeds:
        model, optimizer = wrapped(seed, config_of(layout, seed))
        step(model, optimizer, 7)
        checkpoint.load(root / str(seed), model, optimizer)
        found.append((zeropp.full_state(model), moments(optimizer)))
        step(model, optimizer, 2)
    return found


def whole(ranks: list[dict[str, tuple[int, dict[str, Any]]]]) -> States:
    """Join the optimizer states of all ranks' slices.

    Args:
        ranks: for each rank, (first element of its slice, states of the slice) by parameter name.

    Returns:
        By parameter name, each state as a flat tensor in memory order, or the step count as it is.
    """
    pieces: dict[str, dict[str, dict[int, Any]]] = {}
    for rank in ranks:
        for name, (start, state) in rank.items():
            for key, value in state.items():
                pieces.setdefault(name, {}).setdefault(key, {})[start] = value
    found: States = {}
    for name, keys in pieces.items():
        for key, parts in keys.items():
            rows = [parts[start] for start in sorted(parts)]
            one = key == "step"
            found.setdefault(name, {})[key] = rows[0] if one else torch.cat([row.reshape(-1) for row in rows])
    return found


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names of values that differ, compared in the dtype of ``found``."""
    assert found.keys() == expected.keys()
    return [n for n, value in found.items() if not torch.equal(value, expected[n].to(value.dtype))]


@pytest.mark.filterwarnings("ignore:carried errors of quantized gradients")
@pytest.mark.filterwarnings("ignore:the checkpoint was saved by")
@pytest.mark.parametrize(
    ("before", "after", "seeds"),
    [
        ((4, 2), (3, 3), range(3)),
        pytest.param((3, 3), (4, 2), range(3, 7), marks=pytest.mark.campaign),
        *(
            pytest.param(before, after, range(100, 160), marks=[pytest.mark.campaign, pytest.mark.timeout(1200)])
            for before in LAYOUTS
            for after in LAYOUTS
        ),
    ],
)
def test_any_model_moves_to_any_layout(before: Layout, after: Layout, seeds: range, tmp_path: Path) -> None:
    """Random models have any dtype and order of dimensions, and tied, frozen, zero-dimensional and empty parameters."""
    old = run_ranks(before[0], saved, tmp_path, before, list(seeds), local_world_size=before[1], timeout=900)
    new = run_ranks(after[0], loaded, tmp_path, after, list(seeds), local_world_size=after[1], timeout=900)
    for number, seed in enumerate(seeds):
        about = f"{seed}: {config_of(before, seed)} to {config_of(after, seed)}"
        for rank in new:
            assert differences(rank[number][0], old[0][number][0]) == [], about
        left, right = (whole([rank[number][1] for rank in ranks]) for ranks in (new, old))
        assert left.keys() == right.keys(), about
        assert [name for name in left if differences(left[name], right[name])] == [], about
