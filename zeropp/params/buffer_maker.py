"""Construction of a unit's flat buffers: their dtypes, their layouts, and the paths of their weights and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zeropp.comm.hops import Comm, Groups, Hop, Ledger
from zeropp.offload.storage_tiers import Memory
from zeropp.offload.tier_choice import Tiers
from zeropp.params.coded_buffer import CodedBuffer
from zeropp.params.dtypes import ComputedWith, DtypeOptions
from zeropp.params.flat_buffer import FlatBuffer, WeightPaths
from zeropp.params.gradient import Gradient, GradientPaths
from zeropp.params.guard import own_dtype
from zeropp.params.parameter_swap import Generation
from zeropp.params.unit import Unit
from zeropp.partition.levels import BufferLayout, HopSpec, Mode, Placement, build_layout, dense_strides
from zeropp.partition.units import UnitSpec
from zeropp.wire.differences import BASES, DifferencePath, make_difference_codec
from zeropp.wire.encoding import Encoding
from zeropp.wire.paths import CodedGatherPath, GatherPath, ReduceHop, ReducePath

__all__ = [
    "BufferKey",
    "BufferMaker",
    "BufferOutline",
    "NoGroups",
    "Transfer",
    "UnitOutline",
    "buffer_layouts",
    "gradient_paths",
    "planned_transfers",
    "transfers",
    "weight_paths",
]


@dataclass(frozen=True)
class BufferKey:
    """The properties shared by all parameters of one flat buffer."""

    dtype: torch.dtype  # of gathered weights, which the model computes with
    trainable: bool
    main_dtype: torch.dtype  # of main weights, that is of the shard
    wire_dtype: torch.dtype  # of unquantized gradient messages

    def shares(self, mode: Mode) -> bool:
        """Return True if the model can compute with the main weights themselves, without a gathered copy.

        Main weights must be whole on every rank and have the compute dtype. Trained weights are not shared if there are
        several ranks: a module may edit its weight through ``.data``. Such an edit leaves no trace, and the replicas
        would differ from then on.
        """
        alone = not self.trainable or mode.chain.world == 1
        return alone and mode.states == mode.cached == 1 and self.dtype == self.main_dtype


@dataclass(frozen=True)
class BufferOutline:
    """The description of one flat buffer before the buffer is made.

    Attributes:
        key: properties shared by the buffer's parameters.
        layout: offsets of the parameters in the buffer.
        shard: number of elements in one rank's shard.
        device_numel: number of elements, at the front of the shard, that are stepped on the device; see `Tiers`.
    """

    key: BufferKey
    layout: BufferLayout
    shard: int
    device_numel: int


@dataclass(frozen=True)
class UnitOutline:
    """The description of one unit before it is made: its cut, its levels as one rank sees them, its buffers."""

    spec: UnitSpec
    placement: Placement
    buffers: tuple[BufferOutline, ...]


def buffer_layouts(
    parameters: ComputedWith, spec: UnitSpec, dtypes: DtypeOptions, world: int
) -> Iterator[tuple[BufferKey, BufferLayout]]:
    """Yield the key and the layout of each flat buffer of a unit, one buffer per key.

    Args:
        parameters: all parameters of the model by name, with their compute dtypes.
        spec: unit to lay out.
        dtypes: dtype settings of the engine.
        world: number of ranks.
    """
    groups: dict[BufferKey, list[str]] = {}
    for name in spec.parameters:
        parameter, dtype = parameters[name]
        trainable = parameter.requires_grad
        # Frozen weights are never stepped. They keep their own dtype, because a wider one would only cost memory.
        main = dtypes.main_dtype(dtype) if trainable else own_dtype(parameter)
        groups.setdefault(BufferKey(dtype, trainable, main, dtypes.wire_dtype(dtype)), []).append(name)
    for key, names in groups.items():
        rows = [(n, tuple(parameters[n][0].shape), parameters[n][0].stride()) for n in names]
        # Lay out for ``world`` pieces in every mode. Each piece is then a whole number of blocks, and so is each slice
        # at a smaller level.
        yield key, build_layout([(n, shape, dense_strides(shape, strides)) for n, shape, strides in rows], world)


class NoGroups:
    """A maker of hops without process groups, for plans and rehearsals; a stand-in for :class:`zeropp.comm.hops.Comm`.

    The hops describe themselves as hops over NCCL.
    """

    def __init__(self, world: int, rank: int, hop: type[Hop] = Hop) -> None:
        self.world = world
        self.of_all: list[str] = []  # the last kind of work that needs a group of all ranks, if any
        self._rank = rank
        self._hop = hop
        self._ledger = Ledger()

    def hop(self, kind: str, spec: HopSpec) -> Hop:
        return self._hop(spec, None, "nccl", self._rank, self._ledger, kind)

    def all_ranks(self, kind: str) -> object:
        self.of_all = [kind]
        return None


def planned_transfers(
    groups: Groups, placement: Placement, key: BufferKey, layout: BufferLayout, encoding: Encoding
) -> Iterator[Transfer]:
    """Yield every transfer of a buffer without making the buffer.

    Args:
        groups: maker of hops; called in the same order as when the buffer is made.
        placement: levels of the unit, as one rank sees them.
        key: properties of the buffer.
        layout: layout of the buffer.
        encoding: codecs of the run.
    """
    weights = weight_paths(groups, placement, key, encoding)
    gradients = None
    if key.trainable:
        # Gradient paths own error feedback tensors. On the meta device these take no memory.
        gradients = gradient_paths(groups, placement, layout, key, encoding, torch.device("meta"))
    return transfers(weights, gradients, layout.numel)


class BufferMaker:
    """The factory of one engine's flat buffers; new buffers have no values before `FlatBuffer.shard_from` runs.

    Attributes:
        mode: levels of the units that are not persistent.
        dtypes: dtype settings of the engine.
        tiers: storage tiers of all parts; `Tiers.divided` changes them for buffers that are partly stepped on the
            device.
        generation: number of changes that outdate the prepared work of the engine's units.
    """

    def __init__(self, mode: Mode, encoding: Encoding, dtypes: DtypeOptions, comm: Comm, tiers: Tiers) -> None:
        self.mode = mode
        self.dtypes = dtypes
        self.tiers = tiers
        self.generation = Generation()
        self._comm = comm
        self._encoding = encoding

    def make_units(self, parameters: Mapping[str, nn.Parameter], outlines: Sequence[UnitOutline]) -> list[Unit]:
        """Return one unit for each outline.

        Args:
            parameters: parameters of the model by name.
            outlines: descriptions of all units, in the order of the model.
        """
        memory = Memory(self._comm.device)
        units = []
        for index, unit in enumerate(outlines):
            buffers = []
            for own in unit.buffers:
                tiers = self.tiers.divided(own.device_numel, memory) if own.key.trainable else self.tiers
                named = [parameters[slot.name] for slot in own.layout.slots]
                buffers.append(self._make(unit.spec.name, unit.placement, own.key, named, own.layout, tiers))
            units.append(Unit(index, unit.spec.name, buffers, self.generation, hooked=not unit.spec.persistent))
        return units

    def part(self, buffer: FlatBuffer, indices: Sequence[int], *, trainable: bool) -> FlatBuffer:
        """Return a new buffer for some of the parameters of a frozen buffer.

        Args:
            buffer: frozen buffer that the parameters are in.
            indices: positions of the parameters in ``buffer``.
            trainable: True if the new buffer gets a gradient and optimizer states.
        """
        slots = [buffer.layout.slots[index] for index in indices]
        # Take the strides from the buffer's layout. Released parameters are stand-ins whose own strides are all 0.
        layout = build_layout([(slot.name, slot.shape, slot.strides) for slot in slots], self._comm.world)
        dtype = buffer.compute_dtype
        main = self.dtypes.main_dtype(dtype) if trainable else buffer.main_dtype
        key = BufferKey(dtype, trainable, main, self.dtypes.wire_dtype(dtype))
        parameters = [buffer.parameters[index] for index in indices]
        # Use the undivided tiers. If the host steps any weights, it steps these, too: `divide_steps` split only the
        # buffers that were trainable when the model was wrapped.
        return self._make(buffer.unit, buffer.placement, key, parameters, layout, self.tiers)

    def _make(
        self,
        unit: str,
        placement: Placement,
        key: BufferKey,
        parameters: Sequence[nn.Parameter],
        layout: BufferLayout,
        tiers: Tiers,
    ) -> FlatBuffer:
        encoding = self._encoding
        mode = placement.mode
        device = self._comm.device
        # ``stored``: this buffer's shard is not in device memory. ``brought``: the shards of trainable or of frozen
        # buffers are not in device memory.
        stored = not tiers.main_tier(key.trainable).serves(device)
        brought = not all(self.tiers.main_tier(trainable).serves(device) for trainable in (False, True))
        paths = weight_paths(self._comm, placement, key, encoding, stored=stored, brought=brought)
        if _is_coded(key, encoding):
            assert encoding.frozen is not None
            # Reuse the hops of the main path, and thereby its process groups. This path leaves the messages encoded.
            states, hops = mode.states, paths.main.hops
            codes = CodedGatherPath(
                placement, states, 1, hops, key.dtype, encoding.frozen, level=states, coded=True, decodes=False
            )
            return CodedBuffer(unit, parameters, layout, key.main_dtype, device, paths, codes, tiers, self.generation)
        gradient = None
        if key.trainable:
            travels = gradient_paths(self._comm, placement, layout, key, encoding, device)
            gradient = Gradient(unit, parameters, layout, key.main_dtype, device, travels, tiers)
        return FlatBuffer(unit, parameters, layout, key.main_dtype, device, paths, gradient, tiers, self.generation)


def _is_coded(key: BufferKey, encoding: Encoding) -> bool:
    """Return True if a buffer's shard is stored as 8-bit codes."""
    # Only frozen weights: stepping weights stored as codes would lose every update that is smaller than one code.
    return encoding.frozen is not None and not key.trainable


