"""Boxes: rectangular parts of a tensor, which are what checkpoints store, and how flat ranges become boxes.

A rank owns ranges of flat buffers. A range of an N-dimensional tensor is at most 2N-1 boxes: rows in part, whole rows,
rows in part, and so on inward. Boxes say where values belong whatever ranges others cut.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

__all__ = ["Box", "BoxIndex", "boxes_of_range", "runs"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Box:
    """A part of a tensor: in each dimension a range, from ``offsets`` on, of ``sizes``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements inside."""
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The box that two boxes of one tensor have in common, if any."""
        low = tuple(map(max, self.offsets, other.offsets))
        ends = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        sizes = tuple(min(a + n, b + m) - c for (a, n, b, m), c in zip(ends, low, strict=True))
        return Box(low, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, shape: Sequence[int]) -> bool:
        """Tell whether the box lies in a tensor of this shape."""
        rows = zip(self.offsets, self.sizes, shape, strict=True)
        return all(offset >= 0 and size >= 0 and offset + size <= limit for offset, size, limit in rows)

    def within(self, other: Box) -> Box:
        """The same place, counted from another box's first element."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)

    def of(self, tensor: Tensor) -> Tensor:
        """A view of this part of a tensor."""
        for dimension, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dimension, offset, size)
        return tensor

    def first(self, strides: Sequence[int]) -> int:
        """Place of its first element in memory of these strides."""
        return sum(offset * stride for offset, stride in zip(self.offsets, strides, strict=True))

    def last(self, strides: Sequence[int]) -> int:
        """Place of its last element, of a box that is not empty."""
        rows = zip(self.offsets, self.sizes, strides, strict=True)
        return sum((offset + size - 1) * stride for offset, size, stride in rows)


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of contiguous memory."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if sizes else ()


def boxes_of_range(shape: Sequence[int], strides: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes that a range of a dense tensor's memory consists of, in the order of memory.

    Args:
        shape: of the tensor.
        strides: dense, in any order of dimensions; as channels_last and transposed tensors have them.
        start: first element of the range, in the order of memory.
        stop: one past its last.
    """
    # In the order of memory the dimension with the largest stride is the slowest. Of size 1 they may have any stride.
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], shape[d] != 1))
    found = []
    for offsets, sizes in _cut([shape[d] for d in order], start, stop):
        place, size = [0] * len(shape), [0] * len(shape)
        for position, dimension in enumerate(order):
            place[dimension], size[dimension] = offsets[position], sizes[position]
        found.append(Box(tuple(place), tuple(size)))
    return found


def _cut(sizes: list[int], start: int, stop: int) -> Iterator[tuple[list[int], list[int]]]:
    """(offsets, sizes) of the boxes of a row-major range."""
    if start >= stop:
        return
    if not sizes:
        yield [], []
        return
    row = math.prod(sizes[1:])
    # The first row that begins in the range, and the last that ends in it.
    first, last = -(-start // row), stop // row
    if first > last:
        # It lies inside one row.
        yield from _rows(sizes, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _rows(sizes, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield [first, *[0] * (len(sizes) - 1)], [last - first, *sizes[1:]]
    yield from _rows(sizes, last, 0, stop - last * row)


def _rows(sizes: list[int], row: int, start: int, stop: int) -> Iterator[tuple[list[int], list[int]]]:
    for offsets, inner in _cut(sizes[1:], start, stop):
        yield [row, *offsets], [1, *inner]


def runs(part: Box, whole: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Stretches of memory that a part of a row-major tensor consists of.

    Args:
        part: counted from the tensor's first element.
        whole: sizes of the tensor.

    Yields:
        (place in the tensor, place in the part, elements).
    """
    # Dimensions that are there in full join the one before them to one stretch.
    depth = len(whole)
    while depth > 0 and part.sizes[depth - 1] == whole[depth - 1]:
        depth -= 1
    outer, count = max(depth - 1, 0), math.prod(part.sizes[max(depth - 1, 0) :])
    strides, own = row_major(whole), row_major(part.sizes)
    if part.numel == 0:
        return
    index = [0] * outer
    while True:
        there = sum((part.offsets[d] + index[d]) * strides[d] for d in range(outer))
        there += sum(part.offsets[d] * strides[d] for d in range(outer, len(whole)))
        yield there, sum(index[d] * own[d] for d in range(outer)), count
        position = outer - 1
        while position >= 0 and index[position] + 1 == part.sizes[position]:
            index[position] = 0
            position -= 1
        if position < 0:
            return
        index[position] += 1


class BoxIndex(Generic[_T]):
    """Boxes of one tensor, with what belongs to each, for finding those that meet a box.

    Args:
        shape: of the tensor.
        boxes: with anything.
    """

    def __init__(self, shape: Sequence[int], boxes: Sequence[tuple[Box, _T]]) -> None:
        self._strides = row_major(shape)
        self._boxes = sorted((each for each in boxes if each[0].numel), key=lambda each: each[0].first(self._strides))
        self._firsts = [box.first(self._strides) for box, _ in self._boxes]
        # Largest last element up to each: boxes before the first that reaches far enough cannot meet.
        self._reach: list[int] = []
        for box, _ in self._boxes:
            self._reach.append(max(box.last(self._strides), self._reach[-1] if self._reach else -1))

    def meeting(self, wanted: Box) -> Iterator[tuple[Box, Box, _T]]:
        """(common part, box, what belongs to it) of every box that has elements of ``wanted``."""
        if not wanted.numel:
            return
        begin = bisect.bisect_left(self._reach, wanted.first(self._strides))
        end = bisect.bisect_right(self._firsts, wanted.last(self._strides))
        for box, value in self._boxes[begin:end]:
            common = wanted.intersect(box)
            if common is not None:
                yield common, box, value
