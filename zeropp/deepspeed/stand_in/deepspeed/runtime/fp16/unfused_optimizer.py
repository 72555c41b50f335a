"""Class of the unfused optimizer for float16 in stage 0, for ``isinstance`` checks in scripts."""

from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["FP16_UnfusedOptimizer"]

# zeropp has one optimizer class for all precisions.
FP16_UnfusedOptimizer = ZeroOptimizer
