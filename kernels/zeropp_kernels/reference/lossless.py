"""bfloat16 values as exact differences against a reference: 4-bit codes, and escapes to 8 and to 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..wire import BLOCK, SECTION, LosslessLayout, blocks_of, lossless_layout, sections_of
from .blocks import TILE, require_cpu, scratch

__all__ = ["lossless_count_", "lossless_decode_", "lossless_encode_"]

_ROW = 128
# 4-bit codes that mark an escape: to an 8-bit code, and to a 16-bit value.
_TO_8, _TO_16 = 8, 7
# The one NaN that float32 values round to.
_NAN = 0x7FC0
_EACH_BYTE = 0x0101010101010101


def _row(name: str, numel: int, dtype: torch.dtype) -> Tensor:
    """[numel] of this thread's scratch."""
    return scratch(name, 1, numel, dtype).view(-1)


def _turn_(keys: Tensor) -> Tensor:
    """Bits of bfloat16 values to order-preserving integers, int16 in place (a bijection, and its own inverse)."""
    # Arithmetic: all ones for negative numbers, whose bits fall as they rise. All but the sign are turned round.
    flips = torch.bitwise_right_shift(keys, 15, out=_row("flips", keys.numel(), torch.int16))
    return keys.bitwise_xor_(flips.bitwise_and_(0x7FFF))


def _keys(values: Tensor, name: str) -> Tensor:
    """int16 [n]: keys of bfloat16 values, or of float32 values rounded to bfloat16 with one NaN for all."""
    keys = _row(name, values.numel(), torch.int16)
    if values.dtype == torch.float32:
        keys.view(torch.bfloat16).copy_(values)
        # torch may make another NaN of it than the kernels do.
        missing = values != values
        if missing.any():
            keys.masked_fill_(missing, _NAN)
    else:
        keys.copy_(values.view(torch.int16))
    return _turn_(keys)


