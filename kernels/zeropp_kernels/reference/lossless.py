"""Lossless messages on CPU: bfloat16 values as differences in 4-bit codes, with escapes to 8 bits and to 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..wire import BLOCK, SECTION, LosslessLayout, blocks_of, lossless_layout, sections_of
from .blocks import TILE, require_cpu, scratch

__all__ = ["lossless_count_", "lossless_decode_", "lossless_encode_"]

_ROW = 128
# 4-bit codes that mark an escape: 8 (that is -8) to an 8-bit code, 7 to a 16-bit value.
_TO_8, _TO_16 = 8, 7
# bfloat16 bits of the NaN that every float32 NaN is rounded to.
_NAN = 0x7FC0
_EACH_BYTE = 0x0101010101010101


def _row(name: str, numel: int, dtype: torch.dtype) -> Tensor:
    """Return this thread's scratch buffer of that name and dtype as a tensor [numel]."""
    return scratch(name, 1, numel, dtype).view(-1)


def _turn_(keys: Tensor) -> Tensor:
    """Turn bfloat16 bits (int16) into order-preserving integers in place; a second call turns them back."""
    # The right shift is arithmetic and gives all ones for negative numbers. Bits of negative numbers decrease as the
    # numbers increase, so all bits but the sign are flipped.
    flips = torch.bitwise_right_shift(keys, 15, out=_row("flips", keys.numel(), torch.int16))
    return keys.bitwise_xor_(flips.bitwise_and_(0x7FFF))


def _keys(values: Tensor, name: str) -> Tensor:
    """Return the order-preserving keys of bfloat16 values, or of float32 values rounded to bfloat16, as int16 [n]."""
    keys = _row(name, values.numel(), torch.int16)
    if values.dtype == torch.float32:
        keys.view(torch.bfloat16).copy_(values)
        # Use one NaN, because torch may round a NaN to other bits than the kernels do.
        missing = values != values
        if missing.any():
            keys.masked_fill_(missing, _NAN)
    else:
        keys.copy_(values.view(torch.int16))
    return _turn_(keys)


