"""Steps of shards whose numbers are not all in memory, or whose new weights go on elsewhere: tile by tile.

A tile's numbers are read into staging buffers, stepped there, and written back; the next tile's may be read, and the
last one's written, meanwhile. A tile is as large as the staging buffers allow: each kind of number that is not in
memory has a buffer, or a part of one, for each tile under way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from zeropp.comm.streams import Event
from zeropp.offload import home
from zeropp.offload.read_ahead import Ring
from zeropp.offload.swap import ALIGNED
from zeropp.optimizer.cores import CHUNK_NUMEL, Cores, step_slices
from zeropp.optimizer.fused import Rule, SliceStep
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.gradient import Gradient

__all__ = ["BufferStep", "Tiles"]

_MAIN, _GRADIENT = "main weights", "gradients"
_Range = tuple[int, int]


@dataclass
class BufferStep:
    """One buffer's step.

    Attributes:
        buffer: whose weights are stepped.
        slices: (first element in the shard, step) of each slice that is stepped.
        states: rows of the optimizer's states of one value an element of the host's part, by their keys.
    """

    buffer: FlatBuffer
    slices: list[tuple[int, SliceStep]] = field(default_factory=list)
    states: dict[str, home.Row] = field(default_factory=dict)

    @property
    def gradient(self) -> Gradient:
        """The gradient that the weights are stepped with."""
        assert self.buffer.gradient is not None  # what is stepped has one
        return self.buffer.gradient

    @property
    def clips(self) -> bool:
        """True if gradients are divided as they are read."""
        return any(each.grad_scale is not None for _, each in self.slices)

    @property
    def rows(self) -> dict[str, home.Row]:
        """All that a step reads."""
        return {_MAIN: self.buffer.main, _GRADIENT: self.gradient.row, **self.states}

    def place(self, kind: str, start: int) -> int:
        """The place in a row of an element of the shard: rows of states begin where the host's part does."""
        return start - self.buffer.homes.device_numel if kind in self.states else start

    @property
    def in_place(self) -> bool:
        """True if the host can step all rows where they lie, and no other copy of the weights has to follow."""
        source = self.buffer.source
        return all(row.at_hand for row in self.rows.values()) and (source is None or not source.follows)

    @property
    def staged(self) -> list[str]:
        """Kinds of numbers that go through staging buffers."""
        source = self.buffer.source
        follows = source is not None and source.follows
        return [kind for kind, row in self.rows.items() if not row.at_hand] + ["new weights"] * follows

    def in_tile(self, start: int, values: dict[str, Tensor]) -> list[SliceStep]:
        """Steps of what lies in a tile, on the tile's own numbers."""
        stop, found = start + values[_MAIN].numel(), []
        for first, each in self.slices:
            begin, end = max(first, start), min(first + each.param.numel(), stop)
            # A slice may begin in one tile and end in another: these steps are element by element.
            if begin < end:
                cut, own = slice(begin - start, end - start), slice(begin - first, end - first)
                # Those in memory have no row: each slice has a tensor of its own.
                states = {k: values[k][cut] if k in values else state[own] for k, state in each.states.items()}
                found.append(replace(each, param=values[_MAIN][cut], grad=values[_GRADIENT][cut], states=states))
        return found


