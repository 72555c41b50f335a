"""Files of tied weights: one storage under all of its names, as a plain model's state dict has it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zeropp
from tests.support.deepspeed_stand_in import standing_in
from tests.support.rank_pool import run_ranks
from zeropp import checkpoint
from zeropp.deepspeed.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict


class Tied(nn.Module):
    """A head tied to its embedding, a block that stands under two names, and counts and a buffer tied to others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(50, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.again = self.block
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.count = nn.Parameter(torch.arange(4), requires_grad=False)
        self.head.register_parameter("count", self.count)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.head.register_buffer("mask", self.mask)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.head(self.again(self.block(self.embed(tokens)))).square().mean()
        return loss


CONFIGS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2 bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "stage 3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "stage 3, units": {"zero_optimization": {"stage": 3}, "zeropp": {"unit_min_blocks": 0}},
}


def names_by_storage(state: dict[str, Tensor]) -> list[list[str]]:
    found: dict[int, list[str]] = {}
    for name, value in state.items():
        found.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    return list(found.values())


def nbytes(state: dict[str, Tensor]) -> int:
    file = io.BytesIO()
    torch.save(dict(state), file)  # a state dict of torch has more than its entries
    return file.getbuffer().nbytes


def differences(found: dict[str, Tensor], wanted: nn.Module, about: str) -> list[str]:
    """Ways in which a state dict is not that of a plain model in the same dtypes."""
    plain = wanted.state_dict()
    wrong = []
    if list(found) != list(plain) or any(not torch.equal(found[name], plain[name]) for name in plain):
        wrong.append(f"{about}: names or values")
    if names_by_storage(found) != names_by_storage(plain):
        wrong.append(f"{about}: {names_by_storage(found)}")
    if nbytes(found) > nbytes(plain):
        wrong.append(f"{about}: {nbytes(found)} bytes, and {nbytes(plain)} of a plain model")
    return wrong


def states_of(name: str) -> list[str]:
    """Whole and in parts, inside GatheredParameters, and as DeepSpeed's scripts ask for it, on one rank alone."""
    wrong = []
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    model = Tied()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, CONFIGS[name])
    wrong += differences(model.state_dict(), Tied().to(dtype), "state_dict")
    wrong += differences(model.head.state_dict(), Tied().to(dtype).head, "of a part")
    wrong += differences(zeropp.full_state(model), Tied(), "full_state")
    with zeropp.zero.GatheredParameters(model):
        wrong += differences(model.state_dict(), Tied(), "gathered")
    optimizer.close()
    engine, *_ = zeropp.initialize(model=Tied(), config={**CONFIGS[name], "optimizer": {"type": "SGD"}})
    wrong += differences(engine.module_state_dict(), Tied().to(dtype), "module_state_dict")
    with standing_in():
        from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

        # As Accelerate does it for transformers' Trainer.
        copied = clone_tensors_for_torch_save(engine.module_state_dict())
        wrong += differences(copied, Tied().to(dtype), "clone_tensors_for_torch_save")
    if "stage 3" not in name and engine.global_rank == 1:
        wrong += differences(engine.module.state_dict(), Tied().to(dtype), "one rank alone")
    return wrong


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_state_dict_has_tied_weights_once(name: str) -> None:
    assert run_ranks(2, states_of, name) == [[], []]


def entries_taken_out(name: str) -> bool:
    """A hook moves each entry away as soon as it is made; later names get values all the same."""
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
    engine, *_ = zeropp.initialize(model=Tied(), config={**CONFIGS["stage 3"], "optimizer": {"type": "SGD"}})
    engine.backward(engine(torch.arange(6)))
    engine.step()
    engine.save_checkpoint(path, tag="there")
    return zeropp.full_state(engine.module)


@pytest.mark.every(2)
@pytest.mark.parametrize("limit", [None, 2000])
def test_safetensors_of_a_checkpoint_load_strictly(limit: int | None, tmp_path: Path) -> None:
    """Into the plain model, from one file or several."""
    state = run_ranks(2, saved, tmp_path)[0]
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "fp32", limit, safe_serialization=True)
    checkpoint.consolidate(tmp_path / "there", tmp_path / "whole", layout="hf", file_nbytes=limit or 1 << 30)
    for folder in ("fp32", "whole"):
        found: dict[str, Tensor] = {}
        files = list((tmp_path / folder).glob("*.safetensors"))
        assert (len(files) > 1) == (limit is not None)
        for file in files:
            found |= load_file(file)
        model = Tied()
        assert model.load_state_dict(found, strict=True)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
