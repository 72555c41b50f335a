"""``Init``, ``GatheredParameters`` and other names of DeepSpeed's module for sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeropp.access.gathered import GatheredParameters, register_external_parameter
from zeropp.deepspeed.extension import ZeroParamStatus
from zeropp.deepspeed.refused_modules import refused
from zeropp.init.context import Init

from ...accelerator import get_accelerator

__all__ = [
    "CUDAQuantizer",
    "GatheredParameters",
    "Init",
    "InsertPostInitMethodToModuleSubClasses",
    "MultipleAllGatherHandles",
    "ZeroParamStatus",
    "get_accelerator",
    "get_allgather_dtype",
    "partitioned_param_data_shape",
    "register_external_parameter",
    "zero3_linear_wrap",
]

partitioned_param_data_shape = [0]
"""Shape of a sharded parameter's data between passes."""

# Internal names of DeepSpeed. Scripts that import them beside the public names must not fail at the import.
_PRIVATE = "it is a part of DeepSpeed's engine, which is not here"
CUDAQuantizer = refused("runtime.zero.partition_parameters.CUDAQuantizer", _PRIVATE)
InsertPostInitMethodToModuleSubClasses = refused(
    "runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses", "zeropp.zero.Init wraps no constructor"
)
MultipleAllGatherHandles = refused("runtime.zero.partition_parameters.MultipleAllGatherHandles", _PRIVATE)
get_allgather_dtype = refused("runtime.zero.partition_parameters.get_allgather_dtype", _PRIVATE)
zero3_linear_wrap = refused(
    "runtime.zero.partition_parameters.zero3_linear_wrap", "zeropp leaves torch.nn.functional.linear as it is"
)

# transformers replaces zero_wrapper_for_fp_tensor_constructor while it builds a model, so that torch.arange keeps its
# dtype under DeepSpeed's Init. zeropp's Init wraps no constructor, so both names exist only to be found.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return the constructor unchanged."""
    return fn
