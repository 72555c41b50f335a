"""Units and their flat buffers: one contiguous tensor for the parameters of a unit that share a dtype.

A unit is sharded, guarded (memory is allocated, values are there or on their way) or unsharded (readable).
`zeropp.order` calls the methods that change it.

[Note: storage] While gathered, parameters are views of the buffer's storage. Releasing shrinks that storage to nothing
and gathering grows it back, so that every alias autograd has saved sees the gathered values again; a new storage would
leave them behind.

[Note: versions] Shrinking under autograd's eyes must not go unnoticed. At weight version v a gathered parameter's
version counter is 2v, a released one's 2v+1: a saved tensor that is reached while its unit is away, or after an
optimizer step, is refused by autograd instead of read. A counter at any other value tells of an edit in place.
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
    """The paths by which weights travel.

    Attributes:
        main: from the states' level to whole buffers, for state dicts.
        refresh: from the states' level to what is cached between uses; None if nothing is, or if that is the shard.
        differences: the same way, for a part of the bytes, where what is cached of the last step is right; or None.
        fetch: from what is cached, or else the shard, to whole buffers; None where whole ones are cached.
    """

    main: GatherPath
    refresh: GatherPath | None
    fetch: GatherPath | None
    differences: DifferencePath | None = None

    @property
    def shared(self) -> bool:
        """True if the shard is what the model computes with: whole, in its dtype."""
        return self.refresh is None and self.fetch is None

    @property
    def counts_escapes(self) -> bool:
        """True if ranks have to agree on the size of a message of differences."""
        return self.differences is not None and self.differences.counted is not None


class FlatBuffer:
    """Values and main shard of one group of parameters.

    Attributes:
        coded: whether the shard is a message.
        parameters: the model's own parameter objects.
        flat: [numel] in the compute dtype; empty storage while released; the shard itself where paths lead nowhere.
        main: where the shard is.
        wire_copy: what gathers and refreshes begin with, where it is not the shard.
        secondary: [numel / cached level] weights in the compute dtype, cached between uses (hpZ), or the messages they
            came in, or None.
        tiers: of its parts.
        trainable: whether there is a gradient, and optimizer states; its parameters may yet not be trained now.
        gradient: its sum; None if the buffer is not trainable.
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
        # The version of what is cached between uses; no version is negative, so -1 is older than any.
        self.cached_version = -1
        # Autograd's counters as last set here; an edit in place moves them. See [Note: versions].
        self._noted_version = 0
        # The main shard's, as of the last change of weights that the engine knows of.
        self._main_version = 0
        self.unfrozen: set[str] = set()  # names of frozen parameters that are to be trained from the next forward on
        self.main: StoredTensor = MemoryTensor(torch.empty(0, device=device))
        self.wire_copy: WireCopy | None = None
        self.tiers = tiers
        self.secondary: Tensor | None = None

    def shard_from(self, fill: Callable[[Tensor], None]) -> None:
        """Take whole values, keep this rank's piece, and make the parameters views of the released buffer.

        Args:
            fill: puts the same values on every rank into a buffer of zeros, [numel] in the main dtype.
        """
        numel = self.layout.numel
        # Zeros, since padding is encoded, gathered and summed with the rest.
        if self.device.type == "cpu" and self.placement.mode.states > 1:
            # A copy of the slice is kept and this given back, to the system: a heap keeps what lies between the slices,
            # and would grow by the whole model. And padding that nobody writes to takes no memory.
            whole = aligned(numel, self.main_dtype)
        else:
            whole = torch.zeros(numel, dtype=self.main_dtype, device=self.device)
        with torch.no_grad():
            fill(whole)
            self.main = self._take_piece(whole)
            # Before memory for gathered values is there. It stays if it is the shard.
            del whole
            shared = self.paths.shared
            self.flat = self.shard if shared else torch.empty(numel, dtype=self.compute_dtype, device=self.device)
            # Made once. They survive the release, since the storage object stays: see [Note: storage].
            self._present = self.layout.views(self.flat)
            absent = nothing(self.compute_dtype, self.device)
            # The true shape over one element, so that a released parameter costs no memory and every index finds NaN.
            self._absent = [absent.expand(view.shape) for view in self._present]
            self._prepare_paths()
            self.wire_copy = make_wire_copy(
                self.main, self.paths, self.tiers, self.device, trainable=self.trainable, coded=self.coded
            )
            if self.wire_copy is not None:
                self.wire_copy.renew()
            self.accept_edits()
        # The parameters of a model that was wrapped before may still be guarded.
        unguard(self.parameters)
        bump_versions(self.parameters, self._noted_version)
        self.guard_values()
        if not shared:
            self.free_storage()

    def _take_piece(self, whole: Tensor) -> StoredTensor:
        """This rank's shard of whole values."""
        start, stop = self.placement.slice_of(whole.numel(), self.placement.mode.states)
        # A view would keep all of ``whole`` alive.
        return self._keep(whole) if stop - start == whole.numel() else self._keep(whole[start:stop], copy=True)

    @property
    def tier(self) -> StorageTier:
        """The place of the shard: with the optimizer's states if it is stepped, which frozen weights are not."""
        return self.tiers.main_tier(self.trainable)

    def _keep(self, values: Tensor, *, copy: bool = False) -> StoredTensor:
        """A shard in its tier; the very tensor if it is there, unless a ``copy`` is to be made."""
        if self.tier.serves(self.device):
            return MemoryTensor(values.clone() if copy else values)
        row = self.tier.allocate_tensor(values.numel(), values.dtype)
        # Through the mapping, if it is a file: nothing else is under way yet.
        row.tensor.copy_(values)
        return row

    def move_main(self) -> bool:
        """Move main weights to other memory: whoever has views of them keeps the values of now.

        Returns:
            False where they stay, since they are in a file.
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
        self._main_version = -1  # edited, whatever the new memory's version
        return True

    @property
    def shard(self) -> Tensor:
        """[numel / states] main weights (float32, unless see `main_dtype`), or frozen values in their own dtype.

        Where they are in a file, this is a mapping of it.
        """
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
        """Identity of the gathered buffer's storage, the same as long as the engine lives."""
        return storage_id(self.flat)

    # Values: alloc_storage, gather, unshard; guard_values, free_storage.

    def alloc_storage(self) -> None:
        """Allocate memory for the values, if there is none."""
        # Resized and not replaced, as FSDP2 does: see [Note: storage].
        storage = self.flat.untyped_storage()
        if storage.nbytes() != self.nbytes:
            storage.resize_(self.nbytes)

    def gather(self, after: Event | None) -> Iterator[None]:
        """Bring the values together, which are there ``after`` an event.

        See :meth:`zeropp.wire.paths.GatherPath.gather`.
        """
        assert self.paths.fetch is not None  # whole weights that are cached are only refreshed
        own: Tensor | StoredShard | None = self.secondary
        if own is None:
            own = self.shard if self.wire_copy is None else self.wire_copy.begin_gather(after)
        return self.paths.fetch.gather(own, self._fetch_places, self.unit)

    @property
    def stale(self) -> bool:
        """True if weights that are cached between uses are of an older version."""
        return self.paths.refresh is not None and self.cached_version != self.version

    @property
    def base(self) -> Tensor | None:
        """The weights that are cached between uses, where they are renewed by differences to them."""
        return self._difference_places[-1] if self.paths.differences is not None else None

    @property
    def has_base(self) -> bool:
        """True if all ranks cache the same weights, so that differences to them will do."""
        # Not after a load or an edit: ranks agree on when those happened, so they agree on this, too.
        return self.paths.differences is not None and self.cached_version >= 0

    def note_change(self, *, stepped: bool) -> None:
        """Main weights are new; if by a step, what is cached may serve as a base for differences."""
        self.version += 1
        self.accept_edits()
        if not stepped:
            self.invalidate_cache()
            if self.wire_copy is not None:
                self.wire_copy.renew()

    @property
    def edited(self) -> bool:
        """True if main weights were written to since the engine last heard of a change, seen by their version."""
        return self.main.tensor._version != self._main_version

    def accept_edits(self) -> None:
        """The engine knows of all edits of main weights made so far."""
        self._main_version = self.main.tensor._version

    def invalidate_cache(self) -> None:
        """Let cached weights be renewed from main weights alone."""
        self.cached_version = -1

    def cache_restored(self) -> None:
        """Note that cached weights were restored with the main weights, by all ranks that cache them."""
        self.cached_version = self.version

    @property
    def counts_escapes(self) -> bool:
        """True if ranks have to agree on the size of a message of differences."""
        return self.paths.counts_escapes

    def count_escapes(self) -> Tensor:
        """int64 [2]: what that size depends on; on a comm stream of refreshes."""
        assert self.paths.differences is not None and self.paths.differences.counted is not None
        return self.paths.differences.counted.count_escapes(self._new_values(), self._difference_places[0])

    def take_room(self, room8: int, room16: int) -> bool:
        """Size messages for the largest counts of any rank; whether differences take fewer bytes than weights."""
        assert self.paths.differences is not None and self.paths.differences.counted is not None
        numel = self.shard.numel()
        return self.paths.differences.counted.take_room((room8, room16), numel, numel * self.compute_dtype.itemsize)

    def refresh(self, sends_differences: Callable[[FlatBuffer], bool]) -> Iterator[None]:
        """Renew what is cached, from main weights alone or, if that is the answer when it runs, by differences."""
        # Asked on the comm stream: whether differences are worth it is agreed there, after this was queued, and what is
        # sent is there only now.
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
        """New main weights in the device's memory."""
        return self.shard if self.wire_copy is None else self.wire_copy.new()

    def unshard(self) -> None:
        """Let the model see the values.

        Raises:
            RuntimeError: a parameter was edited while released.
        """
        # First: to a guarded parameter its new ``data`` would be a use, which fetches the unit or is refused.
        unguard(self.parameters)
        self._swap(self._present, 2 * self.version)

    def guard_values(self) -> None:
        """Let no one read the values any more; see `zeropp.params.guard`.

        Raises:
            RuntimeError: a parameter was edited while gathered, or unfrozen.
        """
        unguard(self.parameters)
        try:
            # Guarded whatever comes out: a complaint must not leave a parameter readable that has no values.
            self._swap(self._absent, 2 * self.version + 1)
            self._refuse_unfrozen()
        finally:
            guard(self.parameters)

    def _swap(self, values: list[Tensor], version: int) -> None:
        # Looked at first, since setting the version hides an edit; raised last, so that the swap is complete.
        edited = [n for n, p in zip(self.names, self.parameters, strict=True) if p._version != self._noted_version]
        for parameter, value in zip(self.parameters, values, strict=True):
            # Leaves the parameter object and its version counter as they are. See [Note: versions].
            parameter.data = value
        # FSDP2 hides its writes from the counters instead: a graph from before a step then silently finds newer
        # weights there.
        bump_versions(self.parameters, version)
        self._noted_version = version
        if edited:
            raise RuntimeError(
                f"{edited} were edited in place, and the edit is lost, or stays on this rank: what a module sees is a "
                "copy of values that all ranks hold together. To set weights use zeropp.zero.GatheredParameters("
                "parameters, modifier_rank=0) or model.load_state_dict(...) on every rank, between steps"
            )

    def note_unfrozen(self, parameter: nn.Parameter, trained: bool) -> None:
        """Take note that a parameter, if it is here, is to be trained, or is not after all."""
        for name, other in zip(self.names, self.parameters, strict=True):
            if other is parameter:
                self.unfrozen.add(name) if trained else self.unfrozen.discard(name)

    def _refuse_unfrozen(self) -> None:
        """Nothing takes the gradient of a frozen parameter, so one that came would be lost silently."""
        unfrozen = [
            (name, parameter)
            for name, parameter in zip(self.names, self.parameters, strict=True)
            if not self.trainable and parameter.requires_grad and name not in self.unfrozen
        ]
        for _, parameter in unfrozen:
            # They are unguarded here, so this does not come back through the guard.
            parameter.requires_grad_(False)
        if unfrozen:
            raise RuntimeError(
                f"requires_grad of {[name for name, _ in unfrozen]} was set while the model was running, and is taken "
                "back; call requires_grad_ between passes, on every rank"
            )

    def show_whole(self, index: int, value: Tensor) -> None:
        """Let one parameter have its whole value, in the main dtype, while the others stay released."""
        # Its own class, so that the user's code finds a plain parameter.
        unguard([self.parameters[index]])
        self.parameters[index].data = value

    def release_whole(self, index: int) -> Tensor:
        """Release a parameter that had its whole value; returns what it has by now."""
        parameter = self.parameters[index]
        # Whatever lies there: the user may have put another tensor into ``.data``.
        value = parameter.data
        parameter.data = self._absent[index]
        # Edits of a gathered value are wanted, and must not be found as lost ones.
        bump_versions([parameter], self._noted_version)
        guard([parameter])
        return value

    def free_storage(self) -> None:
        """Free the memory of the values; every reader must be done."""
        self.flat.untyped_storage().resize_(0)

    def load(self, parameter: nn.Parameter, values: Tensor, *, keep_rounded: bool = False) -> None:
        """Take this rank's slice of new values for one of the parameters, if it is here.

        Args:
            parameter: one of the buffer's.
            values: whole, of any dtype and strides.
            keep_rounded: leave this rank's slice alone where it rounds to these values. ``model.state_dict()`` gives
                values in the compute dtype, and loading them back is not to lose the lower bits of main weights.
        """
        for fragment in self.fragments():
            if self.parameters[fragment.slot] is parameter:
                slot = self.layout.slots[fragment.slot]
                # In the order of the buffer's memory, where a fragment is a range; given values may have any strides.
                dense = torch.empty_strided(slot.shape, slot.strides, dtype=self.main_dtype, device=self.device)
                dense.copy_(values)
                row = dense.as_strided((dense.numel(),), (1,))[fragment.start : fragment.stop]
                if keep_rounded and self.trainable and values.dtype == self.compute_dtype != self.main_dtype:
                    own = self.shard[fragment.offset : fragment.offset + row.numel()]
                    if torch.equal(own.to(self.device, values.dtype), row.to(values.dtype)):
                        continue
                self.put(fragment, row, values.dtype)

    def put(self, fragment: Fragment, values: Tensor, given: torch.dtype) -> None:
        """Write new values of a part of a parameter, in the main dtype; ``given`` is the dtype they came in."""
        self.shard[fragment.offset : fragment.offset + values.numel()] = values

    def fragments(self) -> list[Fragment]:
        """Parts of parameters in this rank's shard."""
        states = self.placement.mode.states
        return self.layout.fragments(self.placement.chain.slice_index(self.placement.rank, states), states)


