"""Prediction of the bytes that an engine owns on each rank: on the device, in host memory and in files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from zeropp.config import Config, ConfigSource
from zeropp.offload.storage_tiers import PLACES, MemoryTensor, Place, StoredTensor
from zeropp.offload.tier_choice import ALL, Tiers, upload_staging
from zeropp.params.buffer_maker import BufferOutline, NoGroups, UnitOutline, weight_paths
from zeropp.params.flat_buffer import make_wire_copy
from zeropp.params.unit import TERMS
from zeropp.plan.limits import require_below
from zeropp.plan.outline import (
    CommunicatorMemory,
    PlannedExtent,
    PlannedMemory,
    communicators,
    outline,
    plan_tiers,
)
from zeropp.setup.blueprint import Blueprint
from zeropp.wire.codecs import report_nbytes

__all__ = ["MemoryPlan", "UnitMemory", "memory", "plan_space"]

_MARKERS = 2 * 2  # elements of the edit markers of one parameter group, as in zeropp.optimizer.sharded_params


@dataclass(frozen=True)
class UnitMemory:
    """Bytes on the device that one unit needs for a part of each pass.

    Attributes:
        name: name of the unit.
        persistent: True if the unit's whole weights stay on the device between uses.
        gathered: bytes of the whole weights while the unit is unsharded.
        message: bytes of the first hop's messages that reduce the unit's gradients, the largest of the path.
        held: bytes of gradients that are summed over the micro-batches of an accumulation window.
        arriving: bytes of reduced gradients before they are copied to host memory. If they are added to those of an
            earlier micro-batch, up to 4 Mi elements of the earlier sum are on the device, too.
        gradient: bytes of reduced gradients on the device, from their reduction to ``zero_grad()``.
    """

    name: str
    persistent: bool
    gathered: int
    message: int
    held: int
    arriving: int = 0
    gradient: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that the engine owns on each rank; equal on all ranks, because all shards have equal size.

    Attributes:
        terms: bytes on the device at all times, by term. Optimizer states are not included. The terms are
            ``main_weights`` (shards of trainable parameters in the main dtype),
            ``gradients`` (shards of the same size, of weights that the host steps; see :attr:`gradients` for others),
            ``gradient_norms`` (one number per 256 gradient elements, and a flag for non-finite values),
            ``frozen_weights`` (shards in their own dtype, or quantized),
            ``wire_weights`` (copies for gathers if main weights are offloaded, in the compute dtype or quantized),
            ``secondary_weights`` (hpZ's secondary shards, in the compute dtype or quantized),
            ``persistent_weights`` (whole weights in the compute dtype; 0 if the main weights serve as these),
            ``feedback`` (error-feedback state of quantized gradients),
            ``edit_markers`` (two tensors of two elements per parameter group, with gradients, which show edits).
        units: additional bytes while a unit is unsharded or its gradients are reduced, one entry per unit.
        communicators: NCCL communicators of a process's first engine on a GPU; further engines with equal groups may
            share them. Their memory is outside of torch's allocator, and no other number of this plan includes it.
        host: bytes in host memory, by term: offloaded ``main_weights``, ``gradients``, ``frozen_weights``,
            ``wire_weights`` and ``optimizer_states``; and rings of staging buffers, ``upload_staging`` for new weights
            on their way to the device, ``step_staging`` for gradients and steps of numbers that are not in host
            memory, and ``gather_staging`` for gathers from files.
        disk: bytes in files, by term, with each tensor rounded up to 4096 bytes or, if larger, the page size.
        paths: bytes of ``disk`` below each ``nvme_path``.
        device_states: bytes of optimizer states on the device, which ``total`` does not include.
        new_weights: upper bound on device bytes of stepped weights that are not yet sent to cached weights or
            quantized. It is nonzero only with offload.
        pinned: page-locked bytes of ``host``: staging rings, gradients, and weights that gathers read.
        local: number of ranks per node.
        on_host: True if the device is the CPU, so that ``terms`` are in host memory.
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
        """Estimated bytes of all communicators on a GPU, from figures that NCCL users have reported."""
        return sum(each.nbytes for each in self.communicators)

    @property
    def total(self) -> int:
        """Bytes owned on the device between steps, after ``zero_grad()``, without optimizer states."""
        return sum(self.terms.values())

    @property
    def gradients(self) -> int:
        """Bytes of reduced gradients on the device: each unit's from its first reduction to ``zero_grad()``.

        Not included are gradients of units of which the host steps any weights. They keep their memory, and are in
        ``terms``, ``host`` or ``disk``.
        """
        return sum(unit.gradient for unit in self.units)

    @property
    def held_gradients(self) -> int:
        """Bytes of gradients that wait on the device between the micro-batches of one accumulation window.

        This is 0 if each backward reduces its gradients completely. Only then do whole gradients (``numel`` elements of
        the main dtype) wait inside ``no_sync``, which this number does not include.
        """
        return sum(unit.held for unit in self.units)

    @property
    def largest_unit(self) -> int:
        """Bytes of the largest unit that is not persistent, unsharded: the least that passes need beside ``total``."""
        return max((unit.gathered for unit in self.units if not unit.persistent), default=0)

    @property
    def host_total(self) -> int:
        """Bytes that training needs in host memory for one rank, at least.

        If the device is the CPU, this includes ``terms``, the optimizer states and the largest unit. Activations,
        Python, torch and the model before wrapping are never included.
        """
        return sum(self.host_terms.values())

    @property
    def disk_total(self) -> int:
        """Bytes in files for one rank."""
        return sum(self.disk.values())

    def require(self, *, host_bytes: float | None = None, disk_bytes: float | None = None) -> MemoryPlan:
        """Raise an error if the ranks of a node together need more memory than the limits.

        Args:
            host_bytes: bytes of host memory for all ranks of a node; None for no limit.
            disk_bytes: bytes of disk for all ranks of a node; None for no limit.

        Returns:
            This plan.

        Raises:
            TypeError: a limit is not a number.
            ValueError: a limit is negative.
            MemoryLimitError: a limit is too low; the message lists the terms, and the settings that reduce them, if
                any.
        """
        require_below(self.settings, self.local, "host", self.host_terms, host_bytes)
        require_below(self.settings, self.local, "disk", self.disk, disk_bytes)
        return self

    @property
    def host_terms(self) -> dict[str, int]:
        """Bytes in host memory for one rank, by term; their sum is ``host_total``."""
        terms = Counter(self.host)
        # A CPU device and its host share one memory, so ``update`` adds the values of terms that are in both.
        if self.on_host:
            terms.update(self.terms)
            others = {"gradients": self.gradients, "optimizer_states": self.device_states}
            terms.update({**others, "largest_unit": self.largest_unit})
        return terms

    def __str__(self) -> str:
        rows = [*self.terms.items(), ("total between steps", self.total)]
        rows += [("gradients in a step", self.gradients)] * (self.gradients > 0)
        rows.append(("largest unit, gathered", self.largest_unit))
        # Nonzero only with offload.
        rows += [("new weights, at most", self.new_weights)] * (self.new_weights > 0)
        for place, terms in (("host", self.host), ("disk", self.disk)):
            rows += [(f"{place}: {name}", value) for name, value in terms.items() if value]
            if len([value for value in terms.values() if value]) > 1:
                rows.append((f"{place}: total", sum(terms.values())))
        lines = [f"{name.replace('_', ' '):24}{value:>20,} bytes" for name, value in rows]
        # A CPU has no NCCL communicators, and gloo's groups take little memory.
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
    """Predict the bytes that an engine owns on each of ``world`` ranks.

    Args:
        model: model that is not wrapped; meta parameters suffice.
        config: configuration as for ZeroOptimizer.
        world: number of ranks to partition over.
        local: number of ranks per node; None for a single node.
        device: device that trains; it need not exist on this machine. With "cpu", offload to host memory has no effect.
        states: elements of optimizer state per parameter element: 2 for Adam and AdamW, 3 with ``amsgrad``, 1 for
            Adagrad and for SGD with momentum.
        groups: number of parameter groups of the wrapped optimizer.

    Returns:
        The plan.

    Raises:
        ValueError: ``world`` is not positive, does not fit ``local``, or the configuration is invalid for this model.
    """
    settings, blueprint = outline(model, config, world, local, torch.device(device))
    return _memory_of(blueprint, settings, states, groups)


def plan_space(blueprint: Blueprint, settings: Config, states: Callable[[], int]) -> Mapping[str, int]:
    """Return the bytes that files of a blueprint's engine take on this rank below each path.

    Args:
        blueprint: blueprint of any rank.
        settings: configuration that the blueprint was made from.
        states: returns the elements of optimizer state per parameter element; called only if there are files or a limit
            of host memory.

    Raises:
        MemoryLimitError: the engine needs more host memory than ``host_memory_limit``.
    """
    limit = settings.zeropp.host_memory_limit
    if limit is None and not blueprint.tiers.paths:
        return {}
    return _memory_of(blueprint, settings, states(), groups=1).require(host_bytes=limit).paths


def _memory_of(blueprint: Blueprint, settings: Config, states: int, groups: int) -> MemoryPlan:
    tally = _Tally(blueprint, states)
    units = tuple(tally.add_unit(unit) for unit in blueprint.units)
    rings = dict(blueprint.staging)
    stepped = blueprint.tiers.stepped
    if stepped is not None and (uploads := upload_staging(stepped, blueprint.device, tally.uploaded)) is not None:
        rings["upload_staging"] = uploads
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
        tally.locked + sum(ring.total for ring in rings.values() if ring.pinned is not None),
        blueprint.local,
        blueprint.device.type == "cpu",
        settings,
    )


def _markers_nbytes(blueprint: Blueprint) -> int:
    """Return the bytes of one parameter group's edit markers: see [Note: edits of slices]."""
    buffers = (buffer for unit in blueprint.units for buffer in unit.buffers)
    trained = (buffer.key.main_dtype for buffer in buffers if buffer.key.trainable)
    # Times 2, because each marker has a gradient.
    return _MARKERS * 2 * next(trained, torch.float32).itemsize


