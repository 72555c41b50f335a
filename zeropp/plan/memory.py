"""Every storage the engine will own on one rank, in bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from zeropp.config import ConfigSource
from zeropp.params.unit import TERMS
from zeropp.plan.outline import outline
from zeropp.wire.report import report_nbytes

__all__ = ["COMMUNICATOR_NBYTES", "MemoryPlan", "UnitMemory", "memory"]

COMMUNICATOR_NBYTES = 688 * 2**20
"""What one NCCL communicator takes on a card, estimated: 544 MiB for two ranks and 688 for more were seen on four A100
with NVLink (NVIDIA/nccl issue 964). It is proportional to the channels and to NCCL_BUFFSIZE, and so less on slow links.
"""


@dataclass(frozen=True)
class UnitMemory:
    """One unit: bytes while gathered, of the message that carries its gradients, of gradients held for a later one."""

    name: str
    persistent: bool
    gathered: int
    message: int
    held: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each rank; equal on all, since pieces are.

    Attributes:
        terms: what is owned at all times: ``main_weights`` (float32 or float64 shards of trainable parameters),
            ``gradients`` (the same), ``gradient_norms`` (of each 256 elements of these, and a flag), ``frozen_weights``
            (shards in their own dtype, or in codes), ``secondary_weights`` (what hpZ caches, in the compute dtype or in
            codes), ``persistent_weights`` (whole, compute dtype; none where the main weights are that), ``feedback``
            (errors of quantized gradients).
        units: what comes on top while a unit is gathered, or its gradients are on their way.
        communicators: process groups that carry weights and gradients, and one for what is small and for all, on a
            card one NCCL communicator each. Their memory is none that torch allocates, and in no other number here.
    """

    terms: dict[str, int]
    units: tuple[UnitMemory, ...]
    communicators: int

    @property
    def communicator_nbytes(self) -> int:
        """Bytes that the communicators are likely to take on a card, by :data:`COMMUNICATOR_NBYTES`."""
        return self.communicators * COMMUNICATOR_NBYTES

    @property
    def total(self) -> int:
        """Bytes owned between steps."""
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

    def __str__(self) -> str:
        rows = [*self.terms.items(), ("total between steps", self.total), ("largest unit, gathered", self.largest_unit)]
        lines = [f"{name.replace('_', ' '):24}{value:>20,} bytes" for name, value in rows]
        if self.communicators:
            estimate = f"{self.communicators} NCCL communicators, about"
            lines.append(f"{estimate:32}{self.communicator_nbytes:>12,} bytes, outside of torch's own")
        return "\n".join(lines)


def memory(model: nn.Module, config: ConfigSource, world: int, local: int | None = None) -> MemoryPlan:
    """Predict what the engine will own, on each of ``world`` ranks.

    Optimizer states are the wrapped optimizer's and not counted: AdamW's are twice ``main_weights``.

    Args:
        model: not wrapped; meta parameters will do.
        config: as given to ZeroOptimizer.
        world: ranks to partition over.
        local: ranks per node, which matters to groups of nodes and to deferred reductions; None for a single node.

    Raises:
        ValueError: ``world`` is not positive, or the groups that the configuration asks for do not fit it.
    """
    cut = outline(model, config, world, local)
    encoding = cut.encoding
    terms: Counter[str] = Counter(dict.fromkeys(TERMS, 0))
    units = []
    for unit in cut.units:
        gathered = message = held = 0
        # The unit's own: persistent ones are cached whole in any stage.
        own = unit.placement.mode
        path = unit.placement.reduce_path(1, world)
        for key, layout in unit.buffers:
            gathered += layout.numel * key.dtype.itemsize
            if key.trainable:
                terms["main_weights"] += layout.numel // own.states * key.main_dtype.itemsize
                terms["gradients"] += layout.numel // own.states * key.main_dtype.itemsize
                terms["gradient_norms"] += report_nbytes(layout.numel // own.states, key.main_dtype)
                # Elsewhere gradients wait inside no_sync only, which a plan cannot foresee.
                held += layout.numel // own.held_level * key.main_dtype.itemsize if own.sums else 0
                # The first hop's message is the largest of the path.
                message += encoding.message_nbytes(path, layout.numel, key.wire_dtype)
                terms["feedback"] += encoding.feedback_nbytes(path, layout.numel)
            else:
                numel = layout.numel // own.states
                # Frozen weights in codes have no other form between uses.
                coded = encoding.frozen
                terms["frozen_weights"] += coded.nbytes(numel) if coded else numel * key.main_dtype.itemsize
            # One copy can be both main weights and what modules see; with a codec modules see decoded values.
            if own.cached == 1 and not (key.shares(own) and encoding.weight_codec(key.trainable) is None):
                terms["persistent_weights"] += layout.numel * key.dtype.itemsize
            # A secondary shard (hpZ).
            elif own.cached is not None and own.cached > 1:
                terms["secondary_weights"] += encoding.secondary_nbytes(
                    layout.numel, own, key.dtype, trainable=key.trainable
                )
        units.append(UnitMemory(unit.name, own.cached == 1, gathered, message, held))
    return MemoryPlan(dict(terms), tuple(units), len(cut.groups(world)) + (world > 1))