def make_wire_copy(
    main: StoredTensor, paths: WeightPaths, tiers: Tiers, device: torch.device, *, trainable: bool, coded: bool
) -> WireCopy | None:
    """The offloaded copy that gathers and refreshes start from, without values yet; None if that is the shard.

    Args:
        main: this rank's shard.
        paths: of the weights.
        tiers: of all parts.
        device: that trains.
        trainable: whether there is a gradient.
        coded: whether the shard is a message.
    """
    kept = paths.refresh is None
    path = paths.fetch if kept else paths.refresh
    if path is None or tiers.main_tier(trainable).serves(device):
        return None
    codec = path.codec if kept and isinstance(path, CodedGatherPath) and not coded else None
    # Codes are made of main weights as they are. Lossless differences are of the rounded ones.
    exact = isinstance(path, CodedGatherPath) or (paths.differences is not None and not paths.counts_escapes)
    row: StoredTensor | None = None
    numel = main.tensor.numel()
    dtype = main.tensor.dtype
    # Frozen weights never change, so that a second copy would save little; of others it is worth fewer bytes.
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
"""The kinds of memory that a unit owns at all times."""


class UnitState(Enum):
    """The state of a unit's values."""

    SHARDED = "sharded"  # only pieces; parameters guarded, storage empty
    GATHERED = "gathered"  # memory allocated, values there or on their way; parameters guarded
    UNSHARDED = "unsharded"  # values readable by the model