def _differences(values: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return (keys of the values, differences of keys modulo 2**16), each int16 [n]."""
    keys = _keys(values, "keys")
    # int16 subtraction wraps around, which is the modulo.
    return keys, torch.sub(keys, _keys(reference, "others"), out=_row("differences", values.numel(), torch.int16))


def _outside(differences: Tensor, least: int, most: int) -> Tensor:
    """Return bool [n]: True for differences below ``least`` or above ``most``."""
    # Clamp and compare once, because a comparison costs far more than the clamp.
    return torch.clamp(differences, least, most, out=_row("clamped", differences.numel(), torch.int16)) != differences


def _escapes(differences: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors bool [n]: differences that need an escape (8 or 16 bits), and those that need 16 bits."""
    return _outside(differences, -7, 6), _outside(differences, -128, 127)


def _tiles(numel: int) -> Iterator[slice]:
    """Yield slices of a flat buffer that stay in a core's cache; each starts on a section."""
    for start in range(0, numel, TILE):
        yield slice(start, min(start + TILE, numel))


def _per_section(flags: Tensor) -> Tensor:
    """Return the number of set flags in each 2048, int64 [sections]."""
    if flags.numel() % SECTION:
        # Pad the last section with False.
        padded = flags.new_zeros(sections_of(flags.numel()) * SECTION)
        padded[: flags.numel()] = flags
        flags = padded
    # View eight flags as the eight bytes of one int64. Sums of sixteen such integers do not carry between bytes.
    sums = flags.view(torch.int64).view(-1, SECTION // 128, 16).sum(2)
    return (sums.mul_(_EACH_BYTE) >> 56).bitwise_and_(0xFF).sum(1)


def lossless_count_(values: Tensor, reference: Tensor, starts: Tensor) -> None:
    """Count escapes on CPU, with the arguments of :func:`zeropp_kernels.lossless_count_`."""
    require_cpu(values)
    for piece in _tiles(values.numel()):
        escapes, far = _escapes(_differences(values[piece], reference[piece])[1])
        own = slice(1 + piece.start // SECTION, 1 + sections_of(piece.stop))
        starts[1, own] = counts = _per_section(far)
        starts[0, own] = _per_section(escapes) - counts
    # With a zero in front, the running sum gives the start of each section.
    starts[:, 0] = 0
    starts.copy_(starts.cumsum(1))


@dataclass(frozen=True)
class _Message:
    """Views of one lossless message.

    Attributes:
        codes: uint8 [rows of 128 elements, 64].
        starts: int32 [sections, 2], places of each section's first 8-bit code and first 16-bit value.
        room8: int8 [room8], the 8-bit codes.
        room16: int16 [room16], the 16-bit values.
    """

    codes: Tensor
    starts: Tensor
    room8: Tensor
    room16: Tensor


def _views(message: Tensor, layout: LosslessLayout) -> _Message:
    require_cpu(message)
    # A row of 128 elements has 64 bytes of codes; byte j has the codes of elements j and j + 64.
    codes = message[: layout.codes_nbytes].view(-1, _ROW // 2)
    starts = message[layout.starts_offset : layout.room8_offset].view(torch.int32).view(-1, 2)
    room8 = message[layout.room8_offset : layout.room8_offset + layout.room8].view(torch.int8)
    room16 = message[layout.room16_offset : layout.room16_offset + 2 * layout.room16].view(torch.int16)
    return _Message(codes, starts, room8, room16)


def _halves(ordered: Tensor) -> Tensor:
    """Return views [2, rows, 64] of the low and the high halves of bytes, from a tensor in the order of the codes.

    In the order of the codes, entry 2 j belongs to the low half of byte j and entry 2 j + 1 to its high half.
    """
    return ordered.view(-1, _ROW // 2, 2).permute(2, 0, 1)


def _elements(places: Tensor) -> Tensor:
    """Return the elements (int64) whose codes are at ``places`` in the order of the codes in the bytes."""
    # In a row of 128 elements, codes 2 j and 2 j + 1 belong to elements j and j + 64.
    column = (places >> 1).bitwise_and_(_ROW // 2 - 1).add_((places & 1).mul_(_ROW // 2))
    return column.add_(places & -_ROW)


def _append(room: Tensor, end: int, found: Tensor) -> int:
    """Write ``found`` to the room from place ``end`` on, without entries past the room. Return ``end + len(found)``."""
    target = room[end : end + found.numel()]
    target.copy_(found[: target.numel()])
    return end + found.numel()


def lossless_encode_(
    values: Tensor, reference: Tensor, starts: Tensor, message: Tensor, room8: int, room16: int
) -> None:
    """Encode bfloat16 values on CPU, with the arguments of :func:`zeropp_kernels.lossless_encode_`.

    Raises:
        ValueError: ``starts`` does not belong to these values and reference. A kernel would have put escapes in wrong
            places.
    """
    layout = lossless_layout(values.numel(), room8, room16)
    views = _views(message, layout)
    # Clamp the start offsets of escaped values to the room for them (room8, room16). So no value is stored past the
    # room, and offsets fit int32.
    for column, room in enumerate((room8, room16)):
        views.starts[:, column].copy_(starts[column, :-1].clamp(max=room))
    end8 = end16 = 0
    for piece in _tiles(layout.numel):
        keys = _differences(values[piece], reference[piece])[0]
        # size includes the end of the last block, which is set to zero here because scratch holds old values.
        size = blocks_of(keys.numel()) * BLOCK
        difference, ordered = (_row(name, size, torch.int16) for name in ("differences", "ordered"))
        difference[keys.numel() :] = 0
        for half, lies in zip(_halves(ordered), difference.view(-1, 2, _ROW // 2).unbind(1), strict=True):
            half.copy_(lies)
        escapes, far = _escapes(ordered)
        to8 = escapes ^ far
        # The cast to uint8 keeps the low 8 bits, the mask the low 4. Arithmetic replaces masked fills, which are much
        # slower.
        nibbles = _row("nibbles", size, torch.uint8).copy_(ordered).bitwise_and_(15)
        nibbles.mul_(~escapes).add_(to8, alpha=_TO_8).add_(far, alpha=_TO_16)
        lower, upper = _halves(nibbles)
        first = piece.start // _ROW
        codes = views.codes[first : first + lower.shape[0]]
        torch.bitwise_left_shift(upper, 4, out=codes).bitwise_or_(lower)
        end8 = _append(views.room8, end8, ordered[to8].to(torch.int8))
        # Escapes to 16 bits store the value's bits, not its difference.
        end16 = _append(views.room16, end16, _turn_(keys[_elements(far.nonzero().squeeze(1))]))
    # Rooms may be larger than the escapes. All bytes of the message are sent, so the unused ones must be zeros.
    message[layout.room8_offset + min(end8, room8) : layout.room16_offset].zero_()
    message[layout.room16_offset + 2 * min(end16, room16) :].zero_()
    # Kernels place escapes by the starts. Here they are appended in order, so the starts are only checked.
    if starts[:, -1].tolist() != [end8, end16]:
        raise ValueError(
            f"starts end at {starts[:, -1].tolist()} and the values have {[end8, end16]} escapes; call "
            "lossless_count_ with the same values and reference before lossless_encode_"
        )


def _take(room: Tensor, starts: Tensor, marks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the entries of a room that belong to the marks of a tile, in their order; zeros for places past the room.

    Args:
        room: int8 or int16, the stored escapes of one kind in the whole message.
        starts: int32, place in the room of the first escape of each section of the tile.
        marks: bool [n], True for each code of the tile that marks this kind of escape.

    Returns:
        The entries, and bool, True for places within the room; None instead if all are.
    """
    counts = _per_section(marks)
    ends = counts.cumsum(0)
    total = int(ends[-1])
    # Place of each section's first escape in the room, minus its position among the escapes of the tile.
    shifts = starts.to(torch.int64).clamp_(0, room.numel()).sub_(ends - counts)
    begin = int(shifts[0])
    if begin + total <= room.numel() and bool((shifts == begin).all()):
        return room[begin : begin + total], None
    # The room is too small, or the message is malformed: look up each place, as the kernel does.
    at = shifts.repeat_interleave(counts).add_(torch.arange(total, device="cpu"))
    found, held = room.new_zeros(total), at < room.numel()
    found[held] = room[at[held]]
    return found, held


def lossless_decode_(messages: Tensor, reference: Tensor, out: Tensor, count: int, room8: int, room16: int) -> None:
    """Decode lossless messages on CPU, with the arguments of :func:`zeropp_kernels.lossless_decode_`."""
    layout = lossless_layout(out.numel() // count, room8, room16)
    for index in range(count):
        views = _views(messages[index * layout.nbytes : (index + 1) * layout.nbytes], layout)
        held, target = (each[index * layout.numel : (index + 1) * layout.numel] for each in (reference, out))
        for piece in _tiles(layout.numel):
            # A block is two rows, and a tile starts on a block.
            codes = views.codes[piece.start // _ROW : 2 * blocks_of(piece.stop)]
            starts = views.starts[piece.start // SECTION : sections_of(piece.stop)]
            nibbles = _row("nibbles", codes.numel() * 2, torch.uint8)
            lower, upper = _halves(nibbles)
            torch.bitwise_and(codes, 15, out=lower)
            torch.bitwise_right_shift(codes, 4, out=upper)
            to8, to16 = nibbles == _TO_8, nibbles == _TO_16
            # (code ^ 8) - 8 sign-extends a 4-bit code. Codes that are marks are replaced below.
            small = nibbles.bitwise_xor_(8).sub_(8).view(torch.int8)
            small.masked_scatter_(to8, _take(views.room8, starts[:, 0], to8)[0])
            places = to16.nonzero().squeeze(1)
            exact, within = _take(views.room16, starts[:, 1], to16)
            if within is not None:
                # Values past the room stay those of the reference.
                small[places[~within]] = 0
                places, exact = places[within], exact[within]
            difference = _row("differences", small.numel(), torch.int16)
            for half, lies in zip(_halves(small), difference.view(-1, 2, _ROW // 2).unbind(1), strict=True):
                lies.copy_(half)
            # The keys are computed in scratch, not in out, because out may be the reference.
            keys = _keys(held[piece], "keys")
            bits = _turn_(keys.add_(difference[: keys.numel()]))
            # padded includes the end of the last block, where a malformed message may have marks, too.
            padded = _row("keys", small.numel(), torch.int16)
            padded[_elements(places)] = exact
            target[piece].view(torch.int16).copy_(bits)
