"""Training by DeepSpeed's calls: ``initialize``, its engine, and the optimizers, schedulers and loaders of its JSON.

Knows scripts and their habits; not how weights move, which :class:`zeropp.ZeroOptimizer` does. Start with
``initialize.py``.
"""

from zeropp.training import checkpointing, values
from zeropp.training.data import RepeatingLoader
from zeropp.training.distributed import init_distributed
from zeropp.training.elementwise import Lion
from zeropp.training.engine import Engine
from zeropp.training.initialize import initialize
from zeropp.training.tiled import TiledLinear
from zeropp.training.values import *  # noqa: F403  (its __all__ is the list of accessors)

__all__ = [
    "Engine",
    "Lion",
    "RepeatingLoader",
    "TiledLinear",
    "checkpointing",
    "init_distributed",
    "initialize",
]
__all__ += values.__all__
