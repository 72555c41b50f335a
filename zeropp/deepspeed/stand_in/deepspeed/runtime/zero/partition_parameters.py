"""Partitioned parameters."""

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
"""The shape that a parameter's data has between passes."""

# Parts of DeepSpeed that other code imports beside what it uses.
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

# transformers exchanges the next function for the length of a build, so that arange keeps its dtype; zeropp's Init
# wraps no constructor, so there is nothing to keep it from, and both are there only to be found.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The constructor as it is."""
    return fn
