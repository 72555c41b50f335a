"""Tables of keys of other programs and older DeepSpeed versions, with the matching key of zeropp or a reason for none.

The remedy for an unknown key is looked up in these tables first. Only then is its spelling compared with the existing
keys. No entry recommends a key that zeropp rejects; a test checks each entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "ARGUMENTS",
    "FOREIGN",
    "MOVED",
    "REMOVED",
    "by_words",
    "is_comment",
    "meaning",
    "meant_type",
    "place",
    "without_comments",
]


def _inverted(rows: Mapping[str, str]) -> dict[str, str]:
    # Many names have the same meaning. So the tables are written as meaning -> names, and looked up by name.
    return {name: value for value, names in rows.items() for name in names.split()}


# Right key -> other names for it, separated by spaces. A name with a dot applies inside that block only.
MOVED: Mapping[str, str] = _inverted({
    "train_micro_batch_size_per_gpu": (
        "micro_batch_size micro_batch_size_per_gpu train_micro_batch_size train_batch_size_per_gpu batch_size_per_gpu "
        "batch_size_per_device per_device_train_batch_size per_gpu_train_batch_size micro_batch_per_gpu "
        "train_micro_batch_size_per_device mbs minibatch_size samples_per_gpu"
    ),
    "train_batch_size": "global_batch_size total_batch_size total_train_batch_size global_train_batch_size",
    # The name "batch_size" does not show which of the two keys is meant.
    "train_batch_size or train_micro_batch_size_per_gpu": "batch_size bs",
    "gradient_accumulation_steps": (
        "accumulation_steps grad_accumulation_steps grad_accum_steps grad_accum gradient_accumulation gas "
        "accumulate_grad_batches gradient_accumulation_step num_accumulation_steps grad_steps iter_size update_freq"
    ),
    "gradient_clipping": (
        "max_grad_norm max_norm max_gradient_norm grad_clip clip_grad clip_grad_norm grad_clip_norm grad_norm_clip "
        "gradient_clip gradient_clip_val gradient_clip_norm gradient_clipping_norm gradient_clipping_value clipping "
        "grad_clipping clip_norm clip clipping_norm grad_norm gradient_norm grad_max_norm "
        "optimizer.params.gradient_clipping"
    ),
    "data_types.grad_accum_dtype": (
        "gradient_accumulation_dtype grad_accumulation_dtype gradient_accum_dtype accumulation_dtype grad_dtype "
        "gradient_dtype accumulate_allreduce_grads_in_fp32 accumulate_grads_in_fp32"
    ),
    "data_types.param_dtype": "data_types.dtype model_dtype data_types.compute_dtype compute_dtype",
    "torch_autocast.enabled": "autocast use_autocast torch_amp use_torch_autocast autocast_enabled",
    "torch_autocast.dtype": "autocast_dtype autocast_type",
    "gradient_allreduce_op": "allreduce_op reduce_op",
    "dataloader_drop_last": "drop_last",
    "zeropp.hang_timeout": "timeout",
    "communication_data_type": "comm_data_type comm_dtype communication_dtype reduce_dtype allreduce_dtype",
    "bf16.enabled or fp16.enabled": (
        "mixed_precision precision torch_dtype fp16.dtype bf16.dtype use_amp half_precision dtype amp_enabled"
    ),
    "bf16.enabled": (
        "bf16_enabled use_bf16 bfloat16_enabled bf16.bf16 bf16.bfloat16 fp16.bf16 fp16.bfloat16 fp16.type bf16.type"
    ),
    "fp16.enabled": "fp16_enabled use_fp16 float16 fp16.fp16 fp16.float16 fp16.half bf16.fp16",
    "fp16.loss_scale": "fp16.scale fp16.static_loss_scale static_loss_scale",
    "fp16.loss_scale_window": "scale_window growth_interval fp16.scale_window fp16.growth_interval",
    "fp16.min_loss_scale": "min_scale fp16.min_scale",
    "fp16.hysteresis": "delayed_shift fp16.delayed_shift",
    "zero_optimization.stage": (
        "zero_stage zero_optimization_stage zero_optimization.enabled zero_optimization.enable zero_optimization.level "
        "zero_optimization.zero_stage zero_optimization.stage3 zero_optimization.type zero_level"
    ),
    "zero_optimization.offload_optimizer or zero_optimization.offload_param": (
        "offload zero_offload enable_offload use_offload offload_device zero_optimization.cpu_offloading"
    ),
    "zero_optimization": "zero zero_config zero_optimizer zero_opt",
    "zero_optimization.offload_optimizer": (
        "optimizer_offload offload_optim offload_opt offload_optimizers offload_optimizer_states cpu_offload_optimizer "
        "offload_states"
    ),
    "zero_optimization.offload_param": (
        "param_offload params_offload offload_params offload_parameters offload_parameter offload_weights "
        "cpu_offload_params"
    ),
    "zero_optimization.offload_optimizer.device": (
        "offload_optimizer_device optimizer_offload_device offload_optimizer.type offload_optimizer.target "
        "offload_optimizer.location offload_optimizer.to"
    ),
    "zero_optimization.offload_param.device": (
        "offload_param_device param_offload_device offload_params_device offload_param.type offload_param.target "
        "offload_param.location offload_param.to"
    ),
    "zero_optimization.offload_optimizer.nvme_path": (
        "offload_optimizer_nvme_path offload_optimizer.path offload_optimizer.nvme_dir offload_optimizer.swap_dir "
        "offload_optimizer.nvme offload_optimizer.directory"
    ),
    "zero_optimization.offload_param.nvme_path": (
        "offload_param_nvme_path offload_param.path offload_param.nvme_dir offload_param.swap_dir offload_param.nvme "
        "offload_param.directory"
    ),
    "zero_optimization.offload_optimizer.pin_memory": (
        "offload_optimizer.pin offload_optimizer.pinned offload_optimizer.pinned_memory offload_optimizer.use_pinned"
    ),
    "zero_optimization.offload_optimizer.buffer_count": "offload_optimizer.buffers offload_optimizer.num_buffers",
    "zero_optimization.offload_param.buffer_count": "offload_param.buffers offload_param.num_buffers",
    "zero_optimization.offload_param.pin_memory": (
        "offload_param.pin offload_param.pinned offload_param.pinned_memory offload_param.use_pinned"
    ),
    "zero_optimization.offload_optimizer.pipeline_read or zero_optimization.offload_optimizer.pipeline_write": (
        "offload_optimizer.pipeline offload_optimizer.pipelined offload_optimizer.use_pipeline"
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        "zero3_save_16bit_model save_16bit_model stage3_save_16bit_model gather_fp16_weights_on_model_save "
        "stage3_gather_weights_on_model_save"
    ),
    "zero_optimization.stage3_prefetch_bucket_size": "prefetch_size stage3_prefetch_size stage3_prefetch",
    "zero_optimization.stage3_param_persistence_threshold": (
        "persistence_threshold stage3_persistence_threshold stage3_persistence"
    ),
    "zero_optimization.zero_hpz_partition_size": (
        "hpz_partition_size hpz_size secondary_partition_size hpz zero_hpz_size zero_hpz hpz_partition"
    ),
    "zero_optimization.overlap_comm": "overlap_communication overlap_communications overlap_comms overlap comm_overlap",
    "zero_optimization.zero_quantized_weights": "qwz quantize_weights",
    "zero_optimization.zero_quantized_gradients": "qgz quantize_grads quantized_grads",
    "activation_checkpointing.cpu_checkpointing": (
        "checkpoint_in_cpu activation_checkpointing.offload activation_checkpointing.cpu_offload "
        "activation_checkpointing.offload_to_cpu"
    ),
    "checkpoint.load_universal": "universal_checkpoint load_universal_checkpoint",
    "checkpoint.tag_validation": "checkpoint_tag_validation",
    "aio.intra_op_parallelism": "num_threads aio.threads",
    "aio.queue_depth": "aio.depth aio.queue",
    "aio.block_size": "aio.block",
    "optimizer.type": "optimizer.name optimizer.class optimizer_type optimizer_name optim",
    "optimizer.params.lr": (
        "lr learning_rate base_lr optimizer.learning_rate optimizer.params.learning_rate optimizer.params.base_lr"
    ),
    "optimizer.params.betas": (
        "betas adam_betas adam_beta1 adam_beta2 optimizer.beta1 optimizer.beta2 optimizer.params.beta1 "
        "optimizer.params.beta2 optimizer.params.adam_beta1 optimizer.params.adam_beta2"
    ),
    "optimizer.params.eps": "eps epsilon adam_epsilon adam_eps optimizer.params.epsilon optimizer.params.adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay wd optimizer.params.wd",
    "optimizer.params.momentum": "momentum",
    "optimizer.params": "optimizer.args optimizer.kwargs optimizer.config",
    "optimizer.params.adam_w_mode": "adam_w_mode optimizer.params.adamw_mode adamw_mode",
    "optimizer.params.torch_adam": "torch_adam use_torch_adam",
    "scheduler": "lr_scheduler learning_rate_scheduler",
    "scheduler.type": "scheduler.name lr_scheduler_type scheduler_type scheduler_name",
    "scheduler.params": "scheduler.args scheduler.kwargs scheduler.config",
    "scheduler.params.warmup_num_steps": (
        "warmup_num_steps warmup_steps warmup num_warmup_steps warmup_iters scheduler.warmup_steps "
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
"""Other name -> path of the key that it means, or two such paths joined by "or"."""

REMOVED: Mapping[str, str] = _inverted({
    "bf16 has no loss scale": (
        "bf16.loss_scale bf16.initial_scale_power bf16.loss_scale_window bf16.hysteresis bf16.consecutive_hysteresis "
        "bf16.min_loss_scale bf16.scale_window bf16.min_scale bf16.init_scale bf16.initial_scale bf16.scale "
        "bf16.static_loss_scale bf16.dynamic_loss_scale bf16.growth_interval bf16.delayed_shift bf16.initial_loss_scale"
    ),
    "fp16.loss_scale 0 means a dynamic loss scale": "dynamic_loss_scale fp16.dynamic_loss_scale fp16.dynamic",
    "model inputs are always cast to the 16-bit compute dtype": "bf16.auto_cast",
    "the gradients of a unit are always reduced as soon as they are complete": "accumulate_grads_via_hooks",
    "main weights are in fp32 anyway": (
        "master_weights fp32_master_weights master_weights_in_fp32 keep_fp32_master_weights use_master_weights"
    ),
    "fp16.fp16_master_weights_and_grads also stores optimizer states in fp16": "fp16.fp16_optimizer_states",
    "gradients are clipped by their norm, by gradient_clipping": "clip_value clip_grad_value grad_clip_value",
    'the key "device" switches the block on, and "none" switches it off': " ".join(
        f"{block}.{word}"
        for block in ("offload_optimizer", "offload_param")
        for word in ("enabled", "enable", "use", "active", "on")
    ),
    "zero_optimization.stage3_prefetch_bucket_size limits how many weights are read ahead": (
        "offload_param.pipeline offload_param.pipeline_read offload_param.pipeline_write"
    ),
    "pass the contents of this block as the configuration": "deepspeed deepspeed_config ds_config deepspeed_plugin",
    "fp16.initial_scale_power sets the initial scale, as an exponent of 2": (
        "initial_scale init_scale initial_loss_scale fp16.init_scale fp16.initial_scale fp16.initial_loss_scale"
    ),
    "a warm-up is counted in steps, by scheduler.params.warmup_num_steps": (
        "warmup_ratio warmup_proportion scheduler.params.warmup_ratio scheduler.params.warmup_proportion"
    ),
    "the dynamic scale always changes by a factor of 2": (
        "scale_factor loss_scale_factor growth_factor backoff_factor fp16.scale_factor fp16.loss_scale_factor"
    ),
    "the dynamic scale has no upper bound": "max_loss_scale fp16.max_scale",
    "gradients are reduced unit by unit, and zeropp.unit_numel sets the size of units": (
        "bucket_size bucket_size_mb bucket_cap_mb"
    ),
    "use torch.profiler to measure the steps of a program": "profile profiler",
    "pass the folder and the tag to engine.save_checkpoint": (
        "checkpoint.dir checkpoint.path checkpoint.tag checkpoint.save_dir checkpoint_dir save_dir"
    ),
    "pass the backend to zeropp.init_distributed": "backend dist_backend comm_backend",
    "levels such as O1 belong to Apex": "opt_level fp16_opt_level fp16.opt_level bf16.opt_level fp16.level",
    "the loss scale has no such tolerance; see fp16.hysteresis": "fp16.fp16_scale_tolerance fp16.scale_tolerance",
    "a staging buffer of states holds zero_optimization.sub_group_size elements": (
        "offload_optimizer.buffer_size offload_optimizer.max_in_cpu"
    ),
    "every rank is data-parallel": (
        "model_parallel_size tensor_model_parallel_size tensor_parallel_size pipeline_model_parallel_size "
        "pipeline_parallel_size mp_size tp_size pp_size autotp_size autoep_size num_stages sequence_parallel sp_size "
        "ulysses_sequence_parallel_size context_parallel_size expert_parallel_size expert_model_parallel_size "
        "moe_ep_size sequence_parallel_size seq_parallel_communication_data_type seq_parallel_comm_data_type moe "
        "tp pp dp tensor_parallel_degree pipeline_parallel pipeline_parallel_degree data_parallel_size"
    ),
    "gradients of embeddings are reduced like all others": "sparse_embedding_gradients sparse_gradients_enabled",
    "parameters without a gradient are always allowed": "find_unused_parameters",
    "this key is for inference only": "replace_with_kernel_inject kernel_inject replace_method injection_policy",
    "engine.compile() compiles the model, with the arguments of torch.compile": (
        "compile.enabled compile.disable compile.backend compile.kwargs compile.mode compile.dynamic compile.fullgraph"
    ),
    "the block takes effect when code calls zeropp.training.checkpointing": (
        "activation_checkpointing.enabled activation_checkpointing.enable"
    ),
})  # fmt: skip
"""Other name -> reason why zeropp has no key for it."""

_EVALUATION = "remove it: an evaluation takes the batches that your loop passes in"
_WORDS: tuple[tuple[str, str], ...] = (
    (r"accum.*(fp32|float|type)", "data_types.grad_accum_dtype"),
    (r"(eval|valid|test|infer).*batch|batch.*(eval|valid|test|infer)", _EVALUATION),
    (r"prefetch|dtype|log", ""),
    (r"^(grad(ient)?s?_)?accum[a-z]*(_grad(ient)?s?)?$", "gradient_accumulation_steps"),
    (r"accum.*(step|iter|batch|num|freq|count)|(step|iter|num|count).*accum", "gradient_accumulation_steps"),
    (r"num(ber)?_(micro|mini)_batch|(micro|mini)_batches$", "gradient_accumulation_steps"),
    (r"(global|total|effective)_.*batch", "train_batch_size"),
    (
        r"(micro|mini|local|device|gpu|rank|worker|process)_.*batch|batch_.*(device|gpu|rank|worker|process)",
        "train_micro_batch_size_per_gpu",
    ),
    # Names that begin with "tr" are more likely misspellings of train_batch_size or train_micro_batch_size_per_gpu.
    (r"^(?!tr).*batch_?size", "train_batch_size or train_micro_batch_size_per_gpu"),
    (r"clip.*(grad|norm)|(grad|norm).*clip", "gradient_clipping"),
)
"""Pairs of a pattern for a lower-case key and the key that it means. The first pattern that matches is used."""

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
    "trainers and scripts: settings of reports, checkpoints and training loops": (
        "dataloader_num_workers dataloader_pin_memory dataset debug description do_eval do_train epochs "
        "eval_batch_size eval_interval eval_steps eval_strategy evaluation_strategy experiment_name "
        "gradient_checkpointing gradient_checkpointing_kwargs log_interval logging logging_dir logging_steps "
        "logging_strategy max_epochs max_steps model model_name model_name_or_path name note notes num_epochs "
        "num_train_epochs num_workers output_dir per_device_eval_batch_size per_gpu_eval_batch_size print_interval "
        "project project_name report_to resume run_name save_interval save_steps save_strategy save_total_limit seed "
        "tf32 torch_compile train_steps use_cache verbose version wandb_project"
    ),
}))  # fmt: skip
"""Top-level keys that have no effect in DeepSpeed, either. zeropp accepts them, and one warning lists them."""

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
"""Name of a common optimizer (in lower case) or scheduler -> names of its arguments."""


def place(path: Sequence[str]) -> str:
    """Return the path of the key that an unknown key means.

    Args:
        path: keys that lead to the unknown key, ending with the unknown key.

    Returns:
        A path, two paths joined by "or", or "" if the meaning is unknown or the key already has that path.
    """
    found = _looked_up(path, MOVED)
    # optimizer.params.lr ends with the name `lr`, which means optimizer.params.lr: that is no remedy.
    return "" if found == ".".join(path) else found


def meaning(path: Sequence[str]) -> str:
    """Return a remedy for an unknown key from the tables MOVED and REMOVED; "" if they have no entry.

    Args:
        path: keys that lead to the unknown key, ending with the unknown key.
    """
    if reason := _looked_up(path, REMOVED):
        return f"remove it: {reason}"
    return f"set {found} instead" if (found := place(path)) else ""


def by_words(key: str) -> str:
    """Return a remedy for an unknown key from the words in its name; "" if no pattern matches."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower().replace("-", "_")
    words = re.sub(r"(micro|mini)_?batch", r"\1_batch", words)
    found = next((target for pattern, target in _WORDS if re.search(pattern, words)), "")
    if found == _EVALUATION:
        return found
    return f"set {found} instead" if found else ""


