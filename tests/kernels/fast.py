"""The Triton side of each operation, on CUDA tensors or, under Triton's interpreter, on those of the CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton comes for Linux only")

from zeropp_kernels import device

__all__ = ["device"]
