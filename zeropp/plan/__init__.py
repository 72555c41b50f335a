"""Predictions made from a model and a configuration alone, before anything is partitioned."""

from zeropp.plan.memory import MemoryPlan, UnitMemory, memory

__all__ = ["MemoryPlan", "UnitMemory", "memory"]