def weight_paths(
    comm: Groups, placement: Placement, key: BufferKey, encoding: Encoding, *, stored: bool = False,
    brought: bool = False,
) -> WeightPaths:  # fmt: skip
    """Return the paths of one buffer's weights. Makes process groups, so every rank must call it in the same order.

    Args:
        comm: maker of hops.
        placement: levels of the unit, as this rank sees them.
        key: properties of the buffer.
        encoding: codecs of the run.
        stored: True if gathers start from an offloaded copy that is stored in the form in which it travels.
        brought: True if the weights of trainable or of frozen buffers are offloaded. All buffers of a unit must go over
            the same classes of links, so each path then begins with the link between host and device.
    """
    states = placement.mode.states
    cached = placement.mode.cached
    dtype = key.dtype
    codec = encoding.weight_codec(key.trainable)
    coded = _is_coded(key, encoding)
    # With a codec, the model computes with decoded values, and the shard holds the exact ones.
    shared = key.shares(placement.mode) and codec is None and not stored
    cache_codes = encoding.cache_codes and cached not in (None, 1)

    def path(
        outer: int, inner: int, kind: str, *, encoded: bool, coded: bool = coded, decodes: bool = True,
        stored: bool = False,
    ) -> GatherPath:  # fmt: skip
        # ``comm.hop`` may make a process group, which is collective.
        hops = [comm.hop(kind, spec) for spec in placement.gather_path(outer, inner)]
        if codec is None or not encoded:
            return GatherPath(placement, outer, inner, hops, dtype, stored=stored)
        return CodedGatherPath(
            placement, outer, inner, hops, dtype, codec, level=states, coded=coded, decodes=decodes, stored=stored
        )

    refresh = fetch = differences = None
    if cached is not None and not shared:
        refresh = path(states, cached, "refresh", encoded=True, decodes=not cache_codes)
        # Differences need the weights cached after the previous step. Frozen weights change only by loads and edits,
        # after which the cache is no valid base. Without hops nothing is sent.
        changes = key.trainable and bool(refresh.hops)
        if encoding.differences is not None and changes and dtype in BASES[encoding.differences]:
            difference = make_difference_codec(encoding.differences)
            differences = DifferencePath(placement, states, cached, refresh.hops, dtype, difference)
            if differences.counted is not None:
                # Make the group of all ranks now. The refresh would make it on a comm stream, where ranks may be at
                # different collectives.
                comm.all_ranks("refresh")
    if cached is None:
        fetch = path(states, 1, "gather", encoded=True, coded=coded or stored, stored=brought)
    elif cached > 1:
        # Cached values are gathered without a codec, since encoding decoded values again would change them. Cached
        # codes are forwarded unchanged.
        fetch = path(cached, 1, "gather", encoded=cache_codes, coded=True)
    # State dicts get the exact main weights, without a codec, unless the shard itself is stored as codes.
    return WeightPaths(path(states, 1, "gather", encoded=coded), refresh, fetch, differences)


