"""Keys that other programs and older DeepSpeed versions write: where each belongs, or why nothing takes its place.

A key is looked up by its meaning here before its spelling is compared with the keys that there are. No entry leads to a
key that is refused; a test tries each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ARGUMENTS", "FOREIGN", "MOVED", "REMOVED", "is_comment", "meaning", "place", "without_comments"]


def _inverted(rows: Mapping[str, str]) -> dict[str, str]:
    # Many names have one meaning, so the tables are written by meaning and looked up by name.
    return {name: value for value, names in rows.items() for name in names.split()}


# Keys of the right place -> other names of it. A name with a dot counts in that block only.
MOVED: Mapping[str, str] = _inverted({
    "train_micro_batch_size_per_gpu": (
        "micro_batch_size micro_batch_size_per_gpu train_micro_batch_size train_batch_size_per_gpu batch_size_per_gpu "
        "batch_size_per_device per_device_train_batch_size per_gpu_train_batch_size micro_batch_per_gpu "
        "train_micro_batch_size_per_device"
    ),
    "train_batch_size": "global_batch_size total_batch_size total_train_batch_size global_train_batch_size",
    # This name alone does not tell which of the two is meant.
    "train_batch_size or train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": (
        "accumulation_steps grad_accumulation_steps grad_accum_steps grad_accum gradient_accumulation gas "
        "accumulate_grad_batches gradient_accumulation_step num_accumulation_steps"
    ),
    "gradient_clipping": (
        "max_grad_norm max_norm max_gradient_norm grad_clip clip_grad clip_grad_norm grad_clip_norm grad_norm_clip "
        "gradient_clip gradient_clip_val gradient_clip_norm gradient_clipping_norm gradient_clipping_value clipping "
        "grad_clipping clip_norm optimizer.params.gradient_clipping"
    ),
    "data_types.grad_accum_dtype": (
        "gradient_accumulation_dtype grad_accumulation_dtype gradient_accum_dtype accumulation_dtype grad_dtype "
        "gradient_dtype accumulate_allreduce_grads_in_fp32 accumulate_grads_in_fp32"
    ),
    "data_types.param_dtype": "data_types.dtype model_dtype",
    "communication_data_type": "comm_data_type comm_dtype communication_dtype reduce_dtype allreduce_dtype",
    "bf16.enabled or fp16.enabled": (
        "mixed_precision precision torch_dtype fp16.dtype bf16.dtype use_amp half_precision dtype"
    ),
    "bf16.enabled": (
        "bf16_enabled use_bf16 bfloat16_enabled bf16.bf16 bf16.bfloat16 fp16.bf16 fp16.bfloat16 fp16.type bf16.type"
    ),
    "fp16.enabled": "fp16_enabled use_fp16 float16 fp16.fp16 fp16.float16 bf16.fp16",
    "fp16.loss_scale": "fp16.scale fp16.static_loss_scale static_loss_scale",
    "fp16.loss_scale_window": "scale_window growth_interval fp16.scale_window fp16.growth_interval",
    "fp16.min_loss_scale": "min_scale fp16.min_scale",
    "fp16.hysteresis": "delayed_shift fp16.delayed_shift",
    "zero_optimization.stage": "zero_stage zero_optimization_stage zero_optimization.enabled",
    "zero_optimization": "zero zero_config zero_optimizer",
    "zero_optimization.offload_optimizer": (
        "optimizer_offload offload_optim offload_opt offload_optimizers offload_optimizer_states cpu_offload_optimizer "
        "offload_states"
    ),
    "zero_optimization.offload_param": (
        "param_offload params_offload offload_params offload_parameters offload_parameter offload_weights "
        "cpu_offload_params"
    ),
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device optimizer_offload_device",
    "zero_optimization.offload_param.device": "offload_param_device param_offload_device offload_params_device",
    "zero_optimization.offload_optimizer.nvme_path": "offload_optimizer_nvme_path",
    "zero_optimization.offload_param.nvme_path": "offload_param_nvme_path",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        "zero3_save_16bit_model save_16bit_model stage3_save_16bit_model gather_fp16_weights_on_model_save "
        "stage3_gather_weights_on_model_save"
    ),
    "zero_optimization.stage3_prefetch_bucket_size": "prefetch_size stage3_prefetch_size",
    "zero_optimization.stage3_param_persistence_threshold": "persistence_threshold stage3_persistence_threshold",
    "zero_optimization.zero_hpz_partition_size": "hpz_partition_size hpz_size secondary_partition_size",
    "zero_optimization.overlap_comm": "overlap_communication overlap_communications overlap_comms overlap",
    "activation_checkpointing.cpu_checkpointing": "checkpoint_in_cpu",
    "activation_checkpointing.number_checkpoints": "num_checkpoints",
    "checkpoint.load_universal": "universal_checkpoint load_universal_checkpoint",
    "checkpoint.tag_validation": "checkpoint_tag_validation",
    "aio.intra_op_parallelism": "num_threads",
    "optimizer.type": "optimizer.name optimizer_type optimizer_name optim",
    "optimizer.params.lr": "lr learning_rate base_lr optimizer.learning_rate optimizer.params.learning_rate",
    "optimizer.params.betas": (
        "betas adam_betas adam_beta1 adam_beta2 optimizer.beta1 optimizer.beta2 optimizer.params.beta1 "
        "optimizer.params.beta2 optimizer.params.adam_beta1 optimizer.params.adam_beta2"
    ),
    "optimizer.params.eps": "eps epsilon adam_epsilon adam_eps optimizer.params.epsilon optimizer.params.adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay wd optimizer.params.wd",
    "optimizer.params": "optimizer.args optimizer.kwargs optimizer.config",
    "optimizer.params.adam_w_mode": "adam_w_mode optimizer.params.adamw_mode adamw_mode",
    "optimizer.params.torch_adam": "torch_adam use_torch_adam",
    "scheduler": "lr_scheduler learning_rate_scheduler",
    "scheduler.type": "scheduler.name lr_scheduler_type scheduler_type scheduler_name",
    "scheduler.params": "scheduler.args scheduler.kwargs scheduler.config",
    "scheduler.params.warmup_num_steps": (
        "warmup_num_steps warmup_steps num_warmup_steps warmup_iters scheduler.warmup_steps "
        "scheduler.params.warmup_steps scheduler.params.num_warmup_steps"
    ),
    "scheduler.params.total_num_steps": (
        "total_num_steps total_steps num_training_steps scheduler.total_steps scheduler.params.total_steps "
        "scheduler.params.num_training_steps"
    ),
    "scheduler.params.warmup_min_lr": "warmup_min_lr min_lr scheduler.params.min_lr",
    "scheduler.params.warmup_max_lr": "warmup_max_lr max_lr scheduler.params.max_lr",
    "scheduler.params.warmup_type": "warmup_type",
})  # fmt: skip
"""Names that mean a key of this configuration -> that key, or two of them joined by "or"."""

REMOVED: Mapping[str, str] = _inverted({
    "bf16 has no loss scale": (
        "bf16.loss_scale bf16.initial_scale_power bf16.loss_scale_window bf16.hysteresis bf16.consecutive_hysteresis "
        "bf16.min_loss_scale bf16.scale_window bf16.min_scale bf16.init_scale bf16.initial_scale bf16.scale "
        "bf16.static_loss_scale bf16.dynamic_loss_scale bf16.growth_interval bf16.delayed_shift bf16.initial_loss_scale"
    ),
    "a loss scale of 0 is the dynamic one": "dynamic_loss_scale fp16.dynamic_loss_scale fp16.dynamic",
    "inputs are cast where 16 bits are enabled": "bf16.auto_cast",
    "the first scale is a power of 2, and fp16.initial_scale_power is its exponent": (
        "initial_scale init_scale initial_loss_scale fp16.init_scale fp16.initial_scale fp16.initial_loss_scale"
    ),
    "a warm-up is counted in steps, by scheduler.params.warmup_num_steps": (
        "warmup_ratio warmup_proportion scheduler.params.warmup_ratio scheduler.params.warmup_proportion"
    ),
    "levels such as O1 are Apex's": "opt_level fp16_opt_level fp16.opt_level bf16.opt_level",
    "one overflow more or less does not change how the scale moves": "fp16.fp16_scale_tolerance fp16.scale_tolerance",
    "a staging buffer of states holds zero_optimization.sub_group_size elements": (
        "offload_optimizer.buffer_size offload_optimizer.max_in_cpu"
    ),
    "every rank is data-parallel": (
        "model_parallel_size tensor_model_parallel_size tensor_parallel_size pipeline_model_parallel_size "
        "pipeline_parallel_size mp_size tp_size pp_size autotp_size autoep_size num_stages sequence_parallel sp_size "
        "ulysses_sequence_parallel_size context_parallel_size expert_parallel_size expert_model_parallel_size "
        "moe_ep_size sequence_parallel_size seq_parallel_communication_data_type seq_parallel_comm_data_type"
    ),
    "gradients of embeddings travel like all others": "sparse_embedding_gradients sparse_gradients_enabled",
    "a parameter without a gradient is left as it is without being named": "find_unused_parameters",
    "it is for inference without training": "replace_with_kernel_inject kernel_inject replace_method injection_policy",
    "engine.compile() compiles the model, with the arguments of torch's": (
        "compile.enabled compile.disable compile.backend compile.kwargs compile.mode compile.dynamic compile.fullgraph"
    ),
    "the block acts where code calls zeropp.training.checkpointing": "activation_checkpointing.enabled",
})  # fmt: skip
"""Names without a key here -> why there is none."""

FOREIGN: frozenset[str] = frozenset(_inverted({
    "older DeepSpeed versions, or names of its code that its configuration never had": (
        "fp32_allreduce allreduce_always_fp32 preserve_fp32 monitor_config monitor comms_config comms_log "
        "flops_profile autotune log_dist zero_max_elements_per_comm"
    ),
    "launchers, and Accelerate's file": (
        "compute_environment cuda_visible_devices deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile "
        "deepspeed_inclusion_filter deepspeed_moe_layer_cls_names deepspeed_multinode_launcher distributed_type "
        "downcast_bf16 dynamo_backend dynamo_config enable_cpu_affinity fsdp_config gpu_ids hostfile launcher "
        "local_rank machine_rank main_process_ip main_process_port main_training_function master_addr master_port "
        "megatron_lm_config num_gpus num_machines num_nodes num_processes rdzv_backend same_network tpu_env "
        "tpu_use_cluster tpu_use_sudo use_cpu world_size zero3_init_flag"
    ),
    "trainers and scripts: what they report, save, load and repeat": (
        "dataloader_num_workers dataloader_pin_memory dataset debug description do_eval do_train epochs "
        "eval_batch_size eval_interval eval_steps eval_strategy evaluation_strategy experiment_name "
        "gradient_checkpointing gradient_checkpointing_kwargs log_interval logging logging_dir logging_steps "
        "logging_strategy max_epochs max_steps model model_name model_name_or_path name note notes num_epochs "
        "num_train_epochs num_workers output_dir per_device_eval_batch_size per_gpu_eval_batch_size print_interval "
        "project project_name report_to resume run_name save_interval save_steps save_strategy save_total_limit seed "
        "tf32 torch_compile train_steps use_cache verbose version wandb_project"
    ),
}))  # fmt: skip
"""Keys at the top level that have no effect in DeepSpeed, either: accepted, and named in the note of ignored keys."""

_ADAM = (
    "lr betas eps weight_decay amsgrad maximize foreach capturable differentiable fused "
    "adam_w_mode torch_adam bias_correction fp32_optimizer_states set_grad_none"
)
_WARMUP = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"
ARGUMENTS: Mapping[str, frozenset[str]] = {
    name: frozenset(arguments.split())
    for name, arguments in {
        "adam": _ADAM,
        "adamw": _ADAM,
        "lion": "lr betas weight_decay",
        "sgd": "lr momentum dampening weight_decay nesterov maximize foreach differentiable fused",
        "adagrad": "lr lr_decay weight_decay initial_accumulator_value eps foreach maximize differentiable fused",
        "rmsprop": "lr alpha eps weight_decay momentum centered capturable foreach maximize differentiable",
        "LRRangeTest": (
            "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
            "last_batch_iteration"
        ),
        "OneCycle": (
            "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
            "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom "
            "cycle_max_mom decay_mom_rate last_batch_iteration"
        ),
        "WarmupLR": _WARMUP,
        "WarmupDecayLR": _WARMUP + " total_num_steps",
        "WarmupCosineLR": (
            "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type last_batch_iteration"
        ),
    }.items()
}  # fmt: skip
"""Arguments of the optimizers, in small letters, and schedulers that files name most."""


def place(path: Sequence[str]) -> str:
    """The right place of a key that has another name: a path, two of them joined by "or", or nothing.

    Args:
        path: keys that lead to the unknown one, that one last.
    """
    found = _looked_up(path, MOVED)
    # A name such as `lr` leads to optimizer.params.lr, which is no remedy where it stands there already.
    return "" if found == ".".join(path) else found


def meaning(path: Sequence[str]) -> str:
    """A remedy for an unknown key, from its meaning; nothing where none is known. The argument is that of `place`."""
    if reason := _looked_up(path, REMOVED):
        return f"remove it: {reason}"
    return f"set {found} instead" if (found := place(path)) else ""


def _looked_up(path: Sequence[str], table: Mapping[str, str]) -> str:
    words = [part.lower().replace("-", "_") for part in path]
    # The longest end first: bf16.loss_scale means something else than loss_scale.
    ends = (".".join(words[start:]) for start in range(len(words)))
    return next((table[end] for end in ends if end in table), "")


def is_comment(key: object) -> bool:
    """Tell whether a key stands for a comment: JSON has none, so files have keys such as "_comment" and "comment2"."""
    return isinstance(key, str) and key.lower().startswith(("_", "comment", "//", "#"))


def without_comments(block: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a JSON object without the keys that are comments, at any depth."""
    return {
        key: without_comments(value) if isinstance(value, Mapping) else value
        for key, value in block.items()
        if not is_comment(key)
    }
