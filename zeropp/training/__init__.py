"""Public names of :mod:`zeropp.deepspeed`, re-exported for scripts that import ``zeropp.training``.

This module has no code of its own. Start with ``zeropp/deepspeed/initialization.py``.
"""

import sys

from zeropp.deepspeed import (
    checkpointing,
    data,
    distributed,
    initialization,
    json_optimizers,
    parameter_values,
    schedulers,
    tiled,
    training_engine,
    training_optimizer,
    zero_inference,
)
from zeropp.deepspeed.data import RepeatingLoader
from zeropp.deepspeed.distributed import init_distributed
from zeropp.deepspeed.initialization import initialize
from zeropp.deepspeed.json_optimizers import Lion
from zeropp.deepspeed.parameter_values import *  # noqa: F403  (its __all__ is the list of accessors)
from zeropp.deepspeed.tiled import TiledLinear
from zeropp.deepspeed.training_engine import Engine

__all__ = [
    "Engine",
    "Lion",
    "RepeatingLoader",
    "TiledLinear",
    "checkpointing",
    "init_distributed",
    "initialize",
    "schedulers",
]
__all__ += parameter_values.__all__

# Submodule name -> module, for imports such as `from zeropp.training.checkpointing import checkpoint`.
_MODULES = {
    "checkpointing": checkpointing,
    "data": data,
    "distributed": distributed,
    "engine": training_engine,
    "inference": zero_inference,
    "initialize": initialization,
    "lion": json_optimizers,
    "optimizer": training_optimizer,
    "schedulers": schedulers,
    "tiled": tiled,
}
sys.modules.update({f"{__name__}.{name}": module for name, module in _MODULES.items()})
