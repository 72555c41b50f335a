"""Predictions made from a model and a configuration alone, before anything is partitioned.

Knows the blueprint of an engine, drawn by the function that training uses; no process, no memory.
Start with `outline`, then `memory` and `traffic`.
"""

from __future__ import annotations

import sys
from typing import Any

from zeropp.plan.limits import MemoryLimitError
from zeropp.plan.memory import MemoryPlan, UnitMemory, memory
from zeropp.plan.outline import COMMUNICATOR_NBYTES, CommunicatorMemory
from zeropp.plan.traffic import TrafficPlan, TrafficRow, traffic

__all__ = [
    "COMMUNICATOR_NBYTES",
    "CommunicatorMemory",
    "MemoryLimitError",
    "MemoryPlan",
    "TrafficPlan",
    "TrafficRow",
    "UnitMemory",
    "memory",
    "traffic",
]


def __getattr__(name: str) -> Any:
    """DeepSpeed's estimates, which were in here first: the package itself has them."""
    if name.startswith(("estimate_zero2_", "estimate_zero3_")):
        return getattr(sys.modules["zeropp"], name)
    raise AttributeError(f"module 'zeropp.plan' has no attribute {name!r}")
