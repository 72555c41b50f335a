"""State dicts and files of tied weights have one storage under all names of a weight, as those of a plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zeropp
from tests.support.rank_pool import run_ranks
from tests.support.tied_model import CONFIGS, Tied, differences
from zeropp import checkpoint


def states_of(name: str) -> list[str]:
    """Make state dicts of the whole model and a part, by ``full_state``, and inside GatheredParameters.

    Args:
        name: key of CONFIGS.

    Returns:
        Differences from the state dicts of a plain model.
    """
    wrong = []
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    model = Tied()
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, CONFIGS[name])
    wrong += differences(model.state_dict(), Tied().to(dtype), "state_dict")
    wrong += differences(model.head.state_dict(), Tied().to(dtype).head, "of a part")
    wrong += differences(zeropp.full_state(model), Tied(), "full_state")
    with zeropp.zero.GatheredParameters(model):
        wrong += differences(model.state_dict(), Tied(), "gathered")
    return wrong


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_state_dict_has_tied_weights_once(name: str) -> None:
    assert run_ranks(2, states_of, name) == [[], []]


def entries_taken_out(name: str) -> bool:
    """Make a state dict while a hook removes each new entry, so later names of a tied weight cannot refer to it.

    Args:
        name: key of CONFIGS.

    Returns:
        True if all removed entries have the values of a plain model.
    """
    model = Tied()
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, CONFIGS[name])
    kept: dict[str, Tensor] = {}

    def move(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
        for key in list(state):
            kept[key] = state.pop(key).clone()

    for module in model.modules():
        module._register_state_dict_hook(move)
    model.state_dict()
    plain = Tied().state_dict()
    return kept.keys() == plain.keys() and all(torch.equal(kept[key], value) for key, value in plain.items())


@pytest.mark.parametrize("name", ["stage 1", "stage 3"])
def test_a_hook_may_take_entries_out(name: str) -> None:
    assert run_ranks(2, entries_taken_out, name) == [True, True]


def saved(path: Path) -> dict[str, Tensor]:
    model = Tied()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, CONFIGS["stage 3"])
    optimizer.backward(model(torch.arange(6)))
    optimizer.step()
    checkpoint.save(path, model, optimizer)
    return zeropp.full_state(model)


@pytest.mark.every(2)
@pytest.mark.parametrize("limit", [None, 2000])
def test_safetensors_of_a_checkpoint_load_strictly(limit: int | None, tmp_path: Path) -> None:
    """A consolidated checkpoint of one file or several loads into the plain model with ``strict=True``."""
    state = run_ranks(2, saved, tmp_path / "there")[0]
    checkpoint.consolidate(tmp_path / "there", tmp_path / "whole", layout="hf", file_nbytes=limit or 1 << 30)
    found: dict[str, Tensor] = {}
    files = list((tmp_path / "whole").glob("*.safetensors"))
    assert (len(files) > 1) == (limit is not None)
    for file in files:
        found |= load_file(file)
    model = Tied()
    assert model.load_state_dict(found, strict=True)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