class Unit:
    """Parameters that are gathered, released and reduced together.

    Attributes:
        index: position in the model; the same on every rank.
        persistent: whether whole weights are cached between uses.
        has_frozen: whether some of its parameters are not trained.
        hooked: whether hooks of modules tell of its uses; small persistent parameters are used anywhere.
        users: on this rank, that want it gathered: modules on the call stack, a backward, a touched parameter.
        entered: of these, modules on the call stack.
    """

    def __init__(self, index: int, name: str, buffers: Sequence[FlatBuffer], *, hooked: bool = True) -> None:
        self.index = index
        self.name = name
        self.buffers = tuple(buffers)
        # With nothing to fetch, whole values are there at all times, whatever the mode is called.
        self.persistent = all(buffer.paths.fetch is None for buffer in buffers)
        self.hooked = hooked
        self.state = self._resting
        self.users = self.entered = 0
        self.update_trained()
        # Events of what is queued and has not been waited for.
        self._stepped: Event | None = None
        self._gathered: Event | None = None
        self._refreshed: Event | None = None

    def update_trained(self) -> None:
        """Look again which parameters are trained."""
        self.has_frozen = any(buffer.gradient is None or not all(buffer.gradient.trained) for buffer in self.buffers)

    @property
    def trained(self) -> tuple[bool, ...]:
        """For each parameter of a trainable buffer, true if it is trained."""
        return tuple(trained for gradient in self.gradients for trained in gradient.trained)

    def replace(self, buffer: FlatBuffer, parts: Sequence[FlatBuffer]) -> None:
        """Put parts of a buffer without a gradient in its place, between passes; trainable ones are the last."""
        rest = [other for other in self.buffers if other is not buffer]
        # Behind the rest, since hooks name a parameter by its position among the trainable ones.
        self.buffers = (*rest, *parts)
        # Nothing of the new buffers is gathered, even if the unit was planned to stay.
        self.state = self._resting

    @property
    def _resting(self) -> UnitState:
        """The state of values between passes; whole ones that are cached are only guarded."""
        return UnitState.GATHERED if self.persistent else UnitState.SHARDED

    @property
    def numel(self) -> int:
        """Elements gathered together, padding included."""
        return sum(buffer.layout.numel for buffer in self.buffers)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters in this unit."""
        return [parameter for buffer in self.buffers for parameter in buffer.parameters]

    @property
    def trainable_buffers(self) -> list[FlatBuffer]:
        """Buffers with a gradient and optimizer states."""
        return [buffer for buffer in self.buffers if buffer.trainable]

    @property
    def gradients(self) -> list[Gradient]:
        """The gradients of the trainable buffers."""
        return [buffer.gradient for buffer in self.buffers if buffer.gradient is not None]

    @property
    def version(self) -> int:
        """Newest version of any buffer: steps change trainable weights, loads and edits frozen ones, too."""
        # Frozen buffers stay behind, since an optimizer step gives versions to the trainable ones only.
        return max(buffer.version for buffer in self.buffers)

    def owned_bytes(self, place: Place = "device") -> Iterator[tuple[str, int]]:
        """(term, bytes) of each storage in one place, as it is right now.

        Terms are those in ``TERMS``, "gathered", "held_gradients", and "new_weights" that wait to be sent on.
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
                # Where paths lead nowhere ``flat`` is the shard, which has been counted.
                yield "persistent_weights" if self.persistent else "gathered", buffer.flat.untyped_storage().nbytes()

    def place_of(self, parameter: nn.Parameter) -> tuple[FlatBuffer, int]:
        """The buffer that one of the unit's parameters is in by now, and its index there."""
        for buffer in self.buffers:
            for index, each in enumerate(buffer.parameters):
                if each is parameter:
                    return buffer, index
        raise KeyError(f"unit {self.name!r} has no such parameter")

    def drop_gradient(self, parameter: nn.Parameter) -> int | None:
        """Forget the gradient of one parameter; returns its position among the trainable ones, None if it is frozen."""
        position = 0
        for gradient in self.gradients:
            for other in gradient.parameters:
                if other is parameter:
                    gradient.forget_one(parameter)
                    return position
                position += 1
        return None

    def prepare_gather(self, comm_streams: CommStreams) -> Work:
        """Allocate memory and return the work to queue. A gathered unit takes part again, with the same values.

        Raises:
            RuntimeError: what is cached is of an older version.
        """
        self._check_cached()
        # All buffers of a unit have one mode, so they go over the same links, and share a comm stream at each step.
        path = self.buffers[0].paths.fetch
        assert path is not None
        # ``reshard`` frees on the same comm stream. See [Note: memory on several streams].
        first_stream = comm_streams.stream(path.links[0])
        for buffer in self.buffers:
            first_stream.allocate(buffer.alloc_storage)
        # Gathers read what refreshes write, on other comm streams; or where nothing is cached, what is being stepped.
        after = self._stepped if self._refreshed is None else self._refreshed
        return Work(path.links, [buffer.gather(after) for buffer in self.buffers], after=after)

    def note_gather(self, event: Event) -> None:
        """The gather is queued, and done with ``event``."""
        self._gathered = event
        if self.state is UnitState.SHARDED:
            self.state = UnitState.GATHERED

    @property
    def stale(self) -> bool:
        """True if weights that are cached between uses are of an older version."""
        return any(buffer.stale for buffer in self.buffers)

    def cached_values(self, parameter: nn.Parameter) -> Tensor | None:
        """A view of a parameter's whole values; None if they are not cached between uses, or not of this version."""
        if not self.persistent or self.stale:
            return None
        buffer, index = self.place_of(parameter)
        # Without memory while it is off the device, and before the first refresh.
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
        """Queue the renewal of what is cached, where weights have changed.

        Args:
            comm_streams: to queue it on.
            sends_differences: asked there, whether a buffer is renewed by differences.

        Returns:
            Its end.
        """
        # What follows writes where the model would read.
        if self.state is UnitState.UNSHARDED:
            self.guard_values()
        stale = [buffer for buffer in self.buffers if buffer.stale]
        path = stale[0].paths.refresh
        assert path is not None
        for buffer in stale:
            if self.persistent:
                # Memory for the first refresh; from then on it stays.
                comm_streams.stream(path.links[0]).allocate(buffer.alloc_storage)
            # Already, though it is only queued: whoever uses the unit waits for the event first.
            buffer.cached_version = buffer.version
        work = Work(path.links, [buffer.refresh(sends_differences) for buffer in stale], after=self._stepped)
        self._refreshed = comm_streams.run_work(work)[-1]
        return self._refreshed

    def note_step(self, event: Event) -> None:
        """Main weights and states are being stepped until ``event``; see [Note: steps on the host]."""
        self._stepped = event

    def under_way(self) -> Iterator[tuple[str, Callable[[float], bool]]]:
        """(what, to wait for it) of what the model's next look at the values has to wait for."""
        # Behind a step comes one of the others, unless the model computes with the main weights themselves.
        if self._stepped is not None and self._refreshed is None and self._gathered is None:
            yield "step", self.wait_for_step
        # Told apart from the gather behind it: it takes other links.
        if self._refreshed is not None:
            yield "refresh", self.wait_for_refresh
        if self._gathered is not None:
            yield "gather", self.wait_for_unshard

    @property
    def stepping(self) -> Event | None:
        """The end of a step that was queued and has not been waited for."""
        return self._stepped

    @property
    def refreshing(self) -> bool:
        """True if a refresh was queued and not waited for."""
        return self._refreshed is not None

    def wait_for_step(self, timeout: float) -> bool:
        """Wait for a step; False after ``timeout`` seconds in vain."""
        if self._stepped is not None:
            if not self._stepped.wait(timeout):
                return False
            self._stepped = None
        return True

    def wait_for_unshard(self, timeout: float) -> bool:
        """Wait for a gather; False if it did not end in ``timeout`` seconds."""
        if self._gathered is not None:
            if not self._gathered.wait(timeout):
                return False
            # Not after a wait in vain, so that the work is waited for again.
            self._gathered = None
        return True

    def wait_for_refresh(self, timeout: float) -> bool:
        """Wait until no refresh reads the main weights any more; False after ``timeout`` seconds in vain."""
        if self._refreshed is not None:
            if not self._refreshed.wait(timeout):
                return False
            self._refreshed = None
        return True

    def unshard(self) -> None:
        """Let the model see values that have arrived.

        Raises:
            RuntimeError: they are of an older version.
        """
        if self.state is UnitState.GATHERED:
            self._check_cached()
            self.state = UnitState.UNSHARDED
            with contextlib.ExitStack() as stack:
                for buffer in self.buffers:
                    # Every one, also after one that complains of an edit: the stack runs all, then raises.
                    stack.callback(buffer.unshard)

    def guard_values(self) -> None:
        """Guard the parameters; the values stay where they are."""
        self.state = UnitState.GATHERED
        with contextlib.ExitStack() as stack:
            for buffer in self.buffers:
                # Every one, as in ``unshard``.
                stack.callback(buffer.guard_values)

    def reshard(self, comm_streams: CommStreams) -> None:
        """Free the gathered values; they have arrived."""
        if self.state is UnitState.UNSHARDED:
            self.guard_values()
        self.state = UnitState.SHARDED
        for buffer in self.buffers:
            assert buffer.paths.fetch is not None
            # Behind what the model has been given so far, which may still read them on a GPU.
            comm_streams.stream(buffer.paths.fetch.links[0]).free(buffer.free_storage)


def _rows(buffer: FlatBuffer) -> Iterator[tuple[str, StoredTensor]]:
    """(term, row) of what need not be on the device."""
    yield "main_weights" if buffer.trainable else "frozen_weights", buffer.main
    if buffer.gradient is not None:
        yield "gradients", buffer.gradient.row
    source = buffer.wire_copy
    if source is not None and source.row is not None and source.follows:
        yield "wire_weights", source.row


def layout_id(units: Iterable[Unit], mode: Mode, rank: int) -> str:
    """Fingerprint of one rank's slices; equal exactly when they are the same."""
    # The rank is in it: every slice fits one rank alone.
    digest = hashlib.sha256(f"{mode.chain.levels} {mode.states} {rank}".encode())
    for buffer in (buffer for unit in units for buffer in unit.buffers):
        dtypes = f"{buffer.main_dtype} {buffer.compute_dtype}"
        digest.update(f"{buffer.unit} {buffer.trainable} {dtypes} {buffer.layout}".encode())
        # The device and the host step slices of their own, and a parameter may be cut between them.
        if buffer.trainable and 0 < buffer.tiers.device_numel < buffer.main.tensor.numel():
            digest.update(f"{buffer.tiers.device_numel}".encode())
    return digest.hexdigest()[:16]
