"""The plain reference and the Triton kernels give equal bits for every operation, dtype and awkward length."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import agreement
from tests.kernels.agreement import SHAPES
from tests.kernels.cases import BITS, DEVICE, DTYPES, LENGTHS, same_bits
from tests.kernels.fast import device
from zeropp_kernels import message_layout, reference

# The interpreter is slow, so the default suite runs few lengths: 257 has a partly filled group, 100003 many tiles.
SLOW = pytest.mark.campaign if DEVICE == "cpu" else ()
EVERY = [pytest.param(numel, marks=SLOW if numel in (127, 128, 129, 255) else ()) for numel in (0, *LENGTHS)]
EVERY.append(pytest.param(1_000_000, marks=pytest.mark.campaign))
# All pairs of dtypes. For "large" tensors the default suite runs two pairs, which contain each dtype on some side.
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


@pytest.mark.parametrize("bits", BITS)
def test_norms_of_a_sum_end_where_it_ends(bits: int) -> None:
    """A rotation writes values after the last element of the message, and norms must not include them."""
    agreement.reduce(100, torch.float32, bits)


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
    """A sum starts with the first product, not with +0, so -0 stays -0. Only a negative scale makes a product -0.

    Encoders write no negative scales, so the test writes them.
    """
    layout = message_layout(4096, bits)
    message = torch.zeros(2 * layout.nbytes, dtype=torch.uint8)
    for own in message.view(2, -1):
        own[layout.scales_offset :].view(torch.bfloat16)[: layout.groups] = -1.0
    fast, plain = torch.ones(4096, device=DEVICE), torch.ones(4096)
    device.reduce_(message.to(DEVICE), fast, 2, bits, False, 1.0, False, None, None)
    reference.reduce_(message, plain, 2, bits, False, 1.0, False, None, None)
    assert same_bits(fast, plain) and bool(plain.signbit().all())


REFUSED = {
    "quantize_": lambda x, bytes_: reference.quantize_(x, bytes_, 1, 8, False, None, 0.0, False),
    "reduce_": lambda x, bytes_: reference.reduce_(bytes_, x, 1, 8, False, 1.0, False, None, None),
    "sum_": lambda x, bytes_: reference.sum_(x, x, 1, 1.0, False, None, None),
    "gather_": lambda x, bytes_: reference.gather_([x], torch.zeros(3, 1), x, x, x, 1.0, x, None, False),
    "delta_apply_": lambda x, bytes_: reference.delta_apply_(bytes_, x, 1),
    "lossless_count_": lambda x, bytes_: reference.lossless_count_(x, x, bytes_),
    "lossless_decode_": lambda x, bytes_: reference.lossless_decode_(bytes_, x, x, 1, 0, 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_reference_refuses_other_devices_by_name(name: str) -> None:
    x, message = torch.empty(256, device="meta"), torch.empty(4096, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match=r"take tensors on the CPU, got one on meta; call the operation of the same"):
        REFUSED[name](x, message)
