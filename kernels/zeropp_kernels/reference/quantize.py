"""Encoding on CPU: messages from a flat buffer, from tensors of a table, or from the sum of other messages."""

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

# fill(values, start, stop) writes input elements [start, stop) to values (float32 [n]), as many as fit, and returns
# their number.
Fill = Callable[[Tensor, int, int], int]


def _keep_error(part: Part, error: Tensor, lost: Tensor, spoilt: Tensor | None, beta: float, reset: bool) -> None:
    """Write the new error of a tile: ``beta * error + (1 - beta) * lost``, as 8-bit codes and scales.

    Args:
        part: views of the tile in the state.
        error: float32 [rows, group], the old error; overwritten.
        lost: float32 [rows, group], input minus decoded value; overwritten.
        spoilt: bool [rows], groups whose input had Inf or NaN; None for none. Their state stays as it is, or becomes
            zeros with ``reset``.
        beta: weight of the old error.
        reset: True if error feedback starts again.
    """
    # Three roundings in this order, as in the kernels. 1 - beta is computed in float64 and rounded once.
    error.mul_(beta).add_(lost.mul_(1.0 - beta))
    if spoilt is None:
        encode_(error, part, 8)
        return
    # Copy the state of these groups, because the encoding below overwrites every group. With reset the copy is zeros.
    codes, scales = (each[spoilt].mul_(not reset) for each in (part.codes, part.scales))
    encode_(error, part, 8)
    part.codes[spoilt] = codes
    part.scales[spoilt] = scales


def _encode_tile(values: Tensor, message: Part, bits: int, state: Part | None, beta: float, reset: bool) -> None:
    """Encode a tile; with a state, add the stored error before and store the new error after."""
    if state is None:
        encode_(values, message, bits)
        return
    error = scratch("error", *values.shape)
    # Do not decode the state: with reset it may hold any bytes, also NaN.
    if reset:
        error.zero_()
    else:
        decode_(state, error, 8)
    values.add_(error)
    spoilt = encode_(values, message, bits)
    decoded = scratch("decoded", *values.shape)
    # Decode the codes just written, so that the error is measured against the values that receivers get.
    decode_(message, decoded, bits)
    _keep_error(state, error, values.sub_(decoded), spoilt, beta, reset)


def _encode_all(
    fill: Fill, messages: Tensor, layout: MessageLayout, count: int, rotate: bool, state: Tensor | None, beta: float,
    reset: bool,
) -> None:  # fmt: skip
    """Encode ``count`` messages tile by tile, with values from ``fill``."""
    # A state has the groups of the message, so a tile has the same elements in both.
    kept = state_layout(layout.numel, layout.bits)
    states = parts(state, kept, count) if state is not None else [None] * count
    for index, (message, error) in enumerate(zip(parts(messages, layout, count), states, strict=True)):
        for first, last in tiles(layout):
            values = scratch("values", last - first, layout.group)
            flat = values.view(-1)
            present = fill(flat, index * layout.numel + first * layout.group, (index + 1) * layout.numel)
            if present < flat.numel():
                # Zeros fill up the last group. Old contents of the scratch buffer would change its scale.
                flat[present:].zero_()
            if rotate:
                rotate_(values)
            # Errors are added after the rotation, because they are errors of rotated values.
            tile_error = error.rows(first, last) if error is not None else None
            _encode_tile(values, message.rows(first, last), layout.bits, tile_error, beta, reset)
        # Slots after the last group are part of the message and must be zeros.
        message.scales[layout.groups :].zero_()


def quantize_(
    x: Tensor, messages: Tensor, count: int, bits: int, rotate: bool, state: Tensor | None, beta: float, reset: bool
) -> None:
    """Encode a flat buffer on CPU, with the arguments of :func:`zeropp_kernels.quantize_`."""

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
    """Encode tensors of a table on CPU, with the arguments of :func:`zeropp_kernels.quantize_tensors_`."""
    flat = [in_memory_order(tensor) for tensor in tensors]
    # entries and owners are not used here; kernels need them to find tensors without a search.
    offsets = host[2].tolist()

    def fill(values: Tensor, start: int, stop: int) -> int:
        # Elements between tensors are zeros.
        values.zero_()
        stop = min(stop, start + values.numel())
        # Index of the last tensor that starts at or before the tile. It may end before the tile; the loop skips it
        # then.
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
    """Sum and encode messages on CPU, with the arguments of :func:`zeropp_kernels.reduce_quantize_`."""
    scale = scale_number(scale, device_scale)
    source = message_layout(numel, source_bits)
    incoming = parts(sources, source, count)

    def fill(values: Tensor, start: int, stop: int) -> int:
        # Read whole source groups, past numel, too: in rotated messages the padding of the last group has nonzero
        # values.
        first = start // source.group
        last = min(-(-(start + values.numel()) // source.group), source.groups)
        total = scratch("sum", last - first, source.group)
        sum_tile_(incoming, first, last, source_bits, total)
        present = total.view(-1)[start - first * source.group :][: values.numel()]
        # Scale once, after the sum.
        torch.mul(present, scale, out=values[: present.numel()])
        return present.numel()

    _encode_all(fill, messages, message_layout(numel // out_count, bits), out_count, rotate, state, beta, reset)
