"""The same work by other libraries: DeepSpeed's CUDA quantizer, and torchao's functions compiled by torch.compile.

Bandwidths of all contenders count the bytes that our operation must move, so they compare times. DeepSpeed moves more,
because it has float32 scales. It reads and writes float16 values. torchao also has float32 scales, and keeps each 4-bit
code in a byte of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.kernels.eager import GROUP
from bench.kernels.operations import BETA, Run, values

__all__ = ["CODECS", "PEERS", "Codec", "run_of"]

LEVELS = {8: 127, 4: 7}
TORCHAO = ("choose_qparams_affine", "quantize_affine", "dequantize_affine")


@dataclass(frozen=True)
class Codec:
    """Another library's functions for one operation.

    Attributes:
        bits: width of a code.
        x: values to encode; a row is a group.
        encode: function from values to codes and scales.
        decode: function from codes and scales to values.
    """

    bits: int
    x: Tensor
    encode: Callable[[Tensor], Sequence[Tensor]]
    decode: Callable[[Tensor, Tensor], Tensor]

    def is_right(self) -> bool:
        """Return True if decoded values differ from ``x`` by at most 1.25 / 127 (8 bits) or 1.25 / 7 of the maximum.

        One step is lost if a library clips the maximum. The rest is for rounding to 16 bits.
        """
        x = self.x.float()
        apart = (self.decode(*self.encode(self.x)).view_as(x).float() - x).abs().amax(1)
        return bool((apart <= 1.25 / LEVELS[self.bits] * x.abs().amax(1)).all())


def run_of(name: str, codec: Codec) -> Run:
    """Return the call that does the work of our operation ``name``."""
    if not name.startswith("dequantize"):
        return lambda: codec.encode(codec.x)
    codes, scales = codec.encode(codec.x)
    return lambda: [codec.decode(codes, scales)]


def bits_of(name: str) -> int:
    return 8 if "int8" in name else 4


def need(module: Any, *functions: str) -> None:
    lacking = [name for name in functions if not hasattr(module, name)]
    if lacking:
        pytest.skip(f"the installed {module.__name__} has no {', '.join(lacking)}")


@functools.cache
def quantizer() -> Any:
    """Return DeepSpeed's CUDA extension, which is built at its first use, or the error if it cannot be built."""
    from deepspeed.ops.op_builder import QuantizerBuilder

    try:
        return QuantizerBuilder().load()
    except Exception as error:
        return error


def deepspeed(name: str, numel: int, device: str) -> Codec:
    """Return the codec of DeepSpeed's quantizer; for error feedback that of LoCo, whose error is kept in 8 bits.

    The calls for LoCo are those of DeepSpeed's ``all_to_all_loco_quant_reduce``, with one node of one device. DeepSpeed
    0.17.6 has LoCo, and 0.19.8 does not.
    """
    pytest.importorskip("deepspeed", reason="deepspeed is not installed", exc_type=ImportError)
    if device != "cuda":
        pytest.skip("DeepSpeed's quantizer needs CUDA")
    module, bits = quantizer(), bits_of(name)
    if isinstance(module, Exception):
        pytest.skip(f"DeepSpeed's quantizer cannot be built: {module}")
    need(module, "quantize", "dequantize")
    x = values(numel, device, torch.float16).view(-1, GROUP[bits])
    groups, way = len(x), module.Symmetric

    def encode(x: Tensor) -> Sequence[Tensor]:
        return module.quantize(x, groups, bits, way)

    def decode(codes: Tensor, scales: Tensor) -> Tensor:
        return module.dequantize(codes, scales, groups, bits, way)

    if "feedback" not in name:
        return Codec(bits, x, encode, decode)
    need(module, "loco_swizzle_quant")
    kept = module.quantize(torch.zeros_like(x), groups, 8, way)

    def encode_with_feedback(x: Tensor) -> Sequence[Tensor]:
        nonlocal kept
        error = module.dequantize(*kept, groups, 8, way)
        made = module.loco_swizzle_quant(x, error, BETA, groups, bits, way, 1, 1, 1)
        kept = module.quantize(error, groups, 8, way)
        return made

    return Codec(bits, x, encode_with_feedback, decode)


def torchao(name: str, numel: int, device: str) -> Codec:
    """Return torchao's symmetric codec in our groups and with our levels, compiled."""
    reason = "torchao is not installed"
    affine = pytest.importorskip("torchao.quantization.quant_primitives", reason=reason, exc_type=ImportError)
    need(affine, "MappingType", *TORCHAO)
    bits = bits_of(name)
    x = values(numel, device).view(-1, GROUP[bits])
    block, most = (1, GROUP[bits]), LEVELS[bits]
    symmetric = affine.MappingType.SYMMETRIC

    def encode(x: Tensor) -> Sequence[Tensor]:
        scales, zeros = affine.choose_qparams_affine(
            x, symmetric, block, torch.int8, -most, most, scale_dtype=torch.float32, zero_point_dtype=torch.int32
        )
        return affine.quantize_affine(x, block, scales, zeros, torch.int8, -most, most), scales

    def decode(codes: Tensor, scales: Tensor) -> Tensor:
        return affine.dequantize_affine(codes, block, scales, None, torch.int8, -most, most, output_dtype=x.dtype)

    torch._dynamo.reset()
    return Codec(bits, x, torch.compile(encode, dynamic=False), torch.compile(decode, dynamic=False))


CODECS = {"DeepSpeed": deepspeed, "torchao": torchao}
_BOTH = ("quantize int8", "quantize int4", "dequantize int8", "dequantize int4")
PEERS = [*((name, by) for by in CODECS for name in _BOTH), ("feedback + int4", "DeepSpeed")]
"""Pairs of the name of our operation and the other library."""
