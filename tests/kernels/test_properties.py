"""Properties that every encoding has for all values, on the CPU path, which the kernels match bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.cases import BITS, DTYPES, poisoned, same_bits, values
from zeropp_kernels import (
    block_table,
    delta_apply_,
    delta_encode_,
    dequantize_,
    lossless_count_,
    lossless_decode_,
    lossless_encode_,
    lossless_layout,
    message_layout,
    quantize_,
    quantize_tensors_,
    reduce_,
    reduce_quantize_,
    state_layout,
)

bits_of = st.sampled_from(BITS)
dtypes = st.sampled_from(DTYPES)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
GROUP = {8: 256, 4: 128}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Draw a tensor [1 to 700] of random values of one drawn magnitude, with up to six freely drawn numbers in it."""
    numel = draw(st.integers(1, 700))
    size = 10.0 ** draw(st.integers(-44, 36))
    x = values(numel, torch.float32, draw(st.integers(0, 50)), spoilt=False).clamp_(-1e3, 1e3) * size
    for number in draw(st.lists(floats, max_size=6)):
        x[draw(st.integers(0, numel - 1))] = number
    dtype = draw(dtypes)
    limit = torch.finfo(dtype).max
    return x.clamp_(-limit, limit).to(dtype)


def encoded(x: Tensor, bits: int, **options: object) -> Tensor:
    message = poisoned(message_layout(x.numel(), bits).nbytes)
    quantize_(x, message, bits=bits, **options)
    return message


def decoded(message: Tensor, numel: int, bits: int, dtype: torch.dtype = torch.float32, **options: object) -> Tensor:
    out = torch.full((numel,), math.nan, dtype=dtype)
    dequantize_(message, out, bits=bits, **options)
    return out


def scales_of(message: Tensor, numel: int, bits: int) -> Tensor:
    """Return the scale of each element, float64 [numel]."""
    layout = message_layout(numel, bits)
    scales = message[layout.scales_offset :][: 2 * layout.groups].view(torch.bfloat16).to(torch.float64)
    return scales.repeat_interleave(layout.group)[:numel]


@given(tensors(), bits_of)
def test_error_is_half_a_step(x: Tensor, bits: int) -> None:
    """The error is at most ``scale / 2 + |x| * 2**-23``: rounding the inverse and the product costs 2**-24 each."""
    message = encoded(x, bits)
    error = (decoded(message, x.numel(), bits).double() - x.double()).abs()
    assert (error <= scales_of(message, x.numel(), bits) / 2 + x.double().abs() * 2**-23).all()


def test_half_a_step_alone_is_not_kept() -> None:
    """Next to a tie the error exceeds half a step by a relative 2**-15, because the inverse of the scale is rounded."""
    passed = 0.0
    for mantissa in range(129, 256):
        scale = mantissa / 128
        ties = (torch.arange(1.5, 126.5, dtype=torch.float64) * scale).float()
        x = torch.cat([torch.tensor([127 * scale]), torch.nextafter(ties, torch.tensor(math.inf))])
        error = (decoded(encoded(x, 8), x.numel(), 8).double() - x.double()).abs().max().item()
        passed = max(passed, error / (scale / 2) - 1)
    assert 2**-22 < passed < 2**-14


@given(tensors(), bits_of)
def test_encoding_is_symmetric_in_sign(x: Tensor, bits: int) -> None:
    left, right = (decoded(encoded(value, bits), x.numel(), bits) for value in (x, -x))
    assert torch.equal(left, -right)


@given(tensors(), bits_of, dtypes)
def test_finite_in_finite_out(x: Tensor, bits: int, dtype: torch.dtype) -> None:
    for rotate in (False, True):
        out = decoded(encoded(x, bits, rotate=rotate), x.numel(), bits, dtype, rotate=rotate)
        assert out.isfinite().all()
    total = torch.empty(x.numel(), dtype=dtype)
    reduce_(torch.cat([encoded(x, bits)] * 3), total, count=3, bits=bits)
    if dtype != torch.float32 or x.abs().max() < 1e38:
        assert total.isfinite().all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(65504.0, torch.float16), (3e38, torch.float32), (torch.finfo(torch.float32).max, torch.float32),
     (torch.finfo(torch.bfloat16).max, torch.bfloat16)],
)  # fmt: skip
def test_the_largest_values(value: float, dtype: torch.dtype, bits: int) -> None:
    x = torch.zeros(256, dtype=dtype)
    x[0], x[1] = value, -value
    out = decoded(encoded(x, bits), 256, bits, dtype)
    assert out.isfinite().all() and (out[:2].double() / x[:2].double() - 1).abs().max() < 2**-5
    assert (out[2:] == 0).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("bits", BITS)
