"""Every storage the engine will own on one rank, in bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from zeropp.config import ConfigSource, load_config
from zeropp.engine.build import planned_buffers, unit_options
from zeropp.units import form_units

__all__ = ["MemoryPlan", "UnitMemory", "memory"]


@dataclass(frozen=True)
class UnitMemory:
    """One unit: bytes while gathered, and bytes of the message that carries its gradients."""

    name: str
    persistent: bool
    gathered: int
    message: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each rank; equal on all, since pieces are.

    Attributes:
        terms: what is owned at all times: ``main_weights`` (float32 or float64 pieces of trainable parameters),
            ``gradients`` (the same), ``frozen_weights`` (pieces in their own dtype), ``persistent_weights`` (whole,
            compute dtype).
        units: what comes on top while a unit is gathered, or its gradients are on their way.
    """

    terms: dict[str, int]
    units: tuple[UnitMemory, ...]

    @property
    def total(self) -> int:
        """Bytes owned between steps."""
        return sum(self.terms.values())

    @property
    def largest_unit(self) -> int:
        """Bytes of the largest unit while gathered: the least that forward and backward need on top."""
        return max((unit.gathered for unit in self.units if not unit.persistent), default=0)

    def __str__(self) -> str:
        rows = [*self.terms.items(), ("total between steps", self.total), ("largest unit, gathered", self.largest_unit)]
        return "\n".join(f"{name.replace('_', ' '):24}{value:>20,} bytes" for name, value in rows)


def memory(model: nn.Module, config: ConfigSource, world: int) -> MemoryPlan:
    """Predict what the engine will own, on each of ``world`` ranks.

    Optimizer states are the wrapped optimizer's and not counted: AdamW's are twice ``main_weights``.

    Args:
        model: not wrapped; meta parameters will do.
        config: as given to ZeroOptimizer.
        world: ranks to partition over.

    Raises:
        ValueError: ``world`` is not positive.
    """
    if world < 1:
        raise ValueError(f"world is {world}; expected the number of ranks, at least 1")
    settings = load_config(config)
    parameters = dict(model.named_parameters())
    terms: Counter[str] = Counter(main_weights=0, gradients=0, frozen_weights=0, persistent_weights=0)
    units = []
    for spec in form_units(model, world, unit_options(settings)):
        gathered = message = 0
        for key, _, layout in planned_buffers(parameters, spec, settings, world):
            gathered += layout.numel * key.dtype.itemsize
            if key.trainable:
                terms["main_weights"] += layout.piece_numel * key.main_dtype.itemsize
                terms["gradients"] += layout.piece_numel * key.main_dtype.itemsize
                message += layout.numel * key.wire_dtype.itemsize
            else:
                terms["frozen_weights"] += layout.piece_numel * key.main_dtype.itemsize
        if spec.persistent:
            terms["persistent_weights"] += gathered
        units.append(UnitMemory(spec.name, spec.persistent, gathered, message))
    return MemoryPlan(dict(terms), tuple(units))
