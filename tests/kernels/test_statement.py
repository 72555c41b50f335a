"""The reference against the statement of the formulas in numpy; the kernels equal the reference (test_agreement)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels import statement
from tests.kernels.cases import BITS, DTYPES, values
from zeropp_kernels import (
    delta_encode_,
    dequantize_,
    lossless_count_,
    lossless_encode_,
    lossless_layout,
    message_layout,
    quantize_,
    reduce_,
    state_layout,
)

NUMEL = 20_011


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
        x[1024] = 3e38  # the largest ones have a rule of their own, see test_properties
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
    total = np.zeros(NUMEL)
    for share in shares:
        total = statement.single(total + statement.decode(*statement.encode(wide(share), bits), NUMEL))
    out = torch.empty(NUMEL)
    reduce_(torch.cat([encoded(share, bits) for share in shares]), out, count=4, bits=bits, scale=1 / 3)
    expected = statement.single(total * statement.single(np.array(1 / 3)))
    np.testing.assert_array_equal(wide(out), expected)


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
    """The same length of every 32, codes of the rotated values, and the way back within the codes' steps."""
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


def test_lossless() -> None:
    held = values(NUMEL, torch.bfloat16)
    noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    new = (held.float() * (1 + 0.05 * noise)).bfloat16()
    new[::50] = -new[::50]
    patterns = [tensor.view(torch.int16).numpy().view(np.uint16) for tensor in (new, held)]
    difference = statement.key(patterns[0]) - statement.key(patterns[1])
    difference = (difference + 2**15) % 2**16 - 2**15
    far, farther = np.abs(difference) > 7, np.abs(difference) > 127
    offsets = torch.empty(2, -(-NUMEL // 256) + 1, dtype=torch.int64)
    lossless_count_(new, held, offsets)
    for row, escapes in zip(offsets.numpy(), (far, farther), strict=True):
        np.testing.assert_array_equal(np.diff(row), statement.grouped(escapes.astype(float), 256).sum(axis=1))
    rooms = {"room8": int(far.sum()), "room16": int(farther.sum())}
    layout = lossless_layout(NUMEL, **rooms)
    message = torch.empty(layout.nbytes, dtype=torch.uint8)
    lossless_encode_(new, held, offsets, message, **rooms)
    raw = message.numpy()
    pairs = raw[: layout.codes_nbytes].reshape(-1, 64)
    nibbles = np.concatenate([pairs & 15, pairs >> 4], axis=1).reshape(-1)[:NUMEL]
    np.testing.assert_array_equal(nibbles, np.where(far, 8, difference & 15))
    bytes8 = raw[layout.room8_offset :][: rooms["room8"]]
    np.testing.assert_array_equal(bytes8, np.where(farther, 128, difference & 255)[far])
    words = raw[layout.room16_offset :][: 2 * rooms["room16"]].view(np.uint16)
    np.testing.assert_array_equal(words, patterns[0][farther])
