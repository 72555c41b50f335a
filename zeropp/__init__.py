"""zeropp: ZeRO training for PyTorch on networks that are slower than the devices.

Optimizer states, gradients and weights are spread over the ranks of a process group; weights are gathered just before
they are used and let go right after.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from zeropp import checkpoint, plan, training, zero
from zeropp.access.accumulate import accumulate
from zeropp.access.average import ema
from zeropp.access.state import comm_report, full_state
from zeropp.config import Config, ConfigError, load_config
from zeropp.optimizer.wrapper import ZeroOptimizer
from zeropp.plan.estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zeropp.training.distributed import init_distributed
from zeropp.training.initialize import initialize

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

# Names of DeepSpeed's that its stand-in has and this package has not.
_OF_THE_STAND_IN = (
    "DeepSpeedEngine", "PipelineEngine", "accelerator", "add_config_arguments", "checkpointing", "init_inference",
    "ops", "pipe", "runtime", "utils",
)  # fmt: skip

if TYPE_CHECKING:
    from zeropp import fsdp2 as fsdp2
else:  # a type checker would take any name for one that this function has

    def __getattr__(name: str) -> ModuleType:
        """``zeropp.fsdp2``, imported at its first use."""
        if name == "fsdp2":
            return importlib.import_module("zeropp.fsdp2")
        hint = "; for scripts that use it: python -m zeropp.compat.deepspeed COMMAND" * (name in _OF_THE_STAND_IN)
        raise AttributeError(f"module 'zeropp' has no attribute {name!r}{hint}")
