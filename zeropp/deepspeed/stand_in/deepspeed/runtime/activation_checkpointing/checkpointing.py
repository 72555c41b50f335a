"""The functions of ``deepspeed.checkpointing``: activation checkpointing."""

from zeropp.deepspeed.checkpointing import checkpoint, configure, is_configured, non_reentrant_checkpoint, reset
from zeropp.deepspeed.refused_modules import refused

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
]

get_cuda_rng_tracker = refused("checkpointing.get_cuda_rng_tracker")
model_parallel_cuda_manual_seed = refused("checkpointing.model_parallel_cuda_manual_seed")
