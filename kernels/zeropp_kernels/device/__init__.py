"""All operations as Triton kernels: the implementation for CUDA and ROCm tensors.

Under Triton's interpreter the kernels run on CPU tensors, for tests.
"""

from __future__ import annotations

from .copy import gather_, scatter_
from .delta import delta_apply_, delta_encode_
from .lossless import lossless_count_, lossless_decode_, lossless_encode_
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
    "quantize_",
    "quantize_tensors_",
    "reduce_",
    "reduce_quantize_",
    "scatter_",
    "sum_",
]
