"""The flat buffers of a unit, and how each is put together: dtypes, layout, paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zeropp.comm.hops import Comm, Groups, Hop
from zeropp.config import Config
from zeropp.offload.storage_tiers import Memory
from zeropp.offload.tier_choice import PartialOffload, Tiers
from zeropp.params.coded_buffer import CodedBuffer
from zeropp.params.dtypes import DTYPES, ComputedWith, computed_with, main_dtype
from zeropp.params.gradient import Gradient, GradientPaths
from zeropp.params.guard import own_dtype
from zeropp.params.unit import FlatBuffer, Unit, WeightPaths
from zeropp.partition.levels import BufferLayout, Mode, Placement, build_layout, dense_strides
from zeropp.partition.units import UnitSpec
from zeropp.wire.codecs import dtype_name
from zeropp.wire.differences import BASES, DifferencePath, make_difference_codec
from zeropp.wire.encoding import Encoding, choose_encoding
from zeropp.wire.paths import CodedGatherPath, GatherPath, ReduceHop, ReducePath

__all__ = [
    "BufferKey",
    "BufferMaker",
    "Transfer",
    "buffer_layouts",
    "check_dtypes",
    "gradient_paths",
    "largest_shard",
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


def buffer_layouts(
    parameters: ComputedWith, spec: UnitSpec, config: Config, world: int
) -> Iterator[tuple[BufferKey, list[str], BufferLayout]]:
    """The flat buffers of a unit, one for each dtype, trainable and frozen apart: names and layout of each."""
    groups: dict[BufferKey, list[str]] = {}
    for name in spec.parameters:
        parameter, dtype = parameters[name]
        own = own_dtype(parameter)
        trainable = parameter.requires_grad
        # Frozen: never stepped, so as it came and no larger.
        main = main_dtype(dtype, config) if trainable else own
        groups.setdefault(BufferKey(dtype, trainable, main, _wire_dtype(dtype, config)), []).append(name)
    for key, names in groups.items():
        rows = [(n, tuple(parameters[n][0].shape), parameters[n][0].stride()) for n in names]
        # Laid out for the last level whatever the mode says: its pieces are whole blocks, and so are all larger slices.
        layout = build_layout([(n, shape, dense_strides(shape, strides)) for n, shape, strides in rows], world)
        yield key, names, layout


def largest_shard(
    model: nn.Module, specs: Sequence[UnitSpec], config: Config, mode: Mode, world: int
) -> tuple[int, int]:
    """Elements of the largest shard on a rank, and bytes of the largest element of any."""
    parameters = computed_with(model, config)
    numel = 0
    itemsize = 1
    for spec in specs:
        states = mode.for_unit(spec.persistent).states
        for key, _, layout in buffer_layouts(parameters, spec, config, world):
            numel = max(numel, layout.numel // states)
            itemsize = max(itemsize, key.main_dtype.itemsize)
    return numel, itemsize


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


def _wire_dtype(dtype: torch.dtype, config: Config) -> torch.dtype:
    # float64 models are there for their precision, which the configured dtype would take away.
    if dtype == torch.float64 or config.communication_data_type is None:
        return dtype
    return DTYPES[config.communication_data_type]


def check_dtypes(model: nn.Module, config: Config) -> None:
    """Make sure that messages can carry what the model computes with.

    Raises:
        ValueError: they cannot.
    """
    # Sums are float32 whatever travels, but each rank's own gradient is rounded before it is sent.
    if config.communication_data_type == "fp16" and not config.loss_scaling.enabled:
        raise ValueError(
            'communication_data_type "fp16" needs a loss scale, without which gradients overflow or vanish; enable the '
            'fp16 block, or set "bf16" or "fp32"'
        )
    codec = choose_encoding(config).differences
    if codec is None:
        return
    for name, (parameter, dtype) in computed_with(model, config).items():
        if parameter.requires_grad and dtype not in BASES[codec]:
            raise ValueError(
                f'zeropp.weight_codec "{codec}" sends differences of weights in '
                f"{' or '.join(map(dtype_name, BASES[codec]))}, and parameter {name!r} is computed with in "
                f'{dtype_name(dtype)}; set {{"bf16": {{"enabled": true}}}}, or leave weight_codec out'
            )


class BufferMaker:
    """Makes the flat buffers of one engine; they hold nothing until they shard values.

    Attributes:
        config: of the engine.
        mode: levels of the parts of units, persistent ones aside.
        tiers: of all parts; a `PartialOffload` says which buffers are stepped on the device instead.
    """

    def __init__(self, config: Config, mode: Mode, comm: Comm, tiers: Tiers) -> None:
        self.config = config
        self.mode = mode
        self.tiers = tiers
        self._comm = comm
        self._encoding = choose_encoding(config)

    def make_units(self, model: nn.Module, specs: Sequence[UnitSpec]) -> list[Unit]:
        """A unit for each spec."""
        parameters = computed_with(model, self.config)
        modes = [self.mode.for_unit(spec.persistent) for spec in specs]
        layouts = [list(buffer_layouts(parameters, spec, self.config, self._comm.world)) for spec in specs]
        stepped = [
            layout.numel // mode.states
            for mode, own in zip(modes, layouts, strict=True)
            for key, _, layout in own
            if key.trainable
        ]
        division = PartialOffload(self.config, self.tiers, Memory(self._comm.device), stepped)
        units = []
        for index, (spec, mode, own) in enumerate(zip(specs, modes, layouts, strict=True)):
            placement = Placement(mode, self._comm.rank, self._comm.local)
            buffers = []
            for key, names, layout in own:
                tiers = division.next(layout.numel // mode.states) if key.trainable else self.tiers
                buffers.append(self._make(spec.name, placement, key, [parameters[n][0] for n in names], layout, tiers))
            units.append(Unit(index, spec.name, buffers, hooked=not spec.persistent))
        return units

    def part(self, buffer: FlatBuffer, indices: Sequence[int], *, trainable: bool) -> FlatBuffer:
        """A buffer for some of the parameters of a frozen one, as they lie there but for the padding between them."""
        slots = [buffer.layout.slots[index] for index in indices]
        # Strides as they are in the buffer: the parameters' own are those of stand-ins while they are released.
        layout = build_layout([(slot.name, slot.shape, slot.strides) for slot in slots], self._comm.world)
        dtype = buffer.compute_dtype
        main = main_dtype(dtype, self.config) if trainable else buffer.main_dtype
        key = BufferKey(dtype, trainable, main, _wire_dtype(dtype, self.config))
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
