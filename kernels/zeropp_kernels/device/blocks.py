"""Device functions that several Triton kernels use: loads and stores of tiles, rounding, scales, codes, rotation.

A tile is TILE groups in registers, as two tensors [TILE, K, 64] named lower and upper: the first and the last 64
elements of each row of 128 (K rows per group: 1 for groups of 128, 2 for groups of 256). With this split, the two int4
codes of a byte and the two inputs of the rotation's widest step are in one thread. In encoders and rotations each
thread has runs of 16 consecutive elements, which allows 128-bit loads and stores.

Results are equal to the bit to those of :mod:`zeropp_kernels.reference`, for three reasons. Kernels are compiled with
``enable_fp_fusion=False``. Scales and their inverses are correctly rounded (:func:`_quotient`, :func:`_inverse`). Under
Triton's interpreter, casts to and from bfloat16 are done on integers, because the interpreter's casts truncate and
flush subnormal values to zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..wire import GROUPS
from .tiles import INTERPRETED

__all__ = [
    "aligned",
    "bfloat16_bits",
    "cast",
    "code_pair",
    "encode_pair",
    "group_peak",
    "group_rows",
    "half_rows",
    "load_pair",
    "load_words",
    "loop_end",
    "rotate",
    "saturate",
    "scale_of",
    "scale_value",
    "store_encoded",
    "store_pair",
    "store_scales",
    "value_pair",
    "whole",
    "wide",
    "widen",
    "within",
]

# 1.5 * 2**23. Adding it to a float32 of small magnitude rounds that to an integer, ties to even, because float32 values
# between 2**23 and 2**24 are 1 apart. The extra 2**22 keeps sums with negative numbers in that range.
_MAGIC = tl.constexpr(12582912.0)
# The same for int4 codes, plus 8, which makes the codes positive. Eight codes are added with factors of 16. The bits of
# the magic numbers must disappear in that sum: 17 * 0x4B400000 + 16 * 0xC0000 = 0 modulo 2**32.
_MAGIC_LOWER_4 = tl.constexpr(12582912.0 + 8)
_MAGIC_UPPER_4 = tl.constexpr(12582912.0 + 0xC0000 + 8)
# The highest bit of each code in a word, as int32.
_FLIP_8 = tl.constexpr(0x80808080 - (1 << 32))
_FLIP_4 = tl.constexpr(0x88888888 - (1 << 32))
# Bits of float32 Inf. Magnitudes with larger bits are NaN.
_EXPONENT = tl.constexpr(0x7F800000)
_NAN_SCALE = tl.constexpr(0x7FC0)
# Bits of 2**-126 in bfloat16, whose inverse is 2**126. A group of zeros would have scale 0 and inverse Inf, and 0 * Inf
# is NaN.
_SMALLEST_SCALE = tl.constexpr(0x0080)
# Bits of the largest bfloat16 s with 7 * s finite in float32. int8 needs no such limit: if rounding up makes 127 * s
# infinite, the largest code is 126.
_LARGEST_SCALE_4 = tl.constexpr(0x7E12)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.constexpr_function
def group_rows(bits: int) -> int:
    """Return the number of rows of 128 elements in a group of codes of ``bits`` bits."""
    return GROUPS[bits] // 128


@triton.jit
def whole(size, MULTIPLE: tl.constexpr):
    """Return ``size``, a multiple of MULTIPLE, as an expression that the compiler sees to be a multiple."""
    # Without this, the compiler could not use 128-bit access, because integer arguments are not specialised.
    if _INTERPRETED:
        # The interpreter holds arguments of 2**31 to 2**32 as unsigned numbers of 32 bits, and shifts them as if they
        # were signed.
        return size // MULTIPLE * MULTIPLE
    # A division of a signed number would take five instructions.
    SHIFT: tl.constexpr = MULTIPLE.bit_length() - 1
    return (size >> SHIFT) * MULTIPLE


@triton.jit
def loop_end(count):
    """Return ``count`` for use as the end of a range."""
    if _INTERPRETED:
        # The interpreter of Triton 3.6 calls int() on a one-element array, which numpy 2.4 refuses.
        return count.handle.data.item()
    return count


@triton.jit
def half_rows(STRIDE: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """Return offsets [TILE, K, 64] of the first 64 elements of each row, for rows that are STRIDE apart."""
    # Offsets within a tile fit 32 bits. Callers add the 64-bit start of the tile to the pointer.
    group = tl.arange(0, TILE)[:, None, None]
    row = tl.arange(0, K)[None, :, None]
    column = tl.arange(0, 64)[None, None, :]
    return (group * K + row) * STRIDE + column


@triton.jit
def widen(x):
    """Return float32 of 16-bit or float32 values."""
    if x.dtype == tl.bfloat16 and _INTERPRETED:
        return _upper_half(x)
    return x.to(tl.float32)


@triton.jit
def _upper_half(x):
    """Return float32 of bfloat16 values, which are the upper halves of float32 values."""
    # The interpreter's own cast flushes subnormal values to zero.
    return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _load_wide(source):
    """Load values as float32 with 128-bit access."""
    x = tl.load(source)
    return _upper_half(x) if x.dtype == tl.bfloat16 else x.to(tl.float32)


@triton.jit
def wide(pointer, left, SIZE: tl.constexpr):
    """Return True if ``pointer`` (a scalar) is a multiple of 16 bytes and at least SIZE elements are left from it on.

    The result is one scalar per program, so code that depends on it is one branch. Tiles at an end take the narrow
    branch.
    """
    return (pointer.to(tl.int64) % 16 == 0) & (left >= SIZE)


@triton.jit
def aligned(pointer, at):
    """Return ``pointer + at`` [TILE, K, 64], from a pointer that the compiler sees to be a multiple of 16 bytes.

    Only valid where :func:`wide` is True.
    """
    # Convert the pointer to an integer and back inside the branch. The hint applies to the value itself, which must not
    # be used in the other branch. AMD's compiler also splits pointers that come from arguments, and loses the hint
    # then.
    base = whole(pointer.to(tl.int64), 16).to(pointer.dtype)
    return tl.multiple_of(base, 16) + at


@triton.jit
def within(left, SIZE: tl.constexpr):
    """Return ``left`` (int64, of any sign) clamped to 0 to SIZE, as int32: the number of elements left in a tile."""
    # The result has 32 bits, because masks compare it with every element.
    return tl.minimum(tl.maximum(left, 0), SIZE).to(tl.int32)


@triton.jit
def load_pair(source, left, TILE: tl.constexpr, K: tl.constexpr):
    """Load a tile of values as float32; elements from ``left`` on are zeros."""
    at = half_rows(128, TILE, K)
    SIZE: tl.constexpr = TILE * K * 128
    # Values are converted in each branch. After the branches, every second one of 16-bit values would take an
    # instruction more.
    if wide(source, left, SIZE):
        lower = _load_wide(aligned(source, at))
        upper = _load_wide(aligned(source, at + 64))
    else:
        there = within(left, SIZE)
        lower = widen(tl.load(source + at, mask=at < there, other=0.0))
        upper = widen(tl.load(source + at + 64, mask=at + 64 < there, other=0.0))
    return lower, upper


@triton.jit
def saturate(x, dtype: tl.constexpr):
    """Clamp values to the finite range of ``dtype``. NaN stays NaN."""
    # The values of torch.finfo(dtype).max, which a kernel cannot call.
    if dtype == tl.float32:
        limit = 3.4028234663852886e38
    elif dtype == tl.bfloat16:
        limit = 3.3895313892515355e38
    else:
        limit = 65504.0
    # By default, maximum and minimum return the operand that is not NaN, which would turn NaN into the limit.
    x = tl.maximum(x, -limit, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def bfloat16_bits(x):
    """Return float32 values rounded to bfloat16, ties to even, as bits in [0, 65536). Every NaN becomes 0x7FC0."""
    bits = x.to(tl.int32, bitcast=True)
    # Adds just less than half the value of the last bit that is kept, plus 1 if that bit is set, so ties go to even.
    # The mask removes the sign bits that the shift extends.
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    # The addition could carry from a NaN into the sign bit. The reference also writes this one NaN.
    return tl.where((bits & 0x7FFFFFFF) > _EXPONENT, 0x7FC0, rounded)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Return float32 values rounded to ``dtype``, ties to even."""
    if dtype == tl.bfloat16 and _INTERPRETED:
        return bfloat16_bits(x).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def store_pair(target, lower, upper, left, TILE: tl.constexpr, K: tl.constexpr):
    """Store a tile of float32 values in the dtype of ``target``; elements from ``left`` on are not stored."""
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
    """Return the bits of the largest magnitude of each group, [TILE]; as integers, NaN is the largest."""
    # A maximum of floats takes magnitudes at no cost. The other maxima are of integers, which some GPUs take of three
    # operands at a time.
    peak = tl.maximum(tl.abs(lower), tl.abs(upper), propagate_nan=tl.PropagateNan.ALL).to(tl.int32, bitcast=True)
    return tl.max(tl.max(peak, axis=2), axis=1)


