"""From parameters to one flat buffer, and from the buffer to the pieces that ranks own: pure arithmetic.

Each parameter starts on a block of 256 elements, so that no codec's group ever holds two parameters; the end of the
buffer is padded until every rank's piece is a whole number of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

__all__ = ["BLOCK", "BufferLayout", "Fragment", "Slot", "build_layout", "dense_strides"]

# The same as zeropp_kernels.wire.BLOCK, and written here once more because this room does not know the kernels.
BLOCK = 256
"""Elements per block; every codec's group divides it."""


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its flat buffer."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # elements from the start of the buffer

    @property
    def numel(self) -> int:
        """Elements of the parameter, without padding."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter that lies in one slice; ranges in elements of dense storage order."""

    slot: int  # index of the parameter in the layout
    start: int  # first element within the parameter
    stop: int
    offset: int  # first element within the slice


@dataclass(frozen=True)
class BufferLayout:
    """A flat buffer that can be cut into ``world`` equal pieces."""

    slots: tuple[Slot, ...]
    numel: int  # with padding
    world: int

    @property
    def piece_numel(self) -> int:
        """Elements of each piece."""
        return self.numel // self.world

    @cached_property
    def used_numel(self) -> int:
        """Elements of parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, stop) of padding."""
        # Slots ascend without overlap, so each gap lies between one slot's end and the next one's start.
        ends = [slot.offset + slot.numel for slot in self.slots]
        starts = [slot.offset for slot in self.slots[1:]] + [self.numel]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if start > end)

    def views(self, whole: Tensor) -> list[Tensor]:
        """The parameters' places in a buffer of [numel]."""
        # as_strided counts from the start of the storage, not of the tensor: ``whole`` must begin where that does.
        return [whole.as_strided(slot.shape, slot.strides, slot.offset) for slot in self.slots]

    def slice_range(self, index: int, level: int) -> tuple[int, int]:
        """Range [start, stop) of slice ``index`` when the buffer is spread over ``level`` ranks."""
        size = self.numel // level
        return index * size, (index + 1) * size

    def fragments(self, index: int, level: int) -> list[Fragment]:
        """Parts of parameters that lie in slice ``index`` of ``level``, in order."""
        start, stop = self.slice_range(index, level)
        found = []
        for index, slot in enumerate(self.slots):
            # A slice may begin and end inside a parameter. Padding and empty parameters belong to no fragment.
            low, high = max(start, slot.offset), min(stop, slot.offset + slot.numel)
            if low < high:
                found.append(Fragment(index, low - slot.offset, high - slot.offset, low - start))
        return found


def build_layout(parameters: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]], world: int) -> BufferLayout:
    """Lay parameters out one after the other.

    Args:
        parameters: (name, shape, dense strides) of each.
        world: number of pieces.
    """
    if not parameters:
        raise ValueError("a flat buffer needs at least one parameter")
    slots, offset = [], 0
    for name, shape, strides in parameters:
        slots.append(Slot(name, tuple(shape), tuple(strides), offset))
        # Offsets do not depend on the world, and so neither does what shares a block: codes are the same on any number
        # of ranks.
        offset += -(-slots[-1].numel // BLOCK) * BLOCK
    # Blocks must not be split between ranks, at any level of the chain. Every level divides the world, so it is enough
    # that the pieces of the last one are whole blocks. A buffer of empty parameters still gets a block a rank.
    grain = BLOCK * world
    return BufferLayout(tuple(slots), max(-(-offset // grain), 1) * grain, world)


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides to keep a parameter's memory format; contiguous ones where its elements are not dense.

    A tensor is dense when its elements fill numel places without overlap in some order of dimensions, as
    channels_last tensors do.
    """
    # From the fastest dimension on, each stride must be the product of the sizes before it. Dimensions of size 1 may
    # have any stride.
    expected = 1
    for size, stride in sorted(
        ((n, s) for n, s in zip(shape, strides, strict=True) if n != 1), key=lambda pair: pair[1]
    ):
        if stride != expected:
            break
        expected *= size
    else:
        # Kept as they are: a channels_last weight in another format would run other kernels, or be converted each time.
        return tuple(strides)
    # An expanded or sliced tensor. Its values are copied into the buffer, so how they lay before need not be kept.
    contiguous, step = [], 1
    for size in reversed(shape):
        contiguous.append(step)
        step *= max(size, 1)
    return tuple(reversed(contiguous))
