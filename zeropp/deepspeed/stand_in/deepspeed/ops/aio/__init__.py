"""Placeholder for DeepSpeed's asynchronous file access; zeropp's NVMe offload needs no such module."""

from ..op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
