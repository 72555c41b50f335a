"""Training resumes from a checkpoint bit for bit on the same ranks, and with equal weights and states on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.checkpoint_training import CONFIGS, Went, by_hand, goes_on, saves, states_of
from tests.support.quantized_model import decoded
from tests.support.rank_pool import run_ranks


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def same_states(found: list[Went], expected: list[Went]) -> list[str]:
    left, right = states_of(found), states_of(expected)
    assert left.keys() == right.keys()
    return [name for name in right if left[name].keys() != right[name].keys() or same(left[name], right[name])]


# (configuration, way of saving) that run by default. Their checkpoints have carried gradient errors (LoCo) and cached
# weights that delta4 computes differences to.
CHOSEN = {("hpz loco bf16", "at once"), ("hpz delta4", "asynchronous")}
WAYS = [
    pytest.param(name, way, marks=() if (name, way) in CHOSEN else pytest.mark.campaign)
    for name in CONFIGS
    for way in ("at once", "asynchronous")
]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_the_same_ranks_go_on_to_the_bit(name: str, way: str, tmp_path: Path) -> None:
    """Weights, states, losses and random numbers are equal.

    So are carried gradient errors and the bases of differences, because losses would differ otherwise.
    """
    before = run_ranks(4, saves, tmp_path / "here", name, asynchronous=way == "asynchronous", local_world_size=2)
    after = run_ranks(4, goes_on, tmp_path / "here", name, local_world_size=2)
    for old, new in zip(before, after, strict=True):
        assert same(new.state, old.state) == [] and new.losses == old.losses
        assert new.drawn == old.drawn and new.skipped == old.skipped == 1
    assert same_states(after, before) == []


ELSEWHERE = [(4, 2, "hpz delta4"), (1, 1, "stage 3"), (2, 1, "stage 2 bf16"), (3, 1, "stage 3 small kept"),
             (6, 2, "mics"), (4, 4, "stage 1"), (2, 2, "stage 0"), (4, 1, "one unit")]  # fmt: skip


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Went]]:
    """A checkpoint of two nodes with two ranks each, and the ranks' results.

    The run has quantized gradients, LoCo and bf16.
    """
    path = tmp_path_factory.mktemp("checkpoint") / "here"
    return path, run_ranks(4, saves, path, "hpz loco bf16", local_world_size=2)


@pytest.mark.every(16)
@pytest.mark.filterwarnings("ignore:carried errors of quantized gradients")
@pytest.mark.filterwarnings("ignore:the checkpoint was saved by")
@pytest.mark.parametrize(("world", "local", "name"), ELSEWHERE)
def test_other_ranks_and_placements(world: int, local: int, name: str, elsewhere: tuple[Path, list[Went]]) -> None:
    """Weights and states are equal bit for bit.

    Losses equal those of a new run that starts with these weights and states.
    """
    path, before = elsewhere
    after = run_ranks(world, goes_on, path, name, local_world_size=local)
    assert same(after[0].state, before[0].state) == [] and same_states(after, before) == []
    expected = run_ranks(world, by_hand, before[0].state, states_of(before), name, local_world_size=local)
    assert [rank.losses for rank in after] == expected


@pytest.mark.every(8)
@pytest.mark.filterwarnings("ignore:the checkpoint was saved by")
@pytest.mark.parametrize(("world", "name"), [(4, "frozen codes hpz"), (1, "frozen"), (3, "frozen codes")])
def test_codes_of_frozen_weights(world: int, name: str, tmp_path: Path) -> None:
    """Frozen quantized weights stay equal.

    Codes are copied into codes, and decoded if the new run has plain weights.
    """
    before = run_ranks(4, saves, tmp_path / "here", "frozen codes", local_world_size=2)
    after = run_ranks(world, goes_on, tmp_path / "here", name, local_world_size=2 if world == 4 else world)
    assert same(after[0].state, before[0].state) == [] and same_states(after, before) == []


@pytest.mark.filterwarnings("ignore:the checkpoint was saved by")
def test_frozen_values_are_encoded_where_codes_are_wanted(tmp_path: Path) -> None:
    before = run_ranks(2, saves, tmp_path / "here", "frozen", 9)[0].state
    (after,) = run_ranks(1, goes_on, tmp_path / "here", "frozen codes")
    trained = {name for name in before if name.split(".")[-2:-1] == ["1"] or name == "head.bias"}
    assert same({name: after.state[name] for name in trained}, {name: before[name] for name in trained}) == []
    for name in before.keys() - trained - {"conv.weight"}:
        assert torch.equal(after.state[name], decoded(before[name])), name


def losses_of_plain_torch(state: dict[str, Tensor], states: dict[str, Any]) -> list[float]:
    from tests.support.checkpoint_training import make_optimizer
    from tests.support.quantized_model import Model, tokens

    model = Model()
    model.load_state_dict(state)
    optimizer = make_optimizer(model)
    for key, parameter in model.named_parameters():
        optimizer.state[parameter] = dict(states[key])
    losses = []
    for step in range(4, 14):
        both = [model(tokens(step, rank)) for rank in range(2)]
        (sum(both) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in both) / 2)
    return losses


def test_goes_on_like_plain_torch(elsewhere: tuple[Path, list[Went]]) -> None:
    """Losses equal those of plain torch within 1e-6 in float32, because only the order of sums differs."""
    path, before = elsewhere
    after = run_ranks(2, goes_on, path, "stage 3", local_world_size=2)
    mean = [sum(pair) / 2 for pair in zip(*(rank.losses for rank in after), strict=True)]
    assert mean == pytest.approx(losses_of_plain_torch(before[0].state, states_of(before)), rel=1e-6)
    # A run with another number of ranks seeds its generators anew. No number may be drawn twice, on any rank or before
    # the save.
    drawn = [number for rank in after for number in rank.drawn]
    assert len(set(drawn)) == len(drawn) and not set(drawn) & {number for rank in before for number in rank.drawn}


def test_each_rank_reads_its_own_part(elsewhere: tuple[Path, list[Went]]) -> None:
    """A rank reads less than half of the checkpoint.

    It reads its own part and, to verify checksums, whole megabytes at the edges of that part.
    """
    path, _ = elsewhere
    there = sum(each.stat().st_size for each in path.iterdir())
    for rank in run_ranks(4, goes_on, path, "stage 3", verify="none", local_world_size=2):
        assert rank.found is not None and 0 < rank.found.nbytes_read < there / 2
