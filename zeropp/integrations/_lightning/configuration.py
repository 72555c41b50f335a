"""From a strategy's arguments, and what a Trainer says, to a configuration of zeropp."""

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
"""Path of the configuration, where a strategy is given none; Lightning's own name for it."""

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
    """The configuration that arguments of a strategy ask for; nobody else's object.

    Args:
        given: every argument, by name. A ``config`` among them, or the path in the environment, is all that counts.

    Raises:
        ConfigError: ``config`` is neither a dict nor the path of a JSON file.
    """
    config = given["config"]
    if config is None:
        config = os.environ.get(ENVIRONMENT)
    if config is None:
        return _from_arguments(given)
    # Not in part: Lightning's page says that all other defaults are ignored then.
    if isinstance(config, Mapping):
        # Ours to add to: a Trainer's settings go into it.
        return copy.deepcopy(dict(config))
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"config is a {type(config).__name__}; expected a dict or the path of a JSON file")
    path = Path(config)
    if not path.is_file():
        raise ConfigError(f"config is {str(path)!r}, and no such file is there; give the path of one, or a dict")
    # With comments and trailing commas, as DeepSpeed's examples have them.
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
    # "auto" of a Trainer, None of Fabric: nobody has said.
    if given["logging_batch_size_per_gpu"] not in ("auto", None):
        config["train_micro_batch_size_per_gpu"] = given["logging_batch_size_per_gpu"]
    return config


def _zero_block(given: Mapping[str, Any]) -> dict[str, Any]:
    if not given["zero_optimization"]:
        # Said, and not left out: zeropp asks which stage is meant.
        return {"stage": 0}
    zero = {name: given[name] for name in _ZERO}
    shared = {"nvme_path": given["nvme_path"], "pin_memory": given["pin_memory"]}
    # The block alone switches it on; without it these values go nowhere.
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
    """The configuration with the block that a Trainer's precision asks for; one that has it keeps its own.

    Args:
        config: without a Trainer's part.
        precision: "32-true", "16-mixed", "16-true", "bf16-mixed" or "bf16-true".
        given: arguments of the strategy, of which those of the loss scale are read.
    """
    found = copy.deepcopy(dict(config))
    # A block that is there stays, also one that says no: the file knows better than a Trainer's default.
    if precision.startswith("16-"):
        found.setdefault("fp16", {"enabled": True, **{name: given[name] for name in _SCALING}})
    elif precision.startswith("bf16-"):
        found.setdefault("bf16", {"enabled": True})
    return found


def for_training(config: Mapping[str, Any], *, steps: int, clip: float | None) -> dict[str, Any]:
    """The configuration of a Trainer that divides losses, and says where a window ends, by itself.

    Args:
        config: with its precision.
        steps: micro-batches of a window.
        clip: largest norm of gradients; None or 0 for what the configuration says.

    Raises:
        ConfigError: it says how many micro-batches a window has, or another norm.
    """
    if _STEPS in config:
        raise ConfigError(
            f"{_STEPS} is in the strategy's config; leave it out, and give Trainer(accumulate_grad_batches=...)"
        )
    # DeepSpeed's strategy lets the file win in silence; two norms are one too many.
    own = config.get("gradient_clipping", 0.0)
    if clip and own and clip != own:
        raise ConfigError(
            f"gradient_clipping is {own} in the strategy's config, and Trainer(gradient_clip_val={clip}); give one"
        )
    found = dict(config)
    found[_STEPS] = steps
    # Lightning calls step() where a window ends, which the end of the data may bring before its last micro-batch.
    found["managed_gradient_accumulation"] = False
    # Said, and not left out: nobody but the Trainer and the file clips.
    found["gradient_clipping"] = clip or own
    return found


def for_inference(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what only training has a use for, and would be refused without an optimizer."""
    found = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler", "gradient_clipping")}
    zero = found.get("zero_optimization")
    if isinstance(zero, Mapping):
        # The placement stays: a model that is fitted next need not move.
        found["zero_optimization"] = {key: value for key, value in zero.items() if key != "offload_optimizer"}
    return found


def stage_of(config: Mapping[str, Any]) -> int | None:
    """The stage that a configuration names; None if it names none."""
    zero = config.get("zero_optimization")
    return zero.get("stage") if isinstance(zero, Mapping) else None
