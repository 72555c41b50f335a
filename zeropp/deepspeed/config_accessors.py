"""Methods of DeepSpeed's engine that return configuration values, and the names that zeropp's engine lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["ABSENT", "answers_configuration"]

_T = TypeVar("_T")

_REDUCED = "gradients are reduced as backward makes them, and clipped in step()"
_GROUPS = "use torch.distributed's groups or the mpu given to initialize(); a script may also assign this attribute"
_PIPELINE = "it belongs to pipeline parallelism, which zeropp does not have"
_LOGS = "log the loss and get_global_grad_norm() yourself, and measure with torch.profiler"
ABSENT = {
    **dict.fromkeys(("monitor", "timers", "tput_timer", "flops_profiler", "print_forward_breakdown"), _LOGS),
    **dict.fromkeys(("allreduce_gradients", "clip_fp32_gradients", "buffered_allreduce_fallback"), _REDUCED),
    **dict.fromkeys(("mpu", "data_parallel_group", "seq_data_parallel_group", "mp_world_size"), _GROUPS),
    **dict.fromkeys(("train_batch", "eval_batch", "set_dataloader"), _PIPELINE),
}
"""Attribute of DeepSpeed's engine that zeropp's engine lacks -> reason or remedy, for the AttributeError.

The engine looks a name up in the model first, so a model may define an attribute of the same name.
"""

# Method of the engine -> dotted path of the configuration value that the method returns.
_PLACES = {
    "zero_optimization_stage": "zero.stage",
    "zero_gather_16bit_weights_on_model_save": "zero.gather_16bit_weights_on_model_save",
    "zero_offload_optimizer": "zero.offload_optimizer",
    "zero_offload_param": "zero.offload_param",
    "zero_sub_group_size": "zero.sub_group_size",
    "zero_max_live_parameters": "zero.max_live_parameters",
    "zero_max_reuse_distance": "zero.max_reuse_distance",
    "zero_prefetch_bucket_size": "zero.prefetch_bucket_size",
    "zero_param_persistence_threshold": "zero.param_persistence_threshold",
    "zero_model_persistence_threshold": "zero.model_persistence_threshold",
    "zero_module_granularity_threshold": "zero.module_granularity_threshold",
    "zero_ignore_unused_parameters": "zero.ignore_unused_parameters",
    "zero_load_from_fp32_weights": "zero.load_from_fp32_weights",
    "zero_overlap_comm": "zero.overlap_comm",
    "zero_reduce_bucket_size": "zero.reduce_bucket_size",
    "zero_allgather_bucket_size": "zero.allgather_bucket_size",
    "zero_hpz_partition_size": "zero.zero_hpz_partition_size",
    "zero_quantized_weights": "zero.zero_quantized_weights",
    "zero_quantized_nontrainable_weights": "zero.zero_quantized_nontrainable_weights",
    "zero_quantized_gradients": "zero.zero_quantized_gradients",
    "zeropp_loco_param": "zero.zeropp_loco_param",
    "mics_shard_size": "zero.mics_shard_size",
    "zero_reduce_scatter": "zero.reduce_scatter",
    "zero_contiguous_gradients": "zero.contiguous_gradients",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "communication_data_type": "communication_data_type",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "fp16_enabled": "fp16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "bfloat16_enabled": "bf16.enabled",
    "loss_scale": "fp16.loss_scale",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "dump_state": "dump_state",
    "dataloader_drop_last": "dataloader_drop_last",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
}


def answers_configuration(engine: type[_T]) -> type[_T]:
    """Class decorator: add one method for each configuration value that DeepSpeed's engine has a method for.

    Args:
        engine: class whose instances have the attribute ``loaded_config``.

    Returns:
        The same class. Each added method takes no arguments and returns a value of ``loaded_config``.
    """
    for call, place in _PLACES.items():
        setattr(engine, call, _reading(engine, call, place))
    return engine


def _reading(engine: type, call: str, place: str) -> Callable[[Any], Any]:
    """Return the method named ``call``, which returns the configuration value at the dotted path ``place``."""

    def read(self: Any) -> Any:
        value: Any = self.loaded_config
        for name in place.split("."):
            # An optional block that the configuration leaves out is None, and so are all its values.
            value = None if value is None else getattr(value, name)
        return value

    read.__name__ = call
    read.__qualname__ = f"{engine.__name__}.{call}"
    read.__doc__ = f"Return the configuration value ``{place}``."
    return read
