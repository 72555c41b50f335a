"""Modules that DeepSpeed has apart and that are one here: scripts import them by both names."""

from __future__ import annotations

import sys

from . import comm, utils
from .ops import adam

_SAME = {
    "deepspeed.comm.comm": comm,
    "deepspeed.ops.adam.cpu_adam": adam,
    "deepspeed.ops.adam.fused_adam": adam,
    "deepspeed.utils.tensor_fragment": utils,
    "deepspeed.utils.z3_leaf_module": utils,
}


def stand() -> None:
    """Let both names be imported, and be attributes of their packages."""
    for name, module in _SAME.items():
        # Found before any finder is asked, so it stays one module with one state.
        sys.modules[name] = module
        package, _, last = name.rpartition(".")
        # The package may have a function of that name, which DeepSpeed's has in the module's place, too.
        if not hasattr(sys.modules[package], last):
            setattr(sys.modules[package], last, module)
