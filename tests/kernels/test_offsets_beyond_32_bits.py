"""Offsets beyond 2**32 elements in every kernel, with little memory and time.

Buffers are reserved address ranges that stay almost untouched. Only the last program of each launch runs, under
Triton's interpreter, which computes with the integer widths of a GPU. Its results must equal the reference's on the end
of the buffer. ``test_large.py`` runs whole buffers.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import BITS, DEVICE, same_bits, values
from tests.kernels.fast import device
from zeropp_kernels import block_table, lossless_layout, message_layout, reference, state_layout

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="needs Triton's interpreter; test_large.py is for GPUs")

FAR = 1 << 32  # elements; even their 4-bit codes take 2**31 bytes, more than int32 offsets reach
TAIL = 20 * 256 + 77  # elements after FAR: fewer than a tile of any kernel, so the last tile has exactly these
# The first length makes the last tile narrow. The second fills a whole tile of the interpreter, which is wide.
LENGTHS = [FAR + TAIL, FAR + (1 << 15)]


@pytest.fixture(autouse=True)
def only_the_last_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from triton.runtime import interpreter

    builder, build = interpreter.interpreter_builder, interpreter.GridExecutor.__init__
    set_size, set_index = builder.set_grid_dim, builder.set_grid_idx
    size = [1, 1, 1]

    def init(self: Any, fn: object, names: object, grid: tuple[int, ...], *rest: Any) -> None:
        size[:] = *grid, *[1] * (3 - len(grid))
        build(self, fn, names, (1, 1), *rest)

    monkeypatch.setattr(interpreter.GridExecutor, "__init__", init)
    monkeypatch.setattr(builder, "set_grid_dim", lambda *_: set_size(*size))
    monkeypatch.setattr(builder, "set_grid_idx", lambda *_: set_index(*(each - 1 for each in size)))
    # Arguments are on CPU already, and copying them onto themselves would touch every page of the reserved buffers.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    yield


def reserved(numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return a zero tensor in reserved memory, which is larger than RAM and takes pages only when they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags=flags), dtype=dtype)


def ending(tail: Tensor, numel: int) -> Tensor:
    """Return a buffer of ``numel`` elements whose last elements are ``tail``."""
    buffer = reserved(numel, tail.dtype)
    buffer[numel - tail.numel() :] = tail
    return buffer


def end_of(message: Tensor, numel: int, bits: int, group: int = 0) -> tuple[Tensor, Tensor]:
    """Return codes and scales of the groups that hold the last ``numel - FAR`` elements of a message."""
    group = group or message_layout(numel, bits).group
    first, groups = FAR // group, -(-numel // group)
    scales_offset = groups * group * bits // 8
    codes = message[first * group * bits // 8 : scales_offset]
    return codes, message[scales_offset + 2 * first : scales_offset + 2 * groups]


def same_end(found: Tensor, expected: Tensor, numel: int, bits: int, group: int = 0) -> bool:
    small = numel - FAR
    group = group or message_layout(numel, bits).group
    size = -(-small // group) * group * bits // 8
    wanted = expected[:size], expected[size : size + 2 * -(-small // group)]
    return all(torch.equal(a, b) for a, b in zip(end_of(found, numel, bits, group), wanted, strict=True))


def encode(x: Tensor, bits: int) -> Tensor:
    message = torch.empty(message_layout(x.numel(), bits).nbytes, dtype=torch.uint8)
    reference.quantize_(x, message, 1, bits, False, None, 0.0, False)
    return message


def far_message(x: Tensor, numel: int, bits: int) -> Tensor:
    """Return a message of ``numel`` elements whose last elements are the encoded ``x``."""
    layout, small = message_layout(numel, bits), message_layout(x.numel(), bits)
    message, own = reserved(layout.nbytes), encode(x, bits)
    message[layout.codes_nbytes - small.codes_nbytes : layout.codes_nbytes] = own[: small.codes_nbytes]
    message[layout.scales_offset + 2 * (layout.groups - small.groups) :] = 0
    scales = own[small.scales_offset :][: 2 * small.groups]
    message[layout.scales_offset + 2 * (layout.groups - small.groups) :][: 2 * small.groups] = scales
    return message


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("numel", LENGTHS)
def test_quantize_with_feedback(numel: int, bits: int) -> None:
    tail, layout = values(numel - FAR, torch.bfloat16), state_layout(numel, bits)
    message = reserved(message_layout(numel, bits).nbytes)
    state = reserved(layout.nbytes)
    state[FAR : layout.codes_nbytes] = 0
    state[layout.scales_offset + 2 * FAR // layout.group :] = 0
    small, small_state = encode(tail, bits), torch.zeros(state_layout(tail.numel(), bits).nbytes, dtype=torch.uint8)
    for _ in range(2):
        device.quantize_(ending(tail, numel), message, 1, bits, True, state, 0.8, False)
        reference.quantize_(tail, small, 1, bits, True, small_state, 0.8, False)
    assert same_end(message, small, numel, bits)
    assert same_end(state, small_state, numel, 8, layout.group)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("numel", LENGTHS)
def test_dequantize_and_sums(numel: int, bits: int) -> None:
    """The second message begins beyond 2**31 bytes."""
    tails = [values(numel - FAR, torch.float32, seed) for seed in range(2)]
    message, small = far_message(tails[0], numel, bits), encode(tails[0], bits)
    out, expected = reserved(numel, torch.bfloat16), torch.empty(numel - FAR, dtype=torch.bfloat16)
    device.dequantize_(message, out, 1, bits, False)
    reference.dequantize_(small, expected, 1, bits, False)
    assert same_bits(out[FAR:], expected)
    both = reserved(2 * message.numel())
    for part, tail in zip(both.chunk(2), tails, strict=True):
        layout, wanted = message_layout(numel, bits), far_message(tail, numel, bits)
        for begin, end in [(FAR * bits // 8, layout.codes_nbytes),
                           (layout.scales_offset + 2 * FAR // layout.group, layout.nbytes)]:  # fmt: skip
            part[begin:end] = wanted[begin:end]
    twice = torch.cat([small, encode(tails[1], bits)])
    device.reduce_(both, out, 2, bits, True, 0.3, False, None, None)
    reference.reduce_(twice, expected, 2, bits, True, 0.3, False, None, None)
    assert same_bits(out[FAR:], expected)
    again = reserved(message_layout(numel, 4).nbytes)
    wanted = torch.empty(message_layout(numel - FAR, 4).nbytes, dtype=torch.uint8)
    device.reduce_quantize_(both, numel, 2, bits, 0.3, again, 1, 4, False, None, 0.0, False)
    reference.reduce_quantize_(twice, numel - FAR, 2, bits, 0.3, wanted, 1, 4, False, None, 0.0, False)
    assert same_end(again, wanted, numel, 4)


@pytest.mark.parametrize("numel", LENGTHS)
def test_plain_sums(numel: int) -> None:
    tails = [values(numel - FAR, torch.bfloat16, seed) for seed in range(2)]
    both = reserved(2 * numel, torch.bfloat16)
    for end, tail in zip((numel, 2 * numel), tails, strict=True):
        both[end - tail.numel() : end] = tail
    out, norms = reserved(numel, torch.float32), reserved(-(-numel // 256), torch.float32)
    expected, wanted = torch.empty(numel - FAR), torch.empty(-(-(numel - FAR) // 256))
    device.sum_(both, out, 2, 0.3, False, norms, None)
    reference.sum_(torch.cat(tails), expected, 2, 0.3, False, wanted, None)
    part = min(numel - FAR, 1 << 14)  # a tile of sum_kernel has 2**14 elements, and only the last tile is computed
    blocks = -(-part // 256)
    assert same_bits(out[-part:], expected[-part:]) and same_bits(norms[-blocks:], wanted[-blocks:])


@pytest.mark.parametrize("bits", BITS)
def test_the_last_of_many_messages(bits: int) -> None:
    """4097 messages of 2**20 elements: the offset ``index * nbytes`` of the last message exceeds 2**31 bytes."""
    numel, count = 1 << 20, 4097
    layout = message_layout(numel, bits)
    tail = values(numel, torch.bfloat16)
    messages = reserved(layout.nbytes * count)
    device.quantize_(ending(tail, numel * count), messages, count, bits, False, None, 0.0, False)
    out = reserved(numel * count, torch.float32)
    last = messages[-layout.nbytes :]
    small = encode(tail, bits)
    begin = (numel - 32768) * bits // 8  # first byte of the codes of the last tile, which has 32768 elements
    assert torch.equal(last[begin : layout.codes_nbytes], small[begin : layout.codes_nbytes])
    last.copy_(small)
    device.dequantize_(messages, out, count, bits, False)
    expected = torch.empty(numel)
    reference.dequantize_(small, expected, 1, bits, False)
    assert same_bits(out[-32768:], expected[-32768:])


@pytest.mark.parametrize("numel", LENGTHS)
def test_delta(numel: int) -> None:
    shard, held = values(numel - FAR, torch.float32), values(numel - FAR, torch.bfloat16, 1)
    far_held, message = ending(held, numel), reserved(message_layout(numel, 4).nbytes)
    received, small = ending(held, numel), encode(shard, 4)
    device.delta_encode_(ending(shard, numel), far_held, message, True)
    reference.delta_encode_(shard, held, small, True)
    assert same_end(message, small, numel, 4) and same_bits(far_held[FAR:], held)
    device.delta_apply_(message, received, 1)
    assert same_bits(received[FAR:], held)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("pinned", [False, True])
def test_tensors_that_lie_far_apart(bits: int, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tensor has more than 2**32 elements, and the last tile holds its end and the second tensor."""
    from zeropp_kernels.device import copy

    monkeypatch.setattr(copy, "is_pinned", lambda *_: pinned)
    # One program for each tile. With 32 programs, the last program would also run earlier tiles.
    monkeypatch.setattr(copy, "_PINNED_PROGRAMS", 1 << 31)
    numel = FAR + 20 * 256
    first, second = values(2 * 256, torch.bfloat16), values(17 * 256, torch.bfloat16, 1)
    tensors = [ending(first, FAR + first.numel()), second.clone()]
    table = block_table([each.numel() for each in tensors], [0, FAR + 3 * 256], numel)
    places = (table.host, table.entries, table.owners)
    expected = torch.cat([first, torch.zeros(256, dtype=torch.bfloat16), second])
    flat = reserved(numel, torch.bfloat16)
    device.gather_(tensors, *places, flat, 1.0, None, None, False)
    assert same_bits(flat[FAR:], expected)
    message = reserved(message_layout(numel, bits).nbytes)
    device.quantize_tensors_(tensors, *places, numel, message, 1, bits, False, None, 0.0, False)
    assert same_end(message, encode(expected, bits), numel, bits)
    back = [reserved(each.numel(), torch.bfloat16) for each in tensors]
    device.scatter_(flat, back, *places, 1.0, None, None)
    assert same_bits(back[0][FAR:], first) and same_bits(back[1], second)


