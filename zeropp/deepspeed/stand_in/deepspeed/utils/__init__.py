"""The names of ``deepspeed.utils``: access to sharded values, leaf modules and logging."""

import importlib
from types import ModuleType

from zeropp.deepspeed.data import RepeatingLoader
from zeropp.deepspeed.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from zeropp.deepspeed.parameter_values import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from zeropp.deepspeed.refused_modules import refuse_attribute, refused

from . import groups
from .gradients import safe_update_full_grad_vectorized
from .logging import log_dist, logger
from .nvtx import instrument_w_nvtx

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "groups",
    "instrument_w_nvtx",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "zero_to_fp32",
]

OnDevice = refused("OnDevice", 'build inside torch.device("meta"), after torch.set_default_dtype(dtype)')


def __getattr__(name: str) -> ModuleType:
    # Import the module at its first use: with ``python -m deepspeed.utils.zero_to_fp32`` an earlier import would make
    # Python warn that the module may run twice.
    if name == "zero_to_fp32":
        return importlib.import_module(f"{__name__}.{name}")
    refuse_attribute("deepspeed.utils", name)
