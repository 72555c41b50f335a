"""Files beside training."""

from ..op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