@triton.jit
def scale_value(bits):
    """Return float32 of bfloat16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _quotient(peak, LEVELS: tl.constexpr):
    """Return ``peak / LEVELS``, correctly rounded if it is 2**-126 or more, for LEVELS 7 or 127."""
    if _INTERPRETED:
        # The interpreter of Triton 3.6 rounds twice in fma.
        return tl.div_rn(peak, tl.full(peak.shape, LEVELS, tl.float32))
    # The product with the rounded inverse is off by at most one unit in the last place. The remainder is exact, and
    # one step of Newton's method with it gives the rounded quotient. A test compares all mantissas. div_rn would take
    # three times as many instructions, and a branch for subnormal numbers.
    inverse: tl.constexpr = 1.0 / LEVELS
    quotient = peak * inverse
    remainder = tl.fma(quotient, tl.full(peak.shape, -LEVELS, tl.float32), peak)
    return tl.fma(remainder, tl.full(peak.shape, inverse, tl.float32), quotient)


@triton.jit
def _inverse(scale):
    """Return ``1 / scale``, correctly rounded, for a bfloat16 scale from 2**-126 to 2**125."""
    one = tl.full(scale.shape, 1.0, tl.float32)
    if _INTERPRETED:
        return tl.div_rn(one, scale)
    # rsqrt is off by at most a few units in the last place. One step of Newton's method makes the error smaller than
    # the distance of any of the 128 possible inverses from a tie. A test compares all of them. A division would take
    # more instructions.
    near = tl.rsqrt(scale)
    near *= near
    return tl.fma(near, tl.fma(near, -scale, one), near)


@triton.jit
def scale_of(peak, BITS: tl.constexpr):
    """Return (bfloat16 bits of the scale, inverse of the scale, True if the group is finite), each [TILE].

    The scale is peak / 127 for 8 bits or peak / 7 for 4 bits, rounded up to bfloat16, so that codes need no clamp. A
    group with Inf or NaN gets a NaN scale; :func:`store_encoded` writes zero codes for it.
    """
    scale = _quotient(peak.to(tl.float32, bitcast=True), (1 << (BITS - 1)) - 1)
    # Adding 0xFFFF carries into the upper half unless the lower half is zero, which rounds up. Positive floats are
    # ordered like their bits, so the bounds are compared as integers.
    bits = tl.maximum((scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16, _SMALLEST_SCALE)
    if BITS == 4:
        bits = tl.minimum(bits, _LARGEST_SCALE_4)
    finite = peak < _EXPONENT
    bits = tl.where(finite, bits, _NAN_SCALE)
    # Inverse of the rounded scale: one division per group, one product per element.
    return bits, _inverse(scale_value(bits)), finite


@triton.jit
def encode_pair(lower, upper, inverse, BITS: tl.constexpr):
    """Return the codes of a tile as int32 (lower, upper), for :func:`store_encoded`, and as float32 (lower, upper).

    Adding a number of _MAGIC rounds to an integer. The results are meaningless in groups with Inf or NaN.
    """
    inverse = inverse[:, None, None]
    # Product and sum are rounded separately, as in torch. Fused, products next to a tie would get another code.
    # 8 bits: the low bits of the sum are the code's two's complement. 4 bits: see _store_codes.
    lower_magic: tl.constexpr = _MAGIC if BITS == 8 else _MAGIC_LOWER_4
    upper_magic: tl.constexpr = _MAGIC if BITS == 8 else _MAGIC_UPPER_4
    lower = lower * inverse + lower_magic
    upper = upper * inverse + upper_magic
    # The differences are exact.
    return lower.to(tl.int32, bitcast=True), upper.to(tl.int32, bitcast=True), lower - lower_magic, upper - upper_magic


@triton.jit
def _words(x):
    """Return the sum of the bytes of each word, times their places: [TILE, K, 64] bytes -> [TILE, K, 16] words."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 16, 2, 2]))
    even, odd = tl.split(even + (odd << 8))
    return even + (odd << 16)


