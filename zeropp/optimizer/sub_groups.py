"""Steps of shards whose numbers are not all in host memory, or whose new weights must be copied elsewhere.

:class:`SubGroupSteps` takes them sub-group by sub-group, in the order of the step, across units. A sub-group's numbers
in files are read into staging buffers, stepped there and written back. Meanwhile the next sub-group may be read and the
previous one written. The staging buffers limit the size of a sub-group: each kind of number that is in a file needs a
part of a buffer for each sub-group in flight. A chunk's new weights are rounded right after its step, while they are in
the cache. Those for the device go through staging buffers of their own, and the thread of another stream copies them
while the next sub-group is stepped (:class:`~zeropp.params.wire_copy.Upload`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from torch import Tensor

from zeropp.comm.streams import Event
from zeropp.offload import storage_tiers
from zeropp.offload.read_ahead import Ring
from zeropp.offload.swap import ALIGNED
from zeropp.offload.tier_choice import ALL
from zeropp.optimizer.cpu_pool import CpuStepPool, step_slices
from zeropp.optimizer.fused import Rule, SliceStep
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.gradient import Gradient
from zeropp.params.wire_copy import Upload

__all__ = ["BufferStep", "SubGroupSteps"]

_MAIN = "main weights"
_GRADIENT = "gradients"
_Range = tuple[int, int]


@dataclass
class BufferStep:
    """Work of one optimizer step on one flat buffer.

    Attributes:
        buffer: flat buffer whose main weights are stepped.
        slices: pairs of a slice's first element in the shard and the slice's step.
        states: stored tensors of the elementwise states, by state key. They cover only the part of the shard that the
            host steps.
    """

    buffer: FlatBuffer
    slices: list[tuple[int, SliceStep]] = field(default_factory=list)
    states: dict[str, storage_tiers.StoredTensor] = field(default_factory=dict)

    @property
    def gradient(self) -> Gradient:
        """The gradient of the buffer."""
        assert self.buffer.gradient is not None  # only trainable buffers are stepped
        return self.buffer.gradient

    @property
    def clips(self) -> bool:
        """True if the step divides gradients before using them."""
        return any(each.grad_scale is not None for _, each in self.slices)

    @property
    def rows(self) -> dict[str, storage_tiers.StoredTensor]:
        """Stored tensors that the step reads, by kind: main weights, gradients and states."""
        return {_MAIN: self.buffer.main, _GRADIENT: self.gradient.row, **self.states}

    def place(self, kind: str, start: int) -> int:
        """Return the index, in a kind's stored tensor, of an element of the shard.

        States cover only the part of the shard that the host steps, so their stored tensors begin at that part.

        Args:
            kind: key in ``rows``.
            start: element of the shard.
        """
        return start - self.buffer.tiers.device_numel if kind in self.states else start

    @property
    def in_place(self) -> bool:
        """True if the host computes with all stored tensors in place and no other copy of the weights follows."""
        source = self.buffer.wire_copy
        return all(row.at_hand for row in self.rows.values()) and (source is None or not source.follows)

    @property
    def staged(self) -> list[str]:
        """Kinds of numbers that need a part of a staging buffer: those that are not in host memory.

        New weights are one of these kinds if their copy is in a file. On the way to the device they have a ring of
        their own.
        """
        source = self.buffer.wire_copy
        in_file = source is not None and source.follows and not source.uploads and source.new_in_place(0, 0) is None
        return [kind for kind, row in self.rows.items() if not row.at_hand] + ["new weights"] * in_file

    def upload_room(self, uploads: Ring | None) -> int:
        """Return the largest number of elements of a sub-group whose new weights fit into a buffer of ``uploads``."""
        source = self.buffer.wire_copy
        if uploads is None or source is None or not (source.follows and source.uploads):
            return ALL
        return uploads.nbytes // source.dtype.itemsize

    def left_over(self, start: int, stop: int) -> Iterator[slice]:
        """Yield the parts of a sub-group that no slice steps: padding, and weights without a gradient.

        Args:
            start: first element of the sub-group in the shard.
            stop: last element + 1.
        """
        at = start
        for first, each in sorted(self.slices, key=itemgetter(0)):
            begin = min(max(first, at), stop)
            if begin > at:
                yield slice(at - start, begin - start)
            at = max(at, min(first + each.param.numel(), stop))
        if at < stop:
            yield slice(at - start, stop - start)

    def in_tile(self, start: int, values: dict[str, Tensor], rounded: Tensor | None = None) -> list[SliceStep]:
        """Return the steps of the slice parts that lie in one sub-group, on the sub-group's staged tensors.

        Args:
            start: first element of the sub-group in the shard.
            values: the sub-group's numbers, by kind.
            rounded: output for all new weights of the sub-group in the dtype of their copy; None if there is none.
        """
        stop = start + values[_MAIN].numel()
        found = []
        for first, each in self.slices:
            begin = max(first, start)
            end = min(first + each.param.numel(), stop)
            # A slice may cross a sub-group's border. Stepping its parts separately is correct, because steps are
            # elementwise.
            if begin < end:
                cut = slice(begin - start, end - start)
                own = slice(begin - first, end - first)
                # A state that stays in memory has no stored tensor: each slice has its own tensor instead.
                states = {k: values[k][cut] if k in values else state[own] for k, state in each.states.items()}
                found.append(
                    replace(
                        each, param=values[_MAIN][cut], grad=values[_GRADIENT][cut], states=states,
                        rounded=None if rounded is None else rounded[cut],
                    )
                )  # fmt: skip
        return found


class SubGroupSteps:
    """Steps the buffers of all units once, sub-group by sub-group.

    From the first unit to the last one, it has exclusive use of the ring of staging buffers.
    """

    def __init__(
        self,
        ring: Ring | None,
        uploads: Ring | None,
        cores: CpuStepPool,
        rule: Rule,
        units: Sequence[Sequence[BufferStep]],
        *,
        read_ahead: bool,
        write_behind: bool,
    ) -> None:
        """Configure the step.

        Args:
            ring: staging buffers for numbers that are not in host memory, all of which the step takes; None if all
                numbers are in host memory.
            uploads: staging buffers for new weights on their way to the device; None if none go there.
            cores: threads that step.
            rule: rule of the wrapped optimizer.
            units: the buffers to step, for each unit in the order of the step; a unit may have none.
            read_ahead: True to read the next sub-group, also that of the next unit, while the current one is stepped.
            write_behind: True to write a sub-group while the next one is stepped.
        """
        self._ring = ring
        self._uploads = uploads
        self._pool = cores
        self._rule = rule
        self._units = units
        self._count = 1 + read_ahead + write_behind
        self._read_ahead = read_ahead
        self._unit = 0  # the unit that is stepped next
        self._number = 0  # sub-groups stepped so far
        self._taken = contextlib.ExitStack()
        self._slots: list[_Staging] = []
        # (unit, buffer, first element, last element + 1) of all sub-groups, in order.
        self._sub_groups: list[tuple[int, BufferStep, int, int]] = []

    def step_unit(self, upload: Upload) -> list[Event]:
        """Step the next unit.

        Args:
            upload: the way of the unit's new weights to the device.

        Returns:
            Events of writes to files that are still in flight.
        """
        if self._unit == 0:
            self._begin()
        written = list[Event]()
        while self._number < len(self._sub_groups) and self._sub_groups[self._number][0] == self._unit:
            _, job, start, stop = self._sub_groups[self._number]
            own = self._slots[self._number % self._count]
            if self._number == 0 or not self._read_ahead:
                _begin_read(own, job, start, stop)
            self._number += 1
            if self._read_ahead and self._number < len(self._sub_groups):
                _begin_read(self._slots[self._number % self._count], *self._sub_groups[self._number][1:])
            # Wait for the reads of this sub-group.
            own.wait_for_copies()
            written += self._step(own, job, start, stop, upload)
            if self._count == 1:
                own.wait_for_copies()
        self._unit += 1
        if self._unit == len(self._units):
            self.close()
        return written

    def _begin(self) -> None:
        """Take the staging buffers, and cut all buffers into sub-groups that fit into them."""
        buffers = self._taken.enter_context(self._ring.all_taken()) if self._ring is not None else []
        jobs = [job for unit in self._units for job in unit]
        # Divide for the buffer with the most staged kinds. Small buffers stay in memory and stage fewer kinds.
        kinds = max(len(job.staged) for job in jobs)
        parts = _divide(buffers, kinds * self._count)
        self._slots = [_Staging(parts[index * kinds : (index + 1) * kinds]) for index in range(self._count)]
        most = _room(parts, max(job.buffer.main_dtype.itemsize for job in jobs))
        self._sub_groups = [
            (number, job, *sub_group)
            for number, unit in enumerate(self._units)
            for job in unit
            for sub_group in _cut(job.buffer, min(most, job.upload_room(self._uploads)))
        ]

    def close(self) -> None:
        """Wait for all copies, and return the staging buffers to the ring; called by the last unit, or after an error.

        Raises:
            OSError: a file could not be read or written.
        """
        # After an error, too, wait for all copies: the ring must not hand out memory that is still read or written.
        with self._taken:
            for each in self._slots:
                self._taken.callback(each.wait_for_copies)

    def _step(self, own: _Staging, job: BufferStep, start: int, stop: int, upload: Upload) -> list[Event]:
        """Step one sub-group, start writing the numbers that changed, and return the events of the writes."""
        source = job.buffer.wire_copy
        new, copies = own.values[_MAIN], list[tuple[Tensor, Tensor]]()
        rounded = buffer = None
        if source is not None and source.follows:
            # Written by the step's own threads, in the dtype of the copy. A copy to a GPU that also converts would use
            # one core and pageable memory.
            rounded = source.new_in_place(start, stop)
            if rounded is None:
                if source.uploads:
                    buffer = upload.take_buffer()
                room = own.parts[len(job.staged) - 1] if buffer is None else buffer
                rounded = room[: new.numel() * source.dtype.itemsize].view(source.dtype)
            copies = [(rounded[part], new[part]) for part in job.left_over(start, stop)]
        step_slices(self._pool, self._rule, job.in_tile(start, own.values, rounded), copies)
        for kind, row in job.rows.items():
            # Only clipping changes gradients. Write clipped gradients back, unless zero_grad() has discarded them
            # meanwhile.
            if not row.at_hand and (kind != _GRADIENT or (job.clips and job.gradient.arrived)):
                own.events.append(row.write(job.place(kind, start), own.values[kind]))
        if buffer is not None and source is not None and rounded is not None:
            upload.send(source, start, rounded, buffer, last=stop == job.buffer.main.tensor.numel())
        elif source is not None and rounded is not None and source.new_in_place(start, stop) is None:
            own.events.append(source.take_new_weights(start, rounded))
        return list(own.events)


class _Staging:
    """Staging memory for one sub-group, and the copies in flight that use it."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts
        self.events: list[Event] = []
        self.values: dict[str, Tensor] = {}

    def wait_for_copies(self) -> None:
        """Wait until all reads into this memory and all writes from it have ended; raise the first error."""
        try:
            while self.events:
                self.events.pop().wait(threading.TIMEOUT_MAX)
        finally:
            # After an error, wait for the other copies, too: the memory is free only when the last one has ended.
            while self.events:
                with contextlib.suppress(Exception):
                    self.events.pop().wait(threading.TIMEOUT_MAX)


def _begin_read(own: _Staging, job: BufferStep, start: int, stop: int) -> None:
    """Start reading a sub-group's numbers into staging memory, after earlier copies of that memory have ended."""
    own.wait_for_copies()
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
    """Return at least ``count`` equal parts of the buffers, each a whole number of pages; an empty list for count 0."""
    # Without staged kinds, all numbers are in host memory.
    if not count:
        return []
    # Use equal parts: a sub-group has the same number of elements of each kind, so the largest dtype limits all kinds.
    each = -(-count // len(buffers))
    nbytes = buffers[0].numel() // each // ALIGNED * ALIGNED
    return [buffer[index * nbytes : (index + 1) * nbytes] for buffer in buffers for index in range(each)]


def _room(parts: Sequence[Tensor], itemsize: int) -> int:
    """Return the largest number of elements of a sub-group; practically unlimited if nothing is staged."""
    return parts[0].numel() // itemsize if parts else ALL


def _cut(buffer: FlatBuffer, most: int) -> list[_Range]:
    """Return (start, stop) of sub-groups of at most ``most`` elements that cover the part that the host steps."""
    numel = buffer.main.tensor.numel()
    return [(start, min(start + most, numel)) for start in range(buffer.tiers.device_numel, numel, most)]
