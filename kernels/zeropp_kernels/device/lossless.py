"""Triton: bfloat16 values as exact differences against a reference: 4-bit codes with two tiers of escapes.

Three passes decode a message, since it holds no indices: how many codes of each block escape, how many of those
escape again, and then the values. The running sums between them are made by torch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..wire import BLOCK, lossless_layout
from .blocks import INTERPRETED, bfloat16_bits, half_rows, launched, load_codes, store_codes, whole

__all__ = ["ENCODE_TILE", "TILE", "lossless_count_", "lossless_decode_", "lossless_encode_"]

# Blocks. The interpreter's time is that of programs, whatever they hold.
TILE = 64 if INTERPRETED else 8
# Smaller, since ranks of escapes at two limits take many registers.
ENCODE_TILE = 64 if INTERPRETED else 4


@triton.jit
def _key(bits):
    """Order-preserving integer of bfloat16 bits (a bijection of 16 bits)."""
    # Bits of negative numbers fall as the numbers rise; all but the sign are turned round. The sign stays, so doing it
    # twice gives the bits back.
    return bits ^ tl.where((bits & 0x8000) != 0, 0x7FFF, 0)


@triton.jit
def _present(at, left, live, EVEN: tl.constexpr):
    """Mask of the elements that are there; of whole rows if EVEN, which wide access needs."""
    if EVEN:
        return live[:, None, None]
    else:
        return live[:, None, None] & (at < left)


@triton.jit
def _load_bits(values, at, mask):
    """Bits (int32) of bfloat16 values, or of float32 values rounded to bfloat16; zeros where ``mask`` is false."""
    # Missing elements are zeros in values and reference alike: no difference, no escape.
    if values.dtype.element_ty == tl.float32:
        return bfloat16_bits(tl.load(values + at, mask=mask, other=0.0))
    return tl.load(values.to(tl.pointer_type(tl.int16)) + at, mask=mask, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def _signed(x, BITS: tl.constexpr):
    """The low BITS of an integer, with their sign."""
    # The shift back is arithmetic: int32 has a sign.
    return (x << (32 - BITS)) >> (32 - BITS)


@triton.jit
def _escapes(difference, LIMIT: tl.constexpr):
    # Limits are 7 and 127, not 8 and 128: the codes for -8 and -128 mark escapes.
    return (tl.abs(difference) > LIMIT).to(tl.int32)


@triton.jit
def _block_sum(lower, upper):
    """[TILE]: how many of a block's flags are set."""
    return tl.sum(tl.sum(lower + upper, axis=2), axis=1)


@triton.jit
def _ranks(lower, upper):
    """How many flags are set before each one of a tile in its block: rows in order, in a row lower before upper."""
    # Running sums count the flag itself, too; it is taken off below.
    lower_count = tl.cumsum(lower, axis=2)
    upper_count = tl.cumsum(upper, axis=2)
    lower_total = tl.sum(lower, axis=2)
    row_total = lower_total + tl.sum(upper, axis=2)
    before = tl.cumsum(row_total, axis=1) - row_total
    return (
        lower_count - lower + before[:, :, None],
        upper_count - upper + (before + lower_total)[:, :, None],
    )


@triton.jit
def _differences(values, reference, numel, first, live, EVEN: tl.constexpr, TILE: tl.constexpr):
    """(bits of the values, differences of keys in [-32768, 32767]), each for lower and upper halves."""
    at = half_rows(128, TILE, 2)
    start = first.to(tl.int64) * 256
    in_lower = _present(at, numel - start, live, EVEN)
    in_upper = _present(at + 64, numel - start, live, EVEN)
    lower = _load_bits(values + start, at, in_lower)
    upper = _load_bits(values + start, at + 64, in_upper)
    old_lower = _load_bits(reference + start, at, in_lower)
    old_upper = _load_bits(reference + start, at + 64, in_upper)
    # Modulo 2**16: decoding adds modulo 2**16, too, and has the key again.
    return lower, upper, _signed(_key(lower) - _key(old_lower), 16), _signed(_key(upper) - _key(old_upper), 16)