def test_a_group_that_is_not_finite_becomes_nan_alone(bits: int, bad: float) -> None:
    group = GROUP[bits]
    x = values(4 * group, torch.float32, spoilt=False).clamp_(-10, 10)
    clean = decoded(encoded(x, bits), x.numel(), bits)
    x[group + 5] = bad
    message = encoded(x, bits)
    out = decoded(message, x.numel(), bits)
    assert out[group : 2 * group].isnan().all()
    out[group : 2 * group] = clean[group : 2 * group]
    assert torch.equal(out, clean)
    codes = message[: message_layout(x.numel(), bits).codes_nbytes].view(4, -1)
    assert (codes[1] == 0).all(), "codes of a group with Inf or NaN must be zeros on every machine"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_zeros_and_the_smallest_values(bits: int, dtype: torch.dtype) -> None:
    x = torch.zeros(512, dtype=dtype)
    x[3] = -0.0
    message = encoded(x, bits)
    assert (scales_of(message, 512, bits) == 2.0**-126).all()
    assert same_bits(decoded(message, 512, bits, dtype), torch.zeros(512, dtype=dtype))
    x[5] = torch.finfo(dtype).smallest_normal / 4  # a subnormal number
    step = scales_of(encoded(x, bits), 512, bits)
    assert (decoded(encoded(x, bits), 512, bits).double() - x.double()).abs().le(step / 2).all()


@given(st.integers(1, 600), bits_of, st.randoms(use_true_random=False))
def test_every_code_survives_packing(numel: int, bits: int, random: object) -> None:
    """Values that are whole multiples of a power-of-two scale are encoded exactly, so decoding returns them."""
    top = {8: 127, 4: 7}[bits]
    x = torch.tensor([float(random.randint(-top, top)) for _ in range(numel)])  # type: ignore[attr-defined]
    x[:: GROUP[bits]] = top
    assert torch.equal(decoded(encoded(x, bits), numel, bits), x)


@given(st.permutations(range(4)), bits_of)
def test_permuted_messages_permute_the_sum_s_operands(order: list[int], bits: int) -> None:
    shares = [values(600, torch.float32, rank, spoilt=False).clamp_(-1e4, 1e4) for rank in range(4)]
    messages = [encoded(share, bits) for share in shares]
    out, expected = torch.empty(600), torch.zeros(600)
    reduce_(torch.cat([messages[rank] for rank in order]), out, count=4, bits=bits)
    for rank in order:
        expected += decoded(messages[rank], 600, bits)
    assert torch.equal(out, expected)


@given(tensors(), bits_of, st.booleans())
def test_a_sum_of_one_is_decoding(x: Tensor, bits: int, rotate: bool) -> None:
    message = encoded(x, bits, rotate=rotate)
    out = torch.empty(x.numel())
    reduce_(message, out, count=1, bits=bits, rotate=rotate)
    assert same_bits(out, decoded(message, x.numel(), bits, rotate=rotate))


@given(tensors(), bits_of)
def test_feedback_with_beta_0_carries_the_last_error(x: Tensor, bits: int) -> None:
    assume(x.double().abs().max() < 1e30)
    layout = state_layout(x.numel(), bits)
    state = torch.zeros(layout.nbytes, dtype=torch.uint8)
    message = encoded(x, bits, state=state, beta=0.0)
    assert torch.equal(message, encoded(x, bits)), "the first message must not change, because the error is still zero"
    lost = x.float() - decoded(message, x.numel(), bits)
    codes = state[: layout.codes_nbytes].view(torch.int8).double()[: x.numel()]
    step = state[layout.scales_offset :][: 2 * layout.groups].view(torch.bfloat16).double()
    step = step.repeat_interleave(layout.group)[: x.numel()]
    assert ((codes * step - lost.double()).abs() <= step / 2 * (1 + 2**-14)).all()


@pytest.mark.parametrize("bits", BITS)
def test_feedback_keeps_the_state_of_groups_that_are_not_finite(bits: int) -> None:
    numel, group = 4 * GROUP[bits], GROUP[bits]
    state = torch.zeros(state_layout(numel, bits).nbytes, dtype=torch.uint8)
    encoded(values(numel, torch.float32, spoilt=False).clamp_(-10, 10), bits, state=state)
    before = state.clone()
    x = values(numel, torch.float32, 1, spoilt=False).clamp_(-10, 10)
    x[group] = math.nan
    layout = state_layout(numel, bits)
    scales, old = (each[layout.scales_offset :].view(torch.int16) for each in (state, before))
    encoded(x, bits, state=state)
    assert torch.equal(state[group : 2 * group], before[group : 2 * group]) and scales[1] == old[1]
    assert not torch.equal(state[:group], before[:group])
    encoded(x, bits, state=state, reset=True)
    assert not state[group : 2 * group].any() and scales[1] == 0, "reset must clear groups with NaN, too"
    assert state[:group].any()


