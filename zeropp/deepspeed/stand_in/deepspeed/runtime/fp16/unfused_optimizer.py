"""Float16 below stage 1, step by step."""

from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["FP16_UnfusedOptimizer"]

# Whatever the precision, it is one class here.
FP16_UnfusedOptimizer = ZeroOptimizer
