"""``get_accelerator()``: the device of this process behind one object."""

from .real_accelerator import DeepSpeedAccelerator, get_accelerator, is_current_accelerator_supported, set_accelerator

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]
