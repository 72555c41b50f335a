"""The names that DeepSpeed users know as ``deepspeed.zero``."""

from __future__ import annotations

from zeropp.access.external import register_external_parameter
from zeropp.access.gathered import GatheredParameters
from zeropp.init.context import Init, MiCS_Init
from zeropp.init.materialize import materialize
from zeropp.params.status import ZeroParamStatus

__all__ = ["GatheredParameters", "Init", "MiCS_Init", "ZeroParamStatus", "materialize", "register_external_parameter"]
