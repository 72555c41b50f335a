"""Class of the optimizer for bfloat16 in stage 0, for ``isinstance`` checks in scripts."""

from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["BF16_Optimizer"]

# zeropp has one optimizer class for all precisions.
BF16_Optimizer = ZeroOptimizer