@pytest.mark.parametrize("tail", [TAIL, 6 * 2048])  # narrow access (not a multiple of 256), wide access
def test_lossless(tail: int) -> None:
    numel = FAR + tail
    held = values(tail, torch.bfloat16)
    new = (held.float() * (1 + 0.02 * values(tail, torch.float32, 1, spoilt=False).clamp(-3, 3))).bfloat16()
    small = torch.empty(2, -(-tail // 2048) + 1, dtype=torch.int64)
    reference.lossless_count_(new, held, small)
    room8, room16 = small[:, -1].tolist()
    starts = torch.zeros(2, -(-numel // 2048) + 1, dtype=torch.int64)
    far_held, far_new = ending(held, numel), ending(new, numel)
    device.lossless_count_(far_new, far_held, starts)
    assert torch.equal(starts[:, FAR // 2048 :], small)
    layout, own = lossless_layout(numel, room8, room16), lossless_layout(tail, room8, room16)
    message, expected = (reserved(each.nbytes) for each in (layout, own))
    device.lossless_encode_(far_new, far_held, starts, message, room8, room16)
    reference.lossless_encode_(new, held, small, expected, room8, room16)
    assert torch.equal(message[FAR // 2 : layout.codes_nbytes], expected[: own.codes_nbytes])
    ends = message[layout.room8_offset - 8 * own.sections :], expected[own.starts_offset :]
    assert torch.equal(*(end[: own.room16_offset - own.starts_offset] for end in ends))
    assert torch.equal(message[layout.room16_offset :][: 2 * room16], expected[own.room16_offset :][: 2 * room16])
    out = reserved(numel, torch.bfloat16)
    device.lossless_decode_(message, far_held, out, 1, room8, room16)
    assert torch.equal(out[FAR:].view(torch.int16), new.view(torch.int16))
