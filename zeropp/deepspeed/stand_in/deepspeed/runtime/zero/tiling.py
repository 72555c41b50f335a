"""``TiledLinear``: a linear layer made of smaller linear layers."""

from zeropp.deepspeed.refused_modules import refused
from zeropp.deepspeed.tiled import TiledLinear

__all__ = ["TiledLinear", "TiledLinearReturnBias"]

TiledLinearReturnBias = refused(
    "runtime.zero.tiling.TiledLinearReturnBias",
    "it is of Megatron's layers, which add their bias later; use TiledLinear",
)
