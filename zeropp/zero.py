"""The names that DeepSpeed users know as ``deepspeed.zero``, and those of its leaf modules."""

from __future__ import annotations

from zeropp.access.external import register_external_parameter
from zeropp.access.gathered import GatheredParameters
from zeropp.access.leaves import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from zeropp.init.context import Init, MiCS_Init
from zeropp.init.materialize import materialize
from zeropp.params.status import ZeroParamStatus

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
