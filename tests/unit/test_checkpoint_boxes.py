"""Boxes of a tensor: flat ranges as boxes, contiguous runs of a box in memory, and the search for overlapping boxes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from zeropp.checkpoint.boxes import Box, BoxIndex, boxes_of_range, row_major, runs

SHAPES = [(), (1,), (5,), (3, 4), (2, 3, 4), (1, 3, 1, 2), (2, 2, 2, 2)]


def places(box: Box, strides: Sequence[int]) -> list[int]:
    """Return the memory positions of a box's elements, in the box's row-major order."""
    ranges = (range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*ranges)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_range_of_every_order_of_dimensions(shape: tuple[int, ...]) -> None:
    """The boxes contain each element once, in the order of memory. N dimensions need at most 2N-1 boxes."""
    for order in itertools.permutations(range(len(shape))):
        strides, step = [0] * len(shape), 1
        for dimension in reversed(order):
            strides[dimension], step = step, step * shape[dimension]
        for start, stop in itertools.combinations_with_replacement(range(math.prod(shape) + 1), 2):
            boxes = boxes_of_range(shape, strides, start, stop)
            assert len(boxes) <= max(2 * len(shape) - 1, 1)
            assert [place for box in boxes for place in sorted(places(box, strides))] == list(range(start, stop))


def test_stretches_of_any_part() -> None:
    chosen = random.Random(0)
    for _ in range(2000):
        shape = [chosen.randint(1, 4) for _ in range(chosen.randint(0, 4))]
        offsets = tuple(chosen.randrange(size) for size in shape)
        sizes = tuple(chosen.randint(1, size - offset) for size, offset in zip(shape, offsets, strict=True))
        part, found, done = Box(offsets, sizes), [], 0
        for there, here, count in runs(part, shape):
            assert here == done
            found += range(there, there + count)
            done += count
        assert found == places(part, row_major(shape))


def test_a_part_that_is_whole_in_its_last_dimensions_is_one_stretch() -> None:
    assert list(runs(Box((2, 0, 0), (3, 4, 5)), (8, 4, 5))) == [(40, 0, 60)]
    assert list(runs(Box((0, 1, 0), (2, 2, 5)), (2, 4, 5))) == [(5, 0, 10), (25, 10, 10)]


def test_boxes_that_meet() -> None:
    """The index finds the same boxes as comparing with all of them, for cuts along any dimension."""
    chosen = random.Random(1)
    for _ in range(300):
        shape = [chosen.randint(1, 6) for _ in range(chosen.randint(1, 3))]
        dimension, boxes, begin = chosen.randrange(len(shape)), [], 0
        while begin < shape[dimension]:
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dimension], sizes[dimension] = begin, chosen.randint(1, shape[dimension] - begin)
            begin += sizes[dimension]
            boxes.append((Box(tuple(offsets), tuple(sizes)), len(boxes)))
        offsets = [chosen.randrange(size) for size in shape]
        wanted = Box(tuple(offsets), tuple(chosen.randint(1, n - o) for n, o in zip(shape, offsets, strict=True)))
        found = {number: common for common, _, number in BoxIndex(shape, boxes).overlapping(wanted)}
        assert found == {number: common for box, number in boxes if (common := wanted.intersect(box)) is not None}
        assert sum(common.numel for common in found.values()) == wanted.numel
