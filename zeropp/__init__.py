"""zeropp: ZeRO training for PyTorch, for networks that are slow compared with the devices.

Optimizer states, gradients and weights are sharded over the ranks of a process group. Weights are gathered just before
their use and freed right after it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from zeropp._extensions import MODULES as EXTENSIONS
from zeropp.access.accumulate import accumulate
from zeropp.access.average import ema
from zeropp.access.state import comm_report, full_state
from zeropp.config import Config, ConfigError, load_config
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = [
    "Config",
    "ConfigError",
    "ZeroOptimizer",
    "__version__",
    "accumulate",
    "checkpoint",
    "comm_report",
    "ema",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "full_state",
    "init_distributed",
    "initialize",
    "load_config",
    "plan",
    "training",
    "zero",
]

__version__ = "0.1.0"

# These modules and functions are imported at their first use (``plan`` is loaded already), because many programs do not
# need them.
_MODULES = ("checkpoint", "fsdp2", "plan", "training", "zero")
_FUNCTIONS = {
    "estimate_zero2_model_states_mem_needs": "zeropp.deepspeed.estimates",
    "estimate_zero2_model_states_mem_needs_all_cold": "zeropp.deepspeed.estimates",
    "estimate_zero2_model_states_mem_needs_all_live": "zeropp.deepspeed.estimates",
    "estimate_zero3_model_states_mem_needs": "zeropp.deepspeed.estimates",
    "estimate_zero3_model_states_mem_needs_all_cold": "zeropp.deepspeed.estimates",
    "estimate_zero3_model_states_mem_needs_all_live": "zeropp.deepspeed.estimates",
    "init_distributed": "zeropp.deepspeed.distributed",
    "initialize": "zeropp.deepspeed.initialization",
}
# The core does not import zeropp.deepspeed. Register its extension here; it is imported when a model is built or
# wrapped.
if importlib.util.find_spec("zeropp.deepspeed"):
    EXTENSIONS.append("zeropp.deepspeed.extension")
# Names that zeropp's stand-in for the package deepspeed has and zeropp does not have.
_OF_THE_STAND_IN = (
    "DeepSpeedEngine", "PipelineEngine", "accelerator", "add_config_arguments", "checkpointing", "init_inference",
    "ops", "pipe", "runtime", "utils",
)  # fmt: skip

if TYPE_CHECKING:
    from zeropp import checkpoint as checkpoint
    from zeropp import fsdp2 as fsdp2
    from zeropp import plan as plan
    from zeropp import training as training
    from zeropp import zero as zero
    from zeropp.deepspeed.distributed import init_distributed as init_distributed
    from zeropp.deepspeed.estimates import (
        estimate_zero2_model_states_mem_needs as estimate_zero2_model_states_mem_needs,
    )
    from zeropp.deepspeed.estimates import (
        estimate_zero2_model_states_mem_needs_all_cold as estimate_zero2_model_states_mem_needs_all_cold,
    )
    from zeropp.deepspeed.estimates import (
        estimate_zero2_model_states_mem_needs_all_live as estimate_zero2_model_states_mem_needs_all_live,
    )
    from zeropp.deepspeed.estimates import (
        estimate_zero3_model_states_mem_needs as estimate_zero3_model_states_mem_needs,
    )
    from zeropp.deepspeed.estimates import (
        estimate_zero3_model_states_mem_needs_all_cold as estimate_zero3_model_states_mem_needs_all_cold,
    )
    from zeropp.deepspeed.estimates import (
        estimate_zero3_model_states_mem_needs_all_live as estimate_zero3_model_states_mem_needs_all_live,
    )
    from zeropp.deepspeed.initialization import initialize as initialize
else:  # hidden from type checkers: with a module __getattr__ they would accept every name

    def __getattr__(name: str) -> Any:
        """Import a module or function of the package at its first use."""
        if name in _MODULES:
            value = importlib.import_module(f"zeropp.{name}")
        elif name in _FUNCTIONS:
            value = getattr(importlib.import_module(_FUNCTIONS[name]), name)
        else:
            hint = "; for scripts that use it: python -m zeropp.compat.deepspeed COMMAND" * (name in _OF_THE_STAND_IN)
            raise AttributeError(f"module 'zeropp' has no attribute {name!r}{hint}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
