"""Boxes: the N-dimensional chunks of tensors that checkpoints store, and the dtypes that they may have.

A rank owns contiguous ranges of flat buffers. A contiguous range of an N-dimensional tensor consists of at most
2N - 1 boxes: part of a first row, whole rows, part of a last row, with the two partial rows divided again in the same
way. A box has offsets and sizes in the tensor's own shape, so a rank with another partition can read it.

A :class:`TensorBox` is a box and its values: main weights, optimizer states, or cached weights that differences are
taken to. A tensor that is sharded over fewer ranks than the world has replicas. Each rank saves the range of its
replica that it would own if the tensor were sharded over all ranks (its piece). Pieces lie inside the slices of every
other level, so each element is written exactly once, and all ranks write about equally many bytes.
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
from zeropp.params.flat_buffer import FlatBuffer
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
    """A rectangular part of a tensor: the index range [offset, offset + size) in each dimension.

    Attributes:
        offsets: first index in each dimension.
        sizes: number of indices in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the overlap of two boxes of the same tensor, or None if they do not overlap."""
        low = tuple(map(max, self.offsets, other.offsets))
        ends = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        sizes = tuple(min(a + n, b + m) - c for (a, n, b, m), c in zip(ends, low, strict=True))
        return Box(low, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, shape: Sequence[int]) -> bool:
        """Return True if the box lies inside a tensor of the given shape."""
        rows = zip(self.offsets, self.sizes, shape, strict=True)
        return all(offset >= 0 and size >= 0 and offset + size <= limit for offset, size, limit in rows)

    def within(self, other: Box) -> Box:
        """Return the same box with offsets relative to the first element of ``other``."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of a tensor that covers this box."""
        for dimension, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dimension, offset, size)
        return tensor

    def first(self, strides: Sequence[int]) -> int:
        """Return the memory offset, in elements, of the box's first element in a tensor with the given strides."""
        return sum(offset * stride for offset, stride in zip(self.offsets, strides, strict=True))

    def last(self, strides: Sequence[int]) -> int:
        """Return the memory offset, in elements, of the box's last element; the box must not be empty."""
        rows = zip(self.offsets, self.sizes, strides, strict=True)
        return sum((offset + size - 1) * stride for offset, size, stride in rows)


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor with the given sizes."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if sizes else ()


