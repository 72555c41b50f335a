"""Predictions made from a model and a configuration alone, before anything is partitioned."""

from zeropp.plan.memory import MemoryPlan, UnitMemory, memory
from zeropp.plan.traffic import TrafficPlan, TrafficRow, traffic

__all__ = ["MemoryPlan", "TrafficPlan", "TrafficRow", "UnitMemory", "memory", "traffic"]
