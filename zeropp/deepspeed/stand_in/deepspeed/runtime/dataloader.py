"""``RepeatingLoader`` under DeepSpeed's module name."""

from zeropp.deepspeed.data import RepeatingLoader

__all__ = ["RepeatingLoader"]
