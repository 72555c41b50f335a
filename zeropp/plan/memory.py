"""Every storage the engine will own on one rank, in bytes: of the device, of the host, and of a disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from zeropp.config import Config, ConfigSource
from zeropp.offload.storage_tiers import PLACES, Place, StoredTensor
from zeropp.offload.tier_choice import Tiers
from zeropp.params.buffer_maker import BufferOutline, NoGroups, UnitOutline, weight_paths
from zeropp.params.unit import TERMS, make_wire_copy
from zeropp.plan.limits import require_below
from zeropp.plan.outline import (
    CommunicatorMemory,
    PlannedExtent,
    PlannedMemory,
    communicators,
    outline,
    plan_homes,
)
from zeropp.setup.blueprint import Blueprint
from zeropp.wire.codecs import report_nbytes

__all__ = ["MemoryPlan", "UnitMemory", "memory", "plan_space"]

_MARKERS = 2 * 2  # elements of each parameter group's, as in zeropp.optimizer.sharded_params


@dataclass(frozen=True)
class UnitMemory:
    """One unit: bytes on the device that are there for a while.

    Attributes:
        name: of the unit.
        persistent: whether its whole weights stay.
        gathered: whole weights, while gathered.
        message: what carries its gradients.
        held: gradients that wait for a later backward of the step.
        arriving: sums of gradients on their way to the host.
    """

    name: str
    persistent: bool
    gathered: int
    message: int
    held: int
    arriving: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each rank; equal on all, since pieces are.

    Attributes:
        terms: what is owned on the device at all times: ``main_weights`` (float32 or float64 shards of trainable
            parameters), ``gradients`` (the same), ``gradient_norms`` (of each 256 elements of these, and a flag),
            ``frozen_weights`` (shards in their own dtype, or in codes), ``wire_weights`` (what gathers begin with, in
            the compute dtype or in codes, where main weights are elsewhere), ``secondary_weights`` (what hpZ caches, in
            the compute dtype or in codes), ``persistent_weights`` (whole, compute dtype; none where the main weights
            are that), ``feedback`` (errors of quantized gradients), ``edit_markers`` (two tensors of two elements in
            each parameter group, by which edits of weights are noticed, and their gradients). The optimizer's states
            are not among them.
        units: what comes on top while a unit is gathered, or its gradients are on their way.
        communicators: NCCL communicators of the first engine of a process, on a card; further engines of the same
            placement use the same ones. Their memory is not torch's, and in no other number here.
        host: the same in the host's memory, of what is offloaded: ``main_weights``, ``gradients``, ``frozen_weights``,
            ``wire_weights``, and ``optimizer_states``; and the rings through which all of it moves: ``step_staging`` of
            what is stepped, ``gather_staging`` of what is read for gathers.
        disk: the same in files, in whole blocks of 4096 bytes a row; nothing is staged there.
        paths: bytes of ``disk`` below each ``nvme_path``.
        device_states: optimizer states on the device, which are in no other number here.
        new_weights: at most, on the device: stepped weights that have not been sent on to what caches them, or been
            encoded. Gradients of steps under way take nothing more, since the next backward waits for these.
        pinned: bytes of the rings that are page-locked.
        local: ranks of a node.
        on_host: whether the device is the host's CPU, whose memory is then in ``terms``.
        settings: the configuration.
    """

    terms: dict[str, int]
    units: tuple[UnitMemory, ...]
    communicators: tuple[CommunicatorMemory, ...]
    host: dict[str, int]
    disk: dict[str, int]
    paths: dict[str, int]
    device_states: int
    new_weights: int
    pinned: int
    local: int
    on_host: bool
    settings: Config = field(compare=False, repr=False)

    @property
    def communicator_nbytes(self) -> int:
        """Bytes that the communicators are likely to take on a card, estimated from figures of others."""
        return sum(each.nbytes for each in self.communicators)

    @property
    def total(self) -> int:
        """Bytes owned on the device between steps, optimizer states aside."""
        return sum(self.terms.values())

    @property
    def held_gradients(self) -> int:
        """Bytes that come on top between backwards of one step, where the placement sums gradients before they go on.

        Inside ``no_sync`` other placements hold whole gradients, ``numel`` of the main dtype.
        """
        return sum(unit.held for unit in self.units)

    @property
    def largest_unit(self) -> int:
        """Bytes of the largest unit while gathered: the least that forward and backward need on top."""
        return max((unit.gathered for unit in self.units if not unit.persistent), default=0)

    @property
    def host_total(self) -> int:
        """Bytes that training needs in the host's memory, at least, for one rank.

        Where the CPU trains, all that it owns and its largest unit belong to it; activations never do, nor do Python,
        torch and the model before it was wrapped.
        """
        return sum(self.host_terms.values())

    @property
    def disk_total(self) -> int:
        """Bytes in files, for one rank."""
        return sum(self.disk.values())

    def require(self, *, host_bytes: float | None = None, disk_bytes: float | None = None) -> MemoryPlan:
        """Make sure that a node's ranks can stay below limits, together.

        Args:
            host_bytes: that they may have of the host's memory; None for no limit.
            disk_bytes: that they may have of its disks.

        Returns:
            This plan.

        Raises:
            MemoryLimitError: they cannot, with what each term takes and the settings that make it less.
        """
        require_below(self.settings, self.local, "host", self.host_terms, host_bytes)
        require_below(self.settings, self.local, "disk", self.disk, disk_bytes)
        return self

    @property
    def host_terms(self) -> dict[str, int]:
        """The terms whose sum is ``host_total``."""
        terms = Counter(self.host)
        # There is one memory then, and a term may be in both.
        if self.on_host:
            terms.update(self.terms)
            terms.update({"optimizer_states": self.device_states, "largest_unit": self.largest_unit})
        return terms

    def __str__(self) -> str:
        rows = [*self.terms.items(), ("total between steps", self.total), ("largest unit, gathered", self.largest_unit)]
        # Only where something is offloaded.
        rows += [("new weights, at most", self.new_weights)] * (self.new_weights > 0)
        for place, terms in (("host", self.host), ("disk", self.disk)):
            rows += [(f"{place}: {name}", value) for name, value in terms.items() if value]
            if len([value for value in terms.values() if value]) > 1:
                rows.append((f"{place}: total", sum(terms.values())))
        lines = [f"{name.replace('_', ' '):24}{value:>20,} bytes" for name, value in rows]
        # A CPU's have no buffers to speak of.
        if self.communicators and not self.on_host:
            count = len(self.communicators)
            nbytes = self.communicator_nbytes
            lines.append(f"{count} NCCL communicators, outside of torch's own: about {nbytes:,} bytes (not measured)")
            lines += [f"  {each}: about {each.nbytes:,} bytes" for each in self.communicators]
        return "\n".join(lines)


