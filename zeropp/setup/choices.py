"""From a configuration to the values that the rooms below take: levels, codecs, dtypes, tiers, limits.

Stages, hpZ, MiCS and ZeRO++ end here. The rooms below know levels, codecs and sizes, and see no configuration.
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
from zeropp.params.gradient import LossScaling
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
    """Levels for a configuration.

    Args:
        config: stage, group sizes and deferral are read.
        world: number of ranks.
        local: ranks per node.

    Raises:
        ConfigError: group sizes do not divide each other; with the key and the sizes that would do.
    """
    zero = config.zero
    states = group = world
    if zero.stage == 3 and zero.mics_shard_size > 0:
        states = group = _fitting("mics_shard_size", zero.mics_shard_size, world, [local])
    size = zero.zero_hpz_partition_size
    # A multiple of the shard group makes no second copy: the first is spread over as few ranks already, or fewer.
    if zero.stage == 3 and size > 1 and (size < states or size % states):
        group = _fitting("zero_hpz_partition_size", size, states, [local, states])
    # The node is a level even where nothing is spread over it, so that hop by hop fast links and slow ones stay apart.
    chain = build_chain(world, [local, states, group])
    if zero.stage == 3:
        cached = group if group < states else None
        gradients = states
    else:
        # Below stage 3 weights stay whole between uses. Stages 0 and 1 hold whole gradients between micro-batches;
        # stage 2 sends each backward's all the way.
        states = world if zero.stage > 0 else 1
        cached = 1
        gradients = world if zero.stage == 2 else 1
    if config.zeropp.defer_cross_reduction:
        # Deferral trades memory for traffic between nodes. Stages 0 and 1, which hold more already, stay as they are.
        gradients = min(gradients, local)
    in_groups = zero.stage == 3 and states < world
    return Mode(chain, states, cached, gradients, single_hop=in_groups and not zero.mics_hierarchical_params_gather)


def _fitting(key: str, size: int, most: int, others: list[int]) -> int:
    """``size``, if it and the others divide each other."""
    # Dividing ``most`` is not enough for a chain: of two sizes, neither may cut through a group of the other.
    legal = [n for n in range(1, most + 1) if most % n == 0 and all(n % m == 0 or m % n == 0 for m in others)]
    if size not in legal:
        raise ConfigError(
            f"{key} is {size}; with {others[0]} ranks to a node it must be one of {legal}, since the sizes of groups "
            f"divide each other up to {most} ranks"
        )
    return size


# Units.


def choose_unit_options(config: Config) -> UnitOptions:
    """The configuration's settings of the cut into units."""
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
    """Codecs for a configuration."""
    zero, extension = config.zero, config.zeropp
    bits = None
    if zero.zero_quantized_gradients:
        bits = (8, 4)
        if extension.gradient_bits is not None:
            bits = (extension.gradient_bits.local, extension.gradient_bits.cross)
    codec = extension.weight_codec
    # Stage 0 has whole weights everywhere and sends none: codecs of weights have nothing to do there.
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
    """See that a codec of differences has something to send differences to.

    Raises:
        ConfigError: the levels of ``mode``, which the configuration asks for, leave it nothing.
    """
    codec = encoding.differences
    # A difference needs a base at the receiver. With nothing cached between uses there is none, and whole
    # values would travel silently; one rank sends nothing in any case.
    if codec is not None and mode.cached is None and mode.chain.world > 1:
        smaller = f"set it to less than {mode.states}, or " if mode.states > 2 else ""
        raise ConfigError(
            f'zeropp.weight_codec "{codec}" sends differences to a second copy of the weights, and '
            f"zero_hpz_partition_size {config.zero.zero_hpz_partition_size} makes none: no more than {mode.states} "
            f"ranks share the first one; {smaller}leave weight_codec out"
        )


def choose_dtypes(config: Config) -> DtypeOptions:
    """The dtypes of weights, gradients and their messages."""

    def named(name: str | None) -> torch.dtype | None:
        return None if name is None else DTYPES[name]

    # Under a block that is enabled, `param_dtype` is refused if it says anything else.
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
    """Make sure that messages can carry what the model computes with.

    Raises:
        ValueError: they cannot.
    """
    # Sums are float32 whatever travels, but each rank's own gradient is rounded before it is sent.
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
                f"{' or '.join(map(dtype_name, BASES[codec]))}, and parameter {name!r} is computed with in "
                f'{dtype_name(dtype)}; set {{"bf16": {{"enabled": true}}}}, or leave weight_codec out'
            )


def choose_loss_scaling(config: Config) -> LossScaling:
    """The loss scale, and how it moves."""
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


# Tiers.


def choose_tier_options(config: Config) -> TierOptions:
    """The parts that are kept off the device, with their staging buffers and file I/O."""
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
    return TierOptions(stepped, kept, io)


# Communicators and the engine.


def choose_sharing(config: Config, device: torch.device) -> Sharing:
    """The communicators that may be shared: see rule 2 in [Note: communicators]."""
    # With offload a thread launches the work of each comm stream; on CPU it does all of it.
    ordered = not config.zero.overlap_comm or (device.type == "cuda" and not config.offloads)
    return Sharing(kinds=ordered, engines=ordered and config.zeropp.share_communicators)


def choose_ctas_limits(config: Config, processors: int) -> Ctas:
    """Limits of thread blocks on a card with so many SMs."""
    asked = config.zeropp.max_ctas
    return choose_ctas(processors, asked.local, asked.cross)


def choose_engine_options(config: Config, dtypes: DtypeOptions) -> EngineOptions:
    """The settings of passes, and of saving and loading."""
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