def boxes_of_range(shape: Sequence[int], strides: Sequence[int], start: int, stop: int) -> list[Box]:
    """Divide a contiguous range of a dense tensor's memory into boxes, in memory order.

    Args:
        shape: shape of the tensor.
        strides: strides of the tensor in elements. The tensor must be dense, but its dimensions may lie in any order,
            as in channels_last and transposed tensors.
        start: first element of the range, counted in memory order.
        stop: end of the range (exclusive), counted in memory order.

    Returns:
        At most 2N - 1 boxes for a tensor with N dimensions.
    """
    # Dimensions from the slowest (largest stride) to the fastest. The stride of a dimension of size 1 has no meaning;
    # the second key puts such a dimension before a larger one with an equal stride.
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
    """Yield (offsets, sizes) of the boxes that make up [start, stop) of a contiguous tensor with the given sizes."""
    if start >= stop:
        return
    if not sizes:
        yield [], []
        return
    row = math.prod(sizes[1:])
    # Rows [first, last) lie completely inside the range.
    first = -(-start // row)
    last = stop // row
    if first > last:
        # The range lies inside one row and touches neither end of it.
        yield from _rows(sizes, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _rows(sizes, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield [first, *[0] * (len(sizes) - 1)], [last - first, *sizes[1:]]
    yield from _rows(sizes, last, 0, stop - last * row)


def _rows(sizes: list[int], row: int, start: int, stop: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (offsets, sizes) of the boxes that make up elements [start, stop) of one row."""
    for offsets, inner in _cut(sizes[1:], start, stop):
        yield [row, *offsets], [1, *inner]


def runs(part: Box, whole: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the contiguous memory ranges that a box of a contiguous tensor consists of.

    Args:
        part: the box, with offsets relative to the tensor's first element.
        whole: sizes of the tensor.

    Yields:
        (first element in the tensor's memory, first element in the contiguous copy of the box, number of elements).
    """
    # Trailing dimensions that the box covers completely are contiguous together with the dimension before them.
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
    """A search index over boxes of one tensor that finds the boxes which overlap a given box.

    Args:
        shape: shape of the tensor.
        boxes: pairs of a box and a value of any type that belongs to the box.
    """

    def __init__(self, shape: Sequence[int], boxes: Sequence[tuple[Box, _T]]) -> None:
        self._strides = row_major(shape)
        self._boxes = sorted((each for each in boxes if each[0].numel), key=lambda each: each[0].first(self._strides))
        self._firsts = [box.first(self._strides) for box, _ in self._boxes]
        # _reach[i] is the largest last element of boxes 0 to i. It ascends, so bisection finds the first box that can
        # overlap; all boxes before it end too early.
        self._reach: list[int] = []
        for box, _ in self._boxes:
            self._reach.append(max(box.last(self._strides), self._reach[-1] if self._reach else -1))

    def overlapping(self, wanted: Box) -> Iterator[tuple[Box, Box, _T]]:
        """Yield (overlap with ``wanted``, box, value of the box) for every box that overlaps ``wanted``."""
        if not wanted.numel:
            return
        begin = bisect.bisect_left(self._reach, wanted.first(self._strides))
        end = bisect.bisect_right(self._firsts, wanted.last(self._strides))
        for box, value in self._boxes[begin:end]:
            common = wanted.intersect(box)
            if common is not None:
                yield common, box, value


MODEL, STATE, BASES = "model.", "optimizer.state.", "zeropp.base."
"""Prefixes of tensor names in a checkpoint: model parameters and buffers, optimizer states, and cached weights that
differences are taken to (bases)."""


@dataclass(frozen=True)
class TensorBox:
    """A box of a named tensor, with its values on this rank.

    Attributes:
        name: name of the tensor in the checkpoint, prefix included.
        shape: shape of the whole tensor.
        box: the box.
        values: tensor with shape ``box.sizes``; usually a view of this rank's memory, which loads write to.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


def whole(name: str, values: Tensor) -> TensorBox:
    """Return a :class:`TensorBox` that covers a whole tensor."""
    shape = tuple(values.shape)
    return TensorBox(name, shape, Box((0,) * len(shape), shape), values)


def parts_of_range(name: str, slot: Slot, start: int, row: Tensor) -> Iterator[TensorBox]:
    """Yield the boxes of a contiguous range of a parameter, with views of their values.

    Args:
        name: name of the tensor in the checkpoint.
        slot: the parameter's shape and strides.
        start: first element of the range, in the parameter's memory order.
        row: 1-D contiguous values of the range.
    """
    for box in boxes_of_range(slot.shape, slot.strides, start, start + row.numel()):
        # The row keeps the parameter's memory order without gaps, so the parameter's strides are valid in it.
        place = row.storage_offset() + box.first(slot.strides) - start
        yield TensorBox(name, slot.shape, box, row.as_strided(box.sizes, slot.strides, place))


Which = Literal["slice", "pieces", "own"]
"""Selection of a rank's elements of a flat buffer at some level: "slice" is the rank's whole slice at that level, not
cut further; "pieces" is the same slice, cut into ``world / level`` pieces; "own" is only the one of these pieces that
the rank saves, so that replicas are not saved twice."""


def fragments(buffer: FlatBuffer, level: int, which: Which) -> Iterator[tuple[Slot, Fragment]]:
    """Yield the parts of parameters that lie in this rank's slice of a flat buffer.

    Args:
        buffer: the flat buffer.
        level: number of ranks that the buffer is sharded over.
        which: the part of the slice to return; see :data:`Which`.

    Yields:
        (the parameter's slot, its fragment); ``Fragment.offset`` counts elements from the start of the slice.
    """
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
    """Yield the boxes of a tensor that has one element for each element of this rank's slice of a buffer.

    Args:
        buffer: the flat buffer.
        row: 1-D tensor, aligned with this rank's slice at ``level``.
        level: number of ranks that the buffer is sharded over.
        prefix: prefix of the names in the checkpoint.
        which: the part of the slice to return; see :data:`Which`.
    """
    for slot, each in fragments(buffer, level, which):
        values = row[each.offset : each.offset + each.stop - each.start]
        yield from parts_of_range(prefix + slot.name, slot, each.start, values)


def main_parts(engine: Engine, which: Which) -> Iterator[TensorBox]:
    """Yield the boxes of this rank's shards of main weights and of frozen weights, except those stored as codes."""
    for buffer in engine.buffers:
        if not isinstance(buffer, CodedBuffer):
            yield from parts_of_row(buffer, buffer.shard, buffer.placement.mode.states, MODEL, which)


def base_parts(engine: Engine, which: Which) -> Iterator[TensorBox]:
    """Yield the boxes of this rank's cached weights that a lossy refresh by differences takes its differences to.

    Such cached weights depend on the history of refreshes, so they cannot be recomputed from the main weights. Buffers
    with ``counts_escapes`` use lossless differences: their cached weights can be recomputed and are left out.
    """
    for buffer in engine.trainable_buffers:
        base, cached = buffer.base, buffer.placement.mode.cached
        if base is not None and cached is not None and not buffer.counts_escapes:
            yield from parts_of_row(buffer, base, cached, BASES, which)


def state_parts(engine: Engine, states: Sequence[tuple[Slice, str, Tensor]], which: Which) -> Iterator[TensorBox]:
    """Yield the boxes of elementwise optimizer states, such as Adam's moments.

    Args:
        engine: the model's engine.
        states: (slice parameter, key of the state, 1-D state tensor with one element per element of the slice).
        which: the part of this rank's slice to return; see :data:`Which`.
    """
    by_name: dict[str, list[tuple[int, str, Tensor]]] = {}
    for part, key, tensor in states:
        by_name.setdefault(part.name, []).append((part.start, key, tensor))
    for buffer in engine.trainable_buffers:
        for slot, each in fragments(buffer, buffer.placement.mode.states, which):
            for first, key, tensor in by_name.get(slot.name, ()):
                # A parameter may have two slices on one rank: one is stepped on the device, the other on the host.
                start = max(each.start, first)
                stop = min(each.stop, first + tensor.numel())
                if start < stop:
                    row = tensor[start - first : stop - first]
                    yield from parts_of_range(f"{STATE}{slot.name}.{key}", slot, start, row)


class CheckpointError(RuntimeError):
    """An error of a checkpoint that is damaged, incomplete or does not fit the model, or that cannot be written."""


# Names of dtypes in the safetensors format.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def dtype_code(dtype: torch.dtype, name: str) -> str:
    """Return the safetensors name of a dtype, such as "BF16".

    Args:
        dtype: dtype of a tensor.
        name: name of the tensor, for the error message.

    Raises:
        CheckpointError: safetensors has no name for the dtype.
    """
    if dtype not in _CODES:
        raise CheckpointError(
            f"{name!r} is of {dtype}, which safetensors files cannot hold; they hold {', '.join(map(str, _CODES))}"
        )
    return _CODES[dtype]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a uint8 view [nbytes] of a contiguous tensor's memory."""
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)
