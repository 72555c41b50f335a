"""Helpers that scripts import from ``deepspeed.runtime.utils``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..accelerator import get_accelerator
from ..utils.logging import logger

__all__ = ["move_to_device", "see_memory_usage"]


def move_to_device(
    item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Return nested values with everything on ``device`` that has a ``to`` method.

    Args:
        item: value, or nested mappings, lists and tuples with values.
        device: target device.
        criterion_func: function that returns True for the values to move; None to move all.
    """
    if hasattr(item, "to") and (criterion_func is None or criterion_func(item)):
        return item.to(device)
    if isinstance(item, Mapping):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(move_to_device(each, device, criterion_func) for each in item)
    return item


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the allocated memory and the peak of allocated memory of the device, in GB. Without ``force``, do nothing."""
    if force:
        device = get_accelerator()
        used, peak = device.memory_allocated(), device.max_memory_allocated()
        logger.warning("%s: %.2f GB allocated, %.2f GB at most", message, used / 1e9, peak / 1e9)
