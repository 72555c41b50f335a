"""The parts of tensors that this rank has: main weights, optimizer states, bases of differences, as boxes.

What is spread over few ranks has replicas. A rank saves of it what it would own if it were spread over all: pieces of
the last level lie inside those of every other, so that everything is written once, by all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from zeropp.checkpoint.boxes import Box, boxes_of_range
from zeropp.engine.engine import Engine
from zeropp.optimizer.slices import Slice
from zeropp.params.coded_buffer import CodedBuffer
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.partition.layout import Fragment, Slot

__all__ = [
    "BASES",
    "MODEL",
    "STATE",
    "Part",
    "base_parts",
    "fragments",
    "main_parts",
    "parts_of_range",
    "state_parts",
    "whole",
]

MODEL, STATE, BASES = "model.", "optimizer.state.", "zeropp.base."
"""Prefixes of names: values of the model, states of its optimizer, what differences are taken to."""


@dataclass(frozen=True)
class Part:
    """A box of a named tensor, and its values on this rank: a view, with the sizes of the box."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


def whole(name: str, values: Tensor) -> Part:
    """All of a tensor as one part."""
    shape = tuple(values.shape)
    return Part(name, shape, Box((0,) * len(shape), shape), values)


def parts_of_range(name: str, slot: Slot, start: int, row: Tensor) -> Iterator[Part]:
    """The boxes of a range of a parameter; ``row`` has its elements from ``start`` on, in the order of memory."""
    for box in boxes_of_range(slot.shape, slot.strides, start, start + row.numel()):
        # The row is as dense as the parameter, so its strides serve for a part of it, too.
        place = row.storage_offset() + box.first(slot.strides) - start
        yield Part(name, slot.shape, box, row.as_strided(box.sizes, slot.strides, place))


Which = Literal["slice", "pieces", "own"]
"""A part of a buffer: a rank's slice as one, the pieces of the last level in it one by one, or its own piece alone."""


def fragments(buffer: FlatBuffer, level: int, which: Which) -> Iterator[tuple[Slot, Fragment]]:
    """Parts of parameters in this rank's slice at a level; offsets count from its beginning."""
    chain, rank, layout = buffer.placement.chain, buffer.placement.rank, buffer.layout
    begin, _ = layout.slice_range(chain.slice_index(rank, level), level)
    cut = level if which == "slice" else chain.world
    first = chain.slice_index(rank, level) * (cut // level)
    indices = [chain.slice_index(rank, cut)] if which == "own" else range(first, first + cut // level)
    for index in indices:
        shift = layout.slice_range(index, cut)[0] - begin
        for each in layout.fragments(index, cut):
            yield layout.slots[each.slot], Fragment(each.slot, each.start, each.stop, each.offset + shift)


def parts_of_row(buffer: FlatBuffer, row: Tensor, level: int, prefix: str, which: Which) -> Iterator[Part]:
    """Parts of what has one element for each of a buffer's, spread over ``level`` ranks."""
    for slot, each in fragments(buffer, level, which):
        values = row[each.offset : each.offset + each.stop - each.start]
        yield from parts_of_range(prefix + slot.name, slot, each.start, values)


def main_parts(engine: Engine, which: Which) -> Iterator[Part]:
    """Main weights, and frozen ones as they are, of this rank's shards."""
    for buffer in engine.buffers:
        if not isinstance(buffer, CodedBuffer):
            yield from parts_of_row(buffer, buffer.shard, buffer.placement.mode.states, MODEL, which)


def base_parts(engine: Engine, which: Which) -> Iterator[Part]:
    """Cached weights that differences are taken to, where they are not those that a refresh would make."""
    for buffer in engine.trainable_buffers:
        base, cached = buffer.base, buffer.placement.mode.cached
        if base is not None and cached is not None and not buffer.counts_escapes:
            yield from parts_of_row(buffer, base, cached, BASES, which)


def state_parts(engine: Engine, states: Sequence[tuple[Slice, str, Tensor]], which: Which) -> Iterator[Part]:
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
                start, stop = max(each.start, first), min(each.stop, first + tensor.numel())
                if start < stop:
                    row = tensor[start - first : stop - first]
                    yield from parts_of_range(f"{STATE}{slot.name}.{key}", slot, start, row)
