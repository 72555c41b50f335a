"""Triton: bfloat16 values as exact differences against a reference: 4-bit codes, and escapes to 8 and to 16 bits.

A tile is TILE sections of 2048 elements, as two flat tensors of TILE * 1024: the lower and the upper halves of rows of
128. So the two codes of a byte meet in one thread, and one running sum over the bytes of a section ranks its escapes of
both kinds: an 8-bit escape counts 1, a 16-bit one 2**16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..wire import BLOCK, SECTION, lossless_layout
from .blocks import bfloat16_bits, whole
from .launch import INTERPRETED, launched

__all__ = ["TILE", "lossless_count_", "lossless_decode_", "lossless_encode_"]

# Sections. The interpreter's time is that of programs, whatever they hold.
TILE = 8 if INTERPRETED else 1
# Elements, bytes of codes, and blocks of a section.
_SECTION = tl.constexpr(SECTION)
_BYTES = tl.constexpr(SECTION // 2)
_BLOCKS = tl.constexpr(SECTION // BLOCK)
# Bytes that a program clears at a time.
_CLEARED = tl.constexpr(512)
# 4-bit codes that mark an escape: to an 8-bit code, and to a 16-bit value.
_TO_8 = tl.constexpr(8)
_TO_16 = tl.constexpr(7)


@triton.jit
def _key(bits):
    """Order-preserving integer of bfloat16 bits, both int32 with the sign of their 16 bits (a bijection)."""
    # Bits of negative numbers fall as the numbers rise; all but the sign are turned round. The sign stays, so doing it
    # twice gives the bits back.
    return bits ^ ((bits >> 31) & 0x7FFF)


@triton.jit
def _wrapped(x):
    """int32 with the sign of its low 16 bits: modulo 2**16."""
    return x.to(tl.int16).to(tl.int32)


@triton.jit
def _load_bits(values, at, mask):
    """Bits of bfloat16 values, or of float32 values rounded to bfloat16; zeros where ``mask`` is false."""
    # Missing elements are zeros in values and reference alike: no difference, no escape.
    if values.dtype.element_ty == tl.float32:
        return _wrapped(bfloat16_bits(tl.load(values + at, mask=mask, other=0.0)))
    return tl.load(values.to(tl.pointer_type(tl.int16)) + at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _lower_halves(TILE: tl.constexpr):
    """Offsets of the elements in the lower halves of a tile's rows."""
    byte = tl.arange(0, TILE * _BYTES)
    return byte // 64 * 128 + byte % 64


@triton.jit
def _live(first, blocks, TILE: tl.constexpr):
    """Mask of the bytes of blocks that are there, from section ``first`` on."""
    return tl.arange(0, TILE * _BYTES) // 128 < blocks - first * _BLOCKS


@triton.jit
def _present(numel, first, blocks, EVEN: tl.constexpr, TILE: tl.constexpr):
    """Masks of the elements that are there, in lower and in upper halves; of whole blocks if EVEN, for wide access."""
    live = _live(first, blocks, TILE)
    if EVEN:
        return live, live
    else:
        # Fits 32 bits once it is cut to the tile.
        left = tl.minimum(numel - first.to(tl.int64) * _SECTION, TILE * _SECTION).to(tl.int32)
        at = _lower_halves(TILE)
        return live & (at < left), live & (at + 64 < left)


@triton.jit
def _differences(values, reference, numel, first, blocks, EVEN: tl.constexpr, TILE: tl.constexpr):
    """(bits of the values, differences of keys in [-32768, 32767]), each for lower and upper halves."""
    at = _lower_halves(TILE)
    start = first.to(tl.int64) * _SECTION
    in_lower, in_upper = _present(numel, first, blocks, EVEN, TILE)
    lower = _load_bits(values + start, at, in_lower)
    upper = _load_bits(values + start, at + 64, in_upper)
    old_lower = _load_bits(reference + start, at, in_lower)
    old_upper = _load_bits(reference + start, at + 64, in_upper)
    # Modulo 2**16: decoding adds modulo 2**16, too, and has the key again.
    return lower, upper, _wrapped(_key(lower) - _key(old_lower)), _wrapped(_key(upper) - _key(old_upper))


