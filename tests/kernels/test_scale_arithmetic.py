"""Scales and their inverses are correctly rounded on GPUs, where kernels compute them without a division.

The tests run the kernels' own functions for GPUs in Triton's interpreter, for every mantissa that can occur.
"""

from __future__ import annotations

import numpy
import pytest
import torch

pytest.importorskip("triton", reason="Triton comes for Linux only")

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.kernels.cases import DEVICE
from zeropp_kernels.device import blocks

SIZE = 1 << 17

pytestmark = pytest.mark.skipif(
    DEVICE != "cpu" or triton.__version__.startswith("3.6"),
    reason="needs Triton's interpreter with a fused multiply-add that rounds once; Triton 3.6's rounds twice",
)


@triton.jit
def quotients(peaks, out, LEVELS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, blocks._quotient(tl.load(peaks + at), LEVELS))


@triton.jit
def inverses(scales, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, blocks._inverse(tl.load(scales + at)))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_INTERPRETED", False)


@pytest.mark.parametrize("levels", [7, 127])
# Exponents whose quotients are all 2**-126 or more behave alike. -119 is the smallest of them for 127 levels.
@pytest.mark.parametrize("exponent", [0, -119, 127])
def test_a_scale_is_correctly_rounded(levels: int, exponent: int) -> None:
    mantissas = torch.arange(1 << 23, dtype=torch.int32)
    peaks = (mantissas + ((exponent + 127) << 23)).view(torch.float32)
    out = torch.empty_like(peaks)
    quotients[(peaks.numel() // SIZE,)](peaks, out, LEVELS=levels, SIZE=SIZE)
    assert torch.equal(out, peaks / torch.tensor(float(levels)))


# rsqrt of a GPU is off by a few units in the last place, so the test makes it worse.
@pytest.mark.parametrize("error", [0.0, 2.0**-21, -(2.0**-21)])
def test_an_inverse_is_correctly_rounded(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    exact = InterpreterBuilder.create_rsqrt

    def rsqrt(builder: InterpreterBuilder, scale: TensorHandle) -> TensorHandle:
        found = exact(builder, scale)
        return TensorHandle((found.data * (1.0 + error)).astype(numpy.float32), found.dtype)

    monkeypatch.setattr(InterpreterBuilder, "create_rsqrt", rsqrt)
    # Every bfloat16 from 2**-126 to the largest scale of int4 codes, which is the largest scale of any codes.
    bits = torch.arange(0x0080, 0x7E13, dtype=torch.int32)
    scales = torch.nn.functional.pad(bits, (0, -len(bits) % 1024), value=0x3F80)
    scales = (scales << 16).view(torch.float32)
    out = torch.empty_like(scales)
    inverses[(scales.numel() // 1024,)](scales, out, SIZE=1024)
    assert numpy.array_equal(out.numpy(), numpy.float32(1.0) / scales.numpy())
