"""The reference equals the formulas in ``statement.py``; test_agreement shows that the kernels equal the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels import statement
from tests.kernels.cases import BITS, DTYPES, values
from zeropp_kernels import (
    block_table,
    delta_apply_,
    delta_encode_,
    dequantize_,
    gather_,
    lossless_count_,
    lossless_decode_,
    lossless_encode_,
    lossless_layout,
    message_layout,
    quantize_,
    reduce_,
    reduce_quantize_,
    scatter_,
    state_layout,
    sum_,
)

NUMEL = 150_011  # more than one of the tiles in which the reference works


def wide(x: Tensor) -> statement.Values:
    return x.to(torch.float64).numpy()


def encoded(x: Tensor, bits: int, **options: object) -> Tensor:
    message = torch.empty(message_layout(x.numel(), bits).nbytes, dtype=torch.uint8)
    quantize_(x, message, bits=bits, **options)
    return message


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_scales_and_values(dtype: torch.dtype, bits: int) -> None:
    x = values(NUMEL, dtype)
    if bits == 4 and dtype == torch.float32:
        x[1024] = 3e38  # the largest values follow another rule, see test_properties
    message = encoded(x, bits)
    codes, scales = statement.unpack(message.numpy(), NUMEL, bits)
    expected, expected_scales = statement.encode(wide(x), bits)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected)
    out = torch.empty(NUMEL)
    dequantize_(message, out, bits=bits)
    np.testing.assert_array_equal(wide(out), statement.decode(expected, expected_scales, NUMEL))


@pytest.mark.parametrize("bits", BITS)
def test_sum_in_message_order_scaled_once(bits: int) -> None:
    shares = [values(NUMEL, torch.float32, rank, spoilt=False).clamp_(-1e37, 1e37) for rank in range(4)]
    expected = statement.summed([statement.encode(wide(share), bits) for share in shares], NUMEL, 1 / 3)
    messages, out = torch.cat([encoded(share, bits) for share in shares]), torch.empty(NUMEL)
    reduce_(messages, out, count=4, bits=bits, scale=1 / 3)
    np.testing.assert_array_equal(wide(out), expected)
    out.fill_(2.5)
    reduce_(messages, out, count=4, bits=bits, scale=1 / 3, accumulate=True)
    np.testing.assert_array_equal(wide(out), statement.single(expected + 2.5))


@pytest.mark.parametrize("bits", BITS)
def test_a_rotated_sum_is_added_to_the_output(bits: int) -> None:
    shares = [values(NUMEL, torch.float32, rank, spoilt=False).clamp_(-1e4, 1e4) for rank in range(3)]
    messages = torch.cat([encoded(share, bits, rotate=True) for share in shares])
    alone, out = torch.empty(NUMEL), torch.full((NUMEL,), 2.5)
    reduce_(messages, alone, count=3, bits=bits, rotate=True, scale=1 / 3)
    reduce_(messages, out, count=3, bits=bits, rotate=True, scale=1 / 3, accumulate=True)
    np.testing.assert_array_equal(wide(out), statement.single(wide(alone) + 2.5))


def test_plain_sum_in_message_order_scaled_once() -> None:
    shares = [values(NUMEL, torch.float32, rank, spoilt=False).clamp_(-1e37, 1e37) for rank in range(3)]
    total = statement.single(statement.single(wide(shares[0]) + wide(shares[1])) + wide(shares[2]))
    expected, out = statement.single(total * statement.single(np.array(0.3))), torch.empty(NUMEL)
    sum_(torch.cat(shares), out, count=3, scale=0.3)
    np.testing.assert_array_equal(wide(out), expected)
    out.fill_(2.5)
    sum_(torch.cat(shares), out, count=3, scale=0.3, accumulate=True)
    np.testing.assert_array_equal(wide(out), statement.single(expected + 2.5))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("source_bits", BITS)
def test_the_sum_is_encoded_for_the_next_hop(source_bits: int, bits: int) -> None:
    """Two steps with error feedback: the second adds the error of the first."""
    state = torch.zeros(state_layout(NUMEL, bits).nbytes, dtype=torch.uint8)
    error = np.zeros(NUMEL)
    for step in range(2):
        shares = [values(NUMEL, torch.float32, 3 * step + rank, spoilt=False).clamp_(-1e30, 1e30) for rank in range(3)]
        total = statement.summed([statement.encode(wide(share), source_bits) for share in shares], NUMEL, 0.3)
        sources = torch.cat([encoded(share, source_bits) for share in shares])
        message = torch.empty(message_layout(NUMEL, bits).nbytes, dtype=torch.uint8)
        options = {"source_bits": source_bits, "bits": bits, "state": state, "beta": 0.6}
        reduce_quantize_(sources, message, numel=NUMEL, count=3, scale=0.3, **options)
        codes, scales, *kept = statement.feedback(total, error, bits, 0.6)
        for found, expected in zip(statement.unpack(message.numpy(), NUMEL, bits), (codes, scales), strict=True):
            np.testing.assert_array_equal(found, expected)
        error = statement.decode(*kept, NUMEL)


@pytest.mark.parametrize("bits", BITS)
def test_feedback(bits: int) -> None:
    layout = state_layout(NUMEL, bits)
    state = torch.zeros(layout.nbytes, dtype=torch.uint8)
    error = np.zeros(NUMEL)
    for step in range(4):
        x = values(NUMEL, torch.float32, step, spoilt=False).clamp_(-1e30, 1e30)
        message = encoded(x, bits, state=state, beta=0.8, reset=step == 3)
        if step == 3:
            error = np.zeros(NUMEL)
        codes, scales, error_codes, error_scales = statement.feedback(wide(x), error, bits, 0.8)
        for found, expected in zip(statement.unpack(message.numpy(), NUMEL, bits), (codes, scales), strict=True):
            np.testing.assert_array_equal(found, expected)
        kept = statement.unpack(state.numpy(), NUMEL, 8, layout.group)
        for found, expected in zip(kept, (error_codes, error_scales), strict=True):
            np.testing.assert_array_equal(found, expected)
        error = statement.decode(error_codes, error_scales, NUMEL)


@pytest.mark.parametrize("bits", BITS)
def test_rotation(bits: int) -> None:
    """Codes are the rotated values to half a step, in one of two output orders.

    Decoded values have an RMS error of at most half a step over each 32 values.
    """
    x = values(NUMEL, torch.float32, spoilt=False).clamp_(-1e4, 1e4)
    message = encoded(x, bits, rotate=True)
    codes, scales = statement.unpack(message.numpy(), NUMEL, bits)
    y = (codes * scales[:, None]).reshape(-1, 2, 4, 16).transpose(0, 2, 1, 3).reshape(-1, 32) * np.sqrt(32.0)
    steps = np.repeat(scales * np.sqrt(32.0), statement.GROUP[bits] // 32)
    expected = statement.rotated(np.pad(wide(x), (0, -NUMEL % statement.GROUP[bits])))
    order = [[int(f"{place:05b}"[0] + f"{place:05b}"[1:][::turn], 2) for place in range(32)] for turn in (1, -1)]
    misses = [np.abs(y - expected[:, places]).max(axis=1) / steps for places in order]
    assert min(miss.max() for miss in misses) <= 0.501, "no order of the transform's outputs fits"
    out = torch.empty(NUMEL)
    dequantize_(message, out, bits=bits, rotate=True)
    back = statement.grouped(wide(out) - wide(x), 128).reshape(-1, 2, 4, 16).transpose(0, 2, 1, 3).reshape(-1, 32)
    own = np.repeat(scales, statement.GROUP[bits] // 32)[: len(back)]
    assert (np.linalg.norm(back, axis=1) <= np.sqrt(32) * 0.501 * own * np.sqrt(32) + 1e-30).all()


def test_delta() -> None:
    shard = values(NUMEL, torch.float32, spoilt=False).clamp_(-1e30, 1e30)
    held = (shard + values(NUMEL, torch.float32, 1, spoilt=False).clamp_(-1e3, 1e3) * 1e-3).bfloat16()
    new, message = held.clone(), torch.empty(message_layout(NUMEL, 4).nbytes, dtype=torch.uint8)
    delta_encode_(shard, new, message)
    codes, scales = statement.encode(statement.single(wide(shard) - wide(held)), 4)
    for found, expected in zip(statement.unpack(message.numpy(), NUMEL, 4), (codes, scales), strict=True):
        np.testing.assert_array_equal(found, expected)
    total = statement.single(wide(held) + statement.decode(codes, scales, NUMEL))
    np.testing.assert_array_equal(wide(new), wide(torch.from_numpy(total).float().bfloat16()))
    received = held.clone()
    delta_apply_(message, received)
    np.testing.assert_array_equal(wide(received), wide(new))


def test_lossless() -> None:
    held = values(NUMEL, torch.bfloat16)
    noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    new = (held.float() * (1 + 0.05 * noise)).bfloat16()
    new[::50] = -new[::50]
    patterns = [tensor.view(torch.int16).numpy().view(np.uint16) for tensor in (new, held)]
    limits = np.array([-32768, -129, -128, -8, -7, 6, 7, 127, 128, 32767])
    patterns[0][3000:3010] = statement.unkey(statement.key(patterns[1][3000:3010]) + limits)
    difference, to8, to16 = statement.differences(*patterns)
    np.testing.assert_array_equal(difference[3000:3010], limits)
    rooms = {"room8": int(to8.sum()), "room16": int(to16.sum())}
    counts = np.stack([statement.grouped(each.astype(float), 2048).sum(axis=1) for each in (to8, to16)])
    starts = torch.empty(2, -(-NUMEL // 2048) + 1, dtype=torch.int64)
    lossless_count_(new, held, starts)
    np.testing.assert_array_equal(np.diff(starts.numpy()), counts)
    np.testing.assert_array_equal(starts.numpy()[:, -1], list(rooms.values()))
    layout = lossless_layout(NUMEL, **rooms)
    message = torch.empty(layout.nbytes, dtype=torch.uint8)
    lossless_encode_(new, held, starts, message, **rooms)
    parts = np.split(message.numpy(), np.cumsum(statement.lossless_sizes(NUMEL, **rooms))[:-1])
    codes, pairs, bytes8, gap, words, end = parts
    expected = np.where(to16, 7, np.where(to8, 8, difference & 15))
    np.testing.assert_array_equal(np.stack([codes & 15, codes >> 4], axis=1).reshape(-1), statement.in_bytes(expected))
    np.testing.assert_array_equal(pairs.view(np.int32).reshape(-1, 2), (np.cumsum(counts, axis=1) - counts).T)
    # Escapes are stored in the order of their marks in the message, which is not the order of the elements.
    ordered8, ordered16 = statement.in_bytes(to8).astype(bool), statement.in_bytes(to16).astype(bool)
    np.testing.assert_array_equal(bytes8, statement.in_bytes(difference & 255)[ordered8])
    np.testing.assert_array_equal(words.view(np.uint16), statement.in_bytes(patterns[0])[ordered16])
    assert not gap.any() and not end.any()
    # Decode the bytes that were checked above.
    back = statement.lossless_values(codes, bytes8.view(np.int8), words.view(np.uint16), patterns[1])
    np.testing.assert_array_equal(back, patterns[0])
    out = torch.zeros_like(held)
    lossless_decode_(message, held, out, **rooms)
    np.testing.assert_array_equal(out.view(torch.int16).numpy().view(np.uint16), back)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies(dtype: torch.dtype) -> None:
    """Copies equal the formulas bit for bit both ways, norms within rounding. The flag is 0, and 1 with an Inf."""
    numels, starts, numel = [1000, 3, 700], [0, 1024, 1536], 2560
    parts = [values(each, dtype, index, spoilt=False).float().clamp_(-1e4, 1e4).to(dtype).clone()
             for index, each in enumerate(numels)]  # fmt: skip
    table, factor = block_table(numels, starts, numel), statement.single(np.array(0.3))
    flat, norms, flag = torch.empty(numel), torch.empty(10), torch.zeros(1, dtype=torch.int32)
    gather_(parts, table, flat, scale=0.3, norms=norms, flag=flag)
    expected = np.zeros(numel)
    for part, start in zip(parts, starts, strict=True):
        expected[start : start + part.numel()] = statement.single(wide(part) * factor)
    np.testing.assert_array_equal(wide(flat), expected)
    squares = (expected.reshape(-1, 256) ** 2).sum(axis=1)
    np.testing.assert_allclose(wide(norms), squares, rtol=9 * 2.0**-24)  # one square and eight additions
    assert int(flag) == 0
    back = [torch.empty_like(part) for part in parts]
    scatter_(flat, back, table, scale=2.0, norms=norms, flag=flag)
    np.testing.assert_allclose(wide(norms), 4 * squares, rtol=9 * 2.0**-24)
    for part, start in zip(back, starts, strict=True):
        twice = torch.from_numpy(2 * expected[start : start + part.numel()]).float().to(dtype)
        np.testing.assert_array_equal(wide(part), wide(twice))
    parts[2][699] = float("inf")
    gather_(parts, table, flat, flag=flag)
    assert int(flag) == 1
