"""Averages of weights in a checkpoint: on other ranks, for frozen parameters, and for weights that are loaded later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.checkpoint_training import small, step, train, wrap
from tests.support.rank_pool import run_ranks
from zeropp import checkpoint
from zeropp.checkpoint.boxes import CheckpointError


def with_average(path: Path, name: str, saves: bool, steps: int = 3) -> tuple[dict[str, Tensor], float, int]:
    model, optimizer = wrap(name)
    average = zeropp.ema(model, 0.9 if saves else 0.5)
    for each in range(steps):
        train(model, optimizer, [each])
        average.update()
    if saves:
        checkpoint.save(path, model, optimizer, {"ema": average, "ema.blocks": average})
    else:
        checkpoint.load(path, model, optimizer, {"ema": average})
    with average.applied():
        return zeropp.full_state(model), average.decay, average.updates


@pytest.mark.every(8)
@pytest.mark.parametrize(("world", "local", "name"), [(2, 2, "stage 1"), (4, 4, "hpz loco bf16"), (1, 1, "stage 3")])
def test_averages_of_the_weights(world: int, local: int, name: str, tmp_path: Path) -> None:
    """Averages are restored bit for bit on other ranks and placements, because they are sharded like weights."""
    before = run_ranks(4, with_average, tmp_path, "hpz loco bf16", True, local_world_size=2)[0]
    after = run_ranks(world, with_average, tmp_path, name, False, 1, local_world_size=local)[0]
    assert after[1:] == before[1:] == (0.9, 3)
    assert all(torch.equal(after[0][key], value) for key, value in before[0].items())


@pytest.mark.filterwarnings("ignore:.*_extra_state")
def test_averages_of_parameters_that_were_frozen(tmp_path: Path) -> None:
    """The average of a parameter that was frozen at the save starts with its weights.

    An entry that is no average is refused.
    """
    with_average(tmp_path / "here", "frozen", True)
    state, *_ = with_average(tmp_path / "here", "stage 3", False)
    model, optimizer = wrap("stage 3")
    checkpoint.load(tmp_path / "here", model, optimizer)
    weights = zeropp.full_state(model)
    frozen = [name for name in weights if name.startswith("blocks.") and name.split(".")[-2] == "0"]
    assert frozen and all(torch.equal(state[name], weights[name]) for name in frozen)
    checkpoint.save(tmp_path / "other", model, optimizer, {"ema": 0.9})
    with pytest.raises(CheckpointError, match=r"was none when it was saved.*nothing was changed"):
        checkpoint.load(tmp_path / "other", model, optimizer, {"ema": zeropp.ema(model)})
    with pytest.raises(ValueError, match="another model's"):
        checkpoint.save(tmp_path / "other", model, optimizer, {"ema": zeropp.ema(small()[0])})


def test_an_average_that_is_made_after_weights_were_loaded(tmp_path: Path) -> None:
    """An average of a model built on meta starts with the loaded weights, like that of a model built with values."""
    pairs = [small()]
    checkpoint.export(tmp_path, pairs[0][0])
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zeropp.zero.materialize(model)
    pairs.append(small(model))
    checkpoint.load_safetensors(model, tmp_path)
    found = []
    for pair in pairs:
        average = zeropp.ema(pair[0], 0.9)
        for _ in range(2):
            step(pair)
            average.update()
        with average.applied():
            found.append(zeropp.full_state(pair[0]))
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


@pytest.mark.parametrize("given", [False, True])
def test_an_average_of_weights_that_are_loaded_later(given: bool, tmp_path: Path) -> None:
    """An average made before weights are loaded starts at its first update, unless an average is loaded into it."""
    there = small()
    average = zeropp.ema(there[0], 0.5)
    step(there)
    average.update()
    checkpoint.save(tmp_path / "there", *there, {"ema": average})
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zeropp.zero.materialize(model)
    pair = small(model)
    own = zeropp.ema(model, 0.5)
    checkpoint.load(tmp_path / "there", *pair, {"ema": own} if given else None)
    for each in (there, pair):
        step(each)
    average.update()
    own.update()
    checkpoint.save(tmp_path / "again", *pair, {"ema": own})
    with average.applied(), own.applied():
        expected = zeropp.full_state(there[0]) if given else None
        found = zeropp.full_state(model)
    expected = expected or zeropp.full_state(there[0])
    assert all(torch.equal(found[name], value) for name, value in expected.items())
