"""The Triton side of each operation, on CUDA tensors or, under Triton's interpreter, on those of the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton comes for Linux only")

from zeropp_kernels import copy, delta, lossless, quantize, reduce

__all__ = ["TRITON"]

TRITON = SimpleNamespace(
    quantize_=quantize.quantize_,
    quantize_tensors_=quantize.quantize_tensors_,
    reduce_quantize_=quantize.reduce_quantize_,
    dequantize_=reduce.dequantize_,
    reduce_=reduce.reduce_,
    delta_encode_=delta.delta_encode_,
    delta_apply_=delta.delta_apply_,
    lossless_count_=lossless.lossless_count_,
    lossless_encode_=lossless.lossless_encode_,
    lossless_decode_=lossless.lossless_decode_,
    gather_=copy.gather_,
    scatter_=copy.scatter_,
)
