"""``required_torch_version``: comparison with the installed version of torch."""

from __future__ import annotations

import torch

__all__ = ["required_torch_version"]


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Return True if torch's version is at least ``min_version`` and at most ``max_version``.

    Args:
        min_version: lowest accepted version; None for no lower bound.
        max_version: highest accepted version; None for no upper bound.

    Raises:
        ValueError: neither bound is given.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version() got neither min_version nor max_version; give one of them")
    # A TorchVersion, which compares with strings as versions and not letter by letter.
    found = torch.__version__
    return (min_version is None or found >= str(min_version)) and (max_version is None or found <= str(max_version))
