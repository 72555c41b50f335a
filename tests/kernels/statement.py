"""The formulas of the messages in numpy float64: an independent implementation written from the design.

After each operation the result is rounded to float32. That equals float32 arithmetic, because float64 has enough bits
that rounding a product or sum of two float32 numbers twice gives the same result as rounding once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
GROUP = {8: 256, 4: 128}
LEVELS = {8: 127.0, 4: 7.0}


def single(x: Values) -> Values:
    """Round to float32, and return the result as float64."""
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(np.float64)


def bfloat16_up(x: Values) -> Values:
    """Return the smallest number with 8 significant bits that is >= x, for x > 0, and at least 2**-126."""
    mantissa, exponent = np.frexp(x)
    return np.maximum(np.ldexp(np.ceil(mantissa * 256) / 256, exponent), 2.0**-126)


def grouped(x: Values, group: int) -> Values:
    return np.pad(x, (0, -len(x) % group)).reshape(-1, group)


def encode(x: Values, bits: int, group: int | None = None) -> tuple[Values, Values]:
    """Return the codes [groups, group] and the scales [groups]."""
    rows = grouped(x, group or GROUP[bits])
    peak = np.abs(rows).max(axis=1)
    finite = np.isfinite(peak)
    scale = np.where(finite, bfloat16_up(np.where(finite, peak, 1.0) / LEVELS[bits]), np.nan)
    inverse = single(1.0 / scale)
    codes = np.rint(single(np.where(finite[:, None], rows, 0.0) * inverse[:, None]))
    return np.where(finite[:, None], codes, 0.0), scale


def decode(codes: Values, scales: Values, numel: int) -> Values:
    return (codes * scales[:, None]).reshape(-1)[:numel]


def unpack(message: npt.NDArray[np.uint8], numel: int, bits: int, group: int | None = None) -> tuple[Values, Values]:
    """Return codes and scales of a message. In 4 bits, byte j of 64 has element j (low half) and j + 64 (high half)."""
    group = group or GROUP[bits]
    groups = -(-numel // group)
    size = groups * group * bits // 8
    if bits == 8:
        codes = message[:size].view(np.int8).reshape(groups, group).astype(np.float64)
    else:
        pairs = message[:size].reshape(groups, 64)
        both = np.concatenate([pairs & 15, pairs >> 4], axis=1).astype(np.float64)
        codes = np.where(both > 7, both - 16, both)
    words = message[size : size + 2 * groups].view(np.uint16).astype(np.uint32) << 16
    return codes, words.view(np.float32).astype(np.float64)


def feedback(x: Values, error: Values, bits: int, beta: float) -> tuple[Values, Values, Values, Values]:
    """Return the message's codes and scales and those of the new error, which has 8 bits in the message's groups."""
    h = single(x + error)
    codes, scales = encode(h, bits)
    lost = single(h - decode(codes, scales, len(h)))
    keep, rest = single(np.array(beta)), single(np.array(1.0 - beta))
    new = single(single(error * keep) + single(lost * rest))
    return codes, scales, *encode(new, 8, GROUP[bits])


def hadamard() -> Values:
    """Return the orthonormal Hadamard matrix [32, 32], built by doubling."""
    matrix = np.ones((1, 1))
    while len(matrix) < 32:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(32.0)


def rotated(x: Values) -> Values:
    """Multiply each 32 elements by the Hadamard matrix, up to their order: 16 from each half of a row of 128."""
    rows = grouped(x, 128).reshape(-1, 2, 4, 16).transpose(0, 2, 1, 3).reshape(-1, 32)
    return rows @ hadamard()


def summed(shares: list[tuple[Values, Values]], numel: int, factor: float) -> Values:
    """Return the float32 sum of decoded messages in their order, multiplied by ``factor``."""
    total = np.zeros(numel)
    for share in shares:
        total = single(total + decode(*share, numel))
    return single(total * single(np.array(factor)))


def unkey(number: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
    """Return the bfloat16 bits of integer keys, which wrap modulo 2**16."""
    signed = ((number + 2**15) % 2**16 - 2**15).astype(np.int16)
    return np.where(signed < 0, signed ^ 0x7FFF, signed).astype(np.int16).view(np.uint16)


def key(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """Return an integer for each bfloat16; larger numbers have larger keys."""
    signed = bits.view(np.int16)
    return np.where(signed < 0, signed ^ 0x7FFF, signed).astype(np.int64)


def differences(
    new: npt.NDArray[np.uint16], old: npt.NDArray[np.uint16]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return key differences in [-32768, 32767] and masks of the escapes to 8 bits and to 16 bits."""
    found = (key(new) - key(old) + 2**15) % 2**16 - 2**15
    to16 = (found < -128) | (found > 127)
    return found, ((found < -7) | (found > 6)) & ~to16, to16


def lossless_sizes(numel: int, room8: int, room16: int) -> list[int]:
    """Return the bytes of a lossless message's parts: 4-bit codes, starts, 8-bit codes, gap, 16-bit values, gap."""
    sizes = [-(-numel // 256) * 128, -(-numel // 2048) * 8, room8]
    sizes += [-sum(sizes) % 16, 2 * room16]
    return [*sizes, -sum(sizes) % 128]


def in_bytes(x: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """Pad to whole blocks with zeros, and order elements as the 4-bit codes in bytes: j, j + 64, j + 1, j + 65, ..."""
    padded = np.pad(x.astype(np.int64), (0, -len(x) % 256))
    return padded.reshape(-1, 2, 64).transpose(0, 2, 1).reshape(-1)


def lossless_values(
    codes: npt.NDArray[np.uint8],
    bytes8: npt.NDArray[np.int8],
    words: npt.NDArray[np.uint16],
    old: npt.NDArray[np.uint16],
) -> npt.NDArray[np.uint16]:
    """Decode a lossless message whose rooms have exactly the needed sizes, to bfloat16 bits."""
    marks = np.stack([codes & 15, codes >> 4], axis=1).reshape(-1).astype(np.int64)
    change = np.where(marks > 7, marks - 16, marks)
    change[marks == 8] = bytes8
    exact = np.zeros_like(change)
    exact[marks == 7] = words

    def by_element(x: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return x.reshape(-1, 64, 2).transpose(0, 2, 1).reshape(-1)[: len(old)]

    near = unkey(key(old) + by_element(change))
    return np.where(by_element(marks) == 7, by_element(exact), near).astype(np.uint16)
