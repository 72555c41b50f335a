"""All operations in plain torch: the implementation for CPU tensors, and the expected results in kernel tests."""

from __future__ import annotations

from .copy import gather_, scatter_
from .delta import delta_apply_, delta_encode_
from .lossless import lossless_count_, lossless_decode_, lossless_encode_
from .plain import pack_, squared_norm, sum_messages_
from .quantize import quantize_, quantize_tensors_, reduce_quantize_
from .reduce import dequantize_, reduce_, sum_

__all__ = [
    "delta_apply_",
    "delta_encode_",
    "dequantize_",
    "gather_",
    "lossless_count_",
    "lossless_decode_",
    "lossless_encode_",
    "pack_",
    "quantize_",
    "quantize_tensors_",
    "reduce_",
    "reduce_quantize_",
    "scatter_",
    "squared_norm",
    "sum_",
    "sum_messages_",
]
