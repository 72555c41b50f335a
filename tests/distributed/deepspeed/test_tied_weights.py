"""State dicts and files of a training engine store a tied weight once, under all of its names, as for a plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import zeropp
from tests.support.deepspeed_stand_in import standing_in
from tests.support.rank_pool import run_ranks
from tests.support.tied_model import CONFIGS, Tied, differences
from zeropp import checkpoint
from zeropp.deepspeed.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict


def states_of(name: str) -> list[str]:
    """Return differences from a plain model's state dicts.

    Checked are the engine's calls, and state_dict() on one rank only.

    Args:
        name: key of CONFIGS.
    """
    wrong = []
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    engine, *_ = zeropp.initialize(model=Tied(), config={**CONFIGS[name], "optimizer": {"type": "SGD"}})
    wrong += differences(engine.module_state_dict(), Tied().to(dtype), "module_state_dict")
    with standing_in():
        from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

        # Accelerate calls this for transformers' Trainer.
        copied = clone_tensors_for_torch_save(engine.module_state_dict())
        wrong += differences(copied, Tied().to(dtype), "clone_tensors_for_torch_save")
    if "stage 3" not in name and engine.global_rank == 1:
        wrong += differences(engine.module.state_dict(), Tied().to(dtype), "one rank alone")
    return wrong


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_state_dict_has_tied_weights_once(name: str) -> None:
    assert run_ranks(2, states_of, name) == [[], []]


def saved(path: Path) -> dict[str, Tensor]:
    engine, *_ = zeropp.initialize(model=Tied(), config={**CONFIGS["stage 3"], "optimizer": {"type": "SGD"}})
    engine.backward(engine(torch.arange(6)))
    engine.step()
    engine.save_checkpoint(path, tag="there")
    return zeropp.full_state(engine.module)


@pytest.mark.every(2)
@pytest.mark.parametrize("limit", [None, 2000])
def test_safetensors_of_a_checkpoint_load_strictly(limit: int | None, tmp_path: Path) -> None:
    """Safetensors files made from a checkpoint load into the plain model with strict=True, from one file or several."""
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
