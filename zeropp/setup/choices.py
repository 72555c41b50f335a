"""Conversion of the configuration to the values that the packages below take: levels, codecs, dtypes, tiers, limits.

Stages, hpZ, MiCS and ZeRO++ are named only up to here. The packages below see levels, codecs and sizes instead.
"""

from __future__ import annotations

import torch

from zeropp.comm.communicators import Ctas, Sharing, choose_ctas
from zeropp.config import Config, ConfigError
from zeropp.engine.engine_state import EngineOptions
from zeropp.offload.tier_choice import Offload, TierOptions
from zeropp.offload.transfer import IoOptions
from zeropp.order.prefetch import Limits
from zeropp.params.dtypes import DTYPES, ComputedWith, DtypeOptions
from zeropp.params.loss_scale import LossScaling
from zeropp.partition.levels import Mode, build_chain
from zeropp.partition.units import UnitOptions
from zeropp.wire.codecs import BlockCodec, dtype_name
from zeropp.wire.differences import BASES
from zeropp.wire.encoding import Encoding

__all__ = [
    "choose_ctas_limits",
    "choose_dtypes",
    "choose_encoding",
    "choose_engine_options",
    "choose_loss_scaling",
    "choose_mode",
    "choose_sharing",
    "choose_tier_options",
    "choose_unit_options",
    "require_base",
    "require_dtypes",
]


# Levels.


def choose_mode(config: Config, world: int, local: int) -> Mode:
    """Return the levels of weights, gradients and optimizer states for a configuration.

    Args:
        config: configuration.
        world: number of ranks.
        local: number of ranks per node.

    Raises:
        ConfigError: group sizes do not divide each other; the message has the key and the sizes that are possible.
    """
    zero = config.zero
    states = group = world
    if zero.stage == 3 and zero.mics_shard_size > 0:
        states = group = _fitting("mics_shard_size", zero.mics_shard_size, world, [local])
    size = zero.zero_hpz_partition_size
    # If hpZ's size is a multiple of the shard group, the shards are spread over as few ranks already. A second copy
    # would save no traffic.
    if zero.stage == 3 and size > 1 and (size < states or size % states):
        group = _fitting("zero_hpz_partition_size", size, states, [local, states])
    # The node size is always a level, so that no hop mixes intra-node and inter-node links.
    chain = build_chain(world, [local, states, group])
    if zero.stage == 3:
        cached = group if group < states else None
        gradients = states
    else:
        # Below stage 3, whole weights stay between uses. Stages 0 and 1 sum whole gradients over micro-batches. Stage 2
        # reduces the gradients of each backward completely.
        states = world if zero.stage > 0 else 1
        cached = 1
        gradients = world if zero.stage == 2 else 1
    if config.zeropp.defer_cross_reduction:
        # Deferral sums gradients inside a node and sends the sum between nodes once per window, at the cost of memory.
        # Stages 0 and 1 already keep whole gradients, so nothing changes for them.
        gradients = min(gradients, local)
    in_groups = zero.stage == 3 and states < world
    return Mode(chain, states, cached, gradients, single_hop=in_groups and not zero.mics_hierarchical_params_gather)


def _fitting(key: str, size: int, most: int, others: list[int]) -> int:
    """Return ``size`` if it and the other group sizes divide each other; raise ConfigError otherwise."""
    # A divisor of ``most`` is not enough: of any two group sizes, one must divide the other.
    legal = [n for n in range(1, most + 1) if most % n == 0 and all(n % m == 0 or m % n == 0 for m in others)]
    if size not in legal:
        raise ConfigError(
            f"{key} is {size}; with {others[0]} ranks to a node it must be one of {legal}, since the sizes of groups "
            f"divide each other up to {most} ranks"
        )
    return size


# Units.


