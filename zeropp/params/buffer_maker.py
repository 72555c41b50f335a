"""The flat buffers of a unit, and how each is put together: dtypes, layout, paths."""

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
from zeropp.params.gradient import Gradient, GradientPaths
from zeropp.params.guard import own_dtype
from zeropp.params.unit import FlatBuffer, Unit, WeightPaths
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
    """The properties that the parameters of one flat buffer have in common."""

    dtype: torch.dtype  # gathered
    trainable: bool
    main_dtype: torch.dtype  # of the shard
    wire_dtype: torch.dtype  # of gradient messages

    def shares(self, mode: Mode) -> bool:
        """True if main weights are whole and in the dtype the model computes in, so that one copy serves both.

        Not where trained ones have replicas: a module's edit through ``.data`` leaves no trace, and would part them.
        """
        alone = not self.trainable or mode.chain.world == 1
        return alone and mode.states == mode.cached == 1 and self.dtype == self.main_dtype


@dataclass(frozen=True)
class BufferOutline:
    """One flat buffer before it is made.

    Attributes:
        key: of its parameters.
        layout: their places.
        shard: elements of a rank's shard.
        device_numel: how many of them, at the front, are stepped on the device; see `Tiers`.
    """

    key: BufferKey
    layout: BufferLayout
    shard: int
    device_numel: int


@dataclass(frozen=True)
class UnitOutline:
    """One unit before it is made: its cut, where one rank caches and sums it, and its flat buffers."""

    spec: UnitSpec
    placement: Placement
    buffers: tuple[BufferOutline, ...]


def buffer_layouts(
    parameters: ComputedWith, spec: UnitSpec, dtypes: DtypeOptions, world: int
) -> Iterator[tuple[BufferKey, BufferLayout]]:
    """The flat buffers of a unit, one for each dtype, trainable and frozen apart."""
    groups: dict[BufferKey, list[str]] = {}
    for name in spec.parameters:
        parameter, dtype = parameters[name]
        trainable = parameter.requires_grad
        # Frozen: never stepped, so as it came and no larger.
        main = dtypes.main_dtype(dtype) if trainable else own_dtype(parameter)
        groups.setdefault(BufferKey(dtype, trainable, main, dtypes.wire_dtype(dtype)), []).append(name)
    for key, names in groups.items():
        rows = [(n, tuple(parameters[n][0].shape), parameters[n][0].stride()) for n in names]
        # Laid out for the last level whatever the mode says: its pieces are whole blocks, and so are all larger slices.
        yield key, build_layout([(n, shape, dense_strides(shape, strides)) for n, shape, strides in rows], world)


class NoGroups:
    """Makes hops without process groups, as :class:`zeropp.comm.hops.Comm` would make them over NCCL."""

    def __init__(self, world: int, rank: int, hop: type[Hop] = Hop) -> None:
        self.world = world
        self.of_all: list[str] = []  # kinds of work that were asked about among all ranks
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
    """Every transfer of a buffer that is not made; ``groups`` is asked for hops as in its making."""
    weights = weight_paths(groups, placement, key, encoding)
    gradients = None
    if key.trainable:
        # A path has the errors that are fed back; on the meta device they take no memory.
        gradients = gradient_paths(groups, placement, layout, key, encoding, torch.device("meta"))
    return transfers(weights, gradients, layout.numel)


class BufferMaker:
    """Makes the flat buffers of one engine; they hold nothing until they shard values.

    Attributes:
        mode: levels of the parts of units, persistent ones aside.
        dtypes: of all buffers.
        tiers: of all parts; `Tiers.divided` says which buffers are stepped on the device instead.
    """

    def __init__(self, mode: Mode, encoding: Encoding, dtypes: DtypeOptions, comm: Comm, tiers: Tiers) -> None:
        self.mode = mode
        self.dtypes = dtypes
        self.tiers = tiers
        self._comm = comm
        self._encoding = encoding

    def make_units(self, parameters: Mapping[str, nn.Parameter], outlines: Sequence[UnitOutline]) -> list[Unit]:
        """A unit for each outline, of parameters by name."""
        memory = Memory(self._comm.device)
        units = []
        for index, unit in enumerate(outlines):
            buffers = []
            for own in unit.buffers:
                tiers = self.tiers.divided(own.device_numel, memory) if own.key.trainable else self.tiers
                named = [parameters[slot.name] for slot in own.layout.slots]
                buffers.append(self._make(unit.spec.name, unit.placement, own.key, named, own.layout, tiers))
            units.append(Unit(index, unit.spec.name, buffers, hooked=not unit.spec.persistent))
        return units

    def part(self, buffer: FlatBuffer, indices: Sequence[int], *, trainable: bool) -> FlatBuffer:
        """A buffer for some of the parameters of a frozen one, as they lie there but for the padding between them."""
        slots = [buffer.layout.slots[index] for index in indices]
        # Strides as they are in the buffer: the parameters' own are those of stand-ins while they are released.
        layout = build_layout([(slot.name, slot.shape, slot.strides) for slot in slots], self._comm.world)
        dtype = buffer.compute_dtype
        main = self.dtypes.main_dtype(dtype) if trainable else buffer.main_dtype
        key = BufferKey(dtype, trainable, main, self.dtypes.wire_dtype(dtype))
        parameters = [buffer.parameters[index] for index in indices]
        # What is trained later is the host's, where anything is: the division was of what there was.
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
        # Whether what gathers begin with is not the shard in the device's memory.
        stored = not tiers.main_tier(key.trainable).serves(device)
        brought = not all(self.tiers.main_tier(trainable).serves(device) for trainable in (False, True))
        paths = weight_paths(self._comm, placement, key, encoding, stored=stored, brought=brought)
        if _is_coded(key, encoding):
            assert encoding.frozen is not None
            # The main path's hops, and so its groups and comm streams; but what travels is not decoded at the end.
            states, hops = mode.states, paths.main.hops
            codes = CodedGatherPath(
                placement, states, 1, hops, key.dtype, encoding.frozen, level=states, coded=True, decodes=False
            )
            return CodedBuffer(unit, parameters, layout, key.main_dtype, device, paths, codes, tiers)
        gradient = None
        if key.trainable:
            travels = gradient_paths(self._comm, placement, layout, key, encoding, device)
            gradient = Gradient(unit, parameters, layout, key.main_dtype, device, travels, tiers)
        return FlatBuffer(unit, parameters, layout, key.main_dtype, device, paths, gradient, tiers)


