"""Linear layers in tiles."""

from zeropp.training import TiledLinear

__all__ = ["TiledLinear"]
