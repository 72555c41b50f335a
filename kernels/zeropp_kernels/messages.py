"""Messages as values: functions that allocate what they return, and what lies where in a message."""

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
    """:func:`quantize_` of any shape into new memory: uint8 [count * message_layout(numel, bits).nbytes].

    Args:
        x: count * numel elements of float32, bfloat16 or float16, read in the order of their indices.
        bits, count, rotate: as in :func:`quantize_`.
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
    """:func:`dequantize_` into new memory, on the device of the messages.

    Args:
        messages: uint8 [count * message_layout(numel, bits).nbytes].
        size: of what is returned, count * numel elements: their number, or a shape.
        dtype: float32, bfloat16 or float16.
        bits, count, rotate: as they were encoded.
    """
    if not isinstance(messages, Tensor):
        raise TypeError(f"messages is {type(messages).__name__}; expected a dense tensor")
    shape = tuple(size) if isinstance(size, Sequence) else (size,)
    out = torch.empty(math.prod(shape), dtype=dtype, device=messages.device)
    dequantize_(messages, out, count=count, bits=bits, rotate=rotate)
    return out.view(shape)


def split(messages: Tensor, numel: int, bits: int, *, count: int = 1) -> tuple[Tensor, Tensor]:
    """(codes, scales) of ``count`` messages of ``numel`` elements each, as views; what is written to them is sent.

    A value is its code times the scale of its group; where messages were rotated, a value before the way back. What
    the last group is filled up with is there, too.

    Args:
        messages: uint8 [count * message_layout(numel, bits).nbytes], from an even byte of its storage on.

    Returns:
        8 bits: codes int8 [count, groups, 256].
        4 bits: codes uint8 [count, groups, 64]; byte j holds element j of the group in its low half and element j + 64
        in its high half, each as a two's complement.
        scales: bfloat16 [count, groups]; NaN for a group that was not finite.
    """
    layout = message_layout(numel, bits)
    check_count("count", count, 0, "messages")
    check_messages("messages", messages, layout, count)
    # The compiler has no answer to this, and torch itself refuses such a view.
    if not is_compiling() and messages.storage_offset() % 2:
        raise ValueError("messages begins at an odd byte of its storage, and scales are two bytes each; copy it")
    width = message_layout(layout.group, bits).codes_nbytes
    rows = messages.view(count, layout.nbytes)
    if layout.groups:
        codes = rows[:, : layout.codes_nbytes].view(count, layout.groups, width)
        scales = rows[:, layout.scales_offset :].view(torch.bfloat16)[:, : layout.groups]
    else:
        # Nothing has nothing to share, and its strides suit no view.
        codes, scales = messages.new_empty(count, 0, width), messages.new_empty(count, 0, dtype=torch.bfloat16)
    return codes.view(torch.int8) if width == layout.group else codes, scales
