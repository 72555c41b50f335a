"""Placeholder for DeepSpeed's mixture-of-experts layer."""

from zeropp.deepspeed.refused_modules import NO_EXPERTS, refused

__all__ = ["MoE"]

MoE = refused("moe.layer.MoE", NO_EXPERTS)
