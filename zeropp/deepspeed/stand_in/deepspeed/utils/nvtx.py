"""``instrument_w_nvtx``: a decorator that names a function's range in profiles."""

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
    """Return the function, wrapped so that profiles show each call as a range with the function's name."""

    @wraps(func)
    def ranged(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # torch's record_function also emits an NVTX range while torch.autograd.profiler.emit_nvtx is active.
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return ranged