@launched("counts8", "counts16")
def lossless_count_kernel(
    values, reference, numel: tl.int64, blocks: tl.int32, counts8, counts16, EVEN: tl.constexpr, TILE: tl.constexpr
):
    """Escapes of each block of values. Grid: (tiles,)."""
    first = tl.program_id(0) * TILE
    block = first + tl.arange(0, TILE)
    live = block < blocks
    _, _, lower, upper = _differences(values, reference, numel, first, live, EVEN, TILE)
    # ``counts8`` and ``counts16`` begin one entry into the rows of offsets: see _accumulate.
    tl.store(counts8 + block, _block_sum(_escapes(lower, 7), _escapes(upper, 7)).to(tl.int64), mask=live)
    tl.store(counts16 + block, _block_sum(_escapes(lower, 127), _escapes(upper, 127)).to(tl.int64), mask=live)


@triton.jit
def _store_escapes(room8, room16, offset8, offset16, bits, difference, rank8, rank16, limit8, limit16):
    """Put a tile's escapes in their places; places past the room are left out."""
    # Ranks follow the order of elements, so where an escape goes does not depend on tiles.
    place = offset8[:, None, None] + rank8
    code = tl.where(tl.abs(difference) > 127, 0x80, difference & 0xFF).to(tl.uint8)
    tl.store(room8 + place, code, mask=(tl.abs(difference) > 7) & (place < limit8))
    place = offset16[:, None, None] + rank16
    # The value itself, not its difference.
    tl.store(room16 + place, bits.to(tl.int16), mask=(tl.abs(difference) > 127) & (place < limit16))


