"""Activation checkpointing, as a module of functions: ``deepspeed.checkpointing``."""

from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint"]
