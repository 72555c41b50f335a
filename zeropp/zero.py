"""Public names of ``deepspeed.zero`` and of DeepSpeed's leaf module functions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zeropp.access.gathered import GatheredParameters, register_external_parameter
from zeropp.init.context import Init, MiCS_Init
from zeropp.init.materialize import materialize

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "ZeroParamStatus",
    "get_z3_leaf_modules",
    "materialize",
    "register_external_parameter",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

if TYPE_CHECKING:
    from zeropp.deepspeed.extension import ZeroParamStatus as ZeroParamStatus
    from zeropp.deepspeed.leaf_modules import (
        get_z3_leaf_modules as get_z3_leaf_modules,
    )
    from zeropp.deepspeed.leaf_modules import (
        set_z3_leaf_module as set_z3_leaf_module,
    )
    from zeropp.deepspeed.leaf_modules import (
        set_z3_leaf_modules as set_z3_leaf_modules,
    )
    from zeropp.deepspeed.leaf_modules import (
        set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name,
    )
    from zeropp.deepspeed.leaf_modules import (
        set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix,
    )
    from zeropp.deepspeed.leaf_modules import (
        unset_z3_leaf_modules as unset_z3_leaf_modules,
    )
    from zeropp.deepspeed.leaf_modules import (
        z3_leaf_module as z3_leaf_module,
    )
else:  # hidden from type checkers: with a module __getattr__ they would accept every name

    def __getattr__(name: str) -> Any:
        """Import a name of ``zeropp.deepspeed`` at its first use."""
        if name not in __all__:
            raise AttributeError(f"module 'zeropp.zero' has no attribute {name!r}")
        place = "extension" if name == "ZeroParamStatus" else "leaf_modules"
        return getattr(importlib.import_module(f"zeropp.deepspeed.{place}"), name)
