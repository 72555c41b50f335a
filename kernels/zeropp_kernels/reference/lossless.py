"""bfloat16 values as exact differences against a reference: 4-bit codes with two tiers of escapes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..wire import BLOCK, LosslessLayout, blocks_of, lossless_layout
from .blocks import TILE, scratch

__all__ = ["lossless_count_", "lossless_decode_", "lossless_encode_"]

_ROW = 128
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


def _outside(differences: Tensor, most: int) -> Tensor:
    """bool [n]: those whose size is more than ``most``."""
    # Not by abs: that of -32768 is itself.
    return (differences > most).bitwise_or_(differences < -most)


def _tiles(numel: int) -> Iterator[slice]:
    """A flat buffer in pieces that stay in a core's cache; each starts on a block."""
    for start in range(0, numel, TILE):
        yield slice(start, min(start + TILE, numel))


def _per_block(flags: Tensor) -> Tensor:
    """int64 [blocks]: how many of each 256 flags are set."""
    if flags.numel() % BLOCK:
        # A last block that is partly filled.
        padded = flags.new_zeros(blocks_of(flags.numel()) * BLOCK)
        padded[: flags.numel()] = flags
        flags = padded
    # Eight flags are bytes of one integer, and sums of sixteen such do not carry from one byte to the next.
    sums = flags.view(torch.int64).view(-1, 2, BLOCK // 16).sum(2)
    return (sums.mul_(_EACH_BYTE) >> 56).bitwise_and_(0xFF).sum(1)


def _running_sum(offsets: Tensor) -> None:
    """Counts [..., 1:] -> where the escapes of each block begin, and their total at the end; in place."""
    offsets[..., 0] = 0
    offsets.copy_(offsets.cumsum(-1))


def lossless_count_(values: Tensor, reference: Tensor, offsets: Tensor) -> None:
    """See :func:`zeropp_kernels.lossless_count_`."""
    for piece in _tiles(values.numel()):
        difference = _differences(values[piece], reference[piece])[1]
        own = slice(1 + piece.start // BLOCK, 1 + blocks_of(piece.stop))
        # 7 and 127, not 8 and 128: the codes for -8 and -128 mark escapes.
        offsets[0, own] = _per_block(_outside(difference, 7))
        offsets[1, own] = _per_block(_outside(difference, 127))
    _running_sum(offsets)


def _rooms(message: Tensor, layout: LosslessLayout) -> tuple[Tensor, Tensor, Tensor]:
    """(codes uint8 [rows, 64], room for 8-bit codes int8, room for 16-bit values int16) of one message."""
    # A row of 128 elements has 64 bytes; byte j holds j and j + 64.
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
        keys, difference = _differences(values[piece], reference[piece])
        numel = keys.numel()
        escapes = _outside(difference, 7)
        nibbles = _row("nibbles", blocks_of(numel) * BLOCK, torch.uint8)
        # The end of the last block; scratch holds what it held.
        nibbles[numel:] = 0
        # The cast to uint8 keeps the low 8 bits, the mask 4 of them.
        nibbles[:numel].copy_(difference).bitwise_and_(15).masked_fill_(escapes, 8)
        lower, upper = nibbles.view(-1, 2, _ROW // 2).unbind(1)
        first = piece.start // _ROW
        torch.bitwise_or(lower, upper << 4, out=codes[first : first + lower.shape[0]])
        # Ascending, so escapes lie in the order of elements, as kernels put them by rank.
        places = escapes.nonzero().squeeze(1)
        beyond = difference[places]
        far = _outside(beyond, 127)
        end8 = _append(wide, end8, beyond.to(torch.int8).masked_fill_(far, -128))
        # The value's bits, not its difference.
        end16 = _append(exact, end16, _turn_(keys[places[far]]))
    # A kernel goes by the offsets; here they only must agree.
    if offsets[:, -1].tolist() != [end8, end16]:
        raise ValueError(
            f"offsets end at {offsets[:, -1].tolist()} and the values have {[end8, end16]} escapes; call "
            "lossless_count_ with the same values and reference before lossless_encode_"
        )


def _take(room: Tensor, begin: int, where: Tensor, count: int, target: Tensor) -> int:
    """Put what the room holds from ``begin`` on to the ``count`` places that ``where`` marks, zeros where it ends.

    Returns where the room would be read next.
    """
    found = room[begin : begin + count].to(target.dtype)
    if found.numel() < count:
        # A message with more escapes than room: what a kernel does not load is zero.
        found = torch.cat([found, found.new_zeros(count - found.numel())])
    target.masked_scatter_(where, found)
    return begin + count


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
            numel = piece.stop - piece.start
            # Two rows to a block; a tile begins on one.
            packed = codes[piece.start // _ROW : 2 * blocks_of(piece.stop)]
            nibbles = _row("nibbles", packed.shape[0] * _ROW, torch.uint8).view(-1, 2, _ROW // 2)
            torch.bitwise_and(packed, 15, out=nibbles[:, 0])
            torch.bitwise_right_shift(packed, 4, out=nibbles[:, 1])
            code = nibbles.view(-1)[:numel]
            escapes = code == 8
            # (code ^ 8) - 8 is the code with its sign. Marks become -8 and are overwritten by what escaped.
            difference = _row("differences", numel, torch.int16).copy_(code).bitwise_xor_(8).sub_(8)
            own = slice(1 + piece.start // BLOCK, 1 + blocks_of(piece.stop))
            offsets[index, 0, own] = counts = _per_block(escapes)
            end8 = _take(wide, end8, escapes, int(counts.sum()), difference)
            # No other difference here can be -128: neither 4 bits nor an 8-bit code that is no mark.
            far = difference == -128
            offsets[index, 1, own] = counts = _per_block(far)
            # In scratch, not in ``out``: that may be the reference.
            bits = _turn_(_keys(held[piece], "keys").add_(difference))
            end16 = _take(exact, end16, far, int(counts.sum()), bits)
            target[piece].view(torch.int16).copy_(bits)
    _running_sum(offsets)
