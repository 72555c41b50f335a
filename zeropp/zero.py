"""The names that DeepSpeed users know as ``deepspeed.zero``."""

from __future__ import annotations

from zeropp.access.external import register_external_parameter
from zeropp.access.gathered import GatheredParameters

__all__ = ["GatheredParameters", "register_external_parameter"]