def gradient_paths(
    comm: Groups, placement: Placement, layout: BufferLayout, key: BufferKey, encoding: Encoding, device: torch.device
) -> GradientPaths:
    """Return the paths of one trainable buffer's gradients.

    Makes process groups, so every rank must call it in the same order.

    Args:
        comm: maker of hops.
        placement: levels of the unit, as this rank sees them.
        layout: layout of the buffer.
        key: properties of the buffer.
        encoding: codecs of the run.
        device: device for error feedback.
    """
    world = comm.world
    held_level = placement.mode.held_level
    states = placement.mode.states
    specs = placement.reduce_path(1, world)
    codecs = encoding.gradient_codecs(specs, key.wire_dtype)
    hops = []
    for spec, codec in zip(specs, codecs, strict=True):
        hop = comm.hop("reduce", spec)
        feedback = None
        if encoding.feeds_back(specs, spec):
            # A rank sends ``hop.size`` messages of [numel / outer] elements on this hop. Each has error feedback of its
            # own.
            feedback = codec.feedback(layout.numel // spec.outer, hop.size, encoding.beta, device)
        by_backend = encoding.sums_by_backend(codec, spec, codec.nbytes(layout.numel // spec.outer), hop.backend)
        hops.append(ReduceHop(hop, codec, feedback, by_backend))

    def path(inner: int, outer: int) -> ReducePath:
        # All three paths share hop objects, because error feedback belongs to a hop, whichever path a gradient takes
        # over it.
        own = [each for each in hops if inner < each.spec.outer <= outer]
        return ReducePath(placement, outer, own, key.wire_dtype)

    replicas: GatherPath | None = None
    if states != world:
        # This gather continues a reduction, so it runs on the groups of kind "reduce". On the groups of weight gathers,
        # it would have to keep one order with them.
        back = [comm.hop("reduce", spec) for spec in placement.gather_path(world, states)]
        codec = encoding.return_codec(codecs)
        if codec.coded:
            replicas = CodedGatherPath(placement, world, states, back, key.main_dtype, codec, level=world)
        else:
            replicas = GatherPath(placement, world, states, back, codec.dtype)
    return GradientPaths(path(1, held_level), path(held_level, world), path(1, world), replicas)


@dataclass(frozen=True)
class Transfer:
    """One collective on one hop.

    Attributes:
        hop: hop that carries the transfer.
        collective: "all_gather", "all_to_all" or "reduce_scatter".
        nbytes: total bytes of all members' parts.
        dtype: dtype that the backend sums in during a reduce_scatter; uint8 for collectives that sum nothing.
    """

    hop: Hop
    collective: str
    nbytes: int
    dtype: torch.dtype = torch.uint8


def transfers(weights: WeightPaths, gradients: GradientPaths | None, numel: int) -> Iterator[Transfer]:
    """Yield every transfer of a buffer, in the same order on all ranks.

    Differences to cached weights are not listed: they travel on the hops of the refresh and are smaller than whole
    weights.

    Args:
        weights: paths of the buffer's weights.
        gradients: paths of the buffer's gradients; None if the buffer is not trainable.
        numel: elements of the buffer, padding included.
    """
    gathers = [weights.main, weights.refresh, weights.fetch]
    for hop in gradients.straight.hops if gradients is not None else ():
        numel_of_slice = numel // hop.spec.inner
        nbytes = hop.codec.nbytes(numel_of_slice // hop.size) * hop.size
        if hop.by_backend:
            yield Transfer(hop.transport, "reduce_scatter", nbytes, hop.codec.dtype)
        else:
            yield Transfer(hop.transport, "all_to_all", nbytes)
    if gradients is not None:
        gathers.append(gradients.replicas)
    for path in gathers:
        for transport, nbytes in path.results(numel) if path is not None else ():
            yield Transfer(transport, "all_gather", nbytes)
