"""What the Triton kernels share: tiles of groups in registers, rounding, scales, codes, rotation.

A tile is TILE groups in registers, as two tensors of shape [TILE, K, 64]: the lower and the upper halves of rows of
128 elements (K is 1 for groups of 128 and 2 for groups of 256). So the two int4 codes of a byte, and the two ends of
the rotation's widest step, meet in one thread, and each thread has 16 elements in a row: 128-bit loads and stores.

That these kernels and :mod:`zeropp_kernels.reference` give the same bits rests on three things: kernels are launched
with ``enable_fp_fusion=False``, divisions are rounded once (``div_rn``), and casts from and to bfloat16 are integers
under Triton's interpreter, which would truncate, and flush what is subnormal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import INTERPRETED, ROWS

__all__ = [
    "TILE_ROWS",
    "aligned",
    "bfloat16_bits",
    "cast",
    "code_values",
    "encode_pair",
    "group_peak",
    "half_rows",
    "load_codes",
    "load_packed",
    "load_pair",
    "load_raw",
    "loop_end",
    "rotate",
    "saturate",
    "scale_of",
    "scale_value",
    "store_codes",
    "store_encoded",
    "store_pair",
    "store_scales",
    "unpack",
    "value_pair",
    "whole",
    "wide",
    "widen",
    "within",
]

# 1.5 * 2**23. Between 2**23 and 2**24 neighbours are 1 apart, so adding it rounds to the nearest integer, halves to
# even; the half on top leaves room for negative numbers.
_MAGIC = tl.constexpr(12582912.0)
# Bits of Inf: the exponent all ones. Magnitudes with more bits than that are NaN.
_EXPONENT = tl.constexpr(0x7F800000)
_NAN_SCALE = tl.constexpr(0x7FC0)
# 2**-126, with the inverse 2**126. A group of zeros would have the scale 0, whose inverse is Inf, and 0 * Inf is NaN.
_SMALLEST_SCALE = tl.constexpr(0x0080)
# The largest bfloat16 of which 7 times is finite in float32. int8 needs no such limit: where 127 times the scale would
# be infinite, rounding up has made the largest code 126.
_LARGEST_SCALE_4 = tl.constexpr(0x7E12)
_INTERPRETED = tl.constexpr(INTERPRETED)
# A tile is TILE groups of K rows each, so TILE_ROWS // TILE is K, whatever the width of a code.
TILE_ROWS = tl.constexpr(ROWS)


@triton.jit
def whole(size, MULTIPLE: tl.constexpr):
    """``size``, a multiple of MULTIPLE, in a form that shows it to the compiler: wide access rests on that."""
    # Integers are not specialised, so nothing else tells the compiler that rows stay aligned.
    return size // MULTIPLE * MULTIPLE


@triton.jit
def loop_end(count):
    """``count``, as the end of a range."""
    if _INTERPRETED:
        # Triton 3.6 makes an int of an array with one dimension, which numpy 2.4 refuses.
        return count.handle.data.item()
    return count


@triton.jit
def half_rows(STRIDE: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """[TILE, K, 64]: offsets of the first 64 places of each row, where rows are STRIDE apart."""
    # Offsets in a tile fit 32 bits; where the tile begins is in the pointer, which callers move by 64-bit numbers.
    group = tl.arange(0, TILE)[:, None, None]
    row = tl.arange(0, K)[None, :, None]
    column = tl.arange(0, 64)[None, None, :]
    return (group * K + row) * STRIDE + column


@triton.jit
def widen(x):
    """float32 of 16-bit or float32 values."""
    if x.dtype == tl.bfloat16 and _INTERPRETED:
        # A bfloat16 is the upper half of a float32. The interpreter's own cast flushes what is subnormal.
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def wide(pointer, left, SIZE: tl.constexpr):
    """Whether SIZE elements from ``pointer`` (scalar) on are all there, and begin at a multiple of 16 bytes.

    The same for all of a program, so that choosing by it is one branch, and only tiles at an end have narrow access.
    """
    return (pointer.to(tl.int64) % 16 == 0) & (left >= SIZE)


@triton.jit
def aligned(pointer, at):
    """``pointer + at`` [TILE, K, 64] where :func:`wide` holds, in a form that shows it to the compiler."""
    # Made anew from an integer, here inside the branch: a promise sticks to the value that it is made of, and AMD's
    # compiler takes apart what it knows to come from an argument, and drops what was said of it.
    base = whole(pointer.to(tl.int64), 16).to(pointer.dtype)
    return tl.multiple_of(base, 16) + at


@triton.jit
def within(left, SIZE: tl.constexpr):
    """int32: how many of a tile's SIZE elements are there, of ``left`` (int64, of any sign) from its start on."""
    # In 32 bits, since masks compare it with every element.
    return tl.minimum(tl.maximum(left, 0), SIZE).to(tl.int32)


