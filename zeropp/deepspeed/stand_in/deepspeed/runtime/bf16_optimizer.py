"""Bfloat16 below stage 1."""

from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["BF16_Optimizer"]

# Whatever the precision, it is one class here.
BF16_Optimizer = ZeroOptimizer
