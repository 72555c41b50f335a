"""zeropp under DeepSpeed's names: its calls, its modules, none of its code. This is not DeepSpeed.

Attributes:
    __version__, version: whose calls these are; libraries compare it.
    git_hash, git_branch: "zeropp", for logs that show them.
"""

from __future__ import annotations

from typing import NoReturn

from zeropp.deepspeed.refused_modules import (
    NO_KERNELS,
    NO_PIPELINES,
    RefusingFinder,
    refuse_attribute,
    refused,
)
from zeropp.deepspeed.stand_in_path import VERSION, require_alone

try:
    require_alone()
except RuntimeError as error:
    # As an import's: whoever can do without DeepSpeed goes on.
    raise ImportError(str(error)) from error
# Before anything below is imported, whose own absent modules have a reason each.
RefusingFinder.stand()

from zeropp.deepspeed.training_engine import Engine as DeepSpeedEngine  # noqa: E402  (the checks above come first)

from . import aliases, checkpoint, comm, launcher, moe, ops, pipe, runtime, utils  # noqa: E402, F401
from .accelerator import get_accelerator  # noqa: E402
from .arguments import add_config_arguments  # noqa: E402
from .comm import init_distributed  # noqa: E402
from .git_version_info import git_branch, git_hash, version  # noqa: E402
from .initialization import initialize  # noqa: E402
from .pipe import PipelineModule  # noqa: E402
from .runtime import lr_schedules, zero  # noqa: E402
from .runtime.activation_checkpointing import checkpointing  # noqa: E402
from .runtime.base_optimizer import DeepSpeedOptimizer  # noqa: E402
from .runtime.config import DeepSpeedConfig, DeepSpeedConfigError  # noqa: E402
from .runtime.lr_schedules import add_tuning_arguments  # noqa: E402
from .utils import OnDevice, log_dist, logger  # noqa: E402

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeepSpeedHybridEngine",
    "DeepSpeedOptimizer",
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "InferenceEngine",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "__version__",
    "add_config_arguments",
    "add_tuning_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "default_inference_config",
    "get_accelerator",
    "git_branch",
    "git_hash",
    "init_distributed",
    "init_inference",
    "initialize",
    "launcher",
    "log_dist",
    "logger",
    "lr_schedules",
    "ops",
    "replace_transformer_layer",
    "runtime",
    "set_autotp_mode",
    "tp_model_init",
    "utils",
    "version",
    "zero",
]

aliases.stand()


def __getattr__(name: str) -> NoReturn:
    refuse_attribute("deepspeed", name)


__version__ = VERSION
__git_hash__, __git_branch__ = git_hash, git_branch
# Scripts compare these as numbers.
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in VERSION.split("."))

DeepSpeedHybridEngine = refused("DeepSpeedHybridEngine", "generate inside zero.GatheredParameters(model.parameters())")
DeepSpeedTransformerConfig = refused("DeepSpeedTransformerConfig", "use the layers of torch or transformers")
DeepSpeedTransformerLayer = refused("DeepSpeedTransformerLayer", "use the layers of torch or transformers")
InferenceEngine = refused("InferenceEngine", NO_KERNELS)
PipelineEngine = refused("PipelineEngine", NO_PIPELINES)
default_inference_config = refused("default_inference_config", NO_KERNELS)
init_inference = refused("init_inference", NO_KERNELS)
replace_transformer_layer = refused("replace_transformer_layer", NO_KERNELS)
set_autotp_mode = refused("set_autotp_mode")
tp_model_init = refused("tp_model_init")
