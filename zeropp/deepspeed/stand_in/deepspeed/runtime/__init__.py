"""The engine, its configuration, its schedules, ZeRO."""

from . import activation_checkpointing, base_optimizer, config, dataloader, engine, lr_schedules, utils, zero

__all__ = [
    "activation_checkpointing",
    "base_optimizer",
    "config",
    "dataloader",
    "engine",
    "lr_schedules",
    "utils",
    "zero",
]
