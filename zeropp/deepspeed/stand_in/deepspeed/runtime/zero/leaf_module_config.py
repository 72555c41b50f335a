"""Defaults of the ``leaf_module`` block: modules that are gathered whole without being named in the configuration."""

from zeropp.config.zero_block import SPARSE_BLOCKS

__all__ = ["DEFAULT_LEAF_MODULE_CLASSES", "DEFAULT_LEAF_MODULE_NAMES", "DEFAULT_LEAF_MODULE_NAME_SUFFIXES"]

DEFAULT_LEAF_MODULE_CLASSES = list(SPARSE_BLOCKS)
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []
