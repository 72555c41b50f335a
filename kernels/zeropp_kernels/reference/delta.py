"""Weights sent as int4 differences from a reference that sender and receivers have (SDP4Bit), on CPU."""

from __future__ import annotations

from torch import Tensor

from ..wire import message_layout
from .blocks import Part, decode_, encode_, parts, saturate_, scratch, tiles

__all__ = ["delta_apply_", "delta_encode_"]


def _advance(reference: Tensor, part: Part, group: int) -> None:
    """Add a tile of decoded differences to its part of the reference; sender and receivers both call this."""
    # The sender decodes its own message, too, so that it adds the same values as the receivers.
    rows = part.scales.numel()
    difference = scratch("decoded", rows, group)
    decode_(part, difference, 4)
    flat = difference.view(-1)[: reference.numel()]
    # old reuses the scratch buffer of the tile that was encoded, which is no longer needed.
    old = scratch("values", 1, reference.numel()).view(-1).copy_(reference)
    reference.copy_(saturate_(old.add_(flat), reference.dtype))


def delta_encode_(shard: Tensor, reference: Tensor, message: Tensor, update: bool) -> None:
    """Encode ``shard - reference`` on CPU, with the arguments of :func:`zeropp_kernels.delta_encode_`."""
    layout = message_layout(shard.numel(), 4)
    (whole,) = parts(message, layout, 1)
    for first, last in tiles(layout):
        start, stop = first * layout.group, min(last * layout.group, layout.numel)
        values = scratch("values", last - first, layout.group)
        flat = values.view(-1)
        # Zeros fill up the last group. Old contents of the scratch buffer would change its scale.
        flat[stop - start :].zero_()
        flat = flat[: stop - start]
        flat.copy_(shard[start:stop])
        flat.sub_(scratch("old", 1, stop - start).view(-1).copy_(reference[start:stop]))
        part = whole.rows(first, last)
        encode_(values, part, 4)
        if update:
            _advance(reference[start:stop], part, layout.group)
    # Slots after the last group are part of the message and must be zeros.
    whole.scales[layout.groups :].zero_()


def delta_apply_(messages: Tensor, reference: Tensor, count: int) -> None:
    """Add decoded differences to a reference on CPU, with the arguments of :func:`zeropp_kernels.delta_apply_`."""
    numel = reference.numel() // count
    layout = message_layout(numel, 4)
    for index, message in enumerate(parts(messages, layout, count)):
        own = reference[index * numel : (index + 1) * numel]
        for first, last in tiles(layout):
            tile = own[first * layout.group : min(last * layout.group, numel)]
            _advance(tile, message.rows(first, last), layout.group)
