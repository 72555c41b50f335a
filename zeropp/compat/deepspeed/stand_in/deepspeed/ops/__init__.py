"""DeepSpeed's optimizers, as torch's."""

from . import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
