"""The Triton implementation of each operation, for CUDA tensors or, under Triton's interpreter, for CPU tensors."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton comes for Linux only")

from zeropp_kernels import device

__all__ = ["device"]
