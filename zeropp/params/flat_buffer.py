"""Flat buffers: one contiguous tensor for the parameters of a unit that share a dtype, and this rank's shard of it.

[Note: storage] While a unit is unsharded, its parameters are views of the flat buffer's storage. Resharding resizes
that storage to 0 bytes, and the next gather resizes it back. Tensors that autograd has saved are views of the same
storage object, so they see the gathered values again. They would never see a new storage object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeropp._compat import storage_id, unguarded
from zeropp.comm.streams import Event, Stage, in_turn
from zeropp.offload.storage_tiers import MemoryTensor, StorageTier, StoredTensor
from zeropp.offload.swap import aligned
from zeropp.offload.tier_choice import Tiers
from zeropp.params.gradient import Gradient
from zeropp.params.guard import guard, nothing, unguard
from zeropp.params.parameter_swap import Generation, Swap
from zeropp.params.wire_copy import WireCopy
from zeropp.partition.levels import BufferLayout, Fragment
from zeropp.wire.differences import DifferencePath
from zeropp.wire.paths import CodedGatherPath, GatherPath, StoredShard

__all__ = ["FlatBuffer", "WeightPaths", "make_wire_copy"]


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
        nbytes: bytes of the gathered values.
        generation: number of changes that outdate prepared work; see [Note: generation].
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
        generation: Generation,
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
        # Autograd version of the shard at the last change that the engine made or accepted.
        self._main_version = 0
        self.unfrozen: set[str] = set()  # names of parameters to be trained from the next forward on
        self.main: StoredTensor = MemoryTensor(torch.empty(0, device=device))
        self.wire_copy: WireCopy | None = None
        self.tiers = tiers
        self.generation = generation
        self.secondary: Tensor | None = None
        self.nbytes = layout.numel * self.compute_dtype.itemsize

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
            values = self.layout.views(self.flat)
            # Stand-ins for released parameters: one NaN element expanded to the parameter's shape, so they take no
            # memory.
            nan = nothing(self.compute_dtype, self.device)
            absent = [nan.expand(view.shape) for view in values]
            self._swap = Swap(self.names, self.parameters, values, absent)
            self._prepare_paths()
            self.wire_copy = make_wire_copy(
                self.main, self.paths, self.tiers, self.device, trainable=self.trainable, coded=self.coded
            )
            if self.wire_copy is not None:
                self.wire_copy.renew()
            self.accept_edits()
        # If the model was wrapped before, its parameters may still be guarded, and have other versions.
        unguard(self.parameters)
        self._swap.accept(self.parameters)
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
            self._swap.set_values(self.layout.views(self.flat))
            self._prepare_paths()
        if self.wire_copy is not None:
            self.wire_copy = make_wire_copy(
                self.main, self.paths, self.tiers, self.device, trainable=self.trainable, coded=self.coded
            )
            if self.wire_copy is not None:
                self.wire_copy.renew()
        self._main_version = -1  # counts as edited, whatever version the new memory has
        self.generation.advance()
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

    def gather(self, after: Event | None) -> list[Stage]:
        """Return the stages of a gather of whole values; ``after`` is the event at which their source is written."""
        assert self.paths.fetch is not None  # persistent units have no gather, only refreshes
        own: Tensor | StoredShard | None = self.secondary
        if own is None:
            own = self.shard if self.wire_copy is None else self.wire_copy.begin_gather(after)
        return self.paths.fetch.stages(own, self._fetch_places, self.unit)

    @property
    def reads_at_gather(self) -> bool:
        """True if each gather begins with a read of its own, because the source is in a file."""
        return self.secondary is None and self.wire_copy is not None and self.wire_copy.reads

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
        """Refresh the cached weights, stage by stage.

        ``sends_differences`` returns True if this refresh is to send differences.
        """
        # Call this on the comm stream, not when the refresh is queued. Ranks agree there whether differences are
        # smaller, and the new values exist only once the step has run.
        by_differences = sends_differences(self)
        own = self._new_values()
        if by_differences:
            assert self.paths.differences is not None
            stages = self.paths.differences.stages(own, self._difference_places, self.unit)
        else:
            assert self.paths.refresh is not None
            stages = self.paths.refresh.stages(own, self._refresh_places, self.unit)
        yield from in_turn(stages)
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
        self._swap.show(self.version)

    def guard_values(self) -> None:
        """Point the parameters at their stand-ins and guard them; see `zeropp.params.guard`.

        Raises:
            RuntimeError: A parameter was edited while it was unsharded, or its requires_grad was set.
        """
        if self.trainable:
            self._swap.hide(self.version)
            return
        # Look before the swap, because ``requires_grad_`` of a guarded parameter is a change that the engine takes
        # over. Raise after it, because a parameter without values must not stay readable.
        refused = self._reset_unfrozen()
        self._swap.hide(self.version)
        if refused:
            raise RuntimeError(
                f"requires_grad of {refused} was set while the model was running, and has been reset to False; call "
                "requires_grad_ between passes, on every rank"
            )

    def note_unfrozen(self, parameter: nn.Parameter, trained: bool) -> None:
        """Record that one parameter, if it is in this buffer, is to be trained from the next forward on, or not."""
        for name, other in zip(self.names, self.parameters, strict=True):
            if other is parameter:
                self.unfrozen.add(name) if trained else self.unfrozen.discard(name)

    def _reset_unfrozen(self) -> list[str]:
        """Reset requires_grad set on frozen parameters during a pass; their gradients would be lost silently.

        Returns:
            The names of these parameters.
        """
        reset = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.requires_grad and name not in self.unfrozen:
                with unguarded():
                    parameter.requires_grad_(False)
                reset.append(name)
        return reset

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
        parameter.data = self._swap.absent[index]
        # Edits of a gathered value are intended. Reset the counter, or they would be reported as lost edits.
        self._swap.accept([parameter])
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
    reader = None if row is None or row.in_memory else tiers.reader
    return WireCopy(main, row, dtype if exact else path.dtype, codec, device, reader)
