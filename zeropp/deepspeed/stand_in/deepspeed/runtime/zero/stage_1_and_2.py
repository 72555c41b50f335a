"""Stages 1 and 2: the optimizer's class, and estimates of memory."""

from zeropp.deepspeed.estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]

DeepSpeedZeroOptimizer = ZeroOptimizer
