"""A package with the names of DeepSpeed's calls and modules, implemented by zeropp. It contains no DeepSpeed code.

Attributes:
    __version__, version: the DeepSpeed version whose calls the package offers; libraries compare it.
    git_hash, git_branch: "zeropp", for logs that print them.
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
from zeropp.deepspeed.stand_in_path import VERSION, require_not_installed

try:
    require_not_installed()
except RuntimeError as error:
    # ImportError, because scripts with an optional DeepSpeed catch that error and go on without it.
    raise ImportError(str(error)) from error
# Before the imports below, so that a missing submodule of this package raises an error that gives the reason.
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
# Three integers, because scripts compare the parts of the version as numbers.
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