@triton.jit
def load_raw(source, left, TILE: tl.constexpr, K: tl.constexpr):
    """A tile of values in the dtype they have in memory, zeros from element ``left`` on."""
    at = half_rows(128, TILE, K)
    SIZE: tl.constexpr = TILE * K * 128
    if wide(source, left, SIZE):
        lower = tl.load(aligned(source, at))
        upper = tl.load(aligned(source, at + 64))
    else:
        there = within(left, SIZE)
        lower = tl.load(source + at, mask=at < there, other=0.0)
        upper = tl.load(source + at + 64, mask=at + 64 < there, other=0.0)
    return lower, upper


@triton.jit
def load_pair(source, left, TILE: tl.constexpr, K: tl.constexpr):
    """As :func:`load_raw`, in float32."""
    lower, upper = load_raw(source, left, TILE, K)
    return widen(lower), widen(upper)


@triton.jit
def saturate(x, dtype: tl.constexpr):
    """What passes the largest finite value of ``dtype`` becomes that value; NaN stays NaN."""
    # The numbers of torch.finfo, which a kernel cannot ask.
    if dtype == tl.float32:
        limit = 3.4028234663852886e38
    elif dtype == tl.bfloat16:
        limit = 3.3895313892515355e38
    else:
        limit = 65504.0
    # By default the operand that is no NaN wins, and a NaN would turn into the limit.
    x = tl.maximum(x, -limit, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def bfloat16_bits(x):
    """int32 in [0, 65536): float32 rounded to bfloat16, halves to even, and one NaN for all."""
    bits = x.to(tl.int32, bitcast=True)
    # Adds just less than half of what is cut off, and 1 more where the last bit that stays is odd: halves go to even.
    # The shift drags the sign along, hence the mask.
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    # The addition can carry a NaN over into the sign; all become the one that the reference writes.
    return tl.where((bits & 0x7FFFFFFF) > _EXPONENT, 0x7FC0, rounded)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """float32 rounded to ``dtype``, halves to even."""
    if dtype == tl.bfloat16 and _INTERPRETED:
        return bfloat16_bits(x).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def store_pair(target, lower, upper, left, TILE: tl.constexpr, K: tl.constexpr):
    """Write a tile of float32 values in the dtype of ``target``; the mirror of :func:`load_pair`."""
    at = half_rows(128, TILE, K)
    SIZE: tl.constexpr = TILE * K * 128
    lower = cast(lower, target.dtype.element_ty)
    upper = cast(upper, target.dtype.element_ty)
    if wide(target, left, SIZE):
        tl.store(aligned(target, at), lower)
        tl.store(aligned(target, at + 64), upper)
    else:
        there = within(left, SIZE)
        tl.store(target + at, lower, mask=at < there)
        tl.store(target + at + 64, upper, mask=at + 64 < there)


@triton.jit
def group_peak(lower, upper):
    """[TILE]: bits of the largest magnitude in each group; as integers, so that NaN is larger than any number."""
    lower = lower.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    upper = upper.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.max(tl.maximum(lower, upper), axis=2), axis=1)


