"""Class of the optimizer that ``initialize`` returns, for ``isinstance`` checks in scripts."""

from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]

# zeropp has one optimizer class for all stages.
DeepSpeedOptimizer = ZeROOptimizer = ZeroOptimizer
