"""Stage 3: the optimizer's class, estimates of memory, and weights gathered for generation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zeropp.access.gathered import GatheredParameters
from zeropp.deepspeed.estimates import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zeropp.deepspeed.training_engine import Engine
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "unwrap_model_for_generation",
]

DeepSpeedZeroOptimizer_Stage3 = ZeroOptimizer


@contextlib.contextmanager
def unwrap_model_for_generation(model: Engine) -> Iterator[Engine]:
    """Context in which all weights are gathered, so that forward passes inside need no communication."""
    with GatheredParameters(model.parameters()):
        yield model