@triton.jit
def scale_value(bits):
    """float32 from the 16 bits of a bfloat16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(peak, BITS: tl.constexpr):
    """(bfloat16 bits of the scale, its inverse, whether the group is finite), each [TILE].

    The scale is peak / 127 or peak / 7 rounded up to bfloat16, so that no code passes the ends and none is clamped.
    A group that is not finite gets a NaN scale, and zeros for codes: see :func:`store_encoded`.
    """
    # ``/`` would be an approximate division on NVIDIA; div_rn is rounded once, like torch's.
    levels: tl.constexpr = (1 << (BITS - 1)) - 1
    scale = tl.div_rn(peak.to(tl.float32, bitcast=True), tl.full(peak.shape, levels, tl.float32))
    # Carries into the upper half unless the lower one is zero: rounded up. Bits of positive numbers are in the order of
    # the numbers, so the bounds are compared as integers.
    bits = tl.maximum((scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16, _SMALLEST_SCALE)
    if BITS == 4:
        bits = tl.minimum(bits, _LARGEST_SCALE_4)
    finite = peak < _EXPONENT
    bits = tl.where(finite, bits, _NAN_SCALE)
    # The inverse of the scale as it is sent: one division a group, a product for each element.
    inverse = tl.div_rn(tl.full(peak.shape, 1.0, tl.float32), scale_value(bits))
    return bits, inverse, finite


@triton.jit
def encode_pair(lower, upper, inverse):
    """Codes of a tile in the low bits of int32, and the same as float32; neither means anything in a group with NaN.

    Adding 1.5 * 2**23 rounds to an integer, and the low bits of the sum are its two's complement.
    """
    inverse = inverse[:, None, None]
    # Two roundings, as torch has them: fused into one, some products next to a tie would get another code.
    lower = lower * inverse + _MAGIC
    upper = upper * inverse + _MAGIC
    # These differences are exact.
    return lower.to(tl.int32, bitcast=True), upper.to(tl.int32, bitcast=True), lower - _MAGIC, upper - _MAGIC


@triton.jit
def _code_value(code, BITS: tl.constexpr):
    """float32 value of a code: its bits set below those of 2**23, which takes no conversion from an integer."""
    # 0x4B000000 is 2**23, whose last mantissa bit counts ones. The XOR turns the code's sign bit round, which adds half
    # of its range to its value: the bits of 2**23 + half + code.
    half: tl.constexpr = 1 << (BITS - 1)
    return (code ^ (0x4B000000 + half)).to(tl.float32, bitcast=True) - (8388608.0 + half)


@triton.jit
def code_values(lower, upper, scale, BITS: tl.constexpr):
    """The float32 values of both halves of codes as :func:`unpack` has them, and the scale of each.

    An upper int4 code stays where it is, 16 times its value, under a sixteenth of the scale: a shift less, and exact.
    """
    if BITS == 8:
        return _code_value(lower, 8), _code_value(upper, 8), scale, scale
    else:
        tl.static_assert(BITS == 4)  # here and below: another width lies in other bytes
        # Read as 8 bits, a nibble in the upper half is 16 times its value. A sixteenth of the smallest scale is
        # subnormal and still exact.
        return _code_value(lower, 4), _code_value(upper, 8), scale, scale * 0.0625


@triton.jit
def value_pair(lower, upper, scale, BITS: tl.constexpr):
    """Values of a tile of codes as :func:`unpack` has them, under ``scale``, which broadcasts to [TILE, K, 64].

    Exact: a scale has 8 significant bits and a code at most 7, so a product that a compiler fuses into a sum changes
    nothing.
    """
    lower, upper, lower_scale, upper_scale = code_values(lower, upper, scale, BITS)
    return lower * lower_scale, upper * upper_scale


@triton.jit
def store_codes(base, lower, upper, live, BITS: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """Write the low bits of a tile of int32 as codes at ``base``.

    int4: byte j of a row holds element j, and element j + 64 above it.
    """
    # A row of 128 codes takes 16 * BITS bytes: two half rows in 8 bits, one in 4.
    at = half_rows(16 * BITS, TILE, K)
    live = live[:, None, None]
    if BITS == 8:
        tl.store(base + at, lower.to(tl.uint8), mask=live)
        tl.store(base + at + 64, upper.to(tl.uint8), mask=live)
    else:
        tl.static_assert(BITS == 4)
        tl.store(base + at, ((lower & 15) | (upper << 4)).to(tl.uint8), mask=live)


@triton.jit
def store_encoded(base, lower, upper, live, finite, BITS: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """As :func:`store_codes`, and zeros in groups that are not ``finite`` [TILE], on every machine."""
    store_codes(base, lower, upper, live & finite, BITS, TILE, K)
    # A second store that is hardly ever made costs less than clearing 32 codes in registers.
    zeros = tl.zeros([TILE, K, 64], tl.int32)
    store_codes(base, zeros, zeros, live & ~finite, BITS, TILE, K)


@triton.jit
def load_packed(base, live, BITS: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """Read the bytes of a tile's codes at ``base``, zeros where ``live`` (broadcast to [TILE, K, 64]) is false.

    Those of both halves; int4 has both in one byte, and gives that twice.
    """
    at = half_rows(16 * BITS, TILE, K)
    lower = tl.load(base + at, mask=live, other=0)
    if BITS == 8:
        return lower, tl.load(base + at + 64, mask=live, other=0)
    else:
        tl.static_assert(BITS == 4)
        return lower, lower


@triton.jit
def unpack(lower, upper, BITS: tl.constexpr):
    """The codes (int32) in bytes as :func:`load_packed` has them; int4: upper codes stay in the high half of theirs."""
    if BITS == 8:
        return lower.to(tl.int32), upper.to(tl.int32)
    else:
        tl.static_assert(BITS == 4)
        # Not shifted down: see code_values.
        return lower.to(tl.int32) & 15, upper.to(tl.int32) & 0xF0


@triton.jit
def load_codes(base, live, BITS: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """Read a tile's codes at ``base``, zeros where ``live`` (broadcast to [TILE, K, 64]) is false."""
    lower, upper = load_packed(base, live, BITS, TILE, K)
    return unpack(lower, upper, BITS)


@triton.jit
def store_scales(base, bits, first, groups, slots, TILE: tl.constexpr):
    """Write a tile's scales at ``base``, and zeros in the places after the last group."""
    # Slots go on to the end of the message, so that no byte of it is left as it was in memory.
    group = first + tl.arange(0, TILE)
    # As bits, so that no machine's own rounding to bfloat16 has a say.
    scales = base.to(tl.pointer_type(tl.int16)) + first
    tl.store(scales + tl.arange(0, TILE), tl.where(group < groups, bits, 0).to(tl.int16), mask=group < slots)


@triton.jit
def _halve(x):
    """One step of the transform in runs of 16: sums of neighbours come first, their differences after them."""
    tile: tl.constexpr = x.shape[0]
    k: tl.constexpr = x.shape[1]
    # Four runs of 8 pairs. join puts each sum beside its difference; the permutation takes them apart again, so that a
    # run has its 8 sums first.
    even, odd = tl.split(tl.reshape(x, [tile, k, 4, 8, 2]))
    return tl.reshape(tl.permute(tl.join(even + odd, even - odd), [0, 1, 2, 4, 3]), [tile, k, 64])


@triton.jit
def rotate(lower, upper):
    """Hadamard transform, times 2**-5, of each 32 elements: 16 in a row of the lower half with the 16 of the upper.

    The factor keeps every partial sum finite. Twice is 2**-5 times the input; all factors are exact.
    """
    lower = lower * 0.03125
    upper = upper * 0.03125
    total = lower + upper
    difference = lower - upper
    # With the step between the halves above, five of them: 2**5 elements. Runs of 16 lie in one thread.
    for _ in tl.static_range(4):
        total = _halve(total)
        difference = _halve(difference)
    return total, difference
