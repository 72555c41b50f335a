"""What ``initialize`` returns second, for questions of its class."""

from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]

# Whatever the stage, it is one class here.
DeepSpeedOptimizer = ZeROOptimizer = ZeroOptimizer
