"""Optimizers under DeepSpeed's names, and placeholders for the operations that DeepSpeed compiles."""

from . import adagrad, adam, aio, lamb, lion, op_builder

__all__ = ["__compatible_ops__", "adagrad", "adam", "aio", "lamb", "lion", "op_builder"]

# Name of an operation -> True if zeropp has a replacement for it.
__compatible_ops__ = {each.NAME: each.HERE for each in op_builder.OpBuilder.__subclasses__()}
