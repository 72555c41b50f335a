"""Quantization kernels for communication: encode tensors as messages, and decode, sum and copy.

The package uses torch and Triton only; it has no process groups and no modules.
"""

from __future__ import annotations

from .messages import dequantize, quantize, split
from .ops import (
    delta_apply_,
    delta_encode_,
    dequantize_,
    gather_,
    lossless_count_,
    lossless_decode_,
    lossless_encode_,
    quantize_,
    quantize_tensors_,
    reduce_,
    reduce_quantize_,
    scatter_,
    sum_,
)
from .table import BlockTable, block_table
from .version import __version__
from .wire import MOST_ESCAPES, LosslessLayout, MessageLayout, lossless_layout, message_layout, state_layout

__all__ = [
    "MOST_ESCAPES",
    "BlockTable",
    "LosslessLayout",
    "MessageLayout",
    "__version__",
    "block_table",
    "delta_apply_",
    "delta_encode_",
    "dequantize",
    "dequantize_",
    "gather_",
    "lossless_count_",
    "lossless_decode_",
    "lossless_encode_",
    "lossless_layout",
    "message_layout",
    "quantize",
    "quantize_",
    "quantize_tensors_",
    "reduce_",
    "reduce_quantize_",
    "scatter_",
    "split",
    "state_layout",
    "sum_",
]
