"""Predictions made from a model and a configuration alone, before anything is partitioned.

Knows the cut, the placement and the codecs that training would have; no process, no memory.
Start with `outline`, then `memory` and `traffic`.
"""

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