def choose_unit_options(config: Config) -> UnitOptions:
    """Return the settings that decide how parameters are grouped into units."""
    zero, leaf = config.zero, config.zero.leaf_module
    return UnitOptions(
        unit_numel=config.zeropp.unit_numel,
        unit_min_blocks=config.zeropp.unit_min_blocks,
        param_persistence_threshold=zero.param_persistence_threshold,
        model_persistence_threshold=zero.model_persistence_threshold,
        module_granularity_threshold=zero.module_granularity_threshold,
        leaf_classes=tuple(leaf.classes),
        leaf_names=tuple(leaf.names),
        leaf_suffixes=tuple(leaf.name_suffixes),
    )


# Codecs and dtypes.


def choose_encoding(config: Config) -> Encoding:
    """Return the codecs for a configuration."""
    zero, extension = config.zero, config.zeropp
    bits = None
    if zero.zero_quantized_gradients:
        bits = (8, 4)
        if extension.gradient_bits is not None:
            bits = (extension.gradient_bits.local, extension.gradient_bits.cross)
    codec = extension.weight_codec
    # Stage 0 never gathers weights, so weight codecs have no effect there.
    quantized = zero.zero_quantized_weights or codec == "int8"
    loco = zero.zeropp_loco_param
    return Encoding(
        weights=BlockCodec(8) if quantized and zero.stage > 0 else None,
        frozen=BlockCodec(8) if zero.zero_quantized_nontrainable_weights and zero.stage > 0 else None,
        differences=codec if codec in BASES and zero.stage > 0 else None,
        cache_codes=extension.secondary == "codes",
        bits=bits,
        rotate=extension.hadamard,
        feedback=extension.feedback if loco is not None else None,
        beta=loco.err_beta if loco is not None else 0.0,
        reduce_scatter=extension.reduce_scatter,
    )


def require_base(config: Config, encoding: Encoding, mode: Mode) -> None:
    """Raise an error if a codec of differences has no cached weights as its base.

    Args:
        config: configuration, for the message.
        encoding: codecs.
        mode: levels; ``mode.cached`` is the level of the cached weights.

    Raises:
        ConfigError: several ranks, a codec of differences, and no cached weights.
    """
    codec = encoding.differences
    # Without a base at the receiver, whole weights would be sent, without a notice. One rank sends nothing, so there it
    # does not matter.
    if codec is not None and mode.cached is None and mode.chain.world > 1:
        smaller = f"set it to less than {mode.states}, or " if mode.states > 2 else ""
        raise ConfigError(
            f'zeropp.weight_codec "{codec}" sends weights as differences from a second copy, and '
            f"zero_hpz_partition_size {config.zero.zero_hpz_partition_size} makes none: no more than {mode.states} "
            f"ranks share the first one; {smaller}leave weight_codec out"
        )


def choose_dtypes(config: Config) -> DtypeOptions:
    """Return the dtypes of weights, gradients and messages for a configuration."""

    def named(name: str | None) -> torch.dtype | None:
        return None if name is None else DTYPES[name]

    # If the fp16 or bf16 block is enabled, the configuration refuses a `param_dtype` that differs.
    compute = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else config.data_types.param_dtype
    autocast = config.torch_autocast
    safe = autocast.lower_precision_safe_modules
    return DtypeOptions(
        compute=named(compute),
        message=named(config.communication_data_type),
        main_as_computed=config.main_in_16_bits,
        autocast=DTYPES[autocast.dtype] if autocast.enabled else None,
        autocast_classes=None if safe is None else tuple(safe),
        kept_float32=tuple(config.data_types.keep_in_fp32_modules or ()),
    )


