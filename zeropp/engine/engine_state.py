"""An engine's settings, which stay as they are, and its state between passes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto

import torch

from zeropp.order.prefetch import Limits

__all__ = ["EngineOptions", "EngineState"]


@dataclass(frozen=True)
class EngineOptions:
    """Settings of an engine that stay as they are.

    Attributes:
        limits: bounds of the prefetch plan.
        input_dtype: floating inputs of the model are cast to it; None leaves them alone.
        static_graph: passes of one kind are promised to use the same units, on every rank and every time.
        log_relearning: warn when a known order is given up.
        overlap: let gathers and reductions run beside computing.
        offloads: something that training needs is off the device.
        gathers_16_bit_on_save: `zeropp.checkpoint` writes whole 16-bit weights where they are sharded between uses.
        loads_from_float32: it reads main weights as they were saved, and does not round them.
        loads_in_turns: it lets the ranks of a node read one after the other.
    """

    limits: Limits
    input_dtype: torch.dtype | None
    static_graph: bool
    log_relearning: bool
    overlap: bool
    offloads: bool
    gathers_16_bit_on_save: bool
    loads_from_float32: bool
    loads_in_turns: bool


class EngineState(Flag):
    """The state of an engine between passes: usually READY, else one or several of the others."""

    READY = 0
    LOADING = auto()
    """A state dict is being copied in, or was, by a load that has failed half-way."""
    AVERAGED = auto()
    """Main weights hold an average."""
    RETIRED = auto()
    """The engine was destroyed, or its model is being wrapped again."""
    CLOSED = auto()
    """The engine was taken off its model."""
