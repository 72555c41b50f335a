"""DeepSpeed's optimizers, as torch's; and what it compiles, by name."""

from . import adagrad, adam, aio, lamb, lion, op_builder

__all__ = ["__compatible_ops__", "adagrad", "adam", "aio", "lamb", "lion", "op_builder"]

# Operation -> whether zeropp does it in one way or another.
__compatible_ops__ = {each.NAME: each.HERE for each in op_builder.OpBuilder.__subclasses__()}