# Parts of an optimizer's class name that describe its implementation, such as "fused", "cpu" or "8bit".
_IMPLEMENTATION = re.compile(r"deepspeed|fused|cpu|torch|apex|paged|bnb|npu|xla|hf|ds|(4|8|32)_?bit|optimizer|[\W_]")
_TYPES = _inverted({
    "Adam": "adam",
    "AdamW": "adamw decoupledadamw",
    "Lion": "lion",
    "Adagrad": "adagrad",
    "SGD": "sgd momentum momentumsgd",
    "RMSprop": "rmsprop",
    "WarmupDecayLR": "linear linearwarmup linearwithwarmup warmuplinear warmuplinearlr warmuplineardecaylr warmupdecay",
    "WarmupCosineLR": "cosine cosinewarmup cosinewithwarmup warmupcosine warmupcosinelr warmupcosinedecaylr cosinelr",
    "WarmupLR": "constantwithwarmup warmup warmupconstantlr warmuplr",
    "CosineAnnealingLR": "cosineannealing cosineannealinglr",
})  # fmt: skip


def meant_type(name: str) -> str:
    """Return the accepted type for another name of an optimizer or scheduler: "Adam" for "FusedAdam"; "" if unknown."""
    return _TYPES.get(_IMPLEMENTATION.sub("", name.rpartition(".")[2].lower()), "")


def _looked_up(path: Sequence[str], table: Mapping[str, str]) -> str:
    words = [part.lower().replace("-", "_") for part in path]
    # Try the longest suffix first, because bf16.loss_scale has another meaning than loss_scale.
    ends = (".".join(words[start:]) for start in range(len(words)))
    return next((table[end] for end in ends if end in table), "")


def is_comment(key: object) -> bool:
    """Return True if a key is a comment, such as "_comment" or "comment2". JSON has no comments, so files use keys."""
    return isinstance(key, str) and key.lower().startswith(("_", "comment", "//", "#"))


def without_comments(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a JSON object without the keys that are comments, at any depth."""
    return {
        key: without_comments(value) if isinstance(value, Mapping) else value
        for key, value in block.items()
        if not is_comment(key)
    }
