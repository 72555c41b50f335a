"""Partitioned parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeropp.zero import GatheredParameters, Init, ZeroParamStatus, register_external_parameter

from ...accelerator import get_accelerator

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "get_accelerator", "register_external_parameter"]

# transformers exchanges the next function for the length of a build, so that arange keeps its dtype; zeropp's Init
# wraps no constructor, so there is nothing to keep it from, and both are there only to be found.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The constructor as it is."""
    return fn
