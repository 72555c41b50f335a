"""Second names of modules: DeepSpeed splits some modules in two, and scripts import the part under its own name."""

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
    """Make the second names importable, and attributes of their packages."""
    for name, module in _SAME.items():
        # Python looks into sys.modules before it asks a finder, so both names give the same module object.
        sys.modules[name] = module
        package, _, last = name.rpartition(".")
        # Keep a function of the same name, such as utils.z3_leaf_module: DeepSpeed's package has the function, too.
        if not hasattr(sys.modules[package], last):
            setattr(sys.modules[package], last, module)
