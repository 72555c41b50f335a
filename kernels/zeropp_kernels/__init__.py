"""Kernels for ZeRO communication: tensors in, message bytes out, and back. No process groups, no modules."""

from __future__ import annotations

__all__: list[str] = []
