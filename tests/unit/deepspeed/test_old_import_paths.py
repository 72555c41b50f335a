"""Old import paths still work; they are older than the folder zeropp/deepspeed."""

from __future__ import annotations

import importlib

import pytest

NAMES = {
    "zeropp": "initialize init_distributed zero training estimate_zero2_model_states_mem_needs",
    "zeropp.checkpoint.to_fp32_command": "main",
    "zeropp.checkpoint.zero_to_fp32": "LazyTensor get_fp32_state_dict_from_zero_checkpoint main",
    "zeropp.compat.deepspeed": "install",
    "zeropp.integrations.lightning": "ZeroStrategy",
    "zeropp.plan": "estimate_zero3_model_states_mem_needs_all_live memory",
    "zeropp.training": "Engine Lion RepeatingLoader TiledLinear initialize safe_get_full_fp32_param",
    "zeropp.training.checkpointing": "checkpoint configure",
    "zeropp.training.data": "RepeatingLoader",
    "zeropp.training.distributed": "init_distributed",
    "zeropp.training.engine": "Engine",
    "zeropp.training.initialize": "initialize",
    "zeropp.training.lion": "Lion",
    "zeropp.training.schedulers": "WarmupLR",
    "zeropp.training.tiled": "TiledLinear",
    "zeropp.zero": "GatheredParameters Init ZeroParamStatus set_z3_leaf_modules",
}


@pytest.mark.parametrize("path", NAMES)
def test_names_are_where_scripts_look_for_them(path: str) -> None:
    if path.endswith("lightning"):
        pytest.importorskip("lightning")
    module = importlib.import_module(path)
    assert [name for name in NAMES[path].split() if not hasattr(module, name)] == []
