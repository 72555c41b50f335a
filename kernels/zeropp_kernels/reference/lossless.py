"""bfloat16 values as exact differences against a reference: 4-bit codes with two tiers of escapes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..wire import BLOCK, LosslessLayout, blocks_of, lossless_layout
from .blocks import TILE

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


def _tiles(numel: int) -> Iterator[slice]:
    """A flat buffer in pieces that stay in a core's cache; each starts on a block."""
    for start in range(0, numel, TILE):
        yield slice(start, min(start + TILE, numel))


def _per_block(flags: Tensor) -> Tensor:
    """int64 [blocks]: how many of each 256 flags are set."""
    padded = flags.new_zeros(blocks_of(flags.numel()) * BLOCK)
    padded[: flags.numel()] = flags
    return padded.view(-1, BLOCK).sum(1)


def _running_sum(offsets: Tensor) -> None:
    """Counts [..., 1:] -> where the escapes of each block begin, and their total at the end; in place."""
    offsets[..., 0] = 0
    offsets.copy_(offsets.cumsum(-1))


def lossless_count_(values: Tensor, reference: Tensor, offsets: Tensor) -> None:
    """See :func:`zeropp_kernels.lossless_count_`."""
    for piece in _tiles(values.numel()):
        size = _differences(values[piece], reference[piece])[1].abs()
        own = slice(1 + piece.start // BLOCK, 1 + blocks_of(piece.stop))
        offsets[0, own] = _per_block(size > 7)
        offsets[1, own] = _per_block(size > 127)
    _running_sum(offsets)


def _rooms(message: Tensor, layout: LosslessLayout) -> tuple[Tensor, Tensor, Tensor]:
    """(codes uint8 [rows, 64], room for 8-bit codes int8, room for 16-bit values int16) of one message."""
    codes = message[: layout.codes_nbytes].view(-1, _ROW // 2)
    room8 = message[layout.room8_offset : layout.room8_offset + layout.room8].view(torch.int8)
    room16 = message[layout.room16_offset : layout.room16_offset + 2 * layout.room16].view(torch.int16)
    return codes, room8, room16


def _append(room: Tensor, end: int, found: Tensor) -> int:
    """Write ``found`` to the room from place ``end`` on, as far as there is room; returns where it would end."""
    target = room[end : end + found.numel()]
    target.copy_(found[: target.numel()])
    return end + found.numel()


def lossless_encode_(
    values: Tensor, reference: Tensor, offsets: Tensor, message: Tensor, room8: int, room16: int
) -> None:
    """See :func:`zeropp_kernels.lossless_encode_`; ``offsets`` serve the kernels, here order is enough.

    Raises:
        ValueError: kernels would have written elsewhere.
    """
    layout = lossless_layout(values.numel(), room8, room16)
    message[layout.codes_nbytes :].zero_()
    codes, wide, exact = _rooms(message, layout)
    end8 = end16 = 0
    for piece in _tiles(layout.numel):
        bits, difference = _differences(values[piece], reference[piece])
        escapes, far = difference.abs() > 7, difference.abs() > 127
        nibbles = bits.new_zeros(blocks_of(bits.numel()) * BLOCK)
        nibbles[: bits.numel()] = torch.where(escapes, 8, difference & 15)
        lower, upper = nibbles.view(-1, 2, _ROW // 2).unbind(1)
        first = piece.start // _ROW
        codes[first : first + lower.shape[0]] = lower | (upper << 4)
        end8 = _append(wide, end8, torch.where(far, -128, difference)[escapes])
        end16 = _append(exact, end16, bits[far])
    if offsets[:, -1].tolist() != [end8, end16]:
        raise ValueError(
            f"offsets end at {offsets[:, -1].tolist()} and the values have {[end8, end16]} escapes; call "
            "lossless_count_ with the same values and reference before lossless_encode_"
        )


def _take(room: Tensor, begin: int, where: Tensor, target: Tensor) -> int:
    """Put what the room holds from ``begin`` on to the places that ``where`` marks, zeros where it ends too soon.

    Returns where the room would be read next.
    """
    places = where.nonzero().squeeze(1)
    found = room[begin : begin + places.numel()]
    target[places] = 0
    target[places[: found.numel()]] = found.to(target.dtype)
    return begin + places.numel()


def lossless_decode_(
    messages: Tensor, reference: Tensor, out: Tensor, offsets: Tensor, count: int, room8: int, room16: int
) -> None:
    """See :func:`zeropp_kernels.lossless_decode_`."""
    layout = lossless_layout(out.numel() // count, room8, room16)
    for index in range(count):
        codes, wide, exact = _rooms(messages[index * layout.nbytes : (index + 1) * layout.nbytes], layout)
        held, target = (each[index * layout.numel : (index + 1) * layout.numel] for each in (reference, out))
        end8 = end16 = 0
        for piece in _tiles(layout.numel):
            packed = codes[piece.start // _ROW : 2 * blocks_of(piece.stop)]
            nibbles = torch.stack((packed & 15, packed >> 4), 1).view(-1)[: piece.stop - piece.start].to(torch.int32)
            escapes = nibbles == 8
            difference = nibbles - ((nibbles & 8) << 1)
            end8 = _take(wide, end8, escapes, difference)
            far = escapes & (difference == -128)
            own = slice(1 + piece.start // BLOCK, 1 + blocks_of(piece.stop))
            offsets[index, 0, own] = _per_block(escapes)
            offsets[index, 1, own] = _per_block(far)
            bits = _key((_key(_bits(held[piece])) + difference) & 0xFFFF)
            end16 = _take(exact, end16, far, bits)
            target[piece].view(torch.int16).copy_(bits)
    _running_sum(offsets)
