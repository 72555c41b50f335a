"""bfloat16 values as exact differences against a reference: 4-bit codes, and escapes to 8 and to 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..wire import BLOCK, SECTION, LosslessLayout, blocks_of, lossless_layout, sections_of
from .blocks import TILE, scratch

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
    return (differences > most).bitwise_or_(differences < least)


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
    # A row of 128 elements has 64 bytes; byte j holds j and j + 64.
    codes = message[: layout.codes_nbytes].view(-1, _ROW // 2)
    starts = message[layout.starts_offset : layout.room8_offset].view(torch.int32).view(-1, 2)
    room8 = message[layout.room8_offset : layout.room8_offset + layout.room8].view(torch.int8)
    room16 = message[layout.room16_offset : layout.room16_offset + 2 * layout.room16].view(torch.int16)
    return _Message(codes, starts, room8, room16)


def _marks(codes: Tensor) -> tuple[Tensor, Tensor]:
    """int64, ascending: which 4-bit codes mark escapes to 8 bits, and to 16, counted in the order of the bytes."""
    ordered = _row("ordered", codes.numel() * 2, torch.uint8)
    lower, upper = ordered.view(-1, 2).unbind(1)
    torch.bitwise_and(codes.view(-1), 15, out=lower)
    torch.bitwise_right_shift(codes.view(-1), 4, out=upper)
    return (ordered == _TO_8).nonzero().squeeze(1), (ordered == _TO_16).nonzero().squeeze(1)


def _elements(marks: Tensor) -> Tensor:
    """The elements that codes belong to which are counted in the order of the bytes."""
    # In a row of 128, codes 2 j and 2 j + 1 are those of j and j + 64.
    column = (marks >> 1).bitwise_and_(_ROW // 2 - 1).add_((marks & 1).mul_(_ROW // 2))
    return column.add_(marks & -_ROW)


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
        keys, difference = _differences(values[piece], reference[piece])
        numel = keys.numel()
        escapes, far = _escapes(difference)
        nibbles = _row("nibbles", blocks_of(numel) * BLOCK, torch.uint8)
        # The end of the last block; scratch holds what it held.
        nibbles[numel:] = 0
        # The cast to uint8 keeps the low 8 bits, the mask 4 of them.
        nibbles[:numel].copy_(difference).bitwise_and_(15).masked_fill_(escapes, _TO_8).masked_fill_(far, _TO_16)
        lower, upper = nibbles.view(-1, 2, _ROW // 2).unbind(1)
        first = piece.start // _ROW
        codes = views.codes[first : first + lower.shape[0]]
        torch.bitwise_or(lower, upper << 4, out=codes)
        marks8, marks16 = _marks(codes)
        end8 = _append(views.room8, end8, difference[_elements(marks8)].to(torch.int8))
        # The value's bits, not its difference.
        end16 = _append(views.room16, end16, _turn_(keys[_elements(marks16)]))
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
    """What the room holds for each mark of a tile whose sections begin at ``starts``; zeros past the room."""
    section = torch.div(marks, SECTION, rounding_mode="floor")
    counts = torch.bincount(section, minlength=starts.numel())
    # Marks ascend, so those of a section follow each other.
    before = counts.cumsum(0).sub_(counts)
    # As a kernel does it: a message from elsewhere may say anything.
    begins = starts.to(torch.int64).clamp_(0, room.numel())
    at = begins.sub_(before)[section].add_(torch.arange(marks.numel(), device="cpu"))
    found = room.new_zeros(marks.numel())
    held = at < room.numel()
    found[held] = room[at[held]]
    return found


def lossless_decode_(
    messages: Tensor, reference: Tensor, out: Tensor, count: int, room8: int, room16: int
) -> None:
    """See :func:`zeropp_kernels.lossless_decode_`."""
    layout = lossless_layout(out.numel() // count, room8, room16)
    for index in range(count):
        views = _views(messages[index * layout.nbytes : (index + 1) * layout.nbytes], layout)
        held, target = (each[index * layout.numel : (index + 1) * layout.numel] for each in (reference, out))
        for piece in _tiles(layout.numel):
            numel = piece.stop - piece.start
            # Two rows to a block; a tile begins on one.
            codes = views.codes[piece.start // _ROW : 2 * blocks_of(piece.stop)]
            starts = views.starts[piece.start // SECTION : sections_of(piece.stop)]
            nibbles = _row("nibbles", codes.numel() * 2, torch.uint8).view(-1, 2, _ROW // 2)
            torch.bitwise_and(codes, 15, out=nibbles[:, 0])
            torch.bitwise_right_shift(codes, 4, out=nibbles[:, 1])
            # (code ^ 8) - 8 is the code with its sign. Marks are overwritten by what escaped.
            difference = _row("differences", codes.numel() * 2, torch.int16)
            difference.copy_(nibbles.view(-1)).bitwise_xor_(8).sub_(8)
            marks8, marks16 = _marks(codes)
            difference[_elements(marks8)] = _take(views.room8, starts[:, 0], marks8).to(torch.int16)
            # In scratch, not in ``out``: that may be the reference.
            bits = _turn_(_keys(held[piece], "keys").add_(difference[:numel]))
            # With the end of the last block, where a message from elsewhere may have marks, too.
            _row("keys", codes.numel() * 2, torch.int16)[_elements(marks16)] = _take(
                views.room16, starts[:, 1], marks16
            )
            target[piece].view(torch.int16).copy_(bits)
