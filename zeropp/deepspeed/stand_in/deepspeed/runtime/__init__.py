"""The engine, its configuration, learning rate schedules and ZeRO, under the names of ``deepspeed.runtime``."""

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
