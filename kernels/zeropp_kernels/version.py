"""The version of the distribution that this package comes in."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("zeropp")
except PackageNotFoundError:
    # A source tree on the path, which nobody has installed.
    __version__ = "0+unknown"
