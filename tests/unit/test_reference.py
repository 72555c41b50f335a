"""The plain operations equal numpy and explicit loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zeropp_kernels.reference import pack_, squared_norm, sum_messages_

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
COUNTS = [1, 2, 3, 5]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = a.reshape(-1), b.reshape(-1)
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# Tests of pack_.


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_pack_casts(source: torch.dtype, target: torch.dtype) -> None:
    values = [noise(3, 5, dtype=source, seed=1), noise(7, dtype=source, seed=2), noise(1, dtype=source).squeeze()]
    flat = torch.full((32,), 9.0, dtype=target)
    pack_([flat[:15].view(3, 5), flat[16:23], flat[30]], values)
    assert same_bits(flat[:15], values[0].to(target).flatten())
    assert same_bits(flat[16:23], values[1].to(target)) and same_bits(flat[30], values[2].to(target))
    assert flat[[15, 23, 29, 31]].eq(9).all(), "elements between the parts must not change"


def test_pack_writes_zeros_for_missing_tensors() -> None:
    flat = torch.full((12,), float("nan"))
    parts = [flat[:4], flat[4:8], flat[8:12]]
    pack_(parts, [None, torch.arange(4.0), None])
    assert flat.tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0]
    pack_(parts, [None] * 3)
    assert flat.eq(0).all()
    pack_([], [])


def test_pack_goes_by_index_not_by_memory() -> None:
    """Elements are matched by index, because a gradient may have another memory format than its parameter."""
    image = noise(2, 3, 4, 5)
    flat = torch.zeros(120)
    channels_last = flat.as_strided((2, 3, 4, 5), (60, 1, 15, 3))
    pack_([channels_last], [image])
    assert torch.equal(channels_last, image) and not torch.equal(flat, image.flatten())
    back = torch.zeros(120)
    pack_([back.view(2, 3, 4, 5)], [image.to(memory_format=torch.channels_last)])
    assert torch.equal(back, image.flatten())
    transposed = torch.zeros(6)
    pack_([transposed.as_strided((2, 3), (1, 2))], [torch.arange(6.0).view(2, 3)])
    assert transposed.tolist() == [0, 3, 1, 4, 2, 5]
    expanded = torch.zeros(6)
    pack_([expanded.view(2, 3)], [torch.tensor([[1.0], [2.0]]).expand(2, 3)])
    assert expanded.tolist() == [1, 1, 1, 2, 2, 2]


def test_pack_mixes_dtypes_in_one_call() -> None:
    flat = torch.zeros(6, dtype=torch.bfloat16)
    pack_([flat[:2], flat[2:4], flat[4:]], [noise(2), noise(2, dtype=torch.bfloat16), None])
    assert same_bits(flat[:2], noise(2).bfloat16()) and flat[4:].eq(0).all()


def test_pack_keeps_non_finite_values() -> None:
    flat = torch.zeros(3)
    pack_([flat], [torch.tensor([float("inf"), float("nan"), -float("inf")], dtype=torch.bfloat16)])
    assert flat[0] == float("inf") and flat[1].isnan() and flat[2] == -float("inf")


def test_pack_wants_as_many_sources_as_destinations() -> None:
    with pytest.raises(ValueError):
        pack_([torch.zeros(1)], [])


# Tests of sum_messages_.


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("scale", [1.0, 1 / 3, 0.0625])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("wire", "main", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 1e-5),
        (torch.float16, torch.float32, 1e-5),
        (torch.float32, torch.float64, 1e-14),
        (torch.float64, torch.float64, 1e-14),
    ],
    ids=lambda value: str(value),
)
def test_sums(
    count: int, scale: float, accumulate: bool, wire: torch.dtype, main: torch.dtype, tolerance: float
) -> None:
    messages = noise(count, 257, dtype=wire)
    out = noise(257, dtype=main, seed=9) if accumulate else torch.full((257,), float("nan"), dtype=main)
    expected = messages.double().numpy().sum(0) * scale
    if accumulate:
        expected += out.double().numpy()
    kept = messages.clone()
    sum_messages_(messages, out, scale=scale, accumulate=accumulate)
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=tolerance, atol=tolerance)
    assert same_bits(messages, kept), "the caller's messages must not change"


@given(
    st.sampled_from(COUNTS),
    st.sampled_from([(w, m) for w in DTYPES for m in (torch.float32, torch.float64) if w != torch.float64 or m == w]),
    st.sampled_from([1.0, 0.5, 1 / 3]),
    st.booleans(),
    st.integers(0, 2**31),
)
@settings(max_examples=150)
def test_the_order_of_a_sum_is_the_order_of_messages(
    count: int, dtypes: tuple[torch.dtype, torch.dtype], scale: float, accumulate: bool, seed: int
) -> None:
    """Bits equal those of adding the messages in order in the main dtype, and scaling the sum once."""
    wire, main = dtypes
    size = torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64)[torch.randint(3, (count, 1))]
    messages = (noise(count, 67, dtype=torch.float64, seed=seed) * size).to(wire)
    out = noise(67, dtype=main, seed=seed + 1)
    expected = messages[0].to(main)
    for message in messages[1:]:
        expected = expected + message.to(main)
    expected = expected * scale
    expected = out + expected if accumulate else expected
    sum_messages_(messages, out, scale=scale, accumulate=accumulate)
    assert same_bits(out, expected)


def test_16_bit_messages_are_summed_in_the_main_dtype() -> None:
    messages = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    out = torch.zeros(1)
    sum_messages_(messages, out)
    assert out.item() == 258.0, "the sum must not be computed in bfloat16, where 256 + 1 is 256"
    large = torch.full((2, 1), 6e4, dtype=torch.float16)
    sum_messages_(large, out)
    assert out.isfinite().all()


def test_sums_of_messages_keep_non_finite_values() -> None:
    out = torch.zeros(3)
    sum_messages_(torch.tensor([[float("inf"), 1, float("inf")], [1, float("nan"), -float("inf")]]), out, scale=0.5)
    assert out[0] == float("inf") and out[1].isnan() and out[2].isnan()


# Tests of squared_norm.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e18])
def test_squared_norm_equals_float64(dtype: torch.dtype, scale: float) -> None:
    tensors = [noise(256 * n, dtype=dtype, seed=n) * scale for n in (1, 3, 400)]
    wanted = np.square(torch.cat(tensors).double().numpy()).sum()
    found = squared_norm(tensors)
    assert found.dtype == torch.float64 and found.shape == ()
    assert found.item() == pytest.approx(wanted, rel=1e-8 if dtype == torch.float32 else 1e-14)


def test_squared_norm_does_not_depend_on_how_blocks_are_spread() -> None:
    values = noise(256 * 64)
    one, many = squared_norm([values]), squared_norm(list(values.view(-1, 512).unbind()))
    assert one.item() == pytest.approx(many.item(), rel=1e-15)


def test_squared_norm_of_huge_finite_values_is_finite() -> None:
    """The squares of these values overflow float32."""
    assert squared_norm([torch.full((512,), 3e38)]).item() == pytest.approx(512 * 9e76, rel=1e-6)
    assert squared_norm([torch.tensor([float("inf")] * 256)]).item() == float("inf")
    assert squared_norm([torch.tensor([float("nan")] * 256), torch.ones(256)]).isnan()