class _Tally:
    """A sum of one rank's bytes by place and term, to which units are added one by one."""

    def __init__(self, blueprint: Blueprint, states: int) -> None:
        self.terms: dict[Place, Counter[str]] = {place: Counter() for place in PLACES}
        self.paths = Counter[str]()
        self.device_states = 0
        self.locked = 0  # bytes of page-locked rows
        # Elements, and bytes of an element, of each shard whose new weights a step on the host sends to the device.
        self.uploaded: list[tuple[int, int]] = []
        # Bytes of new weights per buffer: buffers whose new weights are sent as values, and buffers that are quantized
        # first.
        self._sent_on: list[int] = []
        self._encoded: list[int] = []
        self._world = blueprint.world
        self._device = blueprint.device
        self._encoding = blueprint.encoding
        self._states = states
        self._tiers = plan_tiers(blueprint)
        self._groups = NoGroups(blueprint.world, blueprint.rank)

    @property
    def new_weights(self) -> int:
        """Upper bound on the bytes of new weights on the device."""
        # A quantized buffer is encoded before the next buffer is copied, so only the largest counts. New weights that
        # are sent as values may wait for the network all at once.
        return sum(self._sent_on) + max(self._encoded, default=0)

    def add_unit(self, unit: UnitOutline) -> UnitMemory:
        """Add one unit's bytes, and return what it needs during passes."""
        gathered = message = held = arriving = gradient = 0
        # The unit's own levels: a persistent unit is cached whole in every stage.
        own = unit.placement.mode
        encoding = self._encoding
        path = unit.placement.reduce_path(1, self._world)
        # Gradients are summed and measured on the device, even if they are offloaded.
        device = self.terms["device"]
        for buffer in unit.buffers:
            key, numel = buffer.key, buffer.layout.numel
            gathered += numel * key.dtype.itemsize
            tiers = self._tiers
            if key.trainable:
                tiers = tiers.divided(buffer.device_numel, PlannedMemory(self._device))
                device["gradient_norms"] += report_nbytes(buffer.shard, key.main_dtype)
                # Without sums over micro-batches, gradients wait inside no_sync only, which a plan cannot foresee.
                held += numel // own.held_level * key.main_dtype.itemsize if own.sums else 0
                # The first hop's message is the largest of the path.
                message += encoding.message_nbytes(path, numel, key.wire_dtype)
                device["feedback"] += encoding.feedback_nbytes(path, numel)
                # The sum is computed on the device as a whole, and then copied to the host.
                nbytes = buffer.shard * key.main_dtype.itemsize
                if not tiers.gradients.serves(self._device):
                    arriving += nbytes
                elif tiers.device_numel == ALL:
                    gradient += nbytes
            self._add(self._rows(unit, buffer, tiers))
            # hpZ's secondary shard.
            if own.cached is not None and own.cached > 1:
                device["secondary_weights"] += encoding.secondary_nbytes(numel, own, key.dtype, trainable=key.trainable)
        return UnitMemory(unit.spec.name, own.cached == 1, gathered, message, held, arriving, gradient)

    def _add(self, rows: Iterable[tuple[str, StoredTensor]]) -> None:
        for term, row in rows:
            self.terms[row.place][term] += row.nbytes
            self.locked += row.nbytes if isinstance(row, MemoryTensor) and row.locked else 0
            if isinstance(row, PlannedExtent):
                self.paths[row.path] += row.nbytes

    def _rows(self, unit: UnitOutline, buffer: BufferOutline, tiers: Tiers) -> Iterator[tuple[str, StoredTensor]]:
        """Yield (term, tensor) of each tensor of one buffer, allocated in the engine's order."""
        key, piece = buffer.key, buffer.shard
        coded = None if key.trainable else self._encoding.frozen
        tier = tiers.main_tier(key.trainable)
        # Gradients that the device steps have memory only for a part of each step: see [Note: memory of gradients].
        if key.trainable and not (tiers.gradients.serves(self._device) and tiers.device_numel == ALL):
            yield "gradients", tiers.gradients.allocate_tensor(piece, key.main_dtype)
        # Quantized frozen weights are stored as codes only.
        main = tier.allocate_tensor(coded.nbytes(piece) if coded else piece, coded.dtype if coded else key.main_dtype)
        yield "main_weights" if key.trainable else "frozen_weights", main
        if key.trainable:
            self._add_states(tiers, piece, key.main_dtype)
        paths = weight_paths(self._groups, unit.placement, key, self._encoding, stored=not tier.serves(self._device))
        # A whole shard in the compute dtype also serves as the persistent weights if it is frozen or there is one rank.
        # With a codec it cannot, because modules compute with decoded values.
        if unit.placement.mode.cached == 1 and not paths.shared:
            self.terms["device"]["persistent_weights"] += buffer.layout.numel * key.dtype.itemsize
        source = make_wire_copy(main, paths, tiers, self._device, trainable=key.trainable, coded=coded is not None)
        if source is None:
            # Gathers read the main weights where they are.
            return
        if source.row is not None and source.follows:
            yield "wire_weights", source.row
        if key.trainable and source.follows and source.uploads:
            self.uploaded.append((piece, source.dtype.itemsize))
        if key.trainable and (source.row is None or source.encodes):
            (self._sent_on if source.row is None else self._encoded).append(piece * source.dtype.itemsize)

    def _add_states(self, tiers: Tiers, piece: int, dtype: torch.dtype) -> None:
        # The wrapped optimizer creates states on the device for the elements that it steps there.
        here = min(tiers.device_numel, piece)
        self.device_states += self._states * here * dtype.itemsize
        # Each state is a tensor of its own, padded to whole blocks of the file.
        for _ in range(self._states if here < piece else 0):
            row = tiers.states.allocate_tensor(piece - here, dtype)
            if row.place == "device":
                self.device_states += row.nbytes
            else:
                self._add([("optimizer_states", row)])
