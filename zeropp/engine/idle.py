"""Settings that found nothing to do on this model and these ranks; the configuration alone cannot tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zeropp.codecs import BlockCodec
from zeropp.coded_buffer import CodedBuffer
from zeropp.config import Config
from zeropp.config.base import notify
from zeropp.paths import CodedGatherPath
from zeropp.unit import Unit

__all__ = ["warn_of_idle"]


def warn_of_idle(config: Config, units: Sequence[Unit]) -> None:
    """Warn, once for each setting."""
    for text in _idle(config, units):
        notify(text, UserWarning)


def _idle(config: Config, units: Sequence[Unit]) -> Iterator[str]:
    zero, own = config.zero, config.zeropp
    buffers = [buffer for unit in units for buffer in unit.buffers]
    legs = [leg for buffer in buffers if buffer.gradient is not None for leg in buffer.gradient.paths.straight.legs]
    if zero.zero_quantized_gradients and legs:
        hops = sorted({f"{leg.codec.name} over {leg.hop.size} ranks" for leg in legs})
        if own.hadamard and not any(isinstance(leg.codec, BlockCodec) for leg in legs):
            yield f"zeropp.hadamard has no effect: gradients travel as {', '.join(hops)}; set gradient_bits to 8 or 4"
        if zero.zeropp_loco_param is not None and all(leg.feedback is None for leg in legs):
            yield (
                f"zeropp_loco_param has no effect: gradients travel as {', '.join(hops)}, and feedback is "
                f'"{own.feedback}"; set gradient_bits to 8 or 4 where errors are to be fed back'
            )
    coded = zero.zero_quantized_nontrainable_weights and zero.stage > 0
    if coded and not any(isinstance(buffer, CodedBuffer) for buffer in buffers):
        yield (
            "zero_quantized_nontrainable_weights has no effect: the model has no frozen parameters; call "
            "requires_grad_(False) on them before wrapping"
        )
    quantized = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights or own.weight_codec == "int8"
    if own.secondary == "codes" and quantized and zero.stage == 3 and zero.zero_hpz_partition_size > 1:
        kept = [buffer.paths.refresh for buffer in buffers if buffer.paths.fetch is not None]
        if not any(isinstance(path, CodedGatherPath) and not path.decodes for path in kept):
            yield (
                f'zeropp.secondary "codes" has no effect: with zero_hpz_partition_size {zero.zero_hpz_partition_size} '
                "on these ranks no quantized weights are kept a second time; set it to the ranks of a node"
            )
