"""Values of the configuration, by the names of calls that scripts ask DeepSpeed's engine with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeropp.config import Config

__all__ = ["ABSENT", "Accessors"]

_REDUCED = "gradients are reduced as backward makes them, and clipped in step()"
_GROUPS = "groups are torch.distributed's, or those that initialize() was given by mpu; it may be assigned"
_PIPELINE = "it is of pipelines, which zeropp has not"
_LOGS = "log what get_global_grad_norm() and the loss say, and measure with torch.profiler"
ABSENT = {
    **dict.fromkeys(("monitor", "timers", "tput_timer", "flops_profiler", "print_forward_breakdown"), _LOGS),
    **dict.fromkeys(("allreduce_gradients", "clip_fp32_gradients", "buffered_allreduce_fallback"), _REDUCED),
    **dict.fromkeys(("mpu", "data_parallel_group", "seq_data_parallel_group", "mp_world_size"), _GROUPS),
    **dict.fromkeys(("train_batch", "eval_batch", "set_dataloader"), _PIPELINE),
}
"""Names that DeepSpeed's engines have and this one has not, and why; a model may have some of the same name."""

# Call -> place of its answer in the configuration.
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


class Accessors:
    """Calls without arguments, each of which says what one key of the configuration is."""

    loaded_config: Config

    def zero_optimization(self) -> bool:
        """Tell whether anything is partitioned: stage 1 or more."""
        return self.loaded_config.zero.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Tell whether gradients are partitioned: stage 2 or 3."""
        return self.loaded_config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Tell whether weights are partitioned: stage 3."""
        return self.loaded_config.zero.stage == 3

    def dynamic_loss_scale(self) -> bool:
        """Tell whether the loss scale of float16 is dynamic."""
        return self.loaded_config.fp16.loss_scale == 0


def _reading(call: str, place: str) -> Callable[[Accessors], Any]:
    def read(self: Accessors) -> Any:
        value: Any = self.loaded_config
        for name in place.split("."):
            # A block that is not given has nothing to say.
            value = None if value is None else getattr(value, name)
        return value

    read.__name__, read.__qualname__ = call, f"Accessors.{call}"
    read.__doc__ = f"The configuration's ``{place}``."
    return read


# Set from the table, so that a call and the key that it reads stand in one line.
for _call, _place in _PLACES.items():
    setattr(Accessors, _call, _reading(_call, _place))