class _Slot:
    """Staging memory for one tile under way."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts
        self.events: list[Event] = []
        self.values: dict[str, Tensor] = {}

    def wait(self) -> None:
        """Until what was read is there, or what was written is."""
        try:
            while self.events:
                self.events.pop().wait(threading.TIMEOUT_MAX)
        finally:
            # After an error, too: the memory is free when the last of them has ended, well or not.
            while self.events:
                with contextlib.suppress(Exception):
                    self.events.pop().wait(threading.TIMEOUT_MAX)


class Tiles:
    """One step of many buffers, through a ring that nobody else uses meanwhile."""

    def __init__(
        self, ring: Ring, cores: Cores, rule: Rule, *, read_ahead: bool, write_behind: bool,
    ) -> None:  # fmt: skip
        """Use the whole ring.

        Args:
            ring: of staging buffers.
            cores: that step.
            rule: of the optimizer.
            read_ahead: read the next tile while one is stepped.
            write_behind: write a tile while the next one is stepped.
        """
        self._ring = ring
        self._cores = cores
        self._rule = rule
        self._count = 1 + read_ahead + write_behind
        self._read_ahead = read_ahead

    def run(self, jobs: Sequence[BufferStep]) -> None:
        """Step buffers, one after another."""
        with self._ring.all_taken() as buffers:
            # For the buffer with most kinds: small ones, which stay in memory, have fewer.
            kinds = max(len(job.staged) for job in jobs)
            parts = _divide(buffers, kinds * self._count)
            slots = [_Slot(parts[index * kinds : (index + 1) * kinds]) for index in range(self._count)]
            itemsize = max(job.buffer.main_dtype.itemsize for job in jobs)
            tiles = [(job, *tile) for job in jobs for tile in _cut(job.buffer, _room(parts, itemsize))]
            try:
                for number, (job, start, stop) in enumerate(tiles):
                    own = slots[number % self._count]
                    if number == 0 or not self._read_ahead:
                        _begin(own, job, start, stop)
                    if self._read_ahead and number + 1 < len(tiles):
                        _begin(slots[(number + 1) % self._count], *tiles[number + 1])
                    # Also for what was written from this memory before, if no reading has waited for it.
                    own.wait()
                    self._step(own, job, start, stop)
                    if self._count == 1:
                        own.wait()
            finally:
                # Memory that is still read into or written from must not be used for something else.
                with contextlib.ExitStack() as ending:
                    for each in slots:
                        ending.callback(each.wait)

    def _step(self, own: _Slot, job: BufferStep, start: int, stop: int) -> None:
        """Step one tile, and begin to write what is new."""
        step_slices(self._cores, self._rule, job.in_tile(start, own.values))
        for kind, row in job.rows.items():
            # Gradients are changed by clipping alone, which nobody sees once they have been forgotten.
            if not row.at_hand and (kind != _GRADIENT or (job.clips and job.gradient.arrived)):
                own.events.append(row.write(job.place(kind, start), own.values[kind]))
        source = job.buffer.source
        if source is None or not source.follows:
            return
        new = own.values[_MAIN]
        # By these cores, and into memory that may be page-locked: a file takes bytes as they are, and a copy to a card
        # that also rounds is made by one core, from memory that the card cannot read by itself.
        rounded = own.parts[len(job.staged) - 1][: new.numel() * source.dtype.itemsize].view(source.dtype)
        self._cores.run(
            [
                partial(rounded[at : at + CHUNK_NUMEL].copy_, new[at : at + CHUNK_NUMEL])
                for at in range(0, new.numel(), CHUNK_NUMEL)
            ]
        )
        own.events.append(source.take(start, rounded))
        if stop == job.buffer.main.tensor.numel():
            source.finish()


def _begin(own: _Slot, job: BufferStep, start: int, stop: int) -> None:
    """Begin to read a tile's numbers, where what the memory held before has been written."""
    own.wait()
    parts = iter(own.parts)
    own.values = {}
    for kind, row in job.rows.items():
        at = job.place(kind, start)
        if row.at_hand:
            own.values[kind] = row.tensor[at : at + stop - start]
        else:
            dtype = row.tensor.dtype
            own.values[kind] = next(parts)[: (stop - start) * dtype.itemsize].view(dtype)
            own.events.append(row.read(at, own.values[kind]))


def _divide(buffers: Sequence[Tensor], count: int) -> list[Tensor]:
    """At least ``count`` equal parts of buffers, each of whole pages."""
    # Everything is in memory, and only new weights go elsewhere.
    if not count:
        return []
    # Equal ones: a tile has as many elements of each kind, and the largest kind decides how many.
    each = -(-count // len(buffers))
    nbytes = buffers[0].numel() // each // ALIGNED * ALIGNED
    return [buffer[index * nbytes : (index + 1) * nbytes] for buffer in buffers for index in range(each)]


def _room(parts: Sequence[Tensor], itemsize: int) -> int:
    """Elements of a tile."""
    return parts[0].numel() // itemsize if parts else 1 << 62


def _cut(buffer: FlatBuffer, most: int) -> list[_Range]:
    """The host's part of a shard in tiles of at most ``most`` elements."""
    numel = buffer.main.tensor.numel()
    return [(start, min(start + most, numel)) for start in range(buffer.homes.device_numel, numel, most)]
