"""Units: parameters that are gathered, released and reduced together.

A unit is sharded, gathered (memory allocated, values present or in flight, parameters guarded) or unsharded (readable
by the model). `zeropp.order` calls the methods that change this state.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum

from torch import Tensor, nn

from zeropp.comm.streams import DONE, CommStreams, Event, Work, stages_of
from zeropp.offload.storage_tiers import Place, StoredTensor
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.parameter_swap import Generation
from zeropp.partition.levels import Mode

__all__ = ["TERMS", "Unit", "UnitState", "layout_id"]


TERMS = (
    "main_weights", "gradients", "gradient_norms", "frozen_weights", "wire_weights", "secondary_weights",
    "persistent_weights", "feedback",
)  # fmt: skip
"""Names of the kinds of memory that a unit owns, as :meth:`Unit.owned_bytes` yields them.

Gradients on the device are owned only from a reduction to ``zero_grad()``, and all others at all times.
"""


class UnitState(Enum):
    """The state of a unit's gathered values."""

    SHARDED = "sharded"  # only shards; parameters guarded, storage of 0 bytes
    GATHERED = "gathered"  # memory allocated, values present or in flight; parameters guarded
    UNSHARDED = "unsharded"  # the model may read the values


class Unit:
    """Parameters that are gathered, released and reduced together.

    Attributes:
        index: position of the unit in the model, the same on every rank.
        buffers: flat buffers of the unit.
        trainable_buffers: the buffers that have a gradient and optimizer states.
        gradients: the gradients of the trainable buffers.
        persistent: True if whole weights are cached between uses.
        has_frozen: True if some of the parameters are not trained.
        hooked: True if module hooks report the uses of the unit; False for small persistent parameters, used anywhere.
        users: number of current users on this rank that need the unit gathered: module calls, a backward, an access.
        entered: number of these users that are module calls on the call stack.
        stepping: end of a queued step of the main weights; None once it has been waited for, or if it ended at once.
        refreshing: end of a queued refresh; None likewise.
        gathering: end of a queued gather; None likewise.
    """

    def __init__(
        self, index: int, name: str, buffers: Sequence[FlatBuffer], generation: Generation, *, hooked: bool = True
    ) -> None:
        self.index = index
        self.name = name
        self.generation = generation
        self._set_buffers(buffers)
        # Without a fetch path, whole values are present between uses, whatever the mode is called.
        self.persistent = all(buffer.paths.fetch is None for buffer in buffers)
        self.hooked = hooked
        self.state = self._resting
        self.users = self.entered = 0
        self.update_trained()
        self.stepping: Event | None = None
        self.refreshing: Event | None = None
        self.gathering: Event | None = None
        self._gather_work: Work | None = None
        self._prepared_at = -1  # generation of ``_gather_work``

    def _set_buffers(self, buffers: Sequence[FlatBuffer]) -> None:
        self.buffers = tuple(buffers)
        self.trainable_buffers = [buffer for buffer in self.buffers if buffer.trainable]
        self.gradients = [buffer.gradient for buffer in self.buffers if buffer.gradient is not None]
        # The buffers of a unit have one mode, so they use the same links and the same comm streams.
        self._fetch_path = self.buffers[0].paths.fetch
        self._caches = any(buffer.paths.refresh is not None for buffer in self.buffers)

    def update_trained(self) -> None:
        """Update ``has_frozen`` after the set of trained parameters has changed."""
        self.has_frozen = any(buffer.gradient is None or not all(buffer.gradient.trained) for buffer in self.buffers)

    @property
    def trained(self) -> tuple[bool, ...]:
        """One flag for each parameter of the trainable buffers: True if the parameter is trained."""
        return tuple(trained for gradient in self.gradients for trained in gradient.trained)

    def replace(self, buffer: FlatBuffer, parts: Sequence[FlatBuffer]) -> None:
        """Replace a frozen buffer by several new ones, between passes."""
        rest = [other for other in self.buffers if other is not buffer]
        # Append the parts: hooks identify a parameter by its position in the trainable buffers, and the positions of
        # parameters in earlier trainable buffers must not change.
        self._set_buffers((*rest, *parts))
        self.generation.advance()
        # The new buffers hold no gathered values, even if the plan kept the unit gathered.
        self.state = self._resting

    @property
    def _resting(self) -> UnitState:
        """The state between passes: GATHERED, that is guarded, for persistent units; SHARDED for all others."""
        return UnitState.GATHERED if self.persistent else UnitState.SHARDED

    @property
    def numel(self) -> int:
        """Number of elements gathered together, padding included."""
        return sum(buffer.layout.numel for buffer in self.buffers)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this unit."""
        return [parameter for buffer in self.buffers for parameter in buffer.parameters]

    @property
    def version(self) -> int:
        """The newest weight version of any buffer; loads and edits change frozen buffers, too."""
        # The versions of frozen buffers are lower, because a step raises the versions of trainable buffers only.
        return max([buffer.version for buffer in self.buffers]) if len(self.buffers) > 1 else self.buffers[0].version

    def owned_bytes(self, place: Place = "device") -> Iterator[tuple[str, int]]:
        """Yield a (term, bytes) pair for each storage that the unit has in one place right now.

        Terms are those in ``TERMS``, "gathered", "held_gradients", and "new_weights" (stepped weights not yet
        refreshed).
        """
        rows = [(term, row) for buffer in self.buffers for term, row in _rows(buffer)]
        yield from ((term, row.nbytes) for term, row in rows if row.place == place)
        if place != "device":
            return
        for buffer in self.buffers:
            if buffer.gradient is not None:
                yield "gradient_norms", buffer.gradient.report.nbytes
                for feedback in buffer.gradient.feedbacks:
                    yield "feedback", feedback.state.untyped_storage().nbytes()
                if buffer.gradient.held is not None:
                    yield "held_gradients", buffer.gradient.held.untyped_storage().nbytes()
            if buffer.wire_copy is not None and buffer.wire_copy.new_nbytes:
                yield "new_weights", buffer.wire_copy.new_nbytes
            if buffer.secondary is not None:
                yield "secondary_weights", buffer.secondary.untyped_storage().nbytes()
            if not buffer.paths.shared:
                # If ``shared``, ``flat`` is the shard, which is counted above.
                yield "persistent_weights" if self.persistent else "gathered", buffer.flat.untyped_storage().nbytes()

    def place_of(self, parameter: nn.Parameter) -> tuple[FlatBuffer, int]:
        """Return the buffer that now contains one of the unit's parameters, and the parameter's index in it."""
        for buffer in self.buffers:
            for index, each in enumerate(buffer.parameters):
                if each is parameter:
                    return buffer, index
        raise KeyError(f"unit {self.name!r} has no such parameter")

    def drop_gradient(self, parameter: nn.Parameter) -> int | None:
        """Drop a parameter's gradient; return its position among the trainable parameters, None if it is frozen."""
        position = 0
        for gradient in self.gradients:
            for other in gradient.parameters:
                if other is parameter:
                    gradient.forget_one(parameter)
                    return position
                position += 1
        return None

    def prepare_gather(self, comm_streams: CommStreams) -> tuple[Work, Event | None]:
        """Allocate memory for the values; return the work that gathers them, and the event that it must wait for.

        A rank that has the values already still takes part in the collective, and receives the same values again.

        Raises:
            RuntimeError: The cached weights are of an older version.
        """
        if self._caches:
            self._check_cached()
        path = self._fetch_path
        assert path is not None
        # Allocate on the comm stream on which ``reshard`` frees. See [Note: memory on several streams].
        comm_streams[path.links[0]].allocate(self._alloc_storages)
        # The gather must wait until its source is written: by the refresh or, if nothing is cached, by the step.
        after = self.stepping if self.refreshing is None else self.refreshing
        work = self._gather_work
        # A second gather needs messages of its own while the first one is in flight.
        if work is None or self._prepared_at != self.generation.number or self.gathering is not None:
            work = Work(path.links, [buffer.gather(after) for buffer in self.buffers])
            kept = self.gathering is None and not any([buffer.reads_at_gather for buffer in self.buffers])
            self._gather_work = work if kept else None
            self._prepared_at = self.generation.number
        return work, after

    def note_gather(self, event: Event) -> None:
        """Record that a gather is queued; ``event`` is its end."""
        self.gathering = None if event is DONE else event
        if self.state is UnitState.SHARDED:
            self.state = UnitState.GATHERED

    def _alloc_storages(self) -> None:
        for buffer in self.buffers:
            buffer.alloc_storage()

    def _free_storages(self) -> None:
        for buffer in self.buffers:
            buffer.free_storage()

    @property
    def stale(self) -> bool:
        """True if the cached weights of any buffer are older than its main weights."""
        return self._caches and any([buffer.stale for buffer in self.buffers])

    def cached_values(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a view of a parameter's whole cached values; None if they are not cached, or are out of date."""
        if not self.persistent or self.stale:
            return None
        buffer, index = self.place_of(parameter)
        # The storage is empty while it is off the device, and before the first refresh.
        there = not buffer.coded and buffer.flat.untyped_storage().nbytes() > 0
        return buffer.layout.views(buffer.flat)[index] if there else None

    def _check_cached(self) -> None:
        # See [Note: cached weights].
        if self.stale:
            versions = [(buffer.cached_version, buffer.version) for buffer in self.buffers]
            raise RuntimeError(
                f"unit {self.name!r} caches weights of old versions, (cached, current) {versions}: no refresh was "
                "issued"
            )

    def refresh(self, comm_streams: CommStreams, sends_differences: Callable[[FlatBuffer], bool]) -> Event:
        """Queue the refresh of all stale buffers.

        Args:
            comm_streams: streams to queue the work on.
            sends_differences: function called on a comm stream; returns True if a buffer's refresh is to send
                differences.

        Returns:
            The end of the refresh.
        """
        # Guard first: the parameters show old weights, which the refresh of a persistent unit overwrites.
        if self.state is UnitState.UNSHARDED:
            self.guard_values()
        stale = [buffer for buffer in self.buffers if buffer.stale]
        path = stale[0].paths.refresh
        assert path is not None
        for buffer in stale:
            if self.persistent:
                # The first refresh allocates the memory. Persistent units keep it from then on.
                comm_streams[path.links[0]].allocate(buffer.alloc_storage)
            # Mark the cache as current although the refresh is only queued: each use of the unit waits for the refresh.
            buffer.cached_version = buffer.version
        work = Work(path.links, [stages_of(buffer.refresh(sends_differences), path.links) for buffer in stale])
        event = comm_streams.run_work(work, after=self.stepping)
        self.refreshing = None if event is DONE else event
        return event

    def note_step(self, event: Event) -> None:
        """Record that main weights and states are being stepped until ``event``; see [Note: steps on the host]."""
        self.stepping = None if event is DONE else event

    def has_arrived(self) -> bool:
        """Return True if the values are there: no queued work has to be waited for before the model reads them.

        Events that have happened are dropped, so that they need not be waited for.

        Raises:
            RuntimeError: the device has failed.
        """
        gathering, refreshing, stepping = self.gathering, self.refreshing, self.stepping
        # A refresh or gather waits for the step itself. Without either, the model reads main weights directly.
        if gathering is None and refreshing is None:
            if stepping is not None:
                if not stepping.done():
                    return False
                self.stepping = None
            return True
        if refreshing is not None:
            if not refreshing.done():
                return False
            self.refreshing = None
        if gathering is not None:
            if not gathering.done():
                return False
            self.gathering = None
        return True

    def under_way(self) -> Iterator[tuple[str, Callable[[float], bool]]]:
        """Yield a (kind, wait function) pair for each queued work that must end before the model reads the values."""
        # A refresh or gather waits for the step itself. Without either, the model reads main weights directly.
        if self.stepping is not None and self.refreshing is None and self.gathering is None:
            yield "step", self.wait_for_step
        # Waits for refreshes are measured apart from waits for gathers, because they use other links.
        if self.refreshing is not None:
            yield "refresh", self.wait_for_refresh
        if self.gathering is not None:
            yield "gather", self.wait_for_unshard

    def wait_for_step(self, timeout: float) -> bool:
        """Wait for a queued step; return False if it did not end within ``timeout`` seconds."""
        if self.stepping is not None:
            if not self.stepping.wait(timeout):
                return False
            self.stepping = None
        return True

    def wait_for_unshard(self, timeout: float) -> bool:
        """Wait for a queued gather; return False if it did not end within ``timeout`` seconds."""
        if self.gathering is not None:
            if not self.gathering.wait(timeout):
                return False
            # Keep the event after a timeout, so that the gather is waited for again.
            self.gathering = None
        return True

    def wait_for_refresh(self, timeout: float) -> bool:
        """Wait until no refresh reads the main weights; return False if it did not end within ``timeout`` seconds."""
        if self.refreshing is not None:
            if not self.refreshing.wait(timeout):
                return False
            self.refreshing = None
        return True

    def unshard(self) -> None:
        """Make gathered values readable by the model; they must have arrived.

        Raises:
            RuntimeError: The cached weights are of an older version, or a parameter was edited while it was released.
        """
        if self.state is UnitState.GATHERED:
            if self._caches:
                self._check_cached()
            self.state = UnitState.UNSHARDED
            if len(self.buffers) == 1:
                self.buffers[0].unshard()
            else:
                # Process all buffers even if one raises because of an edit.
                run_all([buffer.unshard for buffer in self.buffers])

    def guard_values(self) -> None:
        """Guard the parameters; the gathered values stay in memory."""
        self.state = UnitState.GATHERED
        if len(self.buffers) == 1:
            self.buffers[0].guard_values()
        else:
            run_all([buffer.guard_values for buffer in self.buffers])

    def reshard(self, comm_streams: CommStreams) -> None:
        """Free the gathered values; they must have arrived."""
        if self.state is UnitState.UNSHARDED:
            self.guard_values()
        self.state = UnitState.SHARDED
        assert self._fetch_path is not None
        # Free behind the work that the model has issued so far, because a GPU may still read the values.
        comm_streams[self._fetch_path.links[0]].free(self._free_storages)


def run_all(works: Sequence[Callable[[], None]]) -> None:
    """Call all functions, then raise the error of the last one that failed, if any."""
    with contextlib.ExitStack() as stack:
        for work in works:
            stack.callback(work)


def _rows(buffer: FlatBuffer) -> Iterator[tuple[str, StoredTensor]]:
    """Yield a (term, stored tensor) pair for each stored tensor that may be off the device."""
    yield "main_weights" if buffer.trainable else "frozen_weights", buffer.main
    if buffer.gradient is not None:
        yield "gradients", buffer.gradient.row
    source = buffer.wire_copy
    if source is not None and source.row is not None and source.follows:
        yield "wire_weights", source.row


def layout_id(units: Iterable[Unit], mode: Mode, rank: int) -> str:
    """Return a fingerprint of one rank's slices; equal if and only if the slices are the same."""
    # Include the rank, because each rank has slices of its own.
    digest = hashlib.sha256(f"{mode.chain.levels} {mode.states} {rank}".encode())
    for buffer in (buffer for unit in units for buffer in unit.buffers):
        dtypes = f"{buffer.main_dtype} {buffer.compute_dtype}"
        digest.update(f"{buffer.unit} {buffer.trainable} {dtypes} {buffer.layout}".encode())
        # The device and the host step separate slices, and a parameter may be divided between them.
        if buffer.trainable and 0 < buffer.tiers.device_numel < buffer.main.tensor.numel():
            digest.update(f"{buffer.tiers.device_numel}".encode())
    return digest.hexdigest()[:16]
