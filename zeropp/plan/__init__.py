"""Predictions of memory and traffic from a model and a configuration, before anything is partitioned.

This package computes the blueprint with the function that training uses. It starts no process and allocates no memory.
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
    """Return one of DeepSpeed's memory estimates from the top-level package; some scripts import them from here."""
    if name.startswith(("estimate_zero2_", "estimate_zero3_")):
        return getattr(sys.modules["zeropp"], name)
    raise AttributeError(f"module 'zeropp.plan' has no attribute {name!r}")
