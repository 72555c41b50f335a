"""Placeholder for LAMB, which zeropp does not have."""

from zeropp.deepspeed.refused_modules import refused

__all__ = ["FusedLamb"]

FusedLamb = refused("ops.lamb.FusedLamb", "its steps need norms of whole parameters, and a rank has parts; use AdamW")
