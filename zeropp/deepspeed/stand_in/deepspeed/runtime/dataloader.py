"""Loaders."""

from zeropp.deepspeed.data import RepeatingLoader

__all__ = ["RepeatingLoader"]
