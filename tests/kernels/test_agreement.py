"""The plain reference and the Triton kernels give the same bits, for every operation, dtype, and awkward length."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import agreement
from tests.kernels.agreement import SHAPES
from tests.kernels.cases import BITS, DEVICE, DTYPES, LENGTHS, same_bits
from tests.kernels.fast import device
from zeropp_kernels import message_layout, reference

# The interpreter takes its time: 257 elements are whole groups and a part of one, and 100003 many tiles and a part.
SLOW = pytest.mark.campaign if DEVICE == "cpu" else ()
EVERY = [pytest.param(numel, marks=SLOW if numel in (127, 128, 129, 255) else ()) for numel in (0, *LENGTHS)]
EVERY.append(pytest.param(1_000_000, marks=pytest.mark.campaign))
# Every pair of dtypes in tensors of every other shape; in large ones each dtype once on either side.
COPIES = [
    pytest.param(
        shapes, source, target, id=f"{shapes}-source{i}-target{j}",
        marks=SLOW if shapes == "large" and ((i - j) % 3 != 1 or i == 2) else (),
    )
    for shapes in SHAPES
    for i, source in enumerate(DTYPES)
    for j, target in enumerate(DTYPES)
]  # fmt: skip


@pytest.mark.every(6)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", EVERY)
def test_quantize(numel: int, dtype: torch.dtype, bits: int) -> None:
    agreement.quantize(numel, dtype, bits)


@pytest.mark.parametrize("bits", BITS)
def test_quantize_groups_that_are_not_finite(bits: int) -> None:
    agreement.quantize_spoilt(bits)


@pytest.mark.every(4)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", EVERY)
def test_dequantize(numel: int, dtype: torch.dtype, bits: int) -> None:
    agreement.dequantize(numel, dtype, bits)


@pytest.mark.every(8)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", EVERY)
def test_reduce(numel: int, dtype: torch.dtype, bits: int) -> None:
    agreement.reduce(numel, dtype, bits)


@pytest.mark.every(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", EVERY)
def test_sum(numel: int, dtype: torch.dtype) -> None:
    agreement.plain_sum(numel, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_wide_tiles(dtype: torch.dtype) -> None:
    agreement.wide_sum(dtype)


@pytest.mark.every(8)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("source_bits", BITS)
@pytest.mark.parametrize("numel", [*EVERY, 1536])
def test_reduce_quantize(numel: int, source_bits: int, bits: int) -> None:
    agreement.reduce_quantize(numel, source_bits, bits)


@pytest.mark.every(8)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES)
def test_quantize_tensors(shapes: str, dtype: torch.dtype, bits: int) -> None:
    agreement.quantize_tensors(shapes, dtype, bits)


@pytest.mark.every(12)
@pytest.mark.parametrize(("shapes", "source", "target"), COPIES)
def test_copies(shapes: str, source: torch.dtype, target: torch.dtype) -> None:
    agreement.copies(shapes, source, target)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("numel", EVERY)
def test_delta(numel: int, dtype: torch.dtype) -> None:
    agreement.delta(numel, dtype)


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("numel", EVERY)
def test_lossless(numel: int, dtype: torch.dtype) -> None:
    agreement.lossless(numel, dtype)


@pytest.mark.parametrize("bits", BITS)
def test_a_sum_of_negative_zeros_is_one(bits: int) -> None:
    """Scales below zero, which no encoder writes: the first product opens the sum, whatever its sign."""
    layout = message_layout(4096, bits)
    message = torch.zeros(2 * layout.nbytes, dtype=torch.uint8, device=DEVICE)
    for own in message.view(2, -1):
        own[layout.scales_offset :].view(torch.bfloat16)[: layout.groups] = -1.0
    out = torch.ones(4096, device=DEVICE), torch.ones(4096, device=DEVICE)
    device.reduce_(message, out[0], 2, bits, False, 1.0, False, None, None)
    reference.reduce_(message, out[1], 2, bits, False, 1.0, False, None, None)
    assert same_bits(*out) and bool(out[0].signbit().all())
