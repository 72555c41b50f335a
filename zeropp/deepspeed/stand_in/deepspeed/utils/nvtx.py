"""Ranges in profiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import torch
from typing_extensions import ParamSpec

__all__ = ["instrument_w_nvtx"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def instrument_w_nvtx(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, in a range of its name."""

    @wraps(func)
    def ranged(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # By torch's profiler, which hands it on to NVTX where that records.
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return ranged
