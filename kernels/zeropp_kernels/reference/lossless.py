"""bfloat16 values as exact differences against a reference: 4-bit codes with two tiers of escapes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..wire import BLOCK, LosslessLayout, lossless_layout

__all__ = ["lossless_count_", "lossless_decode_", "lossless_encode_"]

_ROW = 128


def _bits(values: Tensor) -> Tensor:
    """int32 [n]: bits of bfloat16 values, or of float32 values rounded to bfloat16 with one NaN for all."""
    if values.dtype == torch.float32:
        wide = values.view(torch.int32)
        rounded = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16) & 0xFFFF
        return torch.where((wide & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
    return values.view(torch.int16).to(torch.int32) & 0xFFFF


def _key(bits: Tensor) -> Tensor:
    """Order-preserving integer of bfloat16 bits (a bijection of 16 bits, and its own inverse)."""
    return bits ^ torch.where((bits & 0x8000) != 0, 0x7FFF, 0)


def _differences(values: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """(bits, differences of keys in [-32768, 32767]), int32 [n]."""
    bits = _bits(values)
    return bits, (_key(bits) - _key(_bits(reference))).to(torch.int16).to(torch.int32)


def _padded(values: Tensor, blocks: int) -> Tensor:
    """[blocks, 256], the end filled with zeros."""
    padded = values.new_zeros(blocks * BLOCK)
    padded[: values.numel()] = values
    return padded.view(blocks, BLOCK)


def _offsets(counts: Tensor, out: Tensor) -> None:
    """Counts [blocks] -> where each block begins, and the total at the end [blocks + 1]."""
    out[0] = 0
    torch.cumsum(counts, 0, out=out[1:])


def lossless_count_(values: Tensor, reference: Tensor, offsets: Tensor) -> None:
    """See :func:`zeropp_kernels.lossless_count_`."""
    _, difference = _differences(values, reference)
    size = _padded(difference.abs(), offsets.shape[1] - 1)
    _offsets((size > 7).sum(1), offsets[0])
    _offsets((size > 127).sum(1), offsets[1])


def _rooms(message: Tensor, layout: LosslessLayout) -> tuple[Tensor, Tensor, Tensor]:
    """(codes uint8 [rows, 64], room for 8-bit codes int8, room for 16-bit values int16) of one message."""
    codes = message[: layout.codes_nbytes].view(-1, _ROW // 2)
    room8 = message[layout.room8_offset : layout.room8_offset + layout.room8].view(torch.int8)
    room16 = message[layout.room16_offset : layout.room16_offset + 2 * layout.room16].view(torch.int16)
    return codes, room8, room16


def lossless_encode_(
    values: Tensor, reference: Tensor, offsets: Tensor, message: Tensor, room8: int, room16: int
) -> None:
    """See :func:`zeropp_kernels.lossless_encode_`; ``offsets`` serve the kernels, here order is enough."""
    layout = lossless_layout(values.numel(), room8, room16)
    message[layout.codes_nbytes :].zero_()
    codes, wide, exact = _rooms(message, layout)
    bits, difference = _differences(values, reference)
    escapes, far = difference.abs() > 7, difference.abs() > 127
    nibbles = _padded(torch.where(escapes, 8, difference & 15), layout.blocks).view(-1, 2, _ROW // 2)
    codes.copy_(nibbles[:, 0] | (nibbles[:, 1] << 4))
    tier8 = torch.where(far, -128, difference)[escapes][:room8]
    wide[: tier8.numel()] = tier8.to(torch.int8)
    tier16 = bits[far][:room16]
    exact[: tier16.numel()] = tier16.to(torch.int16)


def _fill(target: Tensor, where: Tensor, source: Tensor) -> None:
    """Write ``source`` in order to the places that ``where`` marks; zeros when it is too short."""
    places = where.nonzero().squeeze(1)
    target[places] = 0
    places = places[: source.numel()]
    target[places] = source[: places.numel()].to(target.dtype)


def lossless_decode_(
    messages: Tensor, reference: Tensor, out: Tensor, offsets: Tensor, count: int, room8: int, room16: int
) -> None:
    """See :func:`zeropp_kernels.lossless_decode_`."""
    numel = out.numel() // count
    layout = lossless_layout(numel, room8, room16)
    for index in range(count):
        message = messages[index * layout.nbytes : (index + 1) * layout.nbytes]
        codes, wide, exact = _rooms(message, layout)
        nibbles = torch.stack((codes & 15, codes >> 4), 1).view(-1)[:numel].to(torch.int32)
        escapes = nibbles == 8
        difference = nibbles - ((nibbles & 8) << 1)
        _fill(difference, escapes, wide)
        far = escapes & (difference == -128)
        _offsets(_padded(escapes.to(torch.int64), layout.blocks).sum(1), offsets[index, 0])
        _offsets(_padded(far.to(torch.int64), layout.blocks).sum(1), offsets[index, 1])
        own = slice(index * numel, (index + 1) * numel)
        bits = _key((_key(_bits(reference[own])) + difference) & 0xFFFF)
        _fill(bits, far, exact)
        out[own].view(torch.int16).copy_(bits.to(torch.int16))