@triton.jit
def _where(difference, to_16, to_8, near):
    """The first where a difference escapes to 16 bits, the second where it escapes to 8, else the third."""
    # One comparison each, without a sign: not in [-7, 6], not in [-128, 127].
    escapes = (difference + 7).to(tl.uint32, bitcast=True) > 13
    far = (difference + 128).to(tl.uint32, bitcast=True) > 255
    return tl.where(far, to_16, tl.where(escapes, to_8, near))


@triton.jit
def _codes(difference):
    """4-bit codes, marks among them."""
    return _where(difference, _TO_16, _TO_8, difference & 15)


@triton.jit
def _count(code):
    """1 for a mark of 8 bits, 2**16 for one of 16 bits: a section has 2048, so neither count reaches the other."""
    return tl.where(code == _TO_16, 1 << 16, tl.where(code == _TO_8, 1, 0))


@triton.jit
def _before(counts, TILE: tl.constexpr):
    """Sums of what comes before each byte in its section."""
    sections = tl.reshape(counts, [TILE, _BYTES])
    # A running sum counts the byte itself, too.
    return tl.reshape(tl.cumsum(sections, axis=1) - sections, [TILE * _BYTES])


@triton.jit
def _each(sections, TILE: tl.constexpr):
    """A number of each section, for each of its bytes."""
    return tl.reshape(tl.broadcast_to(sections[:, None], [TILE, _BYTES]), [TILE * _BYTES])


