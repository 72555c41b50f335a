"""Byte layout of messages: sizes and offsets of codes, scales and escapes. Integers only, no tensors.

A message is the bytes that one rank sends to one destination in one hop. A buffer for ``count`` destinations holds
``count`` messages of equal size one after another, in the order of the destinations. There are two kinds of messages::

    quantized | codes, padded to 16 bytes | one bfloat16 scale per group | zeros to 128 bytes |
    lossless  | 4-bit codes | starts | 8-bit codes, padded to 16 bytes | 16-bit values | zeros to 128 bytes |

Quantized message: an element is decoded as ``code * scale of its group``. All scales come after all codes. A scale
right behind its group would make groups of 258 bytes (int8) or 66 bytes (int4) and break the 16-byte alignment that
128-bit loads need.

Lossless message: each element is sent as an integer difference from the receiver's reference, in the 4-bit code if the
difference is -7 to 6. The codes -8 and 7 are marks of escapes. Code -8 means that the difference is in the section of
8-bit codes. Code 7 means that the value's own 16 bits are in the section of 16-bit values. Escapes of one kind are
stored in the order of their marks: by byte of the codes, and within a byte the low half first. The starts are two int32
for each section of 2048 elements: the number of 8-bit codes and the number of 16-bit values before the section's own
ones, but at most ``room8`` and ``room16``. With them a section can be decoded without reading earlier sections.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from torch.compiler import is_compiling

__all__ = [
    "BLOCK",
    "CODES_ALIGNMENT",
    "GROUPS",
    "MESSAGE_ALIGNMENT",
    "MOST_ESCAPES",
    "SECTION",
    "LosslessLayout",
    "MessageLayout",
    "blocks_of",
    "ceil_div",
    "lossless_layout",
    "message_layout",
    "sections_of",
    "state_layout",
]

# Elements in a block, the unit of alignment in flat buffers: each tensor in a flat buffer starts on a block.
BLOCK = 256
# Bytes that the codes are padded to: the size of one 128-bit store.
CODES_ALIGNMENT = 16
# Bytes that a message is padded to: one cache line. If messages follow each other, every one of them is then aligned.
MESSAGE_ALIGNMENT = 128
SCALE_NBYTES = 2  # bytes of a bfloat16 scale
# Elements in a group, by the bits of a code. The elements of a group share one scale. Group sizes divide a block, so a
# group never contains elements of two tensors.
GROUPS = {8: 256, 4: 128}
# Elements in a section of a lossless message, which has one pair of starts: eight blocks, so starts cost 1/32 bit per
# element.
SECTION = 2048
# Largest number of escapes of one kind in a message. Places of escapes are int32, and the place of an escape is its
# section's start plus up to 2047.
MOST_ESCAPES = (1 << 31) - SECTION
_START_NBYTES = 4  # bytes of an int32 start


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def ceil_div(numel: int, size: int) -> int:
    """Return ``numel / size`` rounded up."""
    return -(-numel // size)


def _check_integer(name: str, value: object) -> None:
    # Under torch.compile, a size may be a SymInt. In plain Python a SymInt is no int, but has __index__. In code that
    # Dynamo traces, a SymInt passes isinstance(value, int), so the hasattr call, which Dynamo cannot trace, is not
    # reached.
    if not isinstance(value, int) and not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}; expected an integer")


def _check_numel(numel: int) -> None:
    _check_integer("numel", numel)
    if numel < 0:
        raise ValueError(f"numel is {numel}; a message holds 0 or more elements")


def blocks_of(numel: int) -> int:
    """Return the number of blocks of 256 that ``numel`` elements take; the last block may be partly filled."""
    _check_numel(numel)
    return ceil_div(numel, BLOCK)


def sections_of(numel: int) -> int:
    """Return the number of sections of 2048 that ``numel`` elements take; the last section may be partly filled."""
    _check_numel(numel)
    return ceil_div(numel, SECTION)


@dataclass(frozen=True)
class MessageLayout:
    """Layout of one quantized message, or of one error-feedback state. :func:`message_layout` makes it.

    Attributes:
        numel: elements in the message.
        bits: bits of a code, 8 or 4.
        group: elements that share a scale.
        groups: number of groups, ``ceil(numel / group)``. A partly filled last group is filled up with zero elements
            before it is rotated or encoded.
        codes_nbytes: bytes of all codes, ``groups * group * bits / 8``.
        scales_offset: bytes from the start of the message to the first scale: ``codes_nbytes`` rounded up to 16.
        nbytes: bytes of the message: ``scales_offset + 2 * groups`` rounded up to 128.
        slots: number of bfloat16 places from ``scales_offset`` to the end of the message. The first ``groups`` of them
            hold scales, the others zeros.
    """

    numel: int
    bits: int
    group: int
    # Stored fields, not properties, because every kernel launch reads all of them.
    groups: int = field(init=False, repr=False, compare=False)
    codes_nbytes: int = field(init=False, repr=False, compare=False)
    scales_offset: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)
    slots: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        groups = ceil_div(self.numel, self.group)
        # The codes of the last group are stored in full, so kernels write codes with a mask per group, not per element.
        codes_nbytes = groups * self.group * self.bits // 8
        scales_offset = _round_up(codes_nbytes, CODES_ALIGNMENT)
        nbytes = _round_up(scales_offset + groups * SCALE_NBYTES, MESSAGE_ALIGNMENT)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "codes_nbytes", codes_nbytes)
        object.__setattr__(self, "scales_offset", scales_offset)
        object.__setattr__(self, "nbytes", nbytes)
        # There are more slots than groups because a message is padded to 128 bytes. The padding is zeros, so that equal
        # inputs give equal bytes.
        object.__setattr__(self, "slots", (nbytes - scales_offset) // SCALE_NBYTES)


def _message_layout(numel: int, bits: int, code_bits: int) -> MessageLayout:
    """Return the layout of ``numel`` codes of ``code_bits`` bits, in groups of ``GROUPS[bits]`` elements."""
    _check_numel(numel)
    _check_integer("bits", bits)
    if bits not in GROUPS:
        raise ValueError(f"bits is {bits!r}; codes have {' or '.join(map(str, sorted(GROUPS)))} bits")
    return MessageLayout(numel, code_bits, GROUPS[bits])


_known_layout = functools.lru_cache(maxsize=4096)(_message_layout)


def _layout(numel: int, bits: int, code_bits: int) -> MessageLayout:
    # SymInt sizes cannot be keys of the cache, and torch.compile warns about lru_cache in code that it traces. So
    # compute the layout without the cache while compiling or with SymInt sizes.
    known = type(numel) is int and type(bits) is int and not is_compiling()
    return (_known_layout if known else _message_layout)(numel, bits, code_bits)


def message_layout(numel: int, bits: int) -> MessageLayout:
    """Return the layout of a quantized message.

    Args:
        numel: elements in the message, 0 or more.
        bits: 8 for int8 codes in groups of 256, or 4 for int4 codes in groups of 128.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: ``numel`` is negative, or ``bits`` is not 8 or 4.
    """
    return _layout(numel, bits, bits)


def state_layout(numel: int, bits: int) -> MessageLayout:
    """Return the layout of the error-feedback state that belongs to a quantized message.

    A state stores the quantization error of each element of the message as an 8-bit code. The codes are in the groups
    of the message: groups of 256 for ``bits=8``, groups of 128 for ``bits=4``.

    Args:
        numel: elements in the message, 0 or more.
        bits: bits of a code of the message, 8 or 4.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: ``numel`` is negative, or ``bits`` is not 8 or 4.
    """
    # Groups of the message, not the groups of 256 of an int8 message, so that a tile of groups is the same elements in
    # the message and in its state.
    return _layout(numel, bits, 8)


@dataclass(frozen=True)
class LosslessLayout:
    """Layout of one lossless message. :func:`lossless_layout` makes it.

    Attributes:
        numel: elements in the message.
        room8: number of places for 8-bit codes (escapes to 8 bits).
        room16: number of places for 16-bit values (escapes to 16 bits).
    """

    numel: int
    room8: int
    room16: int

    @property
    def blocks(self) -> int:
        """Number of blocks of 256 in the message; the last block may be partly filled."""
        return blocks_of(self.numel)

    @property
    def sections(self) -> int:
        """Number of sections of 2048 in the message; the last section may be partly filled."""
        return sections_of(self.numel)

    @property
    def codes_nbytes(self) -> int:
        # Two codes per byte; a partly filled last block is stored in full.
        return self.blocks * BLOCK // 2

    @property
    def starts_offset(self) -> int:
        """Bytes from the start of the message to the pair of int32 of the first section."""
        return self.codes_nbytes

    @property
    def room8_offset(self) -> int:
        """Bytes from the start of the message to the first 8-bit code."""
        return self.starts_offset + 2 * _START_NBYTES * self.sections

    @property
    def room16_offset(self) -> int:
        """Bytes from the start of the message to the first 16-bit value."""
        # The padding keeps 16-bit values at even addresses, as int16 access needs.
        return _round_up(self.room8_offset + self.room8, CODES_ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole message, a multiple of 128."""
        return _round_up(self.room16_offset + 2 * self.room16, MESSAGE_ALIGNMENT)


def lossless_layout(numel: int, room8: int, room16: int) -> LosslessLayout:
    """Return the layout of a lossless message of ``numel`` elements.

    Args:
        numel: elements in the message, 0 or more.
        room8: number of places for 8-bit codes, at most ``MOST_ESCAPES``.
        room16: number of places for 16-bit values, at most ``MOST_ESCAPES``.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: ``numel`` is negative, or a room is not in 0 to ``MOST_ESCAPES``.
    """
    _check_numel(numel)
    for name, room in (("room8", room8), ("room16", room16)):
        _check_integer(name, room)
        if not 0 <= room <= MOST_ESCAPES:
            raise ValueError(
                f"{name} is {room}; expected 0 to {MOST_ESCAPES} escapes, whose places are int32: cut a larger buffer "
                "into several messages"
            )
    return LosslessLayout(numel, room8, room16)