@triton.jit
def _store_codes(base, lower, upper, live, BITS: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """Store a tile of codes from :func:`encode_pair` at ``base``, for groups where ``live`` [TILE] is True.

    int4: byte j of a row's 64 bytes has element j in its low half and element j + 64 in its high half.
    """
    live = live[:, None, None]
    # A row of 128 codes takes 16 * BITS bytes: two half rows of 64 bytes for 8 bits, one for 4 bits.
    if BITS == 8:
        at = half_rows(128, TILE, K)
        tl.store(base + at, lower.to(tl.uint8), mask=live)
        tl.store(base + at + 64, upper.to(tl.uint8), mask=live)
    else:
        tl.static_assert(BITS == 4)
        # Each code is 8 more than its value, plus a constant that disappears in the sum (see _MAGIC_UPPER_4), so the
        # sum of a word is eight codes of 0 to 15 that do not overlap. Flipping the highest bit of each subtracts 8.
        words = _words(lower + (upper << 4)) ^ _FLIP_4
        tl.store(_word_pointers(base.to(tl.pointer_type(tl.int32)), BITS, TILE, K), words, mask=live)


@triton.jit
def store_encoded(base, lower, upper, live, finite, BITS: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """Store codes as :func:`_store_codes` does, but zeros in groups where ``finite`` [TILE] is False."""
    _store_codes(base, lower, upper, live & finite, BITS, TILE, K)
    # A second, masked store that is rarely taken costs less than clearing 32 codes in registers. It stores bytes also
    # for 4 bits: then Triton gives each thread 16 consecutive elements, and words need no exchange between threads.
    spoilt = (live & ~finite)[:, None, None]
    zeros = tl.zeros([TILE, K, 64], tl.uint8)
    at = base + half_rows(16 * BITS, TILE, K)
    tl.store(at, zeros, mask=spoilt)
    if BITS == 8:
        tl.store(at + 64, zeros, mask=spoilt)


@triton.jit
def _word_pointers(base, BITS: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """Return pointers [TILE, K, 16] to the first 16 words of each row of codes."""
    # Two steps for rows, so that the compiler finds that the rows of a thread are a constant distance apart.
    group = tl.arange(0, TILE)[:, None, None]
    row = tl.arange(0, K)[None, :, None]
    return base + tl.arange(0, 16)[None, None, :] + group * (4 * K * BITS) + row * (4 * BITS)


@triton.jit
def load_words(base, live, count, BITS: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr = 4):
    """Load the codes of a tile at ``base`` as int32 words of four bytes (lower, upper), each [TILE, K, 16].

    For 4 bits a byte has codes of both halves, so both results are the same tensor. Words are zeros where ``live``,
    which broadcasts to [TILE, K, 16], is False. ``count`` is any int32 that is not negative.

    WIDTH is the number of words in one load of a thread. It is 4 if threads need runs of 16 elements. If values are
    stored directly, it is the number of words whose values fill one 16-byte store: 2 for 16-bit values, 1 for float32.
    A larger WIDTH would move values between threads.
    """
    words = base.to(tl.pointer_type(tl.int32))
    if WIDTH < 4:
        # Adds zero, which the compiler does not know. It can prove an alignment of WIDTH words only, and makes loads of
        # that width.
        words += (count >> 31) * WIDTH
    at = _word_pointers(words, BITS, TILE, K)
    lower = tl.load(at, mask=live, other=0)
    if BITS == 8:
        return lower, tl.load(at + 16, mask=live, other=0)
    else:
        tl.static_assert(BITS == 4)
        return lower, lower


@triton.jit
def _field(words, magic, BITS: tl.constexpr, PLACE: tl.constexpr):
    """Return the codes at bits PLACE to PLACE + BITS - 1 of words, as float32.

    A code c is stored as c plus half of the range of codes. ``magic`` is the bits of float32 2**23.
    """
    # A float without a shift and without a conversion from integer: the code is set into the mantissa of
    # 2**(23 - PLACE), where bit PLACE counts ones.
    bits = (words & (((1 << BITS) - 1) << PLACE)) | (magic - (PLACE << 23))
    return bits.to(tl.float32, bitcast=True) - ((1 << (23 - PLACE)) + (1 << (BITS - 1)))


@triton.jit
def _interleaved(even, odd):
    """Return [TILE, K, 64] from the values of even and odd bytes of half words, each [TILE, K, 16, 2]."""
    return tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1], 64])


