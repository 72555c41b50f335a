"""zeropp: ZeRO training for PyTorch on networks that are slower than the devices.

Optimizer states, gradients and weights are spread over the ranks of a process group; weights are gathered just before
they are used and let go right after.
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

# Imported when they are first used, since a program that trains may need none of them.
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
# The core does not import it: it is named here, and imported when a model is built or wrapped.
if importlib.util.find_spec("zeropp.deepspeed"):
    EXTENSIONS.append("zeropp.deepspeed.extension")
# Names of DeepSpeed's that its stand-in has and this package has not.
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
else:  # a type checker would take any name for one that this function has

    def __getattr__(name: str) -> Any:
        """A part of the package that is imported at its first use."""
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