@launched("offsets8", "offsets16")
def lossless_encode_kernel(
    values, reference, numel: tl.int64, blocks: tl.int32, offsets8, offsets16, message, room8_offset: tl.int64,
    room16_offset: tl.int64, limit8: tl.int64, limit16: tl.int64,
    EVEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Codes and escapes of a tile. Grid: (tiles,)."""
    first = tl.program_id(0) * TILE
    block = first + tl.arange(0, TILE)
    live = block < blocks
    lower_bits, upper_bits, lower, upper = _differences(values, reference, numel, first, live, EVEN, TILE)
    lower_code = tl.where(tl.abs(lower) > 7, 8, lower & 15)
    upper_code = tl.where(tl.abs(upper) > 7, 8, upper & 15)
    # A block takes 128 bytes: 256 codes of 4 bits.
    store_codes(message + first.to(tl.int64) * 128, lower_code, upper_code, live, 4, TILE, 2)
    offset8 = tl.load(offsets8 + block, mask=live, other=0)
    offset16 = tl.load(offsets16 + block, mask=live, other=0)
    lower8, upper8 = _ranks(_escapes(lower, 7), _escapes(upper, 7))
    lower16, upper16 = _ranks(_escapes(lower, 127), _escapes(upper, 127))
    room8 = message + room8_offset
    room16 = (message + room16_offset).to(tl.pointer_type(tl.int16))
    _store_escapes(room8, room16, offset8, offset16, lower_bits, lower, lower8, lower16, limit8, limit16)
    _store_escapes(room8, room16, offset8, offset16, upper_bits, upper, upper8, upper16, limit8, limit16)


@launched("offsets")
def lossless_count4_kernel(
    messages, nbytes: tl.int64, blocks: tl.int32, offsets, row_numel: tl.int64, TILE: tl.constexpr
):
    """4-bit codes of each block that escape. Grid: (tiles of a message, messages)."""
    first = tl.program_id(0) * TILE
    block = first + tl.arange(0, TILE)
    live = block < blocks
    message = messages + tl.program_id(1).to(tl.int64) * whole(nbytes, 128)
    lower, upper = load_codes(message + first.to(tl.int64) * 128, live[:, None, None], 4, TILE, 2)
    # load_codes leaves upper codes in the high half of their byte.
    upper = upper >> 4
    counts = _block_sum((lower == 8).to(tl.int32), (upper == 8).to(tl.int32)).to(tl.int64)
    # offsets [messages, 2, row_numel] with row_numel = blocks + 1: counts at 4 bits, counts at 8 bits; the first entry
    # of a row is for the running sum.
    tl.store(offsets + tl.program_id(1).to(tl.int64) * row_numel * 2 + 1 + block, counts, mask=live)


@launched("offsets")
def lossless_count8_kernel(
    messages, nbytes: tl.int64, blocks: tl.int32, offsets, row_numel: tl.int64, room8_offset: tl.int64,
    limit8: tl.int64, TILE: tl.constexpr,
):  # fmt: skip
    """8-bit codes of each block that escape. Grid: (tiles of a message, messages)."""
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = block < blocks
    room8 = messages + tl.program_id(1).to(tl.int64) * whole(nbytes, 128) + room8_offset
    offsets += tl.program_id(1).to(tl.int64) * row_numel * 2
    begin = tl.load(offsets + block, mask=live, other=0)
    # A message with more escapes than room holds only the first of them.
    end = tl.minimum(tl.load(offsets + block + 1, mask=live, other=0), limit8)
    # A block has 256 elements, so no more codes than that.
    place = begin[:, None] + tl.arange(0, 256)[None, :]
    code = tl.load(room8 + place, mask=place < end[:, None], other=0)
    counts = tl.sum((code == 0x80).to(tl.int32), axis=1).to(tl.int64)
    tl.store(offsets + row_numel + 1 + block, counts, mask=live)


@triton.jit
def _load_escapes(room8, offset8, code, rank8, limit8):
    """(difference, whether it is a raw value) of a tile of 4-bit codes."""
    place = offset8[:, None, None] + rank8
    # Loaded as uint8: the mark -128 is 0x80 here.
    wide = tl.load(room8 + place, mask=(code == 8) & (place < limit8), other=0).to(tl.int32)
    raw = (code == 8) & (wide == 0x80)
    return tl.where(code == 8, _signed(wide, 8), _signed(code, 4)), raw.to(tl.int32)


@triton.jit
def _decoded(room16, offset16, old, difference, raw, rank16, limit16):
    """Bits of a tile of values."""
    place = offset16[:, None, None] + rank16
    exact = tl.load(room16 + place, mask=(raw != 0) & (place < limit16), other=0).to(tl.int32)
    # The key is its own inverse.
    key = (_key(old) + difference) & 0xFFFF
    return tl.where(raw != 0, exact, _key(key)).to(tl.int16)


# Unbounded, Triton 3.6 takes 150.
@launched("offsets", registers=128)
def lossless_decode_kernel(
    messages, reference, out, numel: tl.int64, nbytes: tl.int64, blocks: tl.int32, offsets, row_numel: tl.int64,
    room8_offset: tl.int64, room16_offset: tl.int64, limit8: tl.int64, limit16: tl.int64,
    EVEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Values of a tile. Grid: (tiles of a message, messages)."""
    first = tl.program_id(0) * TILE
    block = first + tl.arange(0, TILE)
    live = block < blocks
    index = tl.program_id(1).to(tl.int64)
    message = messages + tl.program_id(1).to(tl.int64) * whole(nbytes, 128)
    start = first.to(tl.int64) * 256
    offsets += index * row_numel * 2
    offset8 = tl.load(offsets + block, mask=live, other=0)
    offset16 = tl.load(offsets + row_numel + block, mask=live, other=0)
    lower, upper = load_codes(message + first.to(tl.int64) * 128, live[:, None, None], 4, TILE, 2)
    upper = upper >> 4
    lower8, upper8 = _ranks((lower == 8).to(tl.int32), (upper == 8).to(tl.int32))
    room8 = message + room8_offset
    lower, lower_raw = _load_escapes(room8, offset8, lower, lower8, limit8)
    upper, upper_raw = _load_escapes(room8, offset8, upper, upper8, limit8)
    # Known only now: which of the 8-bit codes escape. Ranks are counted among those.
    lower16, upper16 = _ranks(lower_raw, upper_raw)
    room16 = (message + room16_offset).to(tl.pointer_type(tl.int16))
    at = half_rows(128, TILE, 2)
    in_lower = _present(at, numel - start, live, EVEN)
    in_upper = _present(at + 64, numel - start, live, EVEN)
    begin = index * whole(numel, 256 if EVEN else 1) + start
    # Before anything of the tile is written: ``out`` may be the reference.
    old_lower = _load_bits(reference + begin, at, in_lower)
    old_upper = _load_bits(reference + begin, at + 64, in_upper)
    # As bits, so that payloads of NaN come through.
    target = out.to(tl.pointer_type(tl.int16)) + begin
    tl.store(target + at, _decoded(room16, offset16, old_lower, lower, lower_raw, lower16, limit16), mask=in_lower)
    tl.store(target + at + 64, _decoded(room16, offset16, old_upper, upper, upper_raw, upper16, limit16), mask=in_upper)


def _accumulate(counts: Tensor) -> None:
    """Counts [1:] of one row -> places where each block's escapes begin, and their total at the end; in place.

    A row at a time: of several rows torch sums each with one thread block.
    """
    # With a zero in front a running sum is where each block begins.
    counts[0] = 0
    counts.cumsum_(0)


def lossless_count_(values: Tensor, reference: Tensor, offsets: Tensor) -> None:
    """See :func:`zeropp_kernels.lossless_count_`."""
    blocks = offsets.shape[1] - 1
    if blocks:
        lossless_count_kernel[(triton.cdiv(blocks, TILE),)](
            # One entry on, so of any alignment, which the kernel leaves open.
            values, reference, values.numel(), blocks, offsets[0, 1:], offsets[1, 1:],
            EVEN=values.numel() % BLOCK == 0, TILE=TILE, **lossless_count_kernel.options,
        )  # fmt: skip
    for row in offsets:
        _accumulate(row)


def lossless_encode_(
    values: Tensor, reference: Tensor, offsets: Tensor, message: Tensor, room8: int, room16: int
) -> None:
    """See :func:`zeropp_kernels.lossless_encode_`."""
    layout = lossless_layout(values.numel(), room8, room16)
    # Rooms may be larger than what goes in, and all of the message travels.
    message[layout.codes_nbytes :].zero_()
    if layout.blocks:
        lossless_encode_kernel[(triton.cdiv(layout.blocks, ENCODE_TILE),)](
            values, reference, layout.numel, layout.blocks, offsets[0], offsets[1], message,
            layout.room8_offset, layout.room16_offset, room8, room16,
            EVEN=layout.numel % BLOCK == 0, TILE=ENCODE_TILE, **lossless_encode_kernel.options,
        )  # fmt: skip


def lossless_decode_(
    messages: Tensor, reference: Tensor, out: Tensor, offsets: Tensor, count: int, room8: int, room16: int
) -> None:
    """See :func:`zeropp_kernels.lossless_decode_`."""
    layout = lossless_layout(out.numel() // count, room8, room16)
    if layout.blocks == 0:
        offsets.zero_()
        return
    # Each kernel needs the running sum of what the one before has counted.
    grid = triton.cdiv(layout.blocks, TILE), count
    row = layout.blocks + 1
    lossless_count4_kernel[grid](
        messages, layout.nbytes, layout.blocks, offsets, row, TILE=TILE, **lossless_count4_kernel.options
    )
    for rows in offsets:
        _accumulate(rows[0])
    lossless_count8_kernel[grid](
        messages, layout.nbytes, layout.blocks, offsets, row, layout.room8_offset, room8,
        TILE=TILE, **lossless_count8_kernel.options,
    )  # fmt: skip
    for rows in offsets:
        _accumulate(rows[1])
    lossless_decode_kernel[grid](
        messages, reference, out, layout.numel, layout.nbytes, layout.blocks, offsets, row,
        layout.room8_offset, layout.room16_offset, room8, room16,
        EVEN=layout.numel % BLOCK == 0, TILE=TILE, **lossless_decode_kernel.options,
    )  # fmt: skip