@triton.jit
def code_pair(lower, upper, count, BITS: tl.constexpr):
    """Return the codes of a tile in float32 (lower, upper), from words of :func:`load_words`.

    ``count`` is any int32 that is not negative.
    """
    # Numbers that the compiler must not know. An instruction takes one constant, so with a known magic number it would
    # need two to mask a code and to set the bits above it. After a known shift, it would extract bytes one by one.
    magic = (count >> 31) + 0x4B000000
    half = (count >> 31) + 16
    # Flipping the highest bit of a code in two's complement adds half of its range.
    if BITS == 8:
        lower ^= _FLIP_8
        upper ^= _FLIP_8
        lower = tl.join(lower, lower >> half)
        upper = tl.join(upper, upper >> half)
        lower = _interleaved(_field(lower, magic, 8, 0), _field(lower, magic, 8, 8))
        upper = _interleaved(_field(upper, magic, 8, 0), _field(upper, magic, 8, 8))
    else:
        tl.static_assert(BITS == 4)
        lower ^= _FLIP_4
        both = tl.join(lower, lower >> half)
        lower = _interleaved(_field(both, magic, 4, 0), _field(both, magic, 4, 8))
        upper = _interleaved(_field(both, magic, 4, 4), _field(both, magic, 4, 12))
    return lower, upper