def memory(
    model: nn.Module,
    config: ConfigSource,
    world: int,
    local: int | None = None,
    *,
    device: torch.device | str = "cuda",
    states: int = 2,
    groups: int = 1,
) -> MemoryPlan:
    """Predict what the engine will own, on each of ``world`` ranks.

    Args:
        model: not wrapped; meta parameters will do.
        config: as given to ZeroOptimizer.
        world: ranks to partition over.
        local: ranks per node, which matters to groups of nodes and to deferred reductions; None for a single node.
        device: that trains. It need not be here; what is offloaded to the host of a "cpu" stays where it is.
        states: of one value an element that the wrapped optimizer keeps: 2 for Adam and AdamW, 3 with ``amsgrad``, 1
            for Adagrad and for SGD with momentum.
        groups: parameter groups of the wrapped optimizer.

    Raises:
        ValueError: ``world`` is not positive, or the groups that the configuration asks for do not fit it.
    """
    settings, blueprint = outline(model, config, world, local, torch.device(device))
    return _memory_of(blueprint, settings, states, groups)


def plan_space(blueprint: Blueprint, settings: Config, states: Callable[[], int]) -> Mapping[str, int]:
    """Bytes that the files of a blueprint's engine will take below each path.

    Args:
        blueprint: of any rank.
        settings: that it was drawn by.
        states: as in :func:`memory`; asked where there are files, or the host's memory has a limit.

    Raises:
        MemoryLimitError: the host's memory has a limit that is too low.
    """
    limit = settings.zeropp.host_memory_limit
    if limit is None and not blueprint.tiers.paths:
        return {}
    return _memory_of(blueprint, settings, states(), groups=1).require(host_bytes=limit).paths


def _memory_of(blueprint: Blueprint, settings: Config, states: int, groups: int) -> MemoryPlan:
    tally = _Tally(blueprint, states)
    units = tuple(tally.add_unit(unit) for unit in blueprint.units)
    named = zip(("step_staging", "gather_staging"), blueprint.staging, strict=True)
    rings = {name: ring for name, ring in named if ring is not None}
    staging = {name: ring.total for name, ring in rings.items()}
    return MemoryPlan(
        {**{term: tally.terms["device"][term] for term in TERMS}, "edit_markers": groups * _markers_nbytes(blueprint)},
        units,
        communicators(blueprint),
        {**tally.terms["host"], **staging},
        dict(tally.terms["disk"]),
        dict(tally.paths),
        tally.device_states,
        tally.new_weights,
        sum(ring.total for ring in rings.values() if ring.pinned),
        blueprint.local,
        blueprint.device.type == "cpu",
        settings,
    )


def _markers_nbytes(blueprint: Blueprint) -> int:
    """Bytes of one parameter group's markers: see [Note: edits of slices]."""
    buffers = (buffer for unit in blueprint.units for buffer in unit.buffers)
    trained = (buffer.key.main_dtype for buffer in buffers if buffer.key.trainable)
    # Each has a gradient.
    return _MARKERS * 2 * next(trained, torch.float32).itemsize


