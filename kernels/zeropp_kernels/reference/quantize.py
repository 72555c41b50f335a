"""Values -> messages, from a flat buffer, from tensors where they lie, or from the sum of other messages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..table import in_memory_order
from ..wire import MessageLayout, message_layout, state_layout
from .blocks import Part, decode_, encode_, parts, rotate_, scratch, tiles
from .reduce import sum_tile_
from .stats import scale_number

__all__ = ["quantize_", "quantize_tensors_", "reduce_quantize_"]

# fill(values [n] float32, start, stop): write elements from ``start`` on, before ``stop``; returns how many.
Fill = Callable[[Tensor, int, int], int]


def _keep_error(part: Part, error: Tensor, lost: Tensor, spoilt: Tensor | None, beta: float, reset: bool) -> None:
    """Average what was lost into the error, and keep that as int8; ``spoilt`` groups keep theirs, or zeros."""
    # Three roundings, in this order; 1 - beta is a Python float, rounded once.
    error.mul_(beta).add_(lost.mul_(1.0 - beta))
    if spoilt is None:
        encode_(error, part, 8)
        return
    # Copies, since the encoding below overwrites every group. A reset leaves zeros of them.
    codes, scales = (each[spoilt].mul_(not reset) for each in (part.codes, part.scales))
    encode_(error, part, 8)
    part.codes[spoilt] = codes
    part.scales[spoilt] = scales


def _encode_tile(values: Tensor, message: Part, bits: int, state: Part | None, beta: float, reset: bool) -> None:
    """Encode a tile, with feedback where there is a state."""
    if state is None:
        encode_(values, message, bits)
        return
    error = scratch("error", *values.shape)
    # Not decoded: a state may hold anything then.
    if reset:
        error.zero_()
    else:
        decode_(state, error, 8)
    values.add_(error)
    spoilt = encode_(values, message, bits)
    decoded = scratch("decoded", *values.shape)
    # What receivers will have, from the codes themselves.
    decode_(message, decoded, bits)
    _keep_error(state, error, values.sub_(decoded), spoilt, beta, reset)


def _encode_all(
    fill: Fill, messages: Tensor, layout: MessageLayout, count: int, rotate: bool, state: Tensor | None, beta: float,
    reset: bool,
) -> None:  # fmt: skip
    """Walk over ``count`` messages tile by tile; ``fill`` gives the values."""
    # 8-bit codes, in groups of the message: a tile of one is a tile of the other.
    kept = state_layout(layout.numel, layout.bits)
    states = parts(state, kept, count) if state is not None else [None] * count
    for index, (message, error) in enumerate(zip(parts(messages, layout, count), states, strict=True)):
        for first, last in tiles(layout):
            values = scratch("values", last - first, layout.group)
            flat = values.view(-1)
            present = fill(flat, index * layout.numel + first * layout.group, (index + 1) * layout.numel)
            if present < flat.numel():
                # What is missing of the last group must not raise its scale.
                flat[present:].zero_()
            if rotate:
                rotate_(values)
            # After the rotation: errors are those of rotated values.
            tile_error = error.rows(first, last) if error is not None else None
            _encode_tile(values, message.rows(first, last), layout.bits, tile_error, beta, reset)
        # Slots behind the last group travel, too.
        message.scales[layout.groups :].zero_()


def quantize_(
    x: Tensor, messages: Tensor, count: int, bits: int, rotate: bool, state: Tensor | None, beta: float, reset: bool
) -> None:
    """See :func:`zeropp_kernels.quantize_`."""

    def fill(values: Tensor, start: int, stop: int) -> int:
        source = x[start : min(stop, start + values.numel())]
        values[: source.numel()].copy_(source)
        return source.numel()

    layout = message_layout(x.numel() // count, bits)
    _encode_all(fill, messages, layout, count, rotate, state, beta, reset)


def quantize_tensors_(
    tensors: Sequence[Tensor], host: Tensor, entries: Tensor, owners: Tensor, numel: int, messages: Tensor, count: int,
    bits: int, rotate: bool, state: Tensor | None, beta: float, reset: bool,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.quantize_tensors_`."""
    flat = [in_memory_order(tensor) for tensor in tensors]
    # ``entries`` and ``owners`` are for kernels, which have no list to search.
    offsets = host[2].tolist()

    def fill(values: Tensor, start: int, stop: int) -> int:
        # Gaps between tensors count as zeros.
        values.zero_()
        stop = min(stop, start + values.numel())
        # The tensor in which the tile begins, or which ends before it; the loop skips what it does not meet.
        index = max(bisect_right(offsets, start) - 1, 0)
        while index < len(flat) and offsets[index] < stop:
            begin = max(start, offsets[index])
            end = min(stop, offsets[index] + flat[index].numel())
            if begin < end:
                values[begin - start : end - start].copy_(flat[index][begin - offsets[index] : end - offsets[index]])
            index += 1
        return stop - start

    _encode_all(fill, messages, message_layout(numel // count, bits), count, rotate, state, beta, reset)


def reduce_quantize_(
    sources: Tensor, numel: int, count: int, source_bits: int, scale: float, messages: Tensor, out_count: int,
    bits: int, rotate: bool, state: Tensor | None, beta: float, reset: bool, device_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """See :func:`zeropp_kernels.reduce_quantize_`."""
    scale = scale_number(scale, device_scale)
    source = message_layout(numel, source_bits)
    incoming = parts(sources, source, count)

    def fill(values: Tensor, start: int, stop: int) -> int:
        # Rotated messages hold more than ``numel`` elements: what a group's padding became counts too.
        first = start // source.group
        last = min(-(-(start + values.numel()) // source.group), source.groups)
        total = scratch("sum", last - first, source.group)
        sum_tile_(incoming, first, last, source_bits, total)
        present = total.view(-1)[start - first * source.group :][: values.numel()]
        # Once, after the sum.
        torch.mul(present, scale, out=values[: present.numel()])
        return present.numel()

    _encode_all(fill, messages, message_layout(numel // out_count, bits), out_count, rotate, state, beta, reset)
