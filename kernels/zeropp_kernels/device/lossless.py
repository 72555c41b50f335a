"""Triton kernels for lossless messages: bfloat16 values as differences in 4-bit codes, with escapes to 8 and 16 bits.

A tile is TILE sections of 2048 elements, as two flat tensors [TILE * 1024] named lower and upper: the first and the
last 64 elements of each row of 128. Codes are words [TILE * 256] of eight codes: those of four consecutive lower
elements in the low halves of its bytes, and those of the upper elements 64 places behind in the high halves. All
escapes of a word are found at once. One running sum over the words of a section gives the places of both kinds: an
8-bit escape counts 1, a 16-bit one 2**16. Escapes to 8 bits are common, and every element has a masked access for one.
Escapes to 16 bits are rare. A loop handles them: each pass takes the first remaining one of every word.

16-bit integers are in the upper halves of int32. Sums then wrap around as they should, and the lower halves do not
matter.
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

# Elements, words of codes, blocks in a section.
_SECTION = tl.constexpr(SECTION)
_WORDS = tl.constexpr(SECTION // 8)
_BLOCKS = tl.constexpr(SECTION // BLOCK)
# Bytes that one program sets to zero in each pass of the loop in _clear.
_CLEARED = tl.constexpr(512)
# 4-bit codes that mark an escape: 8 (that is -8) to an 8-bit code, 7 to a 16-bit value.
_TO_8 = tl.constexpr(8)
_TO_16 = tl.constexpr(7)
# The lowest bit of each code in a word.
_ONES = tl.constexpr(0x11111111)


@triton.jit
def _key(bits):
    """Return order-preserving integers of bfloat16 bits, both in the upper halves of int32."""
    # Bits of negative numbers decrease as the numbers increase, so all bits but the sign are flipped. The sign stays,
    # so applying the function twice gives the bits back.
    return bits ^ ((bits >> 31) & 0x7FFF0000)


@triton.jit
def _load_bits(values, at, mask):
    """Load bits of bfloat16 values, or of float32 values rounded to bfloat16, into the upper halves of int32.

    They are zeros where ``mask`` is False.
    """
    # Elements past the end are zeros in values and in the reference, so they need no escape.
    if values.dtype.element_ty == tl.float32:
        return bfloat16_bits(tl.load(values + at, mask=mask, other=0.0)) << 16
    return tl.load(values.to(tl.pointer_type(tl.int16)) + at, mask=mask, other=0).to(tl.int32) << 16


@triton.jit
def _lower_halves(TILE: tl.constexpr):
    """Return the offsets of the elements in the lower halves of the rows of a tile."""
    place = tl.arange(0, TILE * _WORDS * 4)
    return place // 64 * 128 + place % 64


@triton.jit
def _present(numel, first, blocks, EVEN: tl.constexpr, TILE: tl.constexpr):
    """Return masks of the elements of the message, for lower and upper halves.

    With EVEN, numel is a multiple of 256. The mask is then the same for all elements of a block, which allows wide
    access.
    """
    # The lower halves of a block are 128 elements.
    live = tl.arange(0, TILE * _WORDS * 4) // 128 < blocks - first * _BLOCKS
    if EVEN:
        return live, live
    else:
        # The number of elements left is limited to the tile, so it fits 32 bits.
        left = tl.minimum(numel - first.to(tl.int64) * _SECTION, TILE * _SECTION).to(tl.int32)
        at = _lower_halves(TILE)
        return live & (at < left), live & (at + 64 < left)


@triton.jit
def _differences(values, reference, numel, first, blocks, EVEN: tl.constexpr, TILE: tl.constexpr):
    """Return the differences of keys of a tile, lower and upper, in the upper halves of int32."""
    at = _lower_halves(TILE)
    start = first.to(tl.int64) * _SECTION
    in_lower, in_upper = _present(numel, first, blocks, EVEN, TILE)
    lower = _load_bits(values + start, at, in_lower)
    upper = _load_bits(values + start, at + 64, in_upper)
    old_lower = _load_bits(reference + start, at, in_lower)
    old_upper = _load_bits(reference + start, at + 64, in_upper)
    # Decoding adds modulo 2**16, too, which gives the key back.
    return _key(lower) - _key(old_lower), _key(upper) - _key(old_upper)


@triton.jit
def _escapes(difference):
    """Return (True for differences that need an escape, True for those that need 16 bits).

    A difference of -7 to 6 needs none, and one of -128 to 127 needs 8 bits.
    """
    # For negative numbers -1 - difference, so that one comparison is enough.
    size = difference ^ (difference >> 31)
    return size >= (7 << 16), size >= (128 << 16)


@triton.jit
def _codes(difference):
    """Return the 4-bit codes of differences, marks of escapes included."""
    escapes, far = _escapes(difference)
    return tl.where(far, _TO_16, tl.where(escapes, _TO_8, (difference >> 16) & 15))


@triton.jit
def _word_codes(lower, upper):
    """Return the words [n / 4] of lower and upper codes [n]."""
    even, odd = tl.split(tl.reshape(lower | (upper << 4), [lower.shape[0] // 4, 2, 2]))
    even, odd = tl.split(even | (odd << 8))
    return even | (odd << 16)


@triton.jit
def _marks(words):
    """Return (marks of 8-bit escapes, marks of 16-bit escapes) in words: the lowest bit of each code that is a mark."""
    # Both marks, binary 1000 and 0111, have a highest bit that differs from the next one, and three equal other bits.
    changes = words ^ (words >> 1)
    escapes = (changes >> 2) & ~(changes >> 1) & ~changes & _ONES
    to_8 = escapes & (words >> 3)
    return to_8, escapes ^ to_8


@triton.jit
def _before(to_8, to_16, TILE: tl.constexpr):
    """Return (places of 8-bit escapes, places of 16-bit escapes, 8-bit marks before each code, 16-bit marks) of words.

    Places [TILE * 256] are counted from the first escape of the section. Marks before a code are counted from the first
    code of its word, 4 bits for each code. The last result is the number of 16-bit marks of each word.
    """
    # The product adds up the codes of a word: each code of the product is the number of marks up to that code. A word
    # has at most 8, so 4 bits are enough.
    up_to_8 = to_8 * _ONES
    up_to_16 = to_16 * _ONES
    far = (up_to_16 >> 28) & 15
    counts = ((up_to_8 >> 28) & 15) + (far << 16)
    sections = tl.reshape(counts, [TILE, _WORDS])
    # The running sum includes the word itself, which is subtracted.
    before = tl.reshape(tl.cumsum(sections, axis=1) - sections, [TILE * _WORDS])
    return before & 0xFFFF, before >> 16, up_to_8 - to_8, far


@triton.jit
def _first_marked(marks, TILE: tl.constexpr):
    """Return (the first mark of each word or 0, the offset of its element in the tile)."""
    lowest = marks & -marks
    # The number of codes below the mark.
    code = (((lowest - 1) & _ONES) * _ONES) >> 28
    word = tl.arange(0, TILE * _WORDS)
    return lowest, word // 16 * 128 + word % 16 * 4 + ((code >> 1) & 3) + (code & 1) * 64


@triton.jit
def _section_words(sections, TILE: tl.constexpr):
    """Return ``sections[i]`` [TILE] repeated for every word of section i, [TILE * 256]."""
    return tl.reshape(tl.broadcast_to(sections[:, None], [TILE, _WORDS]), [TILE * _WORDS])


@triton.jit
def _each(words):
    """Return every word four times, [4 n]: once for each byte."""
    return tl.reshape(tl.broadcast_to(words[:, None], [words.shape[0], 4]), [words.shape[0] * 4])


@triton.jit
def _bytes(words, blocks, PLACE: tl.constexpr):
    """Return the 4 bits at bit PLACE of every byte of words, [4 n]; ``blocks`` is any int32 that is not negative."""
    # All four are masked at once, and one instruction then takes a byte. With a known mask, the compiler would shift
    # and mask each of them.
    halves = (words >> PLACE) & ((blocks >> 31) + 0x0F0F0F0F)
    shifts = 8 * tl.arange(0, 4)[None, :]
    return tl.reshape((halves[:, None] >> shifts) & 0xFF, [words.shape[0] * 4])


@triton.jit
def _shifted(words, PLACE: tl.constexpr):
    """Return words shifted to the right by PLACE plus 8 for each byte: [4 n], for the four bytes of every word."""
    shifts = 8 * tl.arange(0, 4)[None, :] + PLACE
    return tl.reshape(words[:, None] >> shifts, [words.shape[0] * 4])


@triton.jit
def _marked(marks, PLACE: tl.constexpr):
    """Return True for marks at bit PLACE of bytes, [4 n]."""
    return (_shifted(marks, PLACE) & 1) != 0


@triton.jit
def _transposed(x, TILE: tl.constexpr):
    """Reorder the elements of a tile so that the 8 consecutive ones of a thread become 128 apart.

    Stores to data-dependent places handle one value per thread at a time, for 128 threads. In this order, each thread
    stores values that it already has. In the original order the compiler would move all values through shared memory.
    """
    return tl.reshape(tl.trans(tl.reshape(x, [TILE * _WORDS // 2, 8])), [TILE * _WORDS * 4])


@launched("starts")
def lossless_count_kernel(
    values, reference, numel: tl.int64, blocks: tl.int32, starts, EVEN: tl.constexpr, TILE: tl.constexpr
):
    """Store the number of escapes of section i, of both kinds, in ``starts`` at i + 1; zero at 0. Grid: (tiles,)."""
    first = tl.program_id(0) * TILE
    lower, upper = _differences(values, reference, numel, first, blocks, EVEN, TILE)
    escapes_lower, far_lower = _escapes(lower)
    escapes_upper, far_upper = _escapes(upper)
    # A section has at most 2048 escapes, so the two counts in a sum do not overlap.
    escapes = escapes_lower.to(tl.int32) + escapes_upper.to(tl.int32)
    far = far_lower.to(tl.int32) + far_upper.to(tl.int32)
    counts = tl.sum(tl.reshape(escapes + far * 0xFFFF, [TILE, _WORDS * 4]), axis=1)
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
def _store_near(room8, to_8, places8, before8, difference, limit8, PLACE: tl.constexpr, TILE: tl.constexpr):
    """Store the 8-bit codes of the codes at bit PLACE of bytes; escapes past the room are left out."""
    place8 = _transposed(_each(places8) + (_shifted(before8, PLACE) & 15), TILE)
    is_8 = _transposed(_marked(to_8, PLACE), TILE) & (place8 < limit8)
    tl.store(room8 + place8, (_transposed(difference, TILE) >> 16).to(tl.uint8), mask=is_8)


@triton.jit
def _store_far(room16, values, to_16, places16, far, limit16, TILE: tl.constexpr):
    """Store the bits of values with escapes to 16 bits; escapes past the room are left out."""
    left = tl.max(far, axis=0)
    while left > 0:
        lowest, at = _first_marked(to_16, TILE)
        # Loaded again: which register holds the value depends on the data, and registers cannot be indexed.
        bits = _load_bits(values, at, lowest != 0)
        tl.store(room16 + places16, (bits >> 16).to(tl.int16), mask=(lowest != 0) & (places16 < limit16))
        to_16 ^= lowest
        places16 += 1
        left -= 1


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
    lower, upper = _differences(values, reference, numel, first, blocks, EVEN, TILE)
    words = _word_codes(_codes(lower), _codes(upper))
    # A block has 32 words.
    live = tl.arange(0, TILE * _WORDS) // 32 < blocks - first * _BLOCKS
    codes = message.to(tl.pointer_type(tl.int32)) + first.to(tl.int64) * _WORDS + tl.arange(0, TILE * _WORDS)
    tl.store(codes, words, mask=live)
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
    to_8, to_16 = _marks(words)
    places8, places16, before8, far = _before(to_8, to_16, TILE)
    places8 += _section_words(start8.to(tl.int32), TILE)
    places16 += _section_words(start16.to(tl.int32), TILE)
    room8 = message + room8_offset
    _store_near(room8, to_8, places8, before8, lower, limit8, 0, TILE)
    _store_near(room8, to_8, places8, before8, upper, limit8, 4, TILE)
    room16 = (message + room16_offset).to(tl.pointer_type(tl.int16))
    _store_far(room16, values + first.to(tl.int64) * _SECTION, to_16, places16, far, limit16, TILE)
    end8 = room8_offset + _in_room(tl.load(starts + sections), limit8)
    end16 = room16_offset + 2 * _in_room(tl.load(starts16 + sections), limit16)
    _clear(message, end8, room16_offset, end16, nbytes)


@triton.jit
def _beyond(marks, before, places, limit):
    """Return the marks of escapes whose place is ``limit`` or more."""
    # within is the number of a word's escapes that fit, 0 to 8. Add 8 - within to the marks before each code: the
    # highest of their 4 bits is then set if the escape does not fit.
    within = tl.minimum(tl.maximum(limit - places, 0), 8)
    return marks & ((before + (8 - within) * _ONES) >> 3)


@triton.jit
def _in_rooms(words, to_8, to_16, places8, places16, before8, start8, start16, limit8, limit16):
    """Return words and both marks without the escapes beyond the rooms, whose codes become 0."""
    # Only then can an escape be beyond a room. An encoder's own message has none.
    if (tl.max(start8, axis=0) > limit8 - _SECTION) | (tl.max(start16, axis=0) > limit16 - _SECTION):
        beyond_8 = _beyond(to_8, before8, places8, limit8)
        beyond_16 = _beyond(to_16, to_16 * _ONES - to_16, places16, limit16)
        words &= ~((beyond_8 | beyond_16) * 15)
        to_8 ^= beyond_8
        to_16 ^= beyond_16
    return words, to_8, to_16


@triton.jit
def _decoded(room8, words, to_8, places8, before8, old, blocks, PLACE: tl.constexpr):
    """Return bits of decoded values (int16) of the codes at bit PLACE of bytes; ``old`` are those of the reference.

    The bits of values with an escape to 16 bits are arbitrary: _copy_far overwrites them.
    """
    place8 = _each(places8) + _bytes(before8, blocks, PLACE)
    # The left shift moves a code to the highest bits, and the right shift extends its sign.
    shifts = (28 - PLACE) - 8 * tl.arange(0, 4)[None, :]
    near = tl.reshape((words[:, None] << shifts) >> 28, [words.shape[0] * 4]).to(tl.int8)
    # A load leaves the other value where its mask is False, so nothing is selected.
    difference = tl.load(room8 + place8, mask=_marked(to_8, PLACE), other=near).to(tl.int32) << 16
    # _key is its own inverse.
    return (_key(_key(old) + difference) >> 16).to(tl.int16)


@triton.jit
def _copy_far(room16, target, to_16, places16, far, numel, TILE: tl.constexpr):
    """Copy 16-bit values from their room to ``target``, the tile's first element, of which ``numel`` exist."""
    left = tl.max(far, axis=0)
    while left > 0:
        lowest, at = _first_marked(to_16, TILE)
        # A malformed message may have marks past the end of the tensor.
        marked = (lowest != 0) & (at < numel)
        tl.store(target + at, tl.load(room16 + places16, mask=marked, other=0), mask=marked)
        to_16 ^= lowest
        places16 += 1
        left -= 1


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
    codes = message.to(tl.pointer_type(tl.int32)) + first.to(tl.int64) * _WORDS + tl.arange(0, TILE * _WORDS)
    # A block has 32 words.
    words = tl.load(codes, mask=tl.arange(0, TILE * _WORDS) // 32 < blocks - first * _BLOCKS, other=0)
    section = first + tl.arange(0, TILE)
    pairs = (message + blocks.to(tl.int64) * 128).to(tl.pointer_type(tl.int64))
    pair = tl.load(pairs + section, mask=section * _BLOCKS < blocks, other=0)
    # The starts are clamped, because a malformed message may have any starts and nothing outside its rooms may be read.
    start8 = tl.minimum(tl.maximum(pair.to(tl.int32), 0), limit8)
    start16 = tl.minimum(tl.maximum((pair >> 32).to(tl.int32), 0), limit16)
    to_8, to_16 = _marks(words)
    places8, places16, before8, far = _before(to_8, to_16, TILE)
    places8 += _section_words(start8, TILE)
    places16 += _section_words(start16, TILE)
    room8 = (message + room8_offset).to(tl.pointer_type(tl.int8))
    room16 = (message + room16_offset).to(tl.pointer_type(tl.int16))
    words, to_8, to_16 = _in_rooms(words, to_8, to_16, places8, places16, before8, start8, start16, limit8, limit16)
    at = _lower_halves(TILE)
    in_lower, in_upper = _present(numel, first, blocks, EVEN, TILE)
    begin = index * whole(numel, 256 if EVEN else 1) + first.to(tl.int64) * _SECTION
    # Load the reference before storing anything of the tile, because out may be the reference.
    old_lower = _load_bits(reference + begin, at, in_lower)
    old_upper = _load_bits(reference + begin, at + 64, in_upper)
    # The values are stored as bits, so that NaN payloads are kept.
    target = out.to(tl.pointer_type(tl.int16)) + begin
    bits = _decoded(room8, words, to_8, places8, before8, old_lower, blocks, 0)
    tl.store(target + at, bits, mask=in_lower)
    bits = _decoded(room8, words, to_8, places8, before8, old_upper, blocks, 4)
    tl.store(target + at + 64, bits, mask=in_upper)
    # Other threads have stored to the same elements. Wait for them, or they could overwrite the copies below.
    tl.debug_barrier()
    left = tl.minimum(numel - first.to(tl.int64) * _SECTION, TILE * _SECTION).to(tl.int32)
    _copy_far(room16, target, to_16, places16, far, left, TILE)


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
    even = layout.numel % BLOCK == 0
    tile = tile_of(lossless_count_kernel, {"EVEN": even}).holds(SECTION)
    done = launch(
        lossless_count_kernel, (triton.cdiv(layout.sections, tile),),
        values, reference, layout.numel, layout.blocks, starts,
        EVEN=even, TILE=tile,
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
    even = layout.numel % BLOCK == 0
    tile = tile_of(lossless_encode_kernel, {"EVEN": even}).holds(SECTION)
    return launch(
        lossless_encode_kernel, (triton.cdiv(layout.sections, tile),),
        values, reference, layout.numel, layout.blocks, starts, message, layout.nbytes,
        layout.room8_offset, layout.room16_offset, room8, room16,
        EVEN=even, TILE=tile,
    )  # fmt: skip


def lossless_decode_(
    messages: Tensor, reference: Tensor, out: Tensor, count: int, room8: int, room16: int
) -> Launch | None:
    """Decode lossless messages with a Triton kernel, with the arguments of :func:`zeropp_kernels.lossless_decode_`."""
    layout = lossless_layout(out.numel() // count, room8, room16)
    if layout.sections == 0:
        return None
    even = layout.numel % BLOCK == 0
    tile = tile_of(lossless_decode_kernel, {"EVEN": even}).holds(SECTION)
    return launch(
        lossless_decode_kernel, (triton.cdiv(layout.sections, tile), count),
        messages, reference, out, layout.numel, layout.nbytes, layout.blocks,
        layout.room8_offset, layout.room16_offset, room8, room16,
        EVEN=even, TILE=tile,
    )  # fmt: skip
