"""Versions of torch."""

from __future__ import annotations

import torch

__all__ = ["required_torch_version"]


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Whether torch is at least, and at most, of a version.

    Raises:
        ValueError: neither is given.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version() got neither min_version nor max_version; give one of them")
    # Of torch, whose versions compare with strings as versions do.
    found = torch.__version__
    return (min_version is None or found >= str(min_version)) and (max_version is None or found <= str(max_version))
