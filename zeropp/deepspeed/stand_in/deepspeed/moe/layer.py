"""The layer."""

from zeropp.deepspeed.refusals import NO_EXPERTS, refused

__all__ = ["MoE"]

MoE = refused("moe.layer.MoE", NO_EXPERTS)