def require_dtypes(config: Config, encoding: Encoding, parameters: ComputedWith) -> None:
    """Raise an error if messages cannot carry the dtype that the model computes in.

    Args:
        config: configuration.
        encoding: codecs.
        parameters: each parameter by name, with the dtype that the model computes with.

    Raises:
        ValueError: fp16 messages without a loss scale, or differences of weights in a dtype without such a codec.
    """
    # Sums are always float32, but each rank rounds its own gradient to the message dtype before it sends it.
    if config.communication_data_type == "fp16" and not config.loss_scaling.enabled:
        raise ValueError(
            'communication_data_type "fp16" needs a loss scale, without which gradients overflow or vanish; enable the '
            'fp16 block, or set "bf16" or "fp32"'
        )
    codec = encoding.differences
    if codec is None:
        return
    for name, (parameter, dtype) in parameters.items():
        if parameter.requires_grad and dtype not in BASES[codec]:
            raise ValueError(
                f'zeropp.weight_codec "{codec}" sends differences of weights in '
                f"{' or '.join(map(dtype_name, BASES[codec]))}, and parameter {name!r} has the compute dtype "
                f'{dtype_name(dtype)}; set {{"bf16": {{"enabled": true}}}}, or leave weight_codec out'
            )


def choose_loss_scaling(config: Config) -> LossScaling:
    """Return the settings of the loss scale for a configuration."""
    block = config.loss_scaling
    return LossScaling(
        enabled=block.enabled,
        loss_scale=block.loss_scale,
        initial_scale_power=block.initial_scale_power,
        loss_scale_window=block.loss_scale_window,
        hysteresis=block.hysteresis,
        consecutive_hysteresis=block.consecutive_hysteresis,
        min_loss_scale=block.min_loss_scale,
    )


# Storage tiers.


def choose_tier_options(config: Config) -> TierOptions:
    """Return the storage tiers of offloaded tensors, with the sizes of staging buffers and the file I/O options."""
    states, weights, aio = config.zero.offload_optimizer, config.zero.offload_param, config.aio
    stepped = kept = None
    if states is not None and config.steps_on_host:
        path = str(states.nvme_path) if states.device == "nvme" else None
        numel = config.zero.sub_group_size
        stepped = Offload(path, numel, states.buffer_count, states.pin_memory, ratio=states.ratio)
    if weights is not None and weights.device != "none":
        path = str(weights.nvme_path) if weights.device == "nvme" else None
        kept = Offload(
            path, weights.buffer_size, weights.buffer_count, weights.pin_memory, max_in_cpu=weights.max_in_cpu
        )
    io = IoOptions(
        aio.block_size, aio.queue_depth, aio.intra_op_parallelism, aio.single_submit, aio.overlap_events, aio.use_gds
    )
    quantized = config.zero.zero_quantized_weights or config.zeropp.weight_codec == "int8"
    return TierOptions(stepped, kept, io, gathers_main=not (config.bf16.enabled or config.fp16.enabled or quantized))


# Communicators and engine.


def choose_sharing(config: Config, device: torch.device) -> Sharing:
    """Return which kinds of work and which engines may share communicators: see rule 2 in [Note: communicators]."""
    # Sharing needs one order of launches. With offload, or on CPU, a thread per comm stream launches work, so the order
    # of two streams is not fixed.
    ordered = not config.zero.overlap_comm or (device.type == "cuda" and not config.offloads)
    return Sharing(kinds=ordered, engines=ordered and config.zeropp.share_communicators)


def choose_ctas_limits(config: Config, processors: int) -> Ctas:
    """Return the limits of thread blocks of NCCL kernels for a GPU with ``processors`` SMs."""
    asked = config.zeropp.max_ctas
    return choose_ctas(processors, asked.local, asked.cross)


def choose_engine_options(config: Config, dtypes: DtypeOptions) -> EngineOptions:
    """Return the engine's settings of forward, backward, saving and loading."""
    zero, extension = config.zero, config.zeropp
    return EngineOptions(
        limits=Limits(prefetch=zero.prefetch_bucket_size, live=zero.max_live_parameters, reuse=zero.max_reuse_distance),
        input_dtype=dtypes.compute if extension.cast_inputs else None,
        static_graph=extension.static_graph,
        log_relearning=zero.log_trace_cache_warnings,
        overlap=bool(zero.overlap_comm),
        offloads=config.offloads,
        gathers_16_bit_on_save=zero.gather_16bit_weights_on_model_save,
        loads_from_float32=zero.load_from_fp32_weights,
        loads_in_turns=zero.pipeline_loading_checkpoint,
    )
