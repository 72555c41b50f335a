"""The settings of an engine, which do not change, and its state between passes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto

import torch

from zeropp.order.prefetch import Limits

__all__ = ["EngineOptions", "EngineState"]


@dataclass(frozen=True)
class EngineOptions:
    """Settings of an engine. They do not change after its construction.

    Attributes:
        limits: limits of prefetching, in elements.
        input_dtype: dtype that floating-point inputs of the model are cast to; None to leave inputs as they are.
        static_graph: True if the user promises that passes of one kind use the same units on every rank, every time.
        log_relearning: True to log a warning when a known order is given up.
        overlap: True to run gathers and reductions beside the computation.
        offloads: True if weights, gradients or optimizer states are offloaded.
        gathers_16_bit_on_save: True to save whole 16-bit weights in checkpoints if weights are sharded between uses.
        loads_from_float32: True to load main weights from checkpoints as they were saved, without rounding.
        loads_in_turns: True to let the ranks of a node read checkpoints one after another.
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
    """State of an engine between passes: READY, or one or more of the other flags."""

    READY = 0
    LOADING = auto()
    """A state dict is being copied into the parameters, or such a copy has failed half-way."""
    AVERAGED = auto()
    """The main weights hold an average of the weights."""
    RETIRED = auto()
    """The engine was destroyed, or its model is being wrapped again."""
    CLOSED = auto()
    """The engine was taken off its model."""
