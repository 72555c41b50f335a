"""Layers whose experts are spread over ranks, which zeropp has not; and what is true of models without them."""

from . import layer, utils

__all__ = ["layer", "utils"]
