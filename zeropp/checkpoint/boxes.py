"""Boxes and parts: the rectangular pieces of tensors that checkpoints store, and their dtypes.

A rank owns ranges of flat buffers. A range of an N-dimensional tensor is at most 2N-1 boxes: rows in part, whole
rows, rows in part, and so on inward. Boxes say where values belong whatever ranges others cut.

A :class:`TensorBox` is a box with its values: main weights, optimizer states, bases of differences. Tensors that are
sharded over few ranks have replicas. Of these a rank saves the range that it would own if they were sharded over all
ranks: pieces of the last level lie inside those of every other level, so everything is written once, by all ranks
alike.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from zeropp.engine.engine import Engine
from zeropp.optimizer.sharded_params import Slice
from zeropp.params.coded_buffer import CodedBuffer
from zeropp.params.unit import FlatBuffer
from zeropp.partition.levels import Fragment, Slot

__all__ = [
    "BASES",
    "DTYPES",
    "MODEL",
    "STATE",
    "Box",
    "BoxIndex",
    "CheckpointError",
    "TensorBox",
    "as_bytes",
    "base_parts",
    "boxes_of_range",
    "dtype_code",
    "fragments",
    "main_parts",
    "parts_of_range",
    "runs",
    "state_parts",
    "whole",
]


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
        place = [0] * len(shape)
        size = [0] * len(shape)
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
    first = -(-start // row)
    last = stop // row
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
    outer = max(depth - 1, 0)
    count = math.prod(part.sizes[max(depth - 1, 0) :])
    strides = row_major(whole)
    own = row_major(part.sizes)
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

    def overlapping(self, wanted: Box) -> Iterator[tuple[Box, Box, _T]]:
        """(common part, box, what belongs to it) of every box that has elements of ``wanted``."""
        if not wanted.numel:
            return
        begin = bisect.bisect_left(self._reach, wanted.first(self._strides))
        end = bisect.bisect_right(self._firsts, wanted.last(self._strides))
        for box, value in self._boxes[begin:end]:
            common = wanted.intersect(box)
            if common is not None:
                yield common, box, value


MODEL, STATE, BASES = "model.", "optimizer.state.", "zeropp.base."
"""Prefixes of names: values of the model, states of its optimizer, what differences are taken to."""


@dataclass(frozen=True)
class TensorBox:
    """A box of a named tensor, and its values on this rank: a view, with the sizes of the box."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


def whole(name: str, values: Tensor) -> TensorBox:
    """All of a tensor as one part."""
    shape = tuple(values.shape)
    return TensorBox(name, shape, Box((0,) * len(shape), shape), values)


def parts_of_range(name: str, slot: Slot, start: int, row: Tensor) -> Iterator[TensorBox]:
    """The boxes of a range of a parameter; ``row`` has its elements from ``start`` on, in the order of memory."""
    for box in boxes_of_range(slot.shape, slot.strides, start, start + row.numel()):
        # The row is as dense as the parameter, so its strides serve for a part of it, too.
        place = row.storage_offset() + box.first(slot.strides) - start
        yield TensorBox(name, slot.shape, box, row.as_strided(box.sizes, slot.strides, place))


Which = Literal["slice", "pieces", "own"]
"""A part of a buffer: a rank's slice as one, the pieces of the last level in it one by one, or its own piece alone."""


def fragments(buffer: FlatBuffer, level: int, which: Which) -> Iterator[tuple[Slot, Fragment]]:
    """Parts of parameters in this rank's slice at a level; offsets count from its beginning."""
    chain = buffer.placement.chain
    rank = buffer.placement.rank
    layout = buffer.layout
    begin, _ = layout.slice_range(chain.slice_index(rank, level), level)
    cut = level if which == "slice" else chain.world
    first = chain.slice_index(rank, level) * (cut // level)
    indices = [chain.slice_index(rank, cut)] if which == "own" else range(first, first + cut // level)
    for index in indices:
        shift = layout.slice_range(index, cut)[0] - begin
        for each in layout.fragments(index, cut):
            yield layout.slots[each.slot], Fragment(each.slot, each.start, each.stop, each.offset + shift)


def parts_of_row(buffer: FlatBuffer, row: Tensor, level: int, prefix: str, which: Which) -> Iterator[TensorBox]:
    """Parts of what has one element for each of a buffer's, spread over ``level`` ranks."""
    for slot, each in fragments(buffer, level, which):
        values = row[each.offset : each.offset + each.stop - each.start]
        yield from parts_of_range(prefix + slot.name, slot, each.start, values)


def main_parts(engine: Engine, which: Which) -> Iterator[TensorBox]:
    """Main weights, and frozen ones as they are, of this rank's shards."""
    for buffer in engine.buffers:
        if not isinstance(buffer, CodedBuffer):
            yield from parts_of_row(buffer, buffer.shard, buffer.placement.mode.states, MODEL, which)


def base_parts(engine: Engine, which: Which) -> Iterator[TensorBox]:
    """Cached weights that differences are taken to, where they are not those that a refresh would make."""
    for buffer in engine.trainable_buffers:
        base, cached = buffer.base, buffer.placement.mode.cached
        if base is not None and cached is not None and not buffer.counts_escapes:
            yield from parts_of_row(buffer, base, cached, BASES, which)


def state_parts(engine: Engine, states: Sequence[tuple[Slice, str, Tensor]], which: Which) -> Iterator[TensorBox]:
    """Optimizer states of one element for each of a slice's.

    Args:
        engine: of the model.
        states: (slice, key, tensor of the slice's shape).
        which: as in :func:`main_parts`.
    """
    by_name: dict[str, list[tuple[int, str, Tensor]]] = {}
    for part, key, tensor in states:
        by_name.setdefault(part.name, []).append((part.start, key, tensor))
    for buffer in engine.trainable_buffers:
        for slot, each in fragments(buffer, buffer.placement.mode.states, which):
            for first, key, tensor in by_name.get(slot.name, ()):
                # A rank may have two slices of a parameter: the device steps one, and the host the other.
                start = max(each.start, first)
                stop = min(each.stop, first + tensor.numel())
                if start < stop:
                    row = tensor[start - first : stop - first]
                    yield from parts_of_range(f"{STATE}{slot.name}.{key}", slot, start, row)


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, incomplete, or of something else; or it could not be written."""


# As safetensors spells them.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def dtype_code(dtype: torch.dtype, name: str) -> str:
    """The name of a dtype in safetensors.

    Args:
        dtype: of a tensor.
        name: of the tensor, for errors.

    Raises:
        CheckpointError: it has no name for it.
    """
    if dtype not in _CODES:
        raise CheckpointError(
            f"{name!r} is of {dtype}, which safetensors files cannot hold; they hold {', '.join(map(str, _CODES))}"
        )
    return _CODES[dtype]


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as uint8 [nbytes], the same memory."""
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)
