"""Notes of what a configuration sets without effect: keys that nothing reads, and settings that need others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from zeropp.config.base import is_auto, notify_once
from zeropp.config.support import SUPPORT, Kind, switched_on
from zeropp.config.top import Config

# How often progress is printed is no matter of what is trained, and every second file says it.
_SILENT = ("steps_per_print",)


def warn_without_effect(given: Mapping[str, object], config: Config, ignored: Mapping[str, object], name: str) -> None:
    """Warns once, naming all keys that are set but that nothing reads.

    Args:
        given: the configuration as the user wrote it.
        config: made of it.
        ignored: keys that were left out of `config`, with their values.
        name: where it was loaded from.
    """
    unread = {
        key: getattr(config, key)
        # The top level alone has keys of this kind.
        for key, support in SUPPORT[Config].items()
        if support.kind is Kind.UNREAD and key not in _SILENT
    }
    keys = [key for key, value in {**unread, **ignored}.items() if not _changes_nothing(value)]
    if keys:
        # Such as TRL writes beside the block.
        why = "; what belongs in a block is read from inside that block only" if any("." in key for key in keys) else ""
        notify_once(f"these keys of {name} have no effect: {', '.join(keys)}{why}")
    for text in (*_ineffective_offload(given, config), *_ineffective_alone(config)):
        notify_once(text)


def _ineffective_offload(given: Mapping[str, object], config: Config) -> Iterator[str]:
    """A device for weights in a stage in which they have none: the block in `config` has "none" in place of it."""
    zero = given.get("zero_optimization")
    if config.zero.stage == 3 or not isinstance(zero, Mapping):
        return
    block = zero.get("offload_param")
    device = block.get("device") if isinstance(block, Mapping) else "cpu" if zero.get("cpu_offload_param") else None
    if device not in (None, "none") and not is_auto(device):
        yield (
            f'zero_optimization.offload_param.device "{device}" has no effect in stage {config.zero.stage}: it acts in '
            "stage 3 alone, as in DeepSpeed"
        )


def _ineffective_alone(config: Config) -> Iterator[str]:
    """Settings that have an effect only together with others, which are not set."""
    zero, own = config.zero, config.zeropp
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        if zero.stage < 3 and getattr(zero, key) > 1:
            yield f"zero_optimization.{key} {getattr(zero, key)} has no effect in stage {zero.stage}; set stage 3"
    for key in ("offload_optimizer", "offload_param"):
        block = getattr(zero, key)
        # One that says "none" means it.
        if block is not None and block.model_fields_set and "device" not in block.model_fields_set:
            named = ", ".join(sorted(block.model_fields_set))
            yield f'{key}.{named} has no effect: {key}.device is not given; set it to "cpu" or "nvme"'
    quantized = zero.zero_quantized_weights or own.weight_codec == "int8"
    # A secondary shard of frozen weights can be codes, too.
    quantized |= zero.zero_quantized_nontrainable_weights
    if (quantized or own.weight_codec is not None) and zero.stage == 0:
        yield "weights are not encoded in stage 0, where they are never sent; set stage 1, 2 or 3"
    # Codes are cached where there are both: codes that arrive, and a secondary shard for them.
    if own.secondary == "codes" and not (quantized and zero.stage == 3 and zero.zero_hpz_partition_size > 1):
        yield (
            'zeropp.secondary "codes" has no effect; it needs stage 3, zero_quantized_weights and '
            "zero_hpz_partition_size"
        )
    # These only say how gradients are quantized, not that they are.
    if not zero.zero_quantized_gradients:
        given = {
            "zero_optimization.zeropp_loco_param": zero.zeropp_loco_param is not None,
            "zeropp.hadamard": own.hadamard,
            "zeropp.gradient_bits": own.gradient_bits is not None,
        }
        for key in (key for key, is_given in given.items() if is_given):
            yield f"{key} has no effect without zero_quantized_gradients"
    if own.feedback == "both" and zero.zeropp_loco_param is None:
        yield 'zeropp.feedback "both" has no effect without zeropp_loco_param'


def _changes_nothing(value: object) -> bool:
    if isinstance(value, Mapping):
        # Files carry whole blocks that are switched off; to warn of them would be noise.
        return not switched_on(value)
    # Infinite steps between two messages are none.
    return not value or is_auto(value) or value == math.inf
