"""Training by DeepSpeed's calls: ``initialize``, its engine, and the optimizers, schedulers and loaders of its JSON.

Knows scripts and their habits; not how weights move, which :class:`zeropp.ZeroOptimizer` does. Start with
``initialize.py``.
"""

from zeropp.training import checkpointing
from zeropp.training.data import RepeatingLoader
from zeropp.training.distributed import init_distributed
from zeropp.training.elementwise import Lion
from zeropp.training.engine import Engine
from zeropp.training.initialize import initialize
from zeropp.training.tiled import TiledLinear
from zeropp.training.values import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)

__all__ = [
    "Engine",
    "Lion",
    "RepeatingLoader",
    "TiledLinear",
    "checkpointing",
    "init_distributed",
    "initialize",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]