@given(st.lists(st.integers(1, 700), min_size=1, max_size=4), bits_of, st.booleans())
def test_a_parameter_alone_or_among_others_has_the_same_codes(numels: list[int], bits: int, rotate: bool) -> None:
    parts = [values(numel, torch.bfloat16, index) for index, numel in enumerate(numels)]
    offsets, end = [], 0
    for part in parts:
        offsets.append(end)
        end += -(-part.numel() // 256) * 256
    flat = torch.zeros(end, dtype=torch.bfloat16)
    for part, offset in zip(parts, offsets, strict=True):
        flat[offset : offset + part.numel()] = part
    whole = encoded(flat, bits, rotate=rotate)
    gathered = poisoned(whole.numel())
    quantize_tensors_(parts, block_table(numels, offsets, end), gathered, bits=bits, rotate=rotate)
    assert torch.equal(whole, gathered)
    layout = message_layout(end, bits)
    for part, offset in zip(parts, offsets, strict=True):
        alone, own = encoded(part, bits, rotate=rotate), message_layout(part.numel(), bits)
        begin = offset * bits // 8
        assert torch.equal(alone[: own.codes_nbytes], whole[begin : begin + own.codes_nbytes])
        at = layout.scales_offset + 2 * offset // layout.group
        theirs = alone[own.scales_offset :][: 2 * own.groups]
        assert torch.equal(theirs, whole[at : at + 2 * own.groups])


@given(st.integers(1, 3), st.integers(1, 3), bits_of, bits_of)
def test_requantizing_is_reducing_and_quantizing(count: int, parts: int, source: int, bits: int) -> None:
    numel = 512 * parts
    shares = [values(numel, torch.float32, rank, spoilt=False).clamp_(-1e4, 1e4) for rank in range(count)]
    messages = torch.cat([encoded(share, source) for share in shares])
    total = torch.empty(numel)
    reduce_(messages, total, count=count, bits=source, scale=0.25)
    expected = torch.cat([encoded(part, bits) for part in total.chunk(parts)])
    found = poisoned(expected.numel())
    sources = {"numel": numel, "count": count, "source_bits": source, "scale": 0.25}
    reduce_quantize_(messages, found, **sources, out_count=parts, bits=bits)
    assert torch.equal(found, expected)


@given(st.integers(1, 900), st.integers(0, 20))
def test_delta_converges_to_the_shard(numel: int, seed: int) -> None:
    """The remaining difference stays in the shard, so the reference comes closer with every message.

    The bound is one bfloat16 rounding of the value plus one rounding of a difference code.
    """
    shard = values(numel, torch.float32, seed, spoilt=False).clamp_(-100, 100)
    owner = torch.zeros(numel, dtype=torch.bfloat16)
    receiver = owner.clone()
    for _ in range(12):
        message = poisoned(message_layout(numel, 4).nbytes)
        delta_encode_(shard, owner, message)
        delta_apply_(message, receiver)
        assert same_bits(owner, receiver)
    peaks = torch.nn.functional.pad(shard.abs(), (0, -numel % 128)).view(-1, 128).amax(1).repeat_interleave(128)[:numel]
    assert ((owner.float() - shard).abs() <= shard.abs() * 2**-8 + peaks * 2**-9 / 7).all()


@settings(max_examples=10)
@given(st.integers(0, 1000))
def test_lossless_is_exact_for_every_pattern(seed: int) -> None:
    """All 65536 bit patterns, with -0, subnormals and NaN payloads, come back exactly with any reference."""
    generator = torch.Generator().manual_seed(seed)
    new = torch.randperm(65536, generator=generator).to(torch.int16).view(torch.bfloat16)
    near = new.view(torch.int16) + torch.randint(-9, 10, (65536,), generator=generator).to(torch.int16)
    anywhere = torch.randperm(65536, generator=generator).to(torch.int16)
    held = torch.where(torch.rand(65536, generator=generator) < 0.8, near, anywhere).view(torch.bfloat16)
    starts = torch.empty(2, 33, dtype=torch.int64)
    lossless_count_(new, held, starts)
    rooms = {"room8": int(starts[0, -1]), "room16": int(starts[1, -1])}
    message = poisoned(lossless_layout(65536, **rooms).nbytes)
    lossless_encode_(new, held, starts, message, **rooms)
    lossless_decode_(message, held, held, **rooms)
    assert torch.equal(held.view(torch.int16), new.view(torch.int16))


def test_rotation_is_its_own_inverse() -> None:
    """Decoding with rotation returns a single value within an 8-bit step; without rotation, 32 elements hold it."""
    for place in range(0, 256, 7):
        x = torch.zeros(256)
        x[place] = 2.0**place if place < 100 else -3.0
        out = decoded(encoded(x, 8, rotate=True), 256, 8, rotate=True)
        assert (out - x).abs().max() <= x.abs().max() * 2**-7
        spread = decoded(encoded(x, 8, rotate=True), 256, 8)
        assert int(spread.ne(0).sum()) == 32, "one value is spread over 32"
