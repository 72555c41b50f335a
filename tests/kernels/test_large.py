"""Offsets do not wrap in buffers of more than 2**31 elements. The tests need about 13 GB of memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import DEVICE
from zeropp_kernels import dequantize_, message_layout, quantize_, reduce_

NUMEL = (1 << 31) + (1 << 20) + 77
END = 4096 + 77  # elements compared at the end of the buffer, from the start of a group

pytestmark = pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.campaign


def pattern(start: int, numel: int) -> Tensor:
    """Return values computed from the element's index, so that a value at a wrong place is noticed."""
    place = torch.arange(start, start + numel, device=DEVICE)
    return ((place * 2654435761 % 65521) - 32760).to(torch.bfloat16)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bits", [8, 4])
def test_the_end_of_a_large_buffer(bits: int) -> None:
    x = torch.empty(NUMEL, dtype=torch.bfloat16, device=DEVICE)
    step = 1 << 26
    for start in range(0, NUMEL, step):
        x[start : start + step] = pattern(start, min(step, NUMEL - start))
    layout = message_layout(NUMEL, bits)
    message = torch.empty(layout.nbytes, dtype=torch.uint8, device=DEVICE)
    quantize_(x, message, bits=bits)
    small = torch.empty(message_layout(END, bits).nbytes, dtype=torch.uint8, device=DEVICE)
    quantize_(pattern(NUMEL - END, END), small, bits=bits)
    expected = torch.empty(END, dtype=torch.bfloat16, device=DEVICE)
    dequantize_(small, expected, bits=bits)
    assert (NUMEL - END) % layout.group == 0
    x.zero_()
    dequantize_(message, x, bits=bits)
    assert torch.equal(x[-END:], expected)
    middle = (1 << 31) - 4096
    assert (x[middle : middle + 8192].float() - pattern(middle, 8192).float()).abs().max() < 32760 / 6
    reduce_(message, x, count=1, bits=bits, scale=0.5)
    assert torch.equal(x[-END:], (expected.float() * 0.5).bfloat16())
