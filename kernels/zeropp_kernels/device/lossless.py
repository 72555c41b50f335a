"""Triton kernels for lossless messages: bfloat16 values as differences in 4-bit codes, with escapes to 8 and 16 bits.

A tile is TILE sections of 2048 elements, as two flat tensors [TILE * 1024] named lower and upper: the first and the
last 64 elements of each row of 128. With this split, the two codes of a byte are in one thread. One running sum over
the bytes of a section gives the places of both kinds of escapes: an 8-bit escape counts 1, a 16-bit one 2**16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..wire import BLOCK, SECTION, lossless_layout
from .blocks import bfloat16_bits, whole
from .launch import Launch, launch, launched
from .tiles import tile_of

__all__ = ["lossless_count_", "lossless_decode_", "lossless_encode_"]

# Elements, bytes of codes, and blocks in a section.
_SECTION = tl.constexpr(SECTION)
_BYTES = tl.constexpr(SECTION // 2)
_BLOCKS = tl.constexpr(SECTION // BLOCK)
# Bytes that one program sets to zero in each pass of the loop in _clear.
_CLEARED = tl.constexpr(512)
# 4-bit codes that mark an escape: 8 (that is -8) to an 8-bit code, 7 to a 16-bit value.
_TO_8 = tl.constexpr(8)
_TO_16 = tl.constexpr(7)


@triton.jit
def _key(bits):
    """Return order-preserving integers of bfloat16 bits, both int32 with a sign-extended 16-bit value."""
    # Bits of negative numbers decrease as the numbers increase, so all bits but the sign are flipped. The sign stays,
    # so applying the function twice gives the bits back.
    return bits ^ ((bits >> 31) & 0x7FFF)


@triton.jit
def _wrapped(x):
    """Return ``x`` modulo 2**16 as int32 in -32768 to 32767."""
    return x.to(tl.int16).to(tl.int32)


@triton.jit
def _load_bits(values, at, mask):
    """Load bits of bfloat16 values, or of float32 values rounded to bfloat16; zeros where ``mask`` is False."""
    # Elements past the end are zeros in values and in the reference, so they need no escape.
    if values.dtype.element_ty == tl.float32:
        return _wrapped(bfloat16_bits(tl.load(values + at, mask=mask, other=0.0)))
    return tl.load(values.to(tl.pointer_type(tl.int16)) + at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _lower_halves(TILE: tl.constexpr):
    """Return the offsets of the elements in the lower halves of the rows of a tile."""
    byte = tl.arange(0, TILE * _BYTES)
    return byte // 64 * 128 + byte % 64


@triton.jit
def _live(first, blocks, TILE: tl.constexpr):
    """Return the mask of code bytes in blocks of the message, for the tile that starts at section ``first``."""
    return tl.arange(0, TILE * _BYTES) // 128 < blocks - first * _BLOCKS


@triton.jit
def _present(numel, first, blocks, EVEN: tl.constexpr, TILE: tl.constexpr):
    """Return masks of the elements of the message, for lower and upper halves.

    With EVEN, numel is a multiple of 256. The mask is then the same for all elements of a block, which allows wide
    access.
    """
    live = _live(first, blocks, TILE)
    if EVEN:
        return live, live
    else:
        # The number of elements left is limited to the tile, so it fits 32 bits.
        left = tl.minimum(numel - first.to(tl.int64) * _SECTION, TILE * _SECTION).to(tl.int32)
        at = _lower_halves(TILE)
        return live & (at < left), live & (at + 64 < left)


@triton.jit
def _differences(values, reference, numel, first, blocks, EVEN: tl.constexpr, TILE: tl.constexpr):
    """Return (lower bits, upper bits, lower difference, upper difference) of a tile.

    Bits are those of the values. Differences are those of keys modulo 2**16, in -32768 to 32767.
    """
    at = _lower_halves(TILE)
    start = first.to(tl.int64) * _SECTION
    in_lower, in_upper = _present(numel, first, blocks, EVEN, TILE)
    lower = _load_bits(values + start, at, in_lower)
    upper = _load_bits(values + start, at + 64, in_upper)
    old_lower = _load_bits(reference + start, at, in_lower)
    old_upper = _load_bits(reference + start, at + 64, in_upper)
    # Decoding adds modulo 2**16, too, which gives the key back.
    return lower, upper, _wrapped(_key(lower) - _key(old_lower)), _wrapped(_key(upper) - _key(old_upper))


@triton.jit
def _where(difference, to_16, to_8, near):
    """Select by difference: ``near`` in -7 to 6, ``to_8`` otherwise in -128 to 127, ``to_16`` otherwise."""
    # One unsigned comparison per range: outside of [-7, 6], outside of [-128, 127].
    escapes = (difference + 7).to(tl.uint32, bitcast=True) > 13
    far = (difference + 128).to(tl.uint32, bitcast=True) > 255
    return tl.where(far, to_16, tl.where(escapes, to_8, near))


@triton.jit
def _codes(difference):
    """Return the 4-bit codes of differences, marks of escapes included."""
    return _where(difference, _TO_16, _TO_8, difference & 15)


@triton.jit
def _count(code):
    """Return 1 for a mark of an 8-bit escape, 2**16 for a mark of a 16-bit escape, else 0.

    A section has at most 2048 of each kind, so the two counts in a sum do not overlap.
    """
    return tl.where(code == _TO_16, 1 << 16, tl.where(code == _TO_8, 1, 0))


@triton.jit
def _before(counts, TILE: tl.constexpr):
    """Return the sum of the counts before each byte in its section."""
    sections = tl.reshape(counts, [TILE, _BYTES])
    # The running sum includes the byte itself, which is subtracted.
    return tl.reshape(tl.cumsum(sections, axis=1) - sections, [TILE * _BYTES])


@triton.jit
def _each(sections, TILE: tl.constexpr):
    """Return ``sections[i]`` [TILE] repeated for every byte of section i, [TILE * 1024]."""
    return tl.reshape(tl.broadcast_to(sections[:, None], [TILE, _BYTES]), [TILE * _BYTES])


@triton.jit
def _transposed(x, TILE: tl.constexpr):
    """Reorder the bytes of a tile so that the 8 consecutive bytes of one thread become 128 apart.

    Stores to data-dependent places handle one value per thread at a time, for 128 threads. In this order, each thread
    stores values that it already has. In the original order the compiler would move all values through shared memory.
    """
    return tl.reshape(tl.trans(tl.reshape(x, [TILE * _BYTES // 8, 8])), [TILE * _BYTES])


@launched("starts")
def lossless_count_kernel(
    values, reference, numel: tl.int64, blocks: tl.int32, starts, EVEN: tl.constexpr, TILE: tl.constexpr
):
    """Store the number of escapes of section i, of both kinds, in ``starts`` at i + 1; zero at 0. Grid: (tiles,)."""
    first = tl.program_id(0) * TILE
    _, _, lower, upper = _differences(values, reference, numel, first, blocks, EVEN, TILE)
    # The counts equal _count of the codes of these differences.
    counts = _where(lower, 1 << 16, 1, 0) + _where(upper, 1 << 16, 1, 0)
    counts = tl.sum(tl.reshape(counts, [TILE, _BYTES]), axis=1)
    section = first + tl.arange(0, TILE)
    live = section * _BLOCKS < blocks
    starts16 = starts + (tl.cdiv(blocks, _BLOCKS) + 1)
    tl.store(starts + section + 1, (counts & 0xFFFF).to(tl.int64), mask=live)
    tl.store(starts16 + section + 1, (counts >> 16).to(tl.int64), mask=live)
    # With a zero in front, a running sum gives the start of each section.
    zero = tl.zeros([TILE], tl.int64)
    tl.store(starts + section, zero, mask=section == 0)
    tl.store(starts16 + section, zero, mask=section == 0)


@triton.jit
def _clear(message, end8, room16_offset, end16, nbytes):
    """Store zeros after the last escape of both kinds up to the ends of their rooms, padding included."""
    unused8 = room16_offset - end8
    unused = unused8 + nbytes - end16
    # All programs share the work. Often little is unused, and only the first program stores anything.
    begin = tl.program_id(0).to(tl.int64) * _CLEARED
    # A while loop, because the interpreter of Triton 3.6 calls int() on a one-element array for range, which numpy 2.4
    # refuses.
    while begin < unused:
        place = begin + tl.arange(0, _CLEARED)
        at = tl.where(place < unused8, end8 + place, end16 - unused8 + place)
        tl.store(message + at, tl.zeros([_CLEARED], tl.uint8), mask=place < unused)
        begin += tl.num_programs(0).to(tl.int64) * _CLEARED


@triton.jit
def _store_escapes(room8, room16, code, difference, bits, place8, place16, limit8, limit16):
    """Store 8-bit codes and 16-bit values of escapes at their places; escapes past a room are left out."""
    tl.store(room8 + place8, difference.to(tl.uint8), mask=(code == _TO_8) & (place8 < limit8))
    # Escapes to 16 bits store the value's bits, not its difference.
    tl.store(room16 + place16, bits.to(tl.int16), mask=(code == _TO_16) & (place16 < limit16))


@triton.jit
def _in_room(start, limit):
    """Return ``start`` clamped to 0 to ``limit``: the caller's tensor may have any value."""
    return tl.minimum(tl.maximum(start, 0), limit)


