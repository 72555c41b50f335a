"""The dtypes that checkpoints hold, and how safetensors spells them."""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp.checkpoint.errors import CheckpointError

__all__ = ["DTYPES", "as_bytes", "dtype_code"]

# As safetensors spells them.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def dtype_code(dtype: torch.dtype, name: str) -> str:
    """The name of a dtype in safetensors.

    Args:
        dtype: of a tensor.
        name: of the tensor, for errors.

    Raises:
        CheckpointError: it has no name for it.
    """
    if dtype not in _CODES:
        raise CheckpointError(
            f"{name!r} is of {dtype}, which safetensors files cannot hold; they hold {', '.join(map(str, _CODES))}"
        )
    return _CODES[dtype]


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as uint8 [nbytes], the same memory."""
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)
