"""Float16 below stage 1."""

from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["FP16_Optimizer"]

# Whatever the precision, it is one class here.
FP16_Optimizer = ZeroOptimizer
