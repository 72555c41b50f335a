"""Error feedback of zeropp.fsdp2 keeps each error with the parameters and the rank that it belongs to.

The job has two nodes of two ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.support.fsdp2_models import gradients, sharded
from tests.support.fsdp2_reference import tokens
from tests.support.rank_pool import run_ranks, some
from zeropp import fsdp2


class Twins(nn.Module):
    """Matrices of equal size; forward uses the layers with the given numbers, or all layers if none is given."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(count))

    def forward(self, x: Tensor, *numbers: int) -> Tensor:
        used = [self.layers[number] for number in numbers] or self.layers
        return torch.stack([layer(x).square().sum() for layer in used]).sum()


def batch() -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))


def train_only(model: Any, *numbers: int) -> None:
    """Freeze all layers except those with the given numbers."""
    for number, layer in enumerate(model.layers):
        layer.requires_grad_(number in numbers)


def swapped(how: str, keep: bool) -> dict[str, Tensor]:
    """Train a parameter with gradients 1e5 times as large, and then another parameter of the same size.

    Args:
        how: case of the change; "one of two" trains a second parameter all the time, "and back" changes three times.
        keep: False to call ``reset_feedback`` after the change.

    Returns:
        Gradients after the change.
    """
    model: Any = Twins(3)
    train_only(model, *((0, 1) if how == "one of two" else (0,)))
    fully_shard(model)
    adapter = fsdp2.apply(model, weights=None, feedback="both")
    (1e5 * model(batch())).backward()
    model.zero_grad()
    if how == "while gradients are accumulated":
        # This gradient is reduced together with the next one.
        model.set_requires_gradient_sync(False)
        model(batch()).backward()
        model.set_requires_gradient_sync(True)
    train_only(model, *((0, 2) if how == "one of two" else (1,)))
    if not keep:
        adapter.reset_feedback()
    model(batch()).backward()
    found = gradients(model)
    if how == "and back":
        for number in (0, 1):
            model.zero_grad()
            train_only(model, number)
            model(batch()).backward()
        found = gradients(model)
    adapter.remove()
    return found


def swaps(how: str) -> dict[str, float]:
    """Return the relative distance of each gradient from its value with errors that were reset after the change."""
    kept, clean = swapped(how, True), swapped(how, False)
    assert kept.keys() == clean.keys() and kept
    return {name: float((kept[name] - clean[name]).norm() / clean[name].norm()) for name in kept}


@pytest.mark.parametrize("how", some(["one of two", "at once", "while gradients are accumulated", "and back"], 4))
def test_an_error_does_not_go_to_another_parameter_of_the_same_size(how: str) -> None:
    """The adapter must compare the parameters of FSDP2's buffer, and not only the size of the buffer."""
    for found in run_ranks(4, swaps, how, local_world_size=2):
        # The distance is 0 because a change of the trained parameters sets errors to zero. If the error of the large
        # gradient were added to another parameter, the distance would be far above both bounds.
        assert max(found.values()) < (0.5 if how == "and back" else 1e-6), found


def unused() -> str:
    """Return the error of a backward in which only one of two trained parameters of equal size has a gradient."""
    model: Any = Twins(2)
    fully_shard(model)
    fsdp2.apply(model, weights=None, feedback="both")
    model(batch()).backward()
    with pytest.raises(RuntimeError) as raised:
        model(batch(), 0).backward()
    return str(raised.value)


def test_a_trained_parameter_without_a_gradient_is_named() -> None:
    """FSDP2 omits such a parameter from its buffer, so errors stored by position would go to another one."""
    for said in run_ranks(4, unused, local_world_size=2):
        assert "(root): ['layers.1.weight'] have no gradient in this backward" in said
        assert "set_reduce_scatter_unused_params(True)" in said


def checkpointed(folder: Path) -> list[str]:
    """Save and load the adapter with torch.distributed.checkpoint.

    Returns:
        Names of errors that are all zero before they are saved, or differ after loading.
    """
    model = sharded()
    adapter = fsdp2.apply(model, feedback="both")
    for step in range(2):
        model(tokens(step, dist.get_rank())).backward()
    before = adapter.state_dict()
    dcp.save({"adapter": adapter, "model": model}, checkpoint_id=folder)
    wrong = [name for name, value in before.items() if not value.any()]
    # Load into the same adapter, as when a run continues, and into an adapter of a new model.
    again = sharded()
    for each in (adapter, fsdp2.apply(again, feedback="both")):
        each.reset_feedback()
        dcp.load({"adapter": each}, checkpoint_id=folder)
        after = each.state_dict()
        wrong += [name for name in before if not torch.equal(before[name], after[name])]
    return wrong


def test_a_distributed_checkpoint_gives_each_rank_its_own_errors(tmp_path: Path) -> None:
    assert run_ranks(4, checkpointed, tmp_path / "kept", local_world_size=2) == [[]] * 4


def without_errors(folder: Path) -> dict[str, Tensor]:
    """Save and load an adapter without error feedback, and return its state, which is empty."""
    adapter = fsdp2.apply(sharded())
    dcp.save({"adapter": adapter, "step": torch.tensor(3)}, checkpoint_id=folder)
    dcp.load({"adapter": adapter, "step": torch.tensor(0)}, checkpoint_id=folder)
    return adapter.state_dict()


def test_an_adapter_without_errors_can_be_saved(tmp_path: Path) -> None:
    assert run_ranks(4, without_errors, tmp_path / "kept", local_world_size=2) == [{}] * 4


def other_states() -> list[str]:
    """Return the messages for states of another rank, of other trained parameters and of another codec."""
    model: Any = Twins(2)
    train_only(model, 0)
    fully_shard(model)
    adapter = fsdp2.apply(model, feedback="both")
    own = adapter.state_dict()
    rank = dist.get_rank()
    others = [{name.replace(f"rank {rank} ", f"rank {rank + 1} "): value for name, value in own.items()}]
    for trained, settings in ((1, {}), (0, {"gradient_bits": (4, 4)})):
        other: Any = Twins(2)
        train_only(other, trained)
        fully_shard(other)
        others.append(fsdp2.apply(other, feedback="both", **settings).state_dict())
    assert [value.numel() for value in others[1].values()] == [value.numel() for value in own.values()]
    said = []
    for state in others:
        with pytest.raises(ValueError) as raised:
            adapter.load_state_dict(state)
        said.append(str(raised.value))
    # load_state_dict expects errors of the parameters that are trained at that moment, so after this change the second
    # state fits.
    train_only(model, 1)
    adapter.load_state_dict(others[1])
    return said


def test_errors_of_others_are_not_loaded() -> None:
    """Names of errors contain the rank, the codec and a hash of the parameters, so equal sizes do not suffice."""
    for said in run_ranks(4, other_states, local_world_size=2):
        assert all(
            "the state has no errors for" in each and "the same model, trained parameters" in each for each in said
        )
