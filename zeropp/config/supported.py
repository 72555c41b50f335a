"""Support status of each configuration field: which values this version implements, and errors for all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from zeropp.config.base import Block, ConfigError, UnsupportedConfigError, spellings
from zeropp.config.blocks import (
    ActivationCheckpointingConfig,
    AioConfig,
    AutocastConfig,
    Bf16Config,
    CheckpointConfig,
    DataTypesConfig,
    ExtensionConfig,
    Fp16Config,
    GradientBitsConfig,
    MaxCtasConfig,
    NamedBlock,
    OptimizerConfig,
    ParallelWriteConfig,
    SchedulerConfig,
)
from zeropp.config.describe import nested_block, value_text
from zeropp.config.foreign_keys import meant_type
from zeropp.config.ignored_keys import (
    CompileConfig,
    NeedlessTop,
    NeedlessZero,
    OutsideKeys,
    UnreadTop,
)
from zeropp.config.top import Config
from zeropp.config.zero_block import (
    LeafModuleConfig,
    LocoConfig,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    ZeroConfig,
)


class Kind(Enum):
    """Support status of a setting in this version."""

    EFFECT = "implemented for every value"
    NEEDLESS = "accepted at every value without effect, because zeropp needs no such setting"
    LIMITED = "implemented for some values; other values are errors"
    GOVERNED = "read only if another key is set, and that key is limited"
    UNREAD = "accepted at every value without effect, with a warning"
    OFF = "accepted if it is switched off; otherwise an error, because it would change the training"
    BLOCK = "a block whose keys have their own status"


@dataclass(frozen=True)
class Support:
    """Support status of one field, with the texts for its error message.

    Attributes:
        kind: status of the field.
        accepts: accepted values of a limited field; () for the default only.
        remedy: advice for the error message; "" for "leave it at the default".
        governor: for a governed field, the key that must be set for the field to be read.
        instead: text about the replacement of an unsupported feature or of a deprecated key; "" for none.
    """

    kind: Kind
    accepts: tuple[object, ...] = ()
    remedy: str = ""
    governor: str = ""
    instead: str = ""


EFFECT, NEEDLESS, UNREAD, BLOCK = (Support(k) for k in (Kind.EFFECT, Kind.NEEDLESS, Kind.UNREAD, Kind.BLOCK))


def _only(*accepts: object, remedy: str = "") -> Support:
    return Support(Kind.LIMITED, accepts, remedy)


def _later(instead: str) -> Support:
    """Return the status of a field that accepts its default only.

    Args:
        instead: text about the replacement of the missing feature.
    """
    return Support(Kind.LIMITED, instead=instead)


def _off(instead: str) -> Support:
    return Support(Kind.OFF, remedy="leave it out, or switch it off", instead=instead)


def _each(support: Support, names: str) -> dict[str, Support]:
    return dict.fromkeys(names.split(), support)


def _all(model: type[Block], support: Support) -> dict[str, Support]:
    return dict.fromkeys(model.model_fields, support)


def _governed(model: type[Block], governor: str, **own: Support) -> dict[str, Support]:
    return _all(model, Support(Kind.GOVERNED, governor=governor)) | own


_BESIDE = "with lazy_step, offloaded states are stepped during the next forward, with the same results"

# Each field needs an entry, also if it has no effect. A test fails for a field without one.
_ZERO = {
    **_each(BLOCK, "offload_param offload_optimizer leaf_module zeropp_loco_param"),
    **_each(
        EFFECT,
        "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
        "max_reuse_distance module_granularity_threshold overlap_comm ignore_unused_parameters "
        "log_trace_cache_warnings stage sub_group_size zero_hpz_partition_size mics_shard_size "
        "mics_hierarchical_params_gather "
        "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights override_module_apply "
        "gather_16bit_weights_on_model_save load_from_fp32_weights pipeline_loading_checkpoint",
    ),
    **_all(NeedlessZero, NEEDLESS),
    "zenflow": _later(_BESIDE),
    # Loading the configuration already rejects legacy_stage1.
    **_each(_later("stage 1 is implemented once"), "save_muon_momentum_buffer_in_memory legacy_stage1"),
}

_TOP = {
    **_all(OutsideKeys, UNREAD),
    # Raise an error if one of these features is switched on: ignoring it would change the results of the training, or
    # give ranks the wrong data.
    "amp": _off("bf16, fp16 and torch_autocast compute in 16 bits without Apex"),
    "elasticity": _off("checkpoints load on any number of ranks, and torchrun restarts failed ranks"),
    "hybrid_engine": _off("generate inside zeropp.zero.GatheredParameters"),
    "progressive_layer_drop": _off("skip layers in the model's forward; each rank may skip other layers"),
    "sparse_attention": _off("torch's flex_attention has block masks"),
    "weight_quantization": _off("zero_quantized_weights sends weights as int8"),
    "zenflow": _off(_BESIDE),
    **_each(_off("pass a sampler to the data loader"), "curriculum_learning data_efficiency"),
    **_each(_off("every rank is data-parallel"), "expert_parallel tensor_parallel"),
    **_each(_off("zeropp does not compress models; use another library"), "compression_training quantize_training"),
    **_each(
        BLOCK,
        "zero_optimization zeropp bf16 fp16 torch_autocast data_types aio checkpoint activation_checkpointing compile",
    ),
    **_each(
        EFFECT,
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping "
        "gradient_allreduce_op managed_gradient_accumulation communication_data_type dataloader_drop_last",
    ),
    "allgather_size": Support(Kind.EFFECT, instead="zero_optimization.allgather_bucket_size"),
    **_all(NeedlessTop, NEEDLESS),
    **_all(UnreadTop, UNREAD),
    "sequence_parallel_size": _later("every rank is data-parallel"),
    "sparse_gradients": _later("gradients of embeddings are reduced like all others"),
    "seq_parallel_communication_data_type": Support(Kind.GOVERNED, governor="sequence_parallel_size"),
    "optimizer": _only(None, remedy="call zeropp.initialize, which makes it, or make it in your code and pass it in"),
    "scheduler": _only(None, remedy="call zeropp.initialize, which makes it, or make it in your code and step it"),
}

SUPPORT: Mapping[type[Block], Mapping[str, Support]] = {
    Config: _TOP,
    ZeroConfig: _ZERO,
    OffloadParamConfig: _all(OffloadParamConfig, EFFECT),
    OffloadOptimizerConfig: {
        **_all(OffloadOptimizerConfig, EFFECT),
        "fast_init": NEEDLESS,
        "super_offload": _later(_BESIDE),
        "cpuadam_cores_perc": Support(Kind.GOVERNED, governor="super_offload"),
    },
    LeafModuleConfig: _all(LeafModuleConfig, EFFECT),
    LocoConfig: _all(LocoConfig, EFFECT),
    Fp16Config: {**_all(Fp16Config, EFFECT), "auto_cast": NEEDLESS},
    Bf16Config: {**_all(Bf16Config, EFFECT), "immediate_grad_update": NEEDLESS},
    AutocastConfig: _all(AutocastConfig, EFFECT),
    DataTypesConfig: _all(DataTypesConfig, EFFECT),
    ExtensionConfig: {
        **_each(
            EFFECT,
            "local_world_size host_memory_limit unit_numel unit_min_blocks hang_timeout warn_after static_graph "
            "lazy_step warm_up cast_inputs defer_cross_reduction weight_codec reduce_scatter share_communicators "
            "hadamard feedback secondary",
        ),
        **_each(BLOCK, "gradient_bits max_ctas"),
    },
    MaxCtasConfig: _all(MaxCtasConfig, EFFECT),
    GradientBitsConfig: _all(GradientBitsConfig, EFFECT),
    AioConfig: _all(AioConfig, EFFECT),
    CheckpointConfig: {
        **_each(EFFECT, "tag_validation load_universal"),
        "use_node_local_storage": _only(False, remedy="save to a directory that all nodes share; leave it at false"),
        "parallel_write": BLOCK,
        "writer": _later("zeropp.checkpoint.save(..., asynchronous=True) writes in the background"),
        "checkpoint_serialization": NEEDLESS,
    },
    ParallelWriteConfig: _all(ParallelWriteConfig, NEEDLESS),
    ActivationCheckpointingConfig: {
        **_all(ActivationCheckpointingConfig, EFFECT),
        **_each(NEEDLESS, "partition_activations number_checkpoints contiguous_memory_optimization"),
    },
    CompileConfig: _all(
        CompileConfig, _later("engine.compile() compiles the model; zeropp gathers weights outside of compiled graphs")
    ),
    OptimizerConfig: _governed(OptimizerConfig, "optimizer"),
    SchedulerConfig: _governed(SchedulerConfig, "scheduler"),
}


def accepted_values(model: type[Block], name: str) -> tuple[object, ...]:
    """Return the values of a limited field that this version implements."""
    return SUPPORT[model][name].accepts or (model.model_fields[name].default,)


def is_accepted(model: type[Block], name: str) -> bool:
    """Return True if a field accepts a value other than its default, with or without effect."""
    support = SUPPORT[model][name]
    inner = nested_block(model.model_fields[name])
    # zeropp.initialize implements these two blocks, although require_supported rejects them.
    if name in ("optimizer", "scheduler") or support.governor in ("optimizer", "scheduler"):
        return True
    if support.kind is Kind.BLOCK and inner is not None:
        return any(is_accepted(inner, each) for each in inner.model_fields)
    return support.kind in (Kind.EFFECT, Kind.NEEDLESS, Kind.UNREAD)


def is_recommended(model: type[Block], name: str) -> bool:
    """Return True if error messages may recommend a field: the field, or a field of its block, has an effect."""
    support = SUPPORT[model][name]
    inner = nested_block(model.model_fields[name])
    if support.kind is Kind.BLOCK and inner is not None:
        return any(is_recommended(inner, each) for each in inner.model_fields)
    idle = support.kind in (Kind.NEEDLESS, Kind.UNREAD) or (support.kind is Kind.EFFECT and support.instead)
    return is_accepted(model, name) and not idle


def require_stage_for_offload(config: Config) -> None:
    """Check that the stage allows the offload of optimizer states.

    Loading a configuration does not check this, because without an optimizer the block is irrelevant.

    Raises:
        ConfigError: `offload_optimizer` names a device in stage 0, or its ratio is below 1 in a stage other than 3.
    """
    zero = config.zero
    wrong = list[str]()
    states = zero.offload_optimizer
    if states is not None and states.device != "none" and zero.stage == 0:
        wrong.append(
            f'offload_optimizer.device "{states.device}" needs stage 1, 2 or 3, got stage 0; set such a stage, or the '
            'device to "none"'
        )
    if states is not None and states.ratio < 1 and zero.stage != 3:
        wrong.append(
            f"offload_optimizer.ratio {states.ratio:g} needs stage 3, got stage {zero.stage}; "
            "set stage 3 or leave ratio at 1"
        )
    if wrong:
        raise ConfigError([f"zero_optimization: {each}" for each in wrong])


def require_supported(config: Config) -> None:
    """Raise an error if a configuration has settings that this version rejects.

    Raises:
        ConfigError: the stage does not allow the offload of optimizer states.
        UnsupportedConfigError: settings are not implemented or contradict each other. The error lists all of them.
    """
    require_stage_for_offload(config)
    refused = [*_refused(config, ()), *_refused_types(config), *_refused_main(config)]
    if refused:
        raise UnsupportedConfigError(refused)


def _refused(block: Block, path: tuple[str, ...]) -> Iterator[str]:
    model = type(block)
    # Governed settings need no check, because the setting that governs them raises the error.
    for name, support in SUPPORT[model].items():
        # Check every field, not only the given ones. This also finds a default that is not implemented.
        value = getattr(block, name)
        # Name the documented key in messages, whichever key was used.
        here = (*path, spellings(name, model.model_fields[name])[0])
        if support.kind is Kind.BLOCK and isinstance(value, Block):
            yield from _refused(value, here)
        elif support.kind is Kind.LIMITED and value not in accepted_values(model, name):
            remedy = support.remedy or f"leave it at {value_text(model.model_fields[name].default)}"
            # The remedy is to construct the optimizer or scheduler in code, where "auto" is not a valid argument.
            if isinstance(value, NamedBlock) and value.unresolved:
                remedy += f', with values in place of "auto" for {", ".join(value.unresolved)}'
            if isinstance(value, OptimizerConfig) and value.type and (meant := meant_type(value.type)):
                # A class name such as FusedAdam is not an accepted type, so name the type that it means.
                remedy += f', with type "{meant}"' if meant.lower() != value.type.lower() else ""
            yield f"{'.'.join(here)}: {value_text(value)} is not in this version; {_with_reason(remedy, support)}"
        elif support.kind is Kind.OFF and switched_on(value):
            remedy = _with_reason(support.remedy, support)
            # Cut the value to 80 characters, because blocks such as data_efficiency may be pages long.
            yield f"{'.'.join(here)}: {value_text(value):.80} is not in this version; {remedy}"


def _with_reason(remedy: str, support: Support) -> str:
    return f"{remedy} ({support.instead})" if support.instead else remedy


def _refused_types(config: Config) -> Iterator[str]:
    """Iterate over error messages for dtypes in `data_types` that contradict other blocks."""
    computed = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else None
    named = config.data_types.param_dtype
    sums = config.data_types.grad_accum_dtype
    # Raise instead of choosing one: either could be meant, and the fp16 and bf16 blocks set more than a dtype.
    if named is not None and computed not in (None, named):
        yield f'data_types.param_dtype: "{named}" and {computed}.enabled say different things; leave one of them out'
    if named == "fp16" and computed is None:
        yield 'data_types.param_dtype: "fp16" needs a loss scale; set fp16.enabled, which has one'
    made = (computed or named or "fp32") if config.main_in_16_bits else "fp32"
    if sums not in (None, made):
        why = "since main weights are in 16 bits" if config.main_in_16_bits else "unless main weights are in 16 bits"
        yield f'data_types.grad_accum_dtype: "{sums}" is not in this version; sums are {made} {why}: set "{made}"'


def _refused_main(config: Config) -> Iterator[str]:
    """Iterate over error messages for settings that contradict main weights in 16 bits."""
    bf16 = config.bf16
    codec = config.zeropp.weight_codec
    main = bf16.bf16_master_weights_and_grads
    states = bf16.bf16_optimizer_states
    # PyTorch's optimizers create states in the dtype of the weights, so the two flags must be equal.
    if main != states:
        one = "bf16_master_weights_and_grads"
        other = "bf16_optimizer_states"
        one, other = (one, other) if main else (other, one)
        yield f"bf16.{one}: true without bf16.{other} is not in this version; set both, or neither"
    for block in ("bf16", "fp16"):
        if getattr(getattr(config, block), f"{block}_master_weights_and_grads") and not getattr(config, block).enabled:
            yield f"{block}.{block}_master_weights_and_grads: true without {block}.enabled has no meaning; set both"
    if config.main_in_16_bits and codec in ("delta4", "lossless"):
        yield (
            f'zeropp.weight_codec: "{codec}" sends changes of fp32 main weights, and main weights are in 16 bits; '
            "leave it out"
        )


def switched_on(value: object) -> bool:
    """Return True if the value of a feature's key switches the feature on.

    A block is on if any "enabled" key in it, at any depth, is true. A non-empty block without such a key is on, too.
    """
    if not isinstance(value, Mapping):
        return _is_true(value)
    # The blocks tensor_parallel and expert_parallel are switched on by a size above 1.
    sizes = [value[key] for key in ("autotp_size", "tp_size", "autoep_size") if key in value]
    if sizes:
        return any(isinstance(size, int | float) and size > 1 for size in sizes)
    said = list(_said(value))
    return any(map(_is_true, said)) if said else bool(value)


def _is_true(value: object) -> bool:
    # Templates and YAML files may contain strings such as "true", which DeepSpeed takes for true.
    return value.lower() in ("true", "yes", "on", "1") if isinstance(value, str) else value is True or value == 1


def _said(block: Mapping[object, object]) -> Iterator[object]:
    for key, value in block.items():
        if key == "enabled":
            yield value
        elif isinstance(value, Mapping):
            yield from _said(value)


def uncovered(model: type[Block]) -> list[str]:
    """Return the fields without an entry in SUPPORT, and entries without a field, for a block and all nested blocks."""
    # Compare in both directions, so that no entry outlives its field.
    wrong = set(model.model_fields) ^ set(SUPPORT.get(model, {}))
    found = [f"{model.__name__}.{name}" for name in sorted(wrong)]
    for field in model.model_fields.values():
        inner = nested_block(field)
        if inner is not None:
            found.extend(uncovered(inner))
    return found
