"""Training by DeepSpeed's calls: ``initialize``, its engine, and the optimizers, schedulers and loaders of its JSON.

Knows scripts and their habits; not how weights move, which :class:`zeropp.ZeroOptimizer` does. Start with
``initialize.py``.
"""

from zeropp.training.data import RepeatingLoader
from zeropp.training.distributed import init_distributed
from zeropp.training.engine import Engine
from zeropp.training.initialize import initialize
from zeropp.training.lion import Lion

__all__ = ["Engine", "Lion", "RepeatingLoader", "init_distributed", "initialize"]