class _Tally:
    """Bytes of one rank by place and term, as its buffers are made one after another."""

    def __init__(self, blueprint: Blueprint, states: int) -> None:
        self.terms: dict[Place, Counter[str]] = {place: Counter() for place in PLACES}
        self.paths = Counter[str]()
        self.device_states = 0
        # Bytes of each buffer's new weights: of those that wait for the wire, and of those that are encoded.
        self._sent_on: list[int] = []
        self._encoded: list[int] = []
        self._world = blueprint.world
        self._device = blueprint.device
        self._encoding = blueprint.encoding
        self._states = states
        self._tiers = plan_homes(blueprint)
        self._groups = NoGroups(blueprint.world, blueprint.rank)

    @property
    def new_weights(self) -> int:
        """Bytes of new weights on the device, at most."""
        # A buffer in codes is encoded before the next is stepped; others may all wait for the wire.
        return sum(self._sent_on) + max(self._encoded, default=0)

    def add_unit(self, unit: UnitOutline) -> UnitMemory:
        """Count one unit."""
        gathered = message = held = arriving = 0
        # The unit's own: persistent ones are cached whole in any stage.
        own = unit.placement.mode
        encoding = self._encoding
        path = unit.placement.reduce_path(1, self._world)
        # Whatever is offloaded, the device sums and measures gradients.
        device = self.terms["device"]
        for buffer in unit.buffers:
            key, numel = buffer.key, buffer.layout.numel
            gathered += numel * key.dtype.itemsize
            tiers = self._tiers
            if key.trainable:
                tiers = tiers.divided(buffer.device_numel, PlannedMemory(self._device))
                device["gradient_norms"] += report_nbytes(buffer.shard, key.main_dtype)
                # Elsewhere gradients wait inside no_sync only, which a plan cannot foresee.
                held += numel // own.held_level * key.main_dtype.itemsize if own.sums else 0
                # The first hop's message is the largest of the path.
                message += encoding.message_nbytes(path, numel, key.wire_dtype)
                device["feedback"] += encoding.feedback_nbytes(path, numel)
                # Made there as a whole; rings take it away in parts.
                if not tiers.gradients.serves(self._device):
                    arriving += buffer.shard * key.main_dtype.itemsize
            self._add(self._rows(unit, buffer, tiers))
            # A secondary shard (hpZ).
            if own.cached is not None and own.cached > 1:
                device["secondary_weights"] += encoding.secondary_nbytes(numel, own, key.dtype, trainable=key.trainable)
        return UnitMemory(unit.spec.name, own.cached == 1, gathered, message, held, arriving)

    def _add(self, rows: Iterable[tuple[str, StoredTensor]]) -> None:
        for term, row in rows:
            self.terms[row.place][term] += row.nbytes
            if isinstance(row, PlannedExtent):
                self.paths[row.path] += row.nbytes

    def _rows(self, unit: UnitOutline, buffer: BufferOutline, tiers: Tiers) -> Iterator[tuple[str, StoredTensor]]:
        """Rows of one buffer, allocated in the order in which the engine does it."""
        key, piece = buffer.key, buffer.shard
        coded = None if key.trainable else self._encoding.frozen
        tier = tiers.main_tier(key.trainable)
        if key.trainable:
            yield "gradients", tiers.gradients.allocate_tensor(piece, key.main_dtype)
        # Frozen weights in codes have no other form between uses.
        main = tier.allocate_tensor(coded.nbytes(piece) if coded else piece, coded.dtype if coded else key.main_dtype)
        yield "main_weights" if key.trainable else "frozen_weights", main
        if key.trainable:
            self._add_states(tiers, piece, key.main_dtype)
        paths = weight_paths(self._groups, unit.placement, key, self._encoding, stored=not tier.serves(self._device))
        # One copy can be both main weights and what modules see; with a codec modules see decoded values.
        if unit.placement.mode.cached == 1 and not paths.shared:
            self.terms["device"]["persistent_weights"] += buffer.layout.numel * key.dtype.itemsize
        source = make_wire_copy(main, paths, tiers, self._device, trainable=key.trainable, coded=coded is not None)
        if source is None:
            # Gathers begin with the main weights where they are.
            return
        if source.row is not None and source.follows:
            yield "wire_weights", source.row
        if key.trainable and (source.row is None or source.encodes):
            (self._sent_on if source.row is None else self._encoded).append(piece * source.dtype.itemsize)

    def _add_states(self, tiers: Tiers, piece: int, dtype: torch.dtype) -> None:
        # Made by the wrapped optimizer, like what it steps.
        here = min(tiers.device_numel, piece)
        self.device_states += self._states * here * dtype.itemsize
        # Rows of their own, each padded to whole blocks of the file.
        for _ in range(self._states if here < piece else 0):
            row = tiers.states.allocate_tensor(piece - here, dtype)
            if row.place == "device":
                self.device_states += row.nbytes
            else:
                self._add([("optimizer_states", row)])
