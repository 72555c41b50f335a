"""Predictions made from a model and a configuration alone, before anything is partitioned.

Knows the cut, the placement and the codecs that training would have; no process, no memory.
Start with `outline`, then `memory` and `traffic`.
"""

from zeropp.plan.memory import COMMUNICATOR_NBYTES, MemoryPlan, UnitMemory, memory
from zeropp.plan.traffic import TrafficPlan, TrafficRow, traffic

__all__ = ["COMMUNICATOR_NBYTES", "MemoryPlan", "TrafficPlan", "TrafficRow", "UnitMemory", "memory", "traffic"]
