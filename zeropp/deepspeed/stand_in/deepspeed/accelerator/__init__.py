"""``get_accelerator()``: an object with DeepSpeed's calls for the device of this process."""

from .real_accelerator import DeepSpeedAccelerator, get_accelerator, is_current_accelerator_supported, set_accelerator

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]
