"""Names of DeepSpeed's expert parallelism. zeropp has none, so the layer raises and the helpers report no experts."""

from . import layer, utils

__all__ = ["layer", "utils"]