@triton.jit
def _transposed(x, TILE: tl.constexpr):
    """The same bytes in another order: those of one thread, 8 in a row, lie 128 apart.

    Stores to places that depend on data have one value a thread at a time, 128 threads in a row. In this order each
    thread has its own values then, where the compiler would take all of them through shared memory.
    """
    return tl.reshape(tl.trans(tl.reshape(x, [TILE * _BYTES // 8, 8])), [TILE * _BYTES])


@launched("starts", registers=96)
def lossless_count_kernel(
    values, reference, numel: tl.int64, blocks: tl.int32, starts, EVEN: tl.constexpr, TILE: tl.constexpr
):
    """Escapes of each section, one entry on in ``starts``, and zeros in the first. Grid: (tiles,)."""
    first = tl.program_id(0) * TILE
    _, _, lower, upper = _differences(values, reference, numel, first, blocks, EVEN, TILE)
    # As _count of their codes.
    counts = _where(lower, 1 << 16, 1, 0) + _where(upper, 1 << 16, 1, 0)
    counts = tl.sum(tl.reshape(counts, [TILE, _BYTES]), axis=1)
    section = first + tl.arange(0, TILE)
    live = section * _BLOCKS < blocks
    starts16 = starts + (tl.cdiv(blocks, _BLOCKS) + 1)
    tl.store(starts + section + 1, (counts & 0xFFFF).to(tl.int64), mask=live)
    tl.store(starts16 + section + 1, (counts >> 16).to(tl.int64), mask=live)
    # With a zero in front a running sum is where each section begins.
    zero = tl.zeros([TILE], tl.int64)
    tl.store(starts + section, zero, mask=section == 0)
    tl.store(starts16 + section, zero, mask=section == 0)


@triton.jit
def _clear(message, end8, room16_offset, end16, nbytes):
    """Zeros from the ends of both kinds of escapes to the ends of their rooms, with the bytes that align them."""
    unused8 = room16_offset - end8
    unused = unused8 + nbytes - end16
    # Programs share it. Often there is next to nothing, and all but the first have none of it.
    begin = tl.program_id(0).to(tl.int64) * _CLEARED
    # No range: Triton 3.6 makes an int of an array with one dimension for it, which numpy 2.4 refuses.
    while begin < unused:
        place = begin + tl.arange(0, _CLEARED)
        at = tl.where(place < unused8, end8 + place, end16 - unused8 + place)
        tl.store(message + at, tl.zeros([_CLEARED], tl.uint8), mask=place < unused)
        begin += tl.num_programs(0).to(tl.int64) * _CLEARED


@triton.jit
def _store_escapes(room8, room16, code, difference, bits, place8, place16, limit8, limit16):
    """Put escapes in their places; those past the room are left out."""
    tl.store(room8 + place8, difference.to(tl.uint8), mask=(code == _TO_8) & (place8 < limit8))
    # The value itself, not its difference.
    tl.store(room16 + place16, bits.to(tl.int16), mask=(code == _TO_16) & (place16 < limit16))


@triton.jit
def _in_room(start, limit):
    """A start that the caller gives, wherever it points, as a place in the room or its end."""
    return tl.minimum(tl.maximum(start, 0), limit)


@launched("starts", registers=96)
def lossless_encode_kernel(
    values, reference, numel: tl.int64, blocks: tl.int32, starts, message, nbytes: tl.int64, room8_offset: tl.int64,
    room16_offset: tl.int64, limit8: tl.int32, limit16: tl.int32,
    EVEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Codes, starts and escapes of a tile. Grid: (tiles,)."""
    first = tl.program_id(0) * TILE
    lower_bits, upper_bits, lower, upper = _differences(values, reference, numel, first, blocks, EVEN, TILE)
    lower_code = _codes(lower)
    upper_code = _codes(upper)
    codes = message + first.to(tl.int64) * _BYTES + tl.arange(0, TILE * _BYTES)
    tl.store(codes, (lower_code | (upper_code << 4)).to(tl.uint8), mask=_live(first, blocks, TILE))
    sections = tl.cdiv(blocks, _BLOCKS)
    starts16 = starts + (sections + 1)
    section = first + tl.arange(0, TILE)
    live = section < sections
    # Outside of the room nothing is written, and 32 bits hold any place in it.
    start8 = _in_room(tl.load(starts + section, mask=live, other=0), limit8)
    start16 = _in_room(tl.load(starts16 + section, mask=live, other=0), limit16)
    # A pair of int32 is one integer. Starts follow the codes, 128 bytes for each block.
    pairs = (message + blocks.to(tl.int64) * 128).to(tl.pointer_type(tl.int64))
    tl.store(pairs + section, start8 | (start16 << 32), mask=live)
    before = _transposed(_before(_count(lower_code) + _count(upper_code), TILE), TILE)
    place8 = _transposed(_each(start8.to(tl.int32), TILE), TILE) + (before & 0xFFFF)
    place16 = _transposed(_each(start16.to(tl.int32), TILE), TILE) + (before >> 16)
    room8 = message + room8_offset
    room16 = (message + room16_offset).to(tl.pointer_type(tl.int16))
    lower = _transposed(lower, TILE)
    upper = _transposed(upper, TILE)
    lower_code = _codes(lower)
    bits = _transposed(lower_bits, TILE)
    _store_escapes(room8, room16, lower_code, lower, bits, place8, place16, limit8, limit16)
    place8 += (lower_code == _TO_8).to(tl.int32)
    place16 += (lower_code == _TO_16).to(tl.int32)
    bits = _transposed(upper_bits, TILE)
    _store_escapes(room8, room16, _codes(upper), upper, bits, place8, place16, limit8, limit16)
    end8 = room8_offset + _in_room(tl.load(starts + sections), limit8)
    end16 = room16_offset + 2 * _in_room(tl.load(starts16 + sections), limit16)
    _clear(message, end8, room16_offset, end16, nbytes)


@triton.jit
def _decoded(room8, room16, code, old, place8, place16, limit8, limit16):
    """Bits of values, from their codes and the bits of the reference."""
    wide = tl.load(room8 + place8, mask=(code == _TO_8) & (place8 < limit8), other=0).to(tl.int32)
    exact = tl.load(room16 + place16, mask=(code == _TO_16) & (place16 < limit16), other=0)
    # The shift back is arithmetic: int32 has a sign.
    difference = tl.where(code == _TO_8, wide, (code << 28) >> 28)
    # The key is its own inverse.
    near = _key(_wrapped(_key(old) + difference))
    return tl.where(code == _TO_16, exact, near.to(tl.int16))


@launched(registers=96)
def lossless_decode_kernel(
    messages, reference, out, numel: tl.int64, nbytes: tl.int64, blocks: tl.int32, room8_offset: tl.int64,
    room16_offset: tl.int64, limit8: tl.int32, limit16: tl.int32,
    EVEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Values of a tile. Grid: (tiles of a message, messages)."""
    first = tl.program_id(0) * TILE
    index = tl.program_id(1).to(tl.int64)
    message = messages + index * whole(nbytes, 128)
    codes = message + first.to(tl.int64) * _BYTES + tl.arange(0, TILE * _BYTES)
    packed = tl.load(codes, mask=_live(first, blocks, TILE), other=0).to(tl.int32)
    lower = packed & 15
    upper = packed >> 4
    section = first + tl.arange(0, TILE)
    pairs = (message + blocks.to(tl.int64) * 128).to(tl.pointer_type(tl.int64))
    pair = tl.load(pairs + section, mask=section * _BLOCKS < blocks, other=0)
    # A message from elsewhere may say anything; nothing outside its rooms is read.
    start8 = tl.minimum(tl.maximum(pair.to(tl.int32), 0), limit8)
    start16 = tl.minimum(tl.maximum((pair >> 32).to(tl.int32), 0), limit16)
    before = _before(_count(lower) + _count(upper), TILE)
    place8 = _each(start8, TILE) + (before & 0xFFFF)
    place16 = _each(start16, TILE) + (before >> 16)
    room8 = (message + room8_offset).to(tl.pointer_type(tl.int8))
    room16 = (message + room16_offset).to(tl.pointer_type(tl.int16))
    at = _lower_halves(TILE)
    in_lower, in_upper = _present(numel, first, blocks, EVEN, TILE)
    begin = index * whole(numel, 256 if EVEN else 1) + first.to(tl.int64) * _SECTION
    # Before anything of the tile is written: ``out`` may be the reference.
    old_lower = _load_bits(reference + begin, at, in_lower)
    old_upper = _load_bits(reference + begin, at + 64, in_upper)
    # As bits, so that payloads of NaN come through.
    target = out.to(tl.pointer_type(tl.int16)) + begin
    bits = _decoded(room8, room16, lower, old_lower, place8, place16, limit8, limit16)
    tl.store(target + at, bits, mask=in_lower)
    place8 += (lower == _TO_8).to(tl.int32)
    place16 += (lower == _TO_16).to(tl.int32)
    bits = _decoded(room8, room16, upper, old_upper, place8, place16, limit8, limit16)
    tl.store(target + at + 64, bits, mask=in_upper)


def lossless_count_(values: Tensor, reference: Tensor, starts: Tensor) -> None:
    """See :func:`zeropp_kernels.lossless_count_`."""
    layout = lossless_layout(values.numel(), 0, 0)
    if layout.sections == 0:
        starts.zero_()
        return
    lossless_count_kernel[(triton.cdiv(layout.sections, TILE),)](
        values, reference, layout.numel, layout.blocks, starts,
        EVEN=layout.numel % BLOCK == 0, TILE=TILE, **lossless_count_kernel.options,
    )  # fmt: skip
    # A row at a time: of several rows torch sums each with one thread block.
    for row in starts:
        row.cumsum_(0)


def lossless_encode_(
    values: Tensor, reference: Tensor, starts: Tensor, message: Tensor, room8: int, room16: int
) -> None:
    """See :func:`zeropp_kernels.lossless_encode_`."""
    layout = lossless_layout(values.numel(), room8, room16)
    if layout.sections == 0:
        # No program would clear it.
        message.zero_()
        return
    lossless_encode_kernel[(triton.cdiv(layout.sections, TILE),)](
        values, reference, layout.numel, layout.blocks, starts, message, layout.nbytes,
        layout.room8_offset, layout.room16_offset, room8, room16,
        EVEN=layout.numel % BLOCK == 0, TILE=TILE, **lossless_encode_kernel.options,
    )  # fmt: skip


def lossless_decode_(messages: Tensor, reference: Tensor, out: Tensor, count: int, room8: int, room16: int) -> None:
    """See :func:`zeropp_kernels.lossless_decode_`."""
    layout = lossless_layout(out.numel() // count, room8, room16)
    if layout.sections:
        lossless_decode_kernel[(triton.cdiv(layout.sections, TILE), count)](
            messages, reference, out, layout.numel, layout.nbytes, layout.blocks,
            layout.room8_offset, layout.room16_offset, room8, room16,
            EVEN=layout.numel % BLOCK == 0, TILE=TILE, **lossless_decode_kernel.options,
        )  # fmt: skip
