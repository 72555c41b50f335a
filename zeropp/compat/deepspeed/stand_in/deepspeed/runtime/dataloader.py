"""Loaders."""

from zeropp.training import RepeatingLoader

__all__ = ["RepeatingLoader"]
