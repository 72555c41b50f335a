"""Stages 1 and 2."""

from zeropp.optimizer.wrapper import ZeroOptimizer
from zeropp.plan.estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]

DeepSpeedZeroOptimizer = ZeroOptimizer