@launched("starts")
def lossless_encode_kernel(
    values, reference, numel: tl.int64, blocks: tl.int32, starts, message, nbytes: tl.int64, room8_offset: tl.int64,
    room16_offset: tl.int64, limit8: tl.int32, limit16: tl.int32,
    EVEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store codes, starts and escapes of one tile, and clear unused room. Grid: (tiles,)."""
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
    # The starts are clamped, so that no store is outside of the rooms and places fit 32 bits.
    start8 = _in_room(tl.load(starts + section, mask=live, other=0), limit8)
    start16 = _in_room(tl.load(starts16 + section, mask=live, other=0), limit16)
    # A pair of int32 starts is stored as one int64. The starts follow the codes, which have 128 bytes per block.
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
    """Return the bits of decoded values (int16), from codes, the bits of the reference, and the places of escapes."""
    wide = tl.load(room8 + place8, mask=(code == _TO_8) & (place8 < limit8), other=0).to(tl.int32)
    exact = tl.load(room16 + place16, mask=(code == _TO_16) & (place16 < limit16), other=0)
    # The arithmetic right shift extends the sign of the 4-bit code.
    difference = tl.where(code == _TO_8, wide, (code << 28) >> 28)
    # _key is its own inverse.
    near = _key(_wrapped(_key(old) + difference))
    return tl.where(code == _TO_16, exact, near.to(tl.int16))


@launched()
def lossless_decode_kernel(
    messages, reference, out, numel: tl.int64, nbytes: tl.int64, blocks: tl.int32, room8_offset: tl.int64,
    room16_offset: tl.int64, limit8: tl.int32, limit16: tl.int32,
    EVEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Decode one tile of a message. Grid: (tiles of a message, messages)."""
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
    # The starts are clamped, because a malformed message may have any starts and nothing outside its rooms may be read.
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
    # Load the reference before storing anything of the tile, because out may be the reference.
    old_lower = _load_bits(reference + begin, at, in_lower)
    old_upper = _load_bits(reference + begin, at + 64, in_upper)
    # The values are stored as bits, so that NaN payloads are kept.
    target = out.to(tl.pointer_type(tl.int16)) + begin
    bits = _decoded(room8, room16, lower, old_lower, place8, place16, limit8, limit16)
    tl.store(target + at, bits, mask=in_lower)
    place8 += (lower == _TO_8).to(tl.int32)
    place16 += (lower == _TO_16).to(tl.int32)
    bits = _decoded(room8, room16, upper, old_upper, place8, place16, limit8, limit16)
    tl.store(target + at + 64, bits, mask=in_upper)


def _add_up(values: Tensor, reference: Tensor, starts: Tensor) -> None:
    """Replace the counts of both rows of ``starts`` by their running sums."""
    # One cumsum_ per row, because for a [2, n] tensor torch uses only one thread block per row.
    for row in starts.unbind():
        row.cumsum_(0)


def lossless_count_(values: Tensor, reference: Tensor, starts: Tensor) -> Launch | None:
    """Count escapes with a Triton kernel, with the arguments of :func:`zeropp_kernels.lossless_count_`."""
    layout = lossless_layout(values.numel(), 0, 0)
    if layout.sections == 0:
        starts.zero_()
        return None
    tile = tile_of(lossless_count_kernel).holds(SECTION)
    done = launch(
        lossless_count_kernel, (triton.cdiv(layout.sections, tile),),
        values, reference, layout.numel, layout.blocks, starts,
        EVEN=layout.numel % BLOCK == 0, TILE=tile,
    )  # fmt: skip
    _add_up(values, reference, starts)
    return done._replace(after=_add_up)


def lossless_encode_(
    values: Tensor, reference: Tensor, starts: Tensor, message: Tensor, room8: int, room16: int
) -> Launch | None:
    """Encode values, rounded to bfloat16, with a Triton kernel; see :func:`zeropp_kernels.lossless_encode_`."""
    layout = lossless_layout(values.numel(), room8, room16)
    if layout.sections == 0:
        # Without sections no program would run to clear the message.
        message.zero_()
        return None
    tile = tile_of(lossless_encode_kernel).holds(SECTION)
    return launch(
        lossless_encode_kernel, (triton.cdiv(layout.sections, tile),),
        values, reference, layout.numel, layout.blocks, starts, message, layout.nbytes,
        layout.room8_offset, layout.room16_offset, room8, room16,
        EVEN=layout.numel % BLOCK == 0, TILE=tile,
    )  # fmt: skip


def lossless_decode_(
    messages: Tensor, reference: Tensor, out: Tensor, count: int, room8: int, room16: int
) -> Launch | None:
    """Decode lossless messages with a Triton kernel, with the arguments of :func:`zeropp_kernels.lossless_decode_`."""
    layout = lossless_layout(out.numel() // count, room8, room16)
    if layout.sections == 0:
        return None
    tile = tile_of(lossless_decode_kernel).holds(SECTION)
    return launch(
        lossless_decode_kernel, (triton.cdiv(layout.sections, tile), count),
        messages, reference, out, layout.numel, layout.nbytes, layout.blocks,
        layout.room8_offset, layout.room16_offset, room8, room16,
        EVEN=layout.numel % BLOCK == 0, TILE=tile,
    )  # fmt: skip