def _differences(values: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """(keys, differences of keys modulo 2^16), int16 [n]."""
    keys = _keys(values, "keys")
    # int16 wraps around, which is what is asked for.
    return keys, torch.sub(keys, _keys(reference, "others"), out=_row("differences", values.numel(), torch.int16))


def _outside(differences: Tensor, least: int, most: int) -> Tensor:
    """bool [n]: those below ``least`` or above ``most``."""
    # One comparison, which costs far more than what it compares with.
    return torch.clamp(differences, least, most, out=_row("clamped", differences.numel(), torch.int16)) != differences


def _escapes(differences: Tensor) -> tuple[Tensor, Tensor]:
    """bool [n]: those that 4-bit codes cannot hold, and those of them that 8-bit codes cannot hold either."""
    return _outside(differences, -7, 6), _outside(differences, -128, 127)


def _tiles(numel: int) -> Iterator[slice]:
    """A flat buffer in pieces that stay in a core's cache; each starts on a section."""
    for start in range(0, numel, TILE):
        yield slice(start, min(start + TILE, numel))


def _per_section(flags: Tensor) -> Tensor:
    """int64 [sections]: how many of each 2048 flags are set."""
    if flags.numel() % SECTION:
        # A last section that is partly filled.
        padded = flags.new_zeros(sections_of(flags.numel()) * SECTION)
        padded[: flags.numel()] = flags
        flags = padded
    # Eight flags are bytes of one integer, and sums of sixteen such do not carry from one byte to the next.
    sums = flags.view(torch.int64).view(-1, SECTION // 128, 16).sum(2)
    return (sums.mul_(_EACH_BYTE) >> 56).bitwise_and_(0xFF).sum(1)


def lossless_count_(values: Tensor, reference: Tensor, starts: Tensor) -> None:
    """See :func:`zeropp_kernels.lossless_count_`."""
    require_cpu(values)
    for piece in _tiles(values.numel()):
        escapes, far = _escapes(_differences(values[piece], reference[piece])[1])
        own = slice(1 + piece.start // SECTION, 1 + sections_of(piece.stop))
        starts[1, own] = counts = _per_section(far)
        starts[0, own] = _per_section(escapes) - counts
    # With a zero in front a running sum is where each section begins.
    starts[:, 0] = 0
    starts.copy_(starts.cumsum(1))


@dataclass(frozen=True)
class _Message:
    """Views of one message: codes uint8 [rows, 64], starts int32 [sections, 2], rooms int8 and int16."""

    codes: Tensor
    starts: Tensor
    room8: Tensor
    room16: Tensor


def _views(message: Tensor, layout: LosslessLayout) -> _Message:
    require_cpu(message)
    # A row of 128 elements has 64 bytes; byte j holds j and j + 64.
    codes = message[: layout.codes_nbytes].view(-1, _ROW // 2)
    starts = message[layout.starts_offset : layout.room8_offset].view(torch.int32).view(-1, 2)
    room8 = message[layout.room8_offset : layout.room8_offset + layout.room8].view(torch.int8)
    room16 = message[layout.room16_offset : layout.room16_offset + 2 * layout.room16].view(torch.int16)
    return _Message(codes, starts, room8, room16)


def _halves(ordered: Tensor) -> Tensor:
    """[2, rows, 64]: the low and the high halves of bytes, out of what lies in the order of the codes in the bytes."""
    return ordered.view(-1, _ROW // 2, 2).permute(2, 0, 1)


def _elements(places: Tensor) -> Tensor:
    """The elements of codes, int64, that are counted in the order of the bytes."""
    # In a row of 128, codes 2 j and 2 j + 1 are those of j and j + 64.
    column = (places >> 1).bitwise_and_(_ROW // 2 - 1).add_((places & 1).mul_(_ROW // 2))
    return column.add_(places & -_ROW)


def _append(room: Tensor, end: int, found: Tensor) -> int:
    """Write ``found`` to the room from place ``end`` on, as far as there is room; returns where it would end."""
    target = room[end : end + found.numel()]
    target.copy_(found[: target.numel()])
    return end + found.numel()


def lossless_encode_(
    values: Tensor, reference: Tensor, starts: Tensor, message: Tensor, room8: int, room16: int
) -> None:
    """See :func:`zeropp_kernels.lossless_encode_`.

    Raises:
        ValueError: kernels would have written elsewhere.
    """
    layout = lossless_layout(values.numel(), room8, room16)
    views = _views(message, layout)
    # Past the room nothing is written, and int32 holds any place in it.
    for column, room in enumerate((room8, room16)):
        views.starts[:, column].copy_(starts[column, :-1].clamp(max=room))
    end8 = end16 = 0
    for piece in _tiles(layout.numel):
        keys = _differences(values[piece], reference[piece])[0]
        # With the end of the last block, where scratch holds what it held.
        size = blocks_of(keys.numel()) * BLOCK
        difference, ordered = (_row(name, size, torch.int16) for name in ("differences", "ordered"))
        difference[keys.numel() :] = 0
        for half, lies in zip(_halves(ordered), difference.view(-1, 2, _ROW // 2).unbind(1), strict=True):
            half.copy_(lies)
        escapes, far = _escapes(ordered)
        to8 = escapes ^ far
        # The cast to uint8 keeps the low 8 bits, the mask 4 of them. By arithmetic: fills by a mask take much longer.
        nibbles = _row("nibbles", size, torch.uint8).copy_(ordered).bitwise_and_(15)
        nibbles.mul_(~escapes).add_(to8, alpha=_TO_8).add_(far, alpha=_TO_16)
        lower, upper = _halves(nibbles)
        first = piece.start // _ROW
        codes = views.codes[first : first + lower.shape[0]]
        torch.bitwise_left_shift(upper, 4, out=codes).bitwise_or_(lower)
        end8 = _append(views.room8, end8, ordered[to8].to(torch.int8))
        # The value's bits, not its difference.
        end16 = _append(views.room16, end16, _turn_(keys[_elements(far.nonzero().squeeze(1))]))
    # Rooms may be larger than what went in, and all of the message travels.
    message[layout.room8_offset + min(end8, room8) : layout.room16_offset].zero_()
    message[layout.room16_offset + 2 * min(end16, room16) :].zero_()
    # A kernel goes by the starts; here they only must agree.
    if starts[:, -1].tolist() != [end8, end16]:
        raise ValueError(
            f"starts end at {starts[:, -1].tolist()} and the values have {[end8, end16]} escapes; call "
            "lossless_count_ with the same values and reference before lossless_encode_"
        )


def _take(room: Tensor, starts: Tensor, marks: Tensor) -> Tensor:
    """What the room holds for each mark (bool [n]) of a tile whose sections begin at ``starts``; zeros past it."""
    counts = _per_section(marks)
    ends = counts.cumsum(0)
    total = int(ends[-1])
    # Where each section's escapes lie, less where they lie among those of the tile.
    shifts = starts.to(torch.int64).clamp_(0, room.numel()).sub_(ends - counts)
    begin = int(shifts[0])
    if begin + total <= room.numel() and bool((shifts == begin).all()):
        return room[begin : begin + total]
    # Too many for the room, or a message that no sender made: place by place, as a kernel does it.
    at = shifts.repeat_interleave(counts).add_(torch.arange(total, device="cpu"))
    found, held = room.new_zeros(total), at < room.numel()
    found[held] = room[at[held]]
    return found


def lossless_decode_(messages: Tensor, reference: Tensor, out: Tensor, count: int, room8: int, room16: int) -> None:
    """See :func:`zeropp_kernels.lossless_decode_`."""
    layout = lossless_layout(out.numel() // count, room8, room16)
    for index in range(count):
        views = _views(messages[index * layout.nbytes : (index + 1) * layout.nbytes], layout)
        held, target = (each[index * layout.numel : (index + 1) * layout.numel] for each in (reference, out))
        for piece in _tiles(layout.numel):
            # Two rows to a block; a tile begins on one.
            codes = views.codes[piece.start // _ROW : 2 * blocks_of(piece.stop)]
            starts = views.starts[piece.start // SECTION : sections_of(piece.stop)]
            nibbles = _row("nibbles", codes.numel() * 2, torch.uint8)
            lower, upper = _halves(nibbles)
            torch.bitwise_and(codes, 15, out=lower)
            torch.bitwise_right_shift(codes, 4, out=upper)
            to8, to16 = nibbles == _TO_8, nibbles == _TO_16
            # (code ^ 8) - 8 is the code with its sign. Marks are overwritten by what escaped, or below.
            small = nibbles.bitwise_xor_(8).sub_(8).view(torch.int8)
            small.masked_scatter_(to8, _take(views.room8, starts[:, 0], to8))
            difference = _row("differences", small.numel(), torch.int16)
            for half, lies in zip(_halves(small), difference.view(-1, 2, _ROW // 2).unbind(1), strict=True):
                lies.copy_(half)
            # In scratch, not in ``out``: that may be the reference.
            keys = _keys(held[piece], "keys")
            bits = _turn_(keys.add_(difference[: keys.numel()]))
            # With the end of the last block, where a message that no sender made may have marks, too.
            padded = _row("keys", small.numel(), torch.int16)
            padded[_elements(to16.nonzero().squeeze(1))] = _take(views.room16, starts[:, 1], to16)
            target[piece].view(torch.int16).copy_(bits)
