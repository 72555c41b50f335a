"""Device functions that several Triton kernels use: loads and stores of tiles, rounding, scales, codes, rotation.

A tile is TILE groups in registers, as two tensors [TILE, K, 64] named lower and upper: the first and the last 64
elements of each row of 128 (K rows per group: 1 for groups of 128, 2 for groups of 256). With this split, the two int4
codes of a byte and the two inputs of the rotation's widest step are in one thread. Each thread has runs of 16
consecutive elements, which allows 128-bit loads and stores.

Results are equal to the bit to those of :mod:`zeropp_kernels.reference`, for three reasons. Kernels are compiled with
``enable_fp_fusion=False``. Divisions are correctly rounded (``div_rn``). Under Triton's interpreter, casts to and from
bfloat16 are done on integers, because the interpreter's casts truncate and flush subnormal values to zero.
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

# 1.5 * 2**23. Adding it to a float32 of small magnitude rounds that to an integer, ties to even, because float32 values
# between 2**23 and 2**24 are 1 apart. The extra 2**22 keeps sums with negative numbers in that range.
_MAGIC = tl.constexpr(12582912.0)
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
# Rows of 128 in a tile: TILE groups of K rows each, so K = TILE_ROWS // TILE for any width of codes.
TILE_ROWS = tl.constexpr(ROWS)


@triton.jit
def whole(size, MULTIPLE: tl.constexpr):
    """Return ``size``, a multiple of MULTIPLE, as an expression that the compiler sees to be a multiple."""
    # Without this, the compiler could not use 128-bit access, because integer arguments are not specialised.
    return size // MULTIPLE * MULTIPLE


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
        # A bfloat16 is the upper half of a float32. The interpreter's own cast flushes subnormal values to zero.
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


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
def load_raw(source, left, TILE: tl.constexpr, K: tl.constexpr):
    """Load a tile of values in their dtype in memory; elements from ``left`` on are zeros."""
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
    """Load a tile of values as float32; elements from ``left`` on are zeros."""
    lower, upper = load_raw(source, left, TILE, K)
    return widen(lower), widen(upper)


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
    lower = lower.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    upper = upper.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.max(tl.maximum(lower, upper), axis=2), axis=1)


@triton.jit
def scale_value(bits):
    """Return float32 of bfloat16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(peak, BITS: tl.constexpr):
    """Return (bfloat16 bits of the scale, inverse of the scale, True if the group is finite), each [TILE].

    The scale is peak / 127 for 8 bits or peak / 7 for 4 bits, rounded up to bfloat16, so that codes need no clamp. A
    group with Inf or NaN gets a NaN scale; :func:`store_encoded` writes zero codes for it.
    """
    # On NVIDIA, / is an approximate division. div_rn is correctly rounded, like torch's division.
    levels: tl.constexpr = (1 << (BITS - 1)) - 1
    scale = tl.div_rn(peak.to(tl.float32, bitcast=True), tl.full(peak.shape, levels, tl.float32))
    # Adding 0xFFFF carries into the upper half unless the lower half is zero, which rounds up. Positive floats are
    # ordered like their bits, so the bounds are compared as integers.
    bits = tl.maximum((scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16, _SMALLEST_SCALE)
    if BITS == 4:
        bits = tl.minimum(bits, _LARGEST_SCALE_4)
    finite = peak < _EXPONENT
    bits = tl.where(finite, bits, _NAN_SCALE)
    # Inverse of the rounded scale: one division per group, one product per element.
    inverse = tl.div_rn(tl.full(peak.shape, 1.0, tl.float32), scale_value(bits))
    return bits, inverse, finite


@triton.jit
def encode_pair(lower, upper, inverse):
    """Return the codes of a tile as int32 (lower, upper), in the low bits, and as float32 (lower, upper).

    Adding 1.5 * 2**23 rounds to an integer, and the low bits of the sum are its two's complement. The results are
    meaningless in groups with Inf or NaN.
    """
    inverse = inverse[:, None, None]
    # Product and sum are rounded separately, as in torch. Fused, products next to a tie would get another code.
    lower = lower * inverse + _MAGIC
    upper = upper * inverse + _MAGIC
    # The differences with _MAGIC are exact.
    return lower.to(tl.int32, bitcast=True), upper.to(tl.int32, bitcast=True), lower - _MAGIC, upper - _MAGIC


@triton.jit
def _code_value(code, BITS: tl.constexpr):
    """Return the float32 value of a code without a conversion from integer: set its bits below those of 2**23."""
    # 0x4B000000 are the bits of 2**23, whose last mantissa bit counts ones. The XOR also flips the code's sign bit,
    # which adds half to its value. So the float is 2**23 + half + code.
    half: tl.constexpr = 1 << (BITS - 1)
    return (code ^ (0x4B000000 + half)).to(tl.float32, bitcast=True) - (8388608.0 + half)


@triton.jit
def code_values(lower, upper, scale, BITS: tl.constexpr):
    """Return (lower codes, upper codes, lower scale, upper scale) of a tile in float32, for codes from :func:`unpack`.

    Upper int4 codes are not shifted down: they are 16 times their value, and their scale is scale / 16. The product is
    the same and exact, and a shift is saved.
    """
    if BITS == 8:
        return _code_value(lower, 8), _code_value(upper, 8), scale, scale
    else:
        tl.static_assert(BITS == 4)  # here and below: codes of another width would be in other bytes
        # Read as 8 bits, a code in the high half of a byte is 16 times its value. scale / 16 is exact, also where
        # subnormal.
        return _code_value(lower, 4), _code_value(upper, 8), scale, scale * 0.0625


@triton.jit
def value_pair(lower, upper, scale, BITS: tl.constexpr):
    """Return the values (lower, upper) of a tile of codes from :func:`unpack`; ``scale`` broadcasts to [TILE, K, 64].

    The products are exact, because a scale has 8 significant bits and a code at most 7. So it does not matter if the
    compiler fuses them into a sum.
    """
    lower, upper, lower_scale, upper_scale = code_values(lower, upper, scale, BITS)
    return lower * lower_scale, upper * upper_scale


@triton.jit
def store_codes(base, lower, upper, live, BITS: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """Store the low BITS bits of a tile of int32 as codes at ``base``, for groups where ``live`` [TILE] is True.

    int4: byte j of a row's 64 bytes has element j in its low half and element j + 64 in its high half.
    """
    # A row of 128 codes takes 16 * BITS bytes: two half rows of 64 bytes for 8 bits, one for 4 bits.
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
    """Store codes as :func:`store_codes` does, but zeros in groups where ``finite`` [TILE] is False."""
    store_codes(base, lower, upper, live & finite, BITS, TILE, K)
    # A second, masked store that is rarely taken costs less than clearing 32 codes in registers.
    zeros = tl.zeros([TILE, K, 64], tl.int32)
    store_codes(base, zeros, zeros, live & ~finite, BITS, TILE, K)


@triton.jit
def load_packed(base, live, BITS: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """Load the code bytes of a tile at ``base`` as (lower, upper); zeros where ``live`` is False.

    For 8 bits these are the bytes of the lower and the upper halves. For 4 bits a byte has both codes, so both results
    are the same tensor. ``live`` broadcasts to [TILE, K, 64].
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
    """Return the codes in bytes from :func:`load_packed` as int32; upper int4 codes stay in the byte's high half."""
    if BITS == 8:
        return lower.to(tl.int32), upper.to(tl.int32)
    else:
        tl.static_assert(BITS == 4)
        # The upper code is not shifted down: code_values scales it by 1 / 16 instead.
        return lower.to(tl.int32) & 15, upper.to(tl.int32) & 0xF0


@triton.jit
def load_codes(base, live, BITS: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr):
    """Load the codes of a tile at ``base`` as int32; zeros where ``live`` (broadcast to [TILE, K, 64]) is False."""
    lower, upper = load_packed(base, live, BITS, TILE, K)
    return unpack(lower, upper, BITS)


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
def rotate(lower, upper):
    """Apply the Hadamard transform, times 2**-5, to each 32 elements of a tile.

    The 32 elements are 16 consecutive ones of a lower half and the 16 at the same place of the upper half. The factor
    is exact and keeps every partial sum finite. Applying the transform twice multiplies by 2**-5. Source: SDP4Bit
    (arXiv:2410.15526).
    """
    lower = lower * 0.03125
    upper = upper * 0.03125
    total = lower + upper
    difference = lower - upper
    # Four steps within runs of 16, after the step between the halves above: 2**5 elements. A thread has whole runs of
    # 16.
    for _ in tl.static_range(4):
        total = _halve(total)
        difference = _halve(difference)
    return total, difference