@triton.jit
def value_pair(lower, upper, scale, count, BITS: tl.constexpr):
    """Return the values (lower, upper) of a tile of words from :func:`load_words`.

    ``scale`` broadcasts to [TILE, K, 64], and ``count`` is any int32 that is not negative. The products are exact,
    because a scale has 8 significant bits and a code at most 7. So it does not matter if the compiler fuses them into a
    sum.
    """
    lower, upper = code_pair(lower, upper, count, BITS)
    return lower * scale, upper * scale


@triton.jit
def store_scales(base, bits, first, groups, slots, TILE: tl.constexpr):
    """Store the scales of a tile at ``base``, and zeros in the slots after the last group."""
    # Slots reach to the end of the message, so every byte of the message is written.
    group = first + tl.arange(0, TILE)
    # Scales are stored as bits, so that no conversion to bfloat16 can round on some machine.
    scales = base.to(tl.pointer_type(tl.int16)) + first
    tl.store(scales + tl.arange(0, TILE), tl.where(group < groups, bits, 0).to(tl.int16), mask=group < slots)


@triton.jit
def _halve(x):
    """Do one step of the Hadamard transform: return, for each 16 elements, 8 sums of neighbours, then 8 differences."""
    tile: tl.constexpr = x.shape[0]
    k: tl.constexpr = x.shape[1]
    # Four runs of 8 pairs. join interleaves sums and differences; the permutation moves the 8 sums of a run to its
    # front.
    even, odd = tl.split(tl.reshape(x, [tile, k, 4, 8, 2]))
    return tl.reshape(tl.permute(tl.join(even + odd, even - odd), [0, 1, 2, 4, 3]), [tile, k, 64])


@triton.jit
def rotate(lower, upper, EXACT: tl.constexpr):
    """Apply the Hadamard transform, times 2**-5, to each 32 elements of a tile.

    The 32 elements are 16 consecutive ones of a lower half and the 16 at the same place of the upper half. The factor
    keeps every partial sum finite. Applying the transform twice multiplies by 2**-5. Source: SDP4Bit
    (arXiv:2410.15526).

    EXACT tells that products with 2**-5 are exact, which holds for all values of 16 bits. float32 values may become
    subnormal and lose bits.
    """
    upper = upper * 0.03125
    if EXACT:
        # A fused multiply-add has the rounding of a sum of exact products.
        factor = tl.full(lower.shape, 0.03125, tl.float32)
        total = tl.fma(lower, factor, upper)
        difference = tl.fma(lower, factor, -upper)
    else:
        lower = lower * 0.03125
        total = lower + upper
        difference = lower - upper
    # Four steps within runs of 16, after the step between the halves above: 2**5 elements. A thread has whole runs of
    # 16.
    for _ in tl.static_range(4):
        total = _halve(total)
        difference = _halve(difference)
    return total, difference
