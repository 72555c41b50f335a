"""Message layout: where codes and scales lie in the bytes that one hop carries. Integers only, no tensors.

A message holds the codes of its elements, block by block, and after them everything that the blocks share::

    quantized | codes, padded to 16 bytes | one bfloat16 scale a group | zeros to 128 bytes |
    lossless  | 4-bit codes | starts | 8-bit codes, padded to 16 bytes | 16-bit values | zeros to 128 bytes |

A lossless message has differences of -7 to 6 in 4 bits. Two codes are marks that say where a difference escapes to: -8
to an 8-bit code, 7 to the value's own 16 bits. Both kinds of escapes lie in the order of their marks in the message's
bytes, the low half of a byte first. Starts are two int32 for each section of 2048 elements: how many 8-bit codes and
how many 16-bit values lie before its own, so that a section is decoded without a look at those before it.

Scales come last and not beside their group, since 130-byte groups would break the 16-byte alignment that wide loads
need. n messages of one hop follow each other in the order of their destinations.
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

# Elements: the unit of alignment; a tensor that travels with others starts on a block.
BLOCK = 256
# Bytes: one 128-bit store.
CODES_ALIGNMENT = 16
# Bytes: one cache line. It also lets the second of several messages begin aligned.
MESSAGE_ALIGNMENT = 128
SCALE_NBYTES = 2  # bfloat16
# Bits of a code -> elements that share a scale. Both divide a block, so a group has elements of one tensor only.
GROUPS = {8: 256, 4: 128}
# Elements of a lossless message that a pair of starts serves: eight blocks, so starts take 1/32 bit an element.
SECTION = 2048
# Of a kind in one message. Places of escapes are int32: the first of a section, and up to 2047 more.
MOST_ESCAPES = (1 << 31) - SECTION
_START_NBYTES = 4  # int32


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def ceil_div(numel: int, size: int) -> int:
    """The quotient, rounded up."""
    return -(-numel // size)


def _check_integer(name: str, value: object) -> None:
    # Symbols, which sizes are under torch.compile, are no int, but where it reads code: there they are, and hasattr is
    # no question.
    if not isinstance(value, int) and not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}; expected an integer")


def _check_numel(numel: int) -> None:
    _check_integer("numel", numel)
    if numel < 0:
        raise ValueError(f"numel is {numel}; a message holds 0 or more elements")


def blocks_of(numel: int) -> int:
    """Blocks of 256 that ``numel`` elements take, the last perhaps partly filled."""
    _check_numel(numel)
    return ceil_div(numel, BLOCK)


def sections_of(numel: int) -> int:
    """Sections of 2048 that ``numel`` elements take, the last perhaps partly filled."""
    _check_numel(numel)
    return ceil_div(numel, SECTION)


@dataclass(frozen=True)
class MessageLayout:
    """One message of ``numel`` elements in codes of ``bits`` bits, a scale for every ``group`` of them.

    Attributes:
        groups: the last of which may be partly filled; what is missing is encoded as zeros.
        codes_nbytes: bytes of all codes.
        scales_offset: bytes from the start of the message to the first scale.
        nbytes: bytes of the whole message.
        slots: places for scales up to the end of the message; those after the last group hold zeros.
    """

    numel: int
    bits: int
    group: int
    # Kept and not properties: launches ask for each of them at every call.
    groups: int = field(init=False, repr=False, compare=False)
    codes_nbytes: int = field(init=False, repr=False, compare=False)
    scales_offset: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)
    slots: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        groups = ceil_div(self.numel, self.group)
        # Whole groups, the last one filled up: kernels write without a look at single elements.
        codes_nbytes = groups * self.group * self.bits // 8
        scales_offset = _round_up(codes_nbytes, CODES_ALIGNMENT)
        nbytes = _round_up(scales_offset + groups * SCALE_NBYTES, MESSAGE_ALIGNMENT)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "codes_nbytes", codes_nbytes)
        object.__setattr__(self, "scales_offset", scales_offset)
        object.__setattr__(self, "nbytes", nbytes)
        # More than groups, since messages end at 128 bytes: the rest are zeros, so that equal inputs give equal bytes.
        object.__setattr__(self, "slots", (nbytes - scales_offset) // SCALE_NBYTES)


def _message_layout(numel: int, bits: int, code_bits: int) -> MessageLayout:
    """Codes of ``code_bits`` bits in the groups of a message of ``bits``."""
    _check_numel(numel)
    _check_integer("bits", bits)
    if bits not in GROUPS:
        raise ValueError(f"bits is {bits!r}; codes have {' or '.join(map(str, sorted(GROUPS)))} bits")
    return MessageLayout(numel, code_bits, GROUPS[bits])


_known_layout = functools.lru_cache(maxsize=4096)(_message_layout)


def _layout(numel: int, bits: int, code_bits: int) -> MessageLayout:
    # Symbols, which sizes are under torch.compile, are no keys; and of a cache in code that it reads it would warn.
    known = type(numel) is int and type(bits) is int and not is_compiling()
    return (_known_layout if known else _message_layout)(numel, bits, code_bits)


def message_layout(numel: int, bits: int) -> MessageLayout:
    """Layout of ``numel`` elements in int8 (``bits`` 8, group 256) or int4 (``bits`` 4, group 128)."""
    return _layout(numel, bits, bits)


def state_layout(numel: int, bits: int) -> MessageLayout:
    """Layout of the error that feedback keeps beside a message of ``bits``: 8-bit codes in the message's groups."""
    # The message's groups and not those of int8: one scale then serves the same elements in both.
    return _layout(numel, bits, 8)


@dataclass(frozen=True)
class LosslessLayout:
    """One message of ``numel`` differences in 4 bits, with room for those that need 8, and those that need 16."""

    numel: int
    room8: int
    room16: int

    @property
    def blocks(self) -> int:
        """Blocks of 256, the last of which may be partly filled."""
        return blocks_of(self.numel)

    @property
    def sections(self) -> int:
        """Sections of 2048, the last of which may be partly filled."""
        return sections_of(self.numel)

    @property
    def codes_nbytes(self) -> int:
        # Half a byte an element, in whole blocks.
        return self.blocks * BLOCK // 2

    @property
    def starts_offset(self) -> int:
        """Bytes to the first section's pair of int32."""
        return self.codes_nbytes

    @property
    def room8_offset(self) -> int:
        """Bytes to the first 8-bit code."""
        return self.starts_offset + 2 * _START_NBYTES * self.sections

    @property
    def room16_offset(self) -> int:
        """Bytes to the first 16-bit value."""
        # 16-bit values must begin at an even byte at least.
        return _round_up(self.room8_offset + self.room8, CODES_ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole message."""
        return _round_up(self.room16_offset + 2 * self.room16, MESSAGE_ALIGNMENT)


def lossless_layout(numel: int, room8: int, room16: int) -> LosslessLayout:
    """Layout of ``numel`` differences with room for ``room8`` escapes to 8 bits and ``room16`` escapes to 16.

    Raises:
        TypeError: a size that is no integer.
        ValueError: a size below 0, or a room of more than ``MOST_ESCAPES``.
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
