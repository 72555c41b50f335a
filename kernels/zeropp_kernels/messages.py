"""Functions that return new tensors: encode to a new message, decode to a new tensor, and views of codes and scales."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .checks import check_count, check_messages
from .ops import dequantize_, quantize_
from .wire import message_layout

__all__ = ["dequantize", "quantize", "split"]


def quantize(x: Tensor, *, bits: int = 8, count: int = 1, rotate: bool = False) -> Tensor:
    """Encode a tensor of any shape as quantized messages in a new tensor, as :func:`quantize_` does.

    Args:
        x: count * numel elements, float32, bfloat16 or float16, read in the order of their indices.
        bits: bits of a code, 8 or 4.
        count: number of messages that ``x`` is divided into.
        rotate: True to apply the Hadamard transform before encoding.

    Returns:
        The messages, uint8 [count * message_layout(numel, bits).nbytes], on the device of ``x``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, size or device.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x is {type(x).__name__}; expected a dense tensor")
    numel = check_count("count", count, x.numel(), "x")
    messages = torch.empty(message_layout(numel, bits).nbytes * count, dtype=torch.uint8, device=x.device)
    quantize_(x.reshape(-1), messages, count=count, bits=bits, rotate=rotate)
    return messages


def dequantize(
    messages: Tensor,
    size: int | Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    bits: int = 8,
    count: int = 1,
    rotate: bool = False,
) -> Tensor:
    """Decode quantized messages into a new tensor, as :func:`dequantize_` does.

    Args:
        messages: uint8 [count * message_layout(numel, bits).nbytes], at a multiple of 16 bytes.
        size: number of elements (count * numel), or shape, of the result.
        dtype: dtype of the result: float32, bfloat16 or float16.
        bits, count, rotate: as the messages were encoded.

    Returns:
        The values, a tensor of ``size`` and ``dtype`` on the device of the messages.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, size, device or alignment.
    """
    if not isinstance(messages, Tensor):
        raise TypeError(f"messages is {type(messages).__name__}; expected a dense tensor")
    shape = tuple(size) if isinstance(size, Sequence) else (size,)
    out = torch.empty(math.prod(shape), dtype=dtype, device=messages.device)
    dequantize_(messages, out, count=count, bits=bits, rotate=rotate)
    return out.view(shape)


def split(messages: Tensor, numel: int, bits: int, *, count: int = 1) -> tuple[Tensor, Tensor]:
    """Return the codes and scales in quantized messages as views: writing to a view changes the message.

    ``value = code * scale of its group``. If the messages were encoded with ``rotate=True``, this gives rotated values.
    The elements that fill up the last group are included.

    Args:
        messages: uint8 [count * message_layout(numel, bits).nbytes], starting at an even byte of its storage.
        numel: elements of each message.
        bits: bits of a code, 8 or 4.
        count: number of messages.

    Returns:
        codes for 8 bits: int8 [count, groups, 256].
        codes for 4 bits: uint8 [count, groups, 64]. The low half of byte j is element j of the group, the high half is
            element j + 64, each in two's complement.
        scales: bfloat16 [count, groups]. NaN for a group that had Inf or NaN.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype or size, or ``messages`` starts at an odd byte.
    """
    layout = message_layout(numel, bits)
    check_count("count", count, 0, "messages")
    check_messages("messages", messages, layout, count)
    # torch's own error for a bfloat16 view from an odd byte names no remedy. The check is skipped while compiling,
    # because torch.compile cannot evaluate storage_offset().
    if not is_compiling() and messages.storage_offset() % 2:
        raise ValueError("messages begins at an odd byte of its storage, and scales are two bytes each; copy it")
    width = message_layout(layout.group, bits).codes_nbytes
    rows = messages.view(count, layout.nbytes)
    if layout.groups:
        codes = rows[:, : layout.codes_nbytes].view(count, layout.groups, width)
        scales = rows[:, layout.scales_offset :].view(torch.bfloat16)[:, : layout.groups]
    else:
        # Messages without elements have no bytes, so their strides may not allow a view of another dtype.
        codes, scales = messages.new_empty(count, 0, width), messages.new_empty(count, 0, dtype=torch.bfloat16)
    return codes.view(torch.int8) if width == layout.group else codes, scales
