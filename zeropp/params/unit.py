"""Units and their flat buffers: one contiguous tensor for the parameters of a unit that share a dtype.

A unit is sharded, gathered (memory allocated, values present or in flight, parameters guarded) or unsharded (readable
by the model). `zeropp.order` calls the methods that change this state.

[Note: storage] While a unit is unsharded, its parameters are views of the flat buffer's storage. Resharding resizes
that storage to 0 bytes, and the next gather resizes it back. Tensors that autograd has saved are views of the same
storage object, so they see the gathered values again. They would never see a new storage object.

[Note: versions] Autograd must notice if the values of a saved weight were freed or stepped. So the version counter of
each parameter is set: 2 * v while the unit is unsharded at weight version v, and 2 * v + 1 while it is released.
Autograd then refuses to read a saved tensor whose unit is released or was stepped since. Any other counter value shows
that the user edited the parameter in place.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from zeropp._compat import bump_versions, storage_id
from zeropp.comm.streams import CommStreams, Event, Work
from zeropp.offload.storage_tiers import MemoryTensor, Place, StorageTier, StoredTensor
from zeropp.offload.swap import aligned
from zeropp.offload.tier_choice import Tiers
from zeropp.params.gradient import Gradient
from zeropp.params.guard import guard, nothing, unguard
from zeropp.params.wire_copy import WireCopy
from zeropp.partition.levels import BufferLayout, Fragment, Mode
from zeropp.wire.differences import DifferencePath
from zeropp.wire.paths import CodedGatherPath, GatherPath, StoredShard

__all__ = ["TERMS", "FlatBuffer", "Unit", "UnitState", "WeightPaths", "layout_id", "make_wire_copy"]


@dataclass(frozen=True)
class WeightPaths:
    """The paths on which the weights of one buffer are gathered.

    Attributes:
        main: path from the level of the states to whole buffers, for state dicts.
        refresh: path from the level of the states to the cached level; None if nothing is cached or the shard serves.
        differences: path with the same hops that sends only differences to the cached weights, in fewer bytes; or None.
        fetch: path from cached weights, or else from the shard, to whole buffers; None if whole weights are cached.
    """

    main: GatherPath
    refresh: GatherPath | None
    fetch: GatherPath | None
    differences: DifferencePath | None = None

    @property
    def shared(self) -> bool:
        """True if the model computes with the shard itself, because the shard is whole and in the compute dtype."""
        return self.refresh is None and self.fetch is None

    @property
    def counts_escapes(self) -> bool:
        """True if ranks must agree on the message size of differences, because that size depends on the values."""
        return self.differences is not None and self.differences.counted is not None


class FlatBuffer:
    """The gathered weights and the shard of one group of parameters.

    Attributes:
        coded: True if the shard is stored quantized, as a codec message.
        parameters: the model's own parameter objects.
        flat: gathered weights, [numel] in the compute dtype; its storage has 0 bytes while the unit is sharded. The
            shard itself if shared.
        main: stored tensor that holds the shard.
        wire_copy: offloaded source of gathers and refreshes; None if they read the shard itself.
        secondary: cached weights of hpZ, [numel / cached level] in the compute dtype, or cached messages; None without
            hpZ.
        tiers: storage tiers of the buffer's parts.
        trainable: True if there are a gradient and optimizer states, even if parameters are frozen for the moment.
        gradient: gradient sum of the buffer; None if the buffer is not trainable.
    """

    coded = False

    def __init__(
        self,
        unit: str,
        parameters: Sequence[nn.Parameter],
        layout: BufferLayout,
        main_dtype: torch.dtype,
        device: torch.device,
        paths: WeightPaths,
        gradient: Gradient | None,
        tiers: Tiers,
    ) -> None:
        self.unit = unit
        self.names = tuple(slot.name for slot in layout.slots)
        self.parameters = tuple(parameters)
        self.layout = layout
        self.trainable = gradient is not None
        self.device = device
        self.compute_dtype = paths.main.dtype
        self.main_dtype = main_dtype
        self.paths = paths
        self.gradient = gradient
        self.placement = paths.main.placement
        self.version = 0
        # Weight version of the cached weights; -1 means that the cache holds no usable weights.
        self.cached_version = -1
        # Version counter that the engine set last; another value shows an edit in place. See [Note: versions].
        self._noted_version = 0
        # Autograd version of the shard at the last change that the engine made or accepted.
        self._main_version = 0
        self.unfrozen: set[str] = set()  # names of parameters to be trained from the next forward on
        self.main: StoredTensor = MemoryTensor(torch.empty(0, device=device))
        self.wire_copy: WireCopy | None = None
        self.tiers = tiers
        self.secondary: Tensor | None = None

    def shard_from(self, fill: Callable[[Tensor], None]) -> None:
        """Fill the buffer, keep this rank's slice as the shard, and release the parameters.

        Args:
            fill: function that writes the values of all parameters into a zeroed buffer, [numel] in the main dtype; it
                must write the same values on every rank.
        """
        numel = self.layout.numel
        # Start from zeros, because padding is encoded, gathered and summed like values.
        if self.device.type == "cpu" and self.placement.mode.states > 1:
            # Map this memory directly, so that freeing it returns it to the system. The heap would keep the gaps
            # between slices and grow by the whole model. Mapped padding that is never written takes no memory.
            whole = aligned(numel, self.main_dtype)
        else:
            whole = torch.zeros(numel, dtype=self.main_dtype, device=self.device)
        with torch.no_grad():
            fill(whole)
            self.main = self._take_piece(whole)
            # Drop the full-size tensor before allocating the gathered buffer, so that both never exist at once.
            del whole
            shared = self.paths.shared
            self.flat = self.shard if shared else torch.empty(numel, dtype=self.compute_dtype, device=self.device)
            # The views are made once. free_storage keeps the storage object, so they stay valid: see [Note: storage].
            self._present = self.layout.views(self.flat)
            absent = nothing(self.compute_dtype, self.device)
            # Stand-ins for released parameters: one NaN element expanded to the parameter's shape, so they take no
            # memory.
            self._absent = [absent.expand(view.shape) for view in self._present]
            self._prepare_paths()
            self.wire_copy = make_wire_copy(
                self.main, self.paths, self.tiers, self.device, trainable=self.trainable, coded=self.coded
            )
            if self.wire_copy is not None:
                self.wire_copy.renew()
            self.accept_edits()
        # If the model was wrapped before, its parameters may still be guarded.
        unguard(self.parameters)
        bump_versions(self.parameters, self._noted_version)
        self.guard_values()
        if not shared:
            self.free_storage()

    def _take_piece(self, whole: Tensor) -> StoredTensor:
        """Return this rank's slice of whole values as a stored tensor in its tier."""
        start, stop = self.placement.slice_of(whole.numel(), self.placement.mode.states)
        # Copy the slice, because a view would keep all of ``whole`` alive.
        return self._keep(whole) if stop - start == whole.numel() else self._keep(whole[start:stop], copy=True)

    @property
    def tier(self) -> StorageTier:
        """Storage tier of the shard; trainable and frozen buffers may have different tiers."""
        return self.tiers.main_tier(self.trainable)

    def _keep(self, values: Tensor, *, copy: bool = False) -> StoredTensor:
        """Store a shard in its tier; reuse the given tensor if the tier is device memory and ``copy`` is False."""
        if self.tier.serves(self.device):
            return MemoryTensor(values.clone() if copy else values)
        row = self.tier.allocate_tensor(values.numel(), values.dtype)
        # If the row is in a file, write through its mapping. No direct I/O on the row is in flight yet.
        row.tensor.copy_(values)
        return row

    def move_main(self) -> bool:
        """Copy main weights to new memory, so that tensors the user took from ``p.data`` keep their present values.

        Returns:
            False if main weights are in a file, and therefore stay where they are.
        """
        if not self.main.in_memory:
            return False
        self.main = self._keep(self.shard, copy=True)
        if self.paths.shared:
            self.flat = self.shard
            self._present = self.layout.views(self.flat)
            self._prepare_paths()
        if self.wire_copy is not None:
            self.wire_copy = make_wire_copy(
                self.main, self.paths, self.tiers, self.device, trainable=self.trainable, coded=self.coded
            )
            if self.wire_copy is not None:
                self.wire_copy.renew()
        self._main_version = -1  # counts as edited, whatever version the new memory has
        return True

    @property
    def shard(self) -> Tensor:
        """This rank's shard, [numel / states] in `main_dtype`; a memory mapping if the shard is in a file."""
        return self.main.tensor

    def _prepare_paths(self) -> None:
        refresh, fetch = self.paths.refresh, self.paths.fetch
        if fetch is not None:
            self._fetch_places = fetch.places(self.flat)
        if refresh is not None:
            if fetch is not None:
                self.secondary = refresh.empty(self.layout.numel // refresh.inner, self.device)
            cached = self.flat if self.secondary is None else self.secondary
            self._refresh_places = refresh.places(cached)
            if self.paths.differences is not None:
                self._difference_places = self.paths.differences.places(cached)

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered buffer."""
        return self.layout.numel * self.compute_dtype.itemsize

    @property
    def storage_id(self) -> int:
        """Identity of the gathered buffer's storage; only :meth:`move_main` changes it, if the shard is shared."""
        return storage_id(self.flat)

    # A gather and its end, in the order of calls: alloc_storage, gather, unshard, guard_values, free_storage.

    def alloc_storage(self) -> None:
        """Allocate memory for the gathered values, unless it is allocated."""
        # Resize the storage object instead of replacing it: see [Note: storage].
        storage = self.flat.untyped_storage()
        if storage.nbytes() != self.nbytes:
            storage.resize_(self.nbytes)

    def gather(self, after: Event | None) -> Iterator[None]:
        """Return a generator that gathers whole values; ``after`` is the event at which their source is written."""
        assert self.paths.fetch is not None  # persistent units have no gather, only refreshes
        own: Tensor | StoredShard | None = self.secondary
        if own is None:
            own = self.shard if self.wire_copy is None else self.wire_copy.begin_gather(after)
        return self.paths.fetch.gather(own, self._fetch_places, self.unit)

    @property
    def stale(self) -> bool:
        """True if the cached weights are older than the main weights."""
        return self.paths.refresh is not None and self.cached_version != self.version

    @property
    def base(self) -> Tensor | None:
        """The cached weights to which a refresh sends differences; None if refreshes send whole weights only."""
        return self._difference_places[-1] if self.paths.differences is not None else None

    @property
    def has_base(self) -> bool:
        """True if all ranks cache the same weights, so that a refresh may send differences to them."""
        # A load or an edit sets cached_version to -1 on every rank, so ranks agree on this answer without
        # communication.
        return self.paths.differences is not None and self.cached_version >= 0

    def note_change(self, *, stepped: bool) -> None:
        """Record new main weights; after a step (``stepped``), cached weights serve as the base of differences."""
        self.version += 1
        self.accept_edits()
        if not stepped:
            self.invalidate_cache()
            if self.wire_copy is not None:
                self.wire_copy.renew()

    @property
    def edited(self) -> bool:
        """True if main weights were written to, as their version shows, since the last change that the engine knows."""
        return self.main.tensor._version != self._main_version

    def accept_edits(self) -> None:
        """Record that the engine knows all edits of main weights made so far."""
        self._main_version = self.main.tensor._version

    def invalidate_cache(self) -> None:
        """Make the next refresh send whole weights instead of differences to the cached ones."""
        self.cached_version = -1

    def cache_restored(self) -> None:
        """Record that every rank restored cached weights that match the main weights."""
        self.cached_version = self.version

    @property
    def counts_escapes(self) -> bool:
        """True if ranks must agree on the message size of differences, because that size depends on the values."""
        return self.paths.counts_escapes

    def count_escapes(self) -> Tensor:
        """Count the differences that need 8 bits and those that need 16; int64 [2]. Runs on a refresh comm stream."""
        assert self.paths.differences is not None and self.paths.differences.counted is not None
        return self.paths.differences.counted.count_escapes(self._new_values(), self._difference_places[0])

    def set_capacity(self, room8: int, room16: int) -> bool:
        """Set the message size to the largest counts of any rank; return True if differences save bytes."""
        assert self.paths.differences is not None and self.paths.differences.counted is not None
        numel = self.shard.numel()
        return self.paths.differences.counted.set_capacity((room8, room16), numel, numel * self.compute_dtype.itemsize)

    def refresh(self, sends_differences: Callable[[FlatBuffer], bool]) -> Iterator[None]:
        """Refresh the cached weights; ``sends_differences`` returns True if this refresh is to send differences."""
        # Call this on the comm stream, not when the refresh is queued. Ranks agree there whether differences are
        # smaller, and the new values exist only once the step has run.
        by_differences = sends_differences(self)
        own = self._new_values()
        if by_differences:
            assert self.paths.differences is not None
            yield from self.paths.differences.gather(own, self._difference_places, self.unit)
        else:
            assert self.paths.refresh is not None
            yield from self.paths.refresh.gather(own, self._refresh_places, self.unit)
        if self.wire_copy is not None:
            self.wire_copy.drop_new()

    def _new_values(self) -> Tensor:
        """Return the new weights on the device: the shard itself, or new weights in the dtype of the wire copy."""
        return self.shard if self.wire_copy is None else self.wire_copy.new()

    def unshard(self) -> None:
        """Make the gathered values readable: point the parameters at them.

        Raises:
            RuntimeError: A parameter was edited while it was released.
        """
        # Unguard first: setting ``.data`` of a guarded parameter would count as a use of the parameter.
        unguard(self.parameters)
        self._replace_values(self._present, 2 * self.version)

    def guard_values(self) -> None:
        """Point the parameters at their stand-ins and guard them; see `zeropp.params.guard`.

        Raises:
            RuntimeError: A parameter was edited while it was unsharded, or its requires_grad was set.
        """
        unguard(self.parameters)
        try:
            # Guard in ``finally``: after an error, a parameter without values must not stay readable.
            self._replace_values(self._absent, 2 * self.version + 1)
            self._refuse_unfrozen()
        finally:
            guard(self.parameters)

    def _replace_values(self, values: list[Tensor], version: int) -> None:
        # Look for edits first, because setting the version counter hides them. Raise last, so that the swap is
        # complete.
        edited = [n for n, p in zip(self.names, self.parameters, strict=True) if p._version != self._noted_version]
        for parameter, value in zip(self.parameters, values, strict=True):
            # Setting ``.data`` keeps the parameter object and its version counter. See [Note: versions].
            parameter.data = value
        # Without this, as in FSDP2, a graph recorded before a step would silently read newer weights in its backward.
        bump_versions(self.parameters, version)
        self._noted_version = version
        if edited:
            raise RuntimeError(
                f"{edited} were edited in place, and the edit is lost or stays on this rank: modules compute with "
                "copies of the main weights. To set weights use "
                "zeropp.zero.GatheredParameters(parameters, modifier_rank=0) or model.load_state_dict(...) on every "
                "rank, between steps"
            )

    def note_unfrozen(self, parameter: nn.Parameter, trained: bool) -> None:
        """Record that one parameter, if it is in this buffer, is to be trained from the next forward on, or not."""
        for name, other in zip(self.names, self.parameters, strict=True):
            if other is parameter:
                self.unfrozen.add(name) if trained else self.unfrozen.discard(name)

    def _refuse_unfrozen(self) -> None:
        """Refuse requires_grad set on frozen parameters during a pass; their gradients would be lost silently."""
        unfrozen = [
            (name, parameter)
            for name, parameter in zip(self.names, self.parameters, strict=True)
            if not self.trainable and parameter.requires_grad and name not in self.unfrozen
        ]
        for _, parameter in unfrozen:
            # The parameters are unguarded here, so this call does not go through the guard.
            parameter.requires_grad_(False)
        if unfrozen:
            raise RuntimeError(
                f"requires_grad of {[name for name, _ in unfrozen]} was set while the model was running, and has been "
                "reset to False; call requires_grad_ between passes, on every rank"
            )

    def show_whole(self, index: int, value: Tensor) -> None:
        """Point one parameter at its whole value, in main or compute dtype; the other parameters stay released."""
        # Unguard the parameter, so that the user's code finds a plain one.
        unguard([self.parameters[index]])
        self.parameters[index].data = value

    def release_whole(self, index: int) -> Tensor:
        """Release a parameter after :meth:`show_whole`, and return the tensor that its ``.data`` holds by now."""
        parameter = self.parameters[index]
        # The user may have set ``.data`` to another tensor.
        value = parameter.data
        parameter.data = self._absent[index]
        # Edits of a gathered value are intended. Reset the counter, or they would be reported as lost edits.
        bump_versions([parameter], self._noted_version)
        guard([parameter])
        return value

    def free_storage(self) -> None:
        """Free the memory of the gathered values; every reader must have finished."""
        self.flat.untyped_storage().resize_(0)

    def load(self, parameter: nn.Parameter, values: Tensor, *, keep_rounded: bool = False) -> None:
        """Store this rank's slice of new values for one parameter; ignore parameters of other buffers.

        Args:
            parameter: parameter to set.
            values: whole new value, of any dtype and strides.
            keep_rounded: keep this rank's slice if it rounds to ``values``. ``model.state_dict()`` returns weights in
                the compute dtype; loading them back must not lose the lower bits of main weights.
        """
        for fragment in self.fragments():
            if self.parameters[fragment.slot] is parameter:
                slot = self.layout.slots[fragment.slot]
                # Copy into the memory order of the buffer, in which a fragment is one range.
                dense = torch.empty_strided(slot.shape, slot.strides, dtype=self.main_dtype, device=self.device)
                dense.copy_(values)
                row = dense.as_strided((dense.numel(),), (1,))[fragment.start : fragment.stop]
                if keep_rounded and self.trainable and values.dtype == self.compute_dtype != self.main_dtype:
                    own = self.shard[fragment.offset : fragment.offset + row.numel()]
                    if torch.equal(own.to(self.device, values.dtype), row.to(values.dtype)):
                        continue
                self.put(fragment, row, values.dtype)

    def put(self, fragment: Fragment, values: Tensor, given: torch.dtype) -> None:
        """Write new values, in the main dtype, of a part of a parameter; ``given`` is the user's dtype."""
        self.shard[fragment.offset : fragment.offset + values.numel()] = values

    def fragments(self) -> list[Fragment]:
        """Return the parts of parameters that lie in this rank's shard."""
        states = self.placement.mode.states
        return self.layout.fragments(self.placement.chain.slice_index(self.placement.rank, states), states)


def make_wire_copy(
    main: StoredTensor, paths: WeightPaths, tiers: Tiers, device: torch.device, *, trainable: bool, coded: bool
) -> WireCopy | None:
    """Return the offloaded source of gathers and refreshes, without values; None if they read the shard itself.

    Args:
        main: this rank's shard.
        paths: paths of the weights.
        tiers: storage tiers of all parts.
        device: device that trains.
        trainable: True if the buffer has a gradient.
        coded: True if the shard is stored as a codec message.
    """
    kept = paths.refresh is None
    path = paths.fetch if kept else paths.refresh
    if path is None or tiers.main_tier(trainable).serves(device):
        return None
    codec = path.codec if kept and isinstance(path, CodedGatherPath) and not coded else None
    # Codecs and "delta4" differences encode exact main weights. "lossless" encodes weights rounded to the compute
    # dtype.
    exact = isinstance(path, CodedGatherPath) or (paths.differences is not None and not paths.counts_escapes)
    row: StoredTensor | None = None
    numel = main.tensor.numel()
    dtype = main.tensor.dtype
    # Frozen main weights serve as the copy. Trained ones do so if they are in the tier for gather sources, in the dtype
    # that travels; otherwise a second copy in that dtype has fewer bytes to read.
    main_serves = not trainable or (tiers.weights.accepts(main) and dtype == path.dtype)
    if kept and main_serves and codec is None:
        row = main
    elif kept:
        size, stored = (codec.nbytes(numel), codec.dtype) if codec else (numel, path.dtype)
        row = tiers.weights.allocate_tensor(size, stored)
    reader = None if row is None or row.place == "device" else tiers.reader
    return WireCopy(main, row, dtype if exact else path.dtype, codec, device, reader)


TERMS = (
    "main_weights", "gradients", "gradient_norms", "frozen_weights", "wire_weights", "secondary_weights",
    "persistent_weights", "feedback",
)  # fmt: skip
"""Names of the kinds of memory that a unit owns at all times, as :meth:`Unit.owned_bytes` yields them."""


class UnitState(Enum):
    """The state of a unit's gathered values."""

    SHARDED = "sharded"  # only shards; parameters guarded, storage of 0 bytes
    GATHERED = "gathered"  # memory allocated, values present or in flight; parameters guarded
    UNSHARDED = "unsharded"  # the model may read the values


class Unit:
    """Parameters that are gathered, released and reduced together.

    Attributes:
        index: position of the unit in the model, the same on every rank.
        persistent: True if whole weights are cached between uses.
        has_frozen: True if some of the parameters are not trained.
        hooked: True if module hooks report the uses of the unit; False for small persistent parameters, used anywhere.
        users: number of current users on this rank that need the unit gathered: module calls, a backward, an access.
        entered: number of these users that are module calls on the call stack.
    """

    def __init__(self, index: int, name: str, buffers: Sequence[FlatBuffer], *, hooked: bool = True) -> None:
        self.index = index
        self.name = name
        self.buffers = tuple(buffers)
        # Without a fetch path, whole values are present between uses, whatever the mode is called.
        self.persistent = all(buffer.paths.fetch is None for buffer in buffers)
        self.hooked = hooked
        self.state = self._resting
        self.users = self.entered = 0
        self.update_trained()
        # End events of queued work; None once the work has been waited for.
        self._stepped: Event | None = None
        self._gathered: Event | None = None
        self._refreshed: Event | None = None

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
        self.buffers = (*rest, *parts)
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
    def trainable_buffers(self) -> list[FlatBuffer]:
        """The buffers that have a gradient and optimizer states."""
        return [buffer for buffer in self.buffers if buffer.trainable]

    @property
    def gradients(self) -> list[Gradient]:
        """The gradients of the trainable buffers."""
        return [buffer.gradient for buffer in self.buffers if buffer.gradient is not None]

    @property
    def version(self) -> int:
        """The newest weight version of any buffer; loads and edits change frozen buffers, too."""
        # The versions of frozen buffers are lower, because a step raises the versions of trainable buffers only.
        return max(buffer.version for buffer in self.buffers)

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

    def prepare_gather(self, comm_streams: CommStreams) -> Work:
        """Allocate memory for the values and return the work that gathers them.

        A rank that has the values already still takes part in the collective, and receives the same values again.

        Raises:
            RuntimeError: The cached weights are of an older version.
        """
        self._check_cached()
        # The buffers of a unit have one mode, so they use the same links and the same comm streams.
        path = self.buffers[0].paths.fetch
        assert path is not None
        # Allocate on the comm stream on which ``reshard`` frees. See [Note: memory on several streams].
        first_stream = comm_streams.stream(path.links[0])
        for buffer in self.buffers:
            first_stream.allocate(buffer.alloc_storage)
        # The gather must wait until its source is written: by the refresh or, if nothing is cached, by the step.
        after = self._stepped if self._refreshed is None else self._refreshed
        return Work(path.links, [buffer.gather(after) for buffer in self.buffers], after=after)

    def note_gather(self, event: Event) -> None:
        """Record that a gather is queued; ``event`` is its end."""
        self._gathered = event
        if self.state is UnitState.SHARDED:
            self.state = UnitState.GATHERED

    @property
    def stale(self) -> bool:
        """True if the cached weights of any buffer are older than its main weights."""
        return any(buffer.stale for buffer in self.buffers)

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
                comm_streams.stream(path.links[0]).allocate(buffer.alloc_storage)
            # Mark the cache as current although the refresh is only queued: each use of the unit waits for the refresh.
            buffer.cached_version = buffer.version
        work = Work(path.links, [buffer.refresh(sends_differences) for buffer in stale], after=self._stepped)
        self._refreshed = comm_streams.run_work(work)[-1]
        return self._refreshed

    def note_step(self, event: Event) -> None:
        """Record that main weights and states are being stepped until ``event``; see [Note: steps on the host]."""
        self._stepped = event

    def under_way(self) -> Iterator[tuple[str, Callable[[float], bool]]]:
        """Yield a (kind, wait function) pair for each queued work that must end before the model reads the values."""
        # A refresh or gather waits for the step itself. Without either, the model reads main weights directly.
        if self._stepped is not None and self._refreshed is None and self._gathered is None:
            yield "step", self.wait_for_step
        # Waits for refreshes are measured apart from waits for gathers, because they use other links.
        if self._refreshed is not None:
            yield "refresh", self.wait_for_refresh
        if self._gathered is not None:
            yield "gather", self.wait_for_unshard

    @property
    def stepping(self) -> Event | None:
        """The end event of a queued step that has not been waited for; None if there is none."""
        return self._stepped

    @property
    def refreshing(self) -> bool:
        """True if a refresh was queued and has not been waited for."""
        return self._refreshed is not None

    def wait_for_step(self, timeout: float) -> bool:
        """Wait for a queued step; return False if it did not end within ``timeout`` seconds."""
        if self._stepped is not None:
            if not self._stepped.wait(timeout):
                return False
            self._stepped = None
        return True

    def wait_for_unshard(self, timeout: float) -> bool:
        """Wait for a queued gather; return False if it did not end within ``timeout`` seconds."""
        if self._gathered is not None:
            if not self._gathered.wait(timeout):
                return False
            # Keep the event after a timeout, so that the gather is waited for again.
            self._gathered = None
        return True

    def wait_for_refresh(self, timeout: float) -> bool:
        """Wait until no refresh reads the main weights; return False if it did not end within ``timeout`` seconds."""
        if self._refreshed is not None:
            if not self._refreshed.wait(timeout):
                return False
            self._refreshed = None
        return True

    def unshard(self) -> None:
        """Make gathered values readable by the model; they must have arrived.

        Raises:
            RuntimeError: The cached weights are of an older version, or a parameter was edited while it was released.
        """
        if self.state is UnitState.GATHERED:
            self._check_cached()
            self.state = UnitState.UNSHARDED
            with contextlib.ExitStack() as stack:
                for buffer in self.buffers:
                    # Process all buffers even if one raises because of an edit; the stack raises at its end.
                    stack.callback(buffer.unshard)

    def guard_values(self) -> None:
        """Guard the parameters; the gathered values stay in memory."""
        self.state = UnitState.GATHERED
        with contextlib.ExitStack() as stack:
            for buffer in self.buffers:
                # Process all buffers even if one raises, as in ``unshard``.
                stack.callback(buffer.guard_values)

    def reshard(self, comm_streams: CommStreams) -> None:
        """Free the gathered values; they must have arrived."""
        if self.state is UnitState.UNSHARDED:
            self.guard_values()
        self.state = UnitState.SHARDED
        for buffer in self.buffers:
            assert buffer.paths.fetch is not None
            # Free behind the work that the model has issued so far, because a GPU may still read the values.
            comm_streams.stream(buffer.paths.fetch.links[0]).free(buffer.free_storage)


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