def _is_coded(key: BufferKey, encoding: Encoding) -> bool:
    """Tell whether a buffer's shard is codes."""
    # Codes of weights that change would lose every step that is smaller than a code; frozen ones lose once.
    return encoding.frozen is not None and not key.trainable


def weight_paths(
    comm: Groups, placement: Placement, key: BufferKey, encoding: Encoding, *, stored: bool = False,
    brought: bool = False,
) -> WeightPaths:  # fmt: skip
    """Paths of one buffer's weights; makes process groups, so that all ranks come here in one order.

    Args:
        comm: makes hops.
        placement: of the unit.
        key: of the buffer.
        encoding: of what travels.
        stored: what gathers begin with is kept apart from main weights, as it travels.
        brought: of some buffers it is in the host's memory; those of a unit go over the same links.
    """
    states = placement.mode.states
    cached = placement.mode.cached
    dtype = key.dtype
    codec = encoding.weight_codec(key.trainable)
    coded = _is_coded(key, encoding)
    # With a codec the model computes with decoded values, which the shard does not hold.
    shared = key.shares(placement.mode) and codec is None and not stored
    cache_codes = encoding.cache_codes and cached not in (None, 1)

    def path(
        outer: int, inner: int, kind: str, *, encoded: bool, coded: bool = coded, decodes: bool = True,
        stored: bool = False,
    ) -> GatherPath:  # fmt: skip
        # Makes process groups, so every rank must come here for the same buffers in the same order.
        hops = [comm.hop(kind, spec) for spec in placement.gather_path(outer, inner)]
        if codec is None or not encoded:
            return GatherPath(placement, outer, inner, hops, dtype, stored=stored)
        return CodedGatherPath(
            placement, outer, inner, hops, dtype, codec, level=states, coded=coded, decodes=decodes, stored=stored
        )

    refresh = fetch = differences = None
    if cached is not None and not shared:
        refresh = path(states, cached, "refresh", encoded=True, decodes=not cache_codes)
        # Frozen weights change by loads and edits only, after which there is no base. Without hops nothing travels.
        changes = key.trainable and bool(refresh.hops)
        if encoding.differences is not None and changes and dtype in BASES[encoding.differences]:
            difference = make_difference_codec(encoding.differences)
            differences = DifferencePath(placement, states, cached, refresh.hops, dtype, difference)
            if differences.counted is not None:
                # Made now, by all: later it would be made on a comm stream, where ranks may be at different places.
                comm.all_ranks("refresh")
    if cached is None:
        fetch = path(states, 1, "gather", encoded=True, coded=coded or stored, stored=brought)
    elif cached > 1:
        # What was decoded once goes on as it is: encoding it anew would change it. Cached codes are forwarded.
        fetch = path(cached, 1, "gather", encoded=cache_codes, coded=True)
    # State dicts get main weights as they are, uncoded; only where the shard is codes is there nothing else to send.
    return WeightPaths(path(states, 1, "gather", encoded=coded), refresh, fetch, differences)


def gradient_paths(
    comm: Groups, placement: Placement, layout: BufferLayout, key: BufferKey, encoding: Encoding, device: torch.device
) -> GradientPaths:
    """Paths of one trainable buffer's gradients; as :func:`weight_paths`."""
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
            # A rank brings ``hop.size`` messages of [numel / outer] to this hop, each with errors of its own.
            feedback = codec.feedback(layout.numel // spec.outer, hop.size, encoding.beta, device)
        by_backend = encoding.sums_by_backend(codec, spec, codec.nbytes(layout.numel // spec.outer), hop.backend)
        hops.append(ReduceHop(hop, codec, feedback, by_backend))

    def path(inner: int, outer: int) -> ReducePath:
        # The same hops in all three paths: errors belong to a hop, whichever path a gradient takes over it.
        own = [each for each in hops if inner < each.spec.outer <= outer]
        return ReducePath(placement, outer, own, key.wire_dtype)

    replicas: GatherPath | None = None
    if states != world:
        # A gather, but of kind "reduce": it follows a reduction, and must not be ordered among the gathers of weights.
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
        hop: over which it goes.
        collective: "all_gather", "all_to_all" or "reduce_scatter".
        nbytes: of all members' parts together.
        dtype: of what is summed on the way; uint8 where nothing is.
    """

    hop: Hop
    collective: str
    nbytes: int
    dtype: torch.dtype = torch.uint8


def transfers(weights: WeightPaths, gradients: GradientPaths | None, numel: int) -> Iterator[Transfer]:
    """Every transfer of a buffer of [numel] elements, padding included; in one order on all ranks.

    Differences to cached weights travel on the hops of whole weights and are smaller.
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
