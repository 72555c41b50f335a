"""The engine, its configuration, its schedules, ZeRO."""

from . import config, dataloader, engine, lr_schedules, zero

__all__ = ["config", "dataloader", "engine", "lr_schedules", "zero"]
