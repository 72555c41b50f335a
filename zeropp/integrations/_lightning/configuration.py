"""Functions that make zeropp's configuration from the arguments of a strategy and the settings of a Trainer."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeropp.config import ConfigError
from zeropp.config.loading import parse

__all__ = ["ENVIRONMENT", "choose_config", "for_inference", "for_training", "stage_of", "with_precision"]

ENVIRONMENT = "PL_DEEPSPEED_CONFIG_PATH"
"""Environment variable with the path of the configuration, if a strategy gets none. The name is Lightning's."""

_STEPS = "gradient_accumulation_steps"
_ZERO = (
    "stage", "contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter", "allgather_bucket_size",
    "reduce_bucket_size", "sub_group_size",
)  # fmt: skip
_AIO = ("block_size", "queue_depth", "single_submit", "overlap_events", "thread_count")
_RECOMPUTATION = (
    "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "synchronize_checkpoint_boundary",
)  # fmt: skip
_SCALING = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def choose_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new configuration dict from the arguments of a strategy.

    Args:
        given: all arguments, by name. If ``config`` is given, or the environment names a file, the other arguments do
            not enter the configuration.

    Raises:
        ConfigError: ``config`` is neither a dict nor the path of a JSON file.
    """
    config = given["config"]
    if config is None:
        config = os.environ.get(ENVIRONMENT)
    if config is None:
        return _from_arguments(given)
    # A given config replaces all other arguments, as Lightning documents for its DeepSpeedStrategy.
    if isinstance(config, Mapping):
        # A copy, because the Trainer's settings are added to the configuration later.
        return copy.deepcopy(dict(config))
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"config is a {type(config).__name__}; expected a dict or the path of a JSON file")
    path = Path(config)
    if not path.is_file():
        raise ConfigError(f"config is {str(path)!r}, and no such file is there; give the path of one, or a dict")
    # parse() accepts comments and trailing commas, which DeepSpeed's examples contain.
    found = parse(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(found, dict):
        raise ConfigError(f"{str(path)!r} has a {type(found).__name__}; expected a JSON object at the top level")
    return found


def _from_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "zero_optimization": _zero_block(given),
        "aio": {name: given[name] for name in _AIO},
        "activation_checkpointing": {name: given[name] for name in _RECOMPUTATION},
    }
    if given["zero_optimization"]:
        config["zero_allow_untested_optimizer"] = given["zero_allow_untested_optimizer"]
    # The default, "auto" for a Trainer and None for Fabric, means that the user gave no batch size.
    if given["logging_batch_size_per_gpu"] not in ("auto", None):
        config["train_micro_batch_size_per_gpu"] = given["logging_batch_size_per_gpu"]
    return config


def _zero_block(given: Mapping[str, Any]) -> dict[str, Any]:
    if not given["zero_optimization"]:
        # An explicit stage, because zeropp raises if a configuration has no stage.
        return {"stage": 0}
    zero = {name: given[name] for name in _ZERO}
    shared = {"nvme_path": given["nvme_path"], "pin_memory": given["pin_memory"]}
    # The blocks below enable offloading by being present, so they are only added if offloading is on.
    if given["offload_optimizer"]:
        zero["offload_optimizer"] = {
            "device": given["offload_optimizer_device"],
            "buffer_count": given["optimizer_buffer_count"],
            **shared,
        }
    if given["offload_parameters"]:
        zero["offload_param"] = {
            "device": given["offload_params_device"],
            "buffer_count": given["params_buffer_count"],
            "buffer_size": given["params_buffer_size"],
            "max_in_cpu": given["max_in_cpu"],
            **shared,
        }
    return zero


def with_precision(config: Mapping[str, Any], precision: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the block for a precision, unless it already has that block.

    Args:
        config: configuration without the Trainer's settings.
        precision: "32-true", "16-mixed", "16-true", "bf16-mixed" or "bf16-true".
        given: arguments of the strategy; those of the loss scale are used for float16.
    """
    found = copy.deepcopy(dict(config))
    # An existing block stays even if it disables the precision: the user's file wins over the Trainer's default.
    if precision.startswith("16-"):
        found.setdefault("fp16", {"enabled": True, **{name: given[name] for name in _SCALING}})
    elif precision.startswith("bf16-"):
        found.setdefault("bf16", {"enabled": True})
    return found


def for_training(config: Mapping[str, Any], *, steps: int, clip: float | None) -> dict[str, Any]:
    """Return the configuration for a Trainer, which divides losses and decides where accumulation windows end.

    Args:
        config: configuration with its precision.
        steps: number of micro-batches in an accumulation window.
        clip: largest gradient norm; None or 0 to use the configuration's ``gradient_clipping``.

    Raises:
        ConfigError: the configuration sets ``gradient_accumulation_steps``, or a norm other than ``clip``.
    """
    if _STEPS in config:
        raise ConfigError(
            f"{_STEPS} is in the strategy's config; leave it out, and give Trainer(accumulate_grad_batches=...)"
        )
    # Raise for two different norms. Lightning's DeepSpeedStrategy silently uses the norm of the file.
    own = config.get("gradient_clipping", 0.0)
    if clip and own and clip != own:
        raise ConfigError(
            f"gradient_clipping is {own} in the strategy's config, and Trainer(gradient_clip_val={clip}); give one"
        )
    found = dict(config)
    found[_STEPS] = steps
    # Lightning calls step() at the end of each window. The last window of an epoch may have fewer micro-batches.
    found["managed_gradient_accumulation"] = False
    # An explicit value, also 0.
    found["gradient_clipping"] = clip or own
    return found


def for_inference(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without keys for training, which zeropp refuses if there is no optimizer."""
    found = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler", "gradient_clipping")}
    zero = found.get("zero_optimization")
    if isinstance(zero, Mapping):
        # Keep the other keys of the block, so that weights stay where they are if the model is trained next.
        found["zero_optimization"] = {key: value for key, value in zero.items() if key != "offload_optimizer"}
    return found


def stage_of(config: Mapping[str, Any]) -> int | None:
    """Return the stage in a configuration; None if the configuration has none."""
    zero = config.get("zero_optimization")
    return zero.get("stage") if isinstance(zero, Mapping) else None
