"""The package's version, read from the installed distribution ``zeropp``, of which this package is a part."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("zeropp")
except PackageNotFoundError:
    # A source tree on the path that is not installed.
    __version__ = "0+unknown"
