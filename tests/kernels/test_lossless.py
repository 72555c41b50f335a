"""Lossless messages at borders of sections, rooms and lengths, and damaged messages that no encoder has written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.agreement import check, weights
from tests.kernels.cases import DEVICE, poisoned
from tests.kernels.fast import device
from zeropp_kernels import lossless_layout, reference
from zeropp_kernels.wire import SECTION

NUMEL = 3 * SECTION + 300  # three full sections, and one with a full block and 44 elements
BORDERS = [0, 63, 64, 127, 128, 2047, 2048, 4095, 4096, 6143, 6144, 6271, 6272, 6399, 6400, NUMEL - 1]


def moved(held: Tensor, steps: Tensor) -> Tensor:
    """Return the bfloat16 values whose keys differ from those of ``held`` by ``steps``."""

    def turned(bits: Tensor) -> Tensor:
        return torch.where(bits < 0, bits ^ 0x7FFF, bits)

    return turned(turned(held.view(torch.int16)) + steps.to(torch.int16)).view(torch.bfloat16)


def counted(new: Tensor, held: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return the starts of each section, and the exact number of escapes to 8 and to 16 bits."""
    starts = torch.full((2, -(-new.numel() // SECTION) + 1), -1)
    check("lossless_count_", (new, held, starts), [2])
    return starts, (int(starts[0, -1]), int(starts[1, -1]))


def round_trip(new: Tensor, held: Tensor) -> tuple[int, int]:
    """Encode and decode, require the exact values back, and return the number of escapes of both kinds."""
    starts, rooms = counted(new, held)
    message = poisoned(lossless_layout(new.numel(), *rooms).nbytes)
    check("lossless_encode_", (new, held, starts, message, *rooms), [3])
    out = held.clone()
    check("lossless_decode_", (message, held, out, 1, *rooms), [2])
    assert torch.equal(out.view(torch.int16), new.view(torch.int16))
    return rooms


@pytest.mark.every(8)
@pytest.mark.parametrize("place", BORDERS)
def test_an_escape_at_a_border(place: int) -> None:
    """A single escape of each kind, and then the same place among escapes in all sections."""
    _, held = weights(NUMEL, torch.bfloat16, 0)
    for size, rooms in ((7, (1, 0)), (-8, (1, 0)), (6, (0, 0)), (-128, (1, 0)), (128, (0, 1)), (-129, (0, 1))):
        steps = torch.zeros(NUMEL, dtype=torch.int64)
        steps[place] = size
        assert round_trip(moved(held, steps), held) == rooms
    steps[::5], steps[::9] = 20, -20_000
    round_trip(moved(held, steps), held)


@pytest.mark.parametrize(("size", "kind"), [(0, None), (-7, None), (100, 0), (-30_000, 1)])
def test_nothing_or_everything_escapes(size: int, kind: int | None) -> None:
    _, held = weights(NUMEL, torch.bfloat16, 1)
    rooms = round_trip(moved(held, torch.full((NUMEL,), size)), held)
    assert rooms == tuple(NUMEL if index == kind else 0 for index in range(2))


@pytest.mark.parametrize("numel", [1, 65, 2047, 2048, 2049, 2 * SECTION])
def test_lengths_around_a_section(numel: int) -> None:
    round_trip(*weights(numel, torch.bfloat16, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unused_rooms_for_escapes_are_zeros(dtype: torch.dtype) -> None:
    """Equal values then give equal bytes. Some rooms are larger than the part that one program clears at a time."""
    new, held = weights(NUMEL, dtype, 3)
    starts, (room8, room16) = counted(new, held)
    tight = poisoned(lossless_layout(NUMEL, room8, room16).nbytes)
    check("lossless_encode_", (new, held, starts, tight, room8, room16), [3])
    for more8, more16 in [(0, 1), (1, 0), (7, 40), (5000, 0), (0, 5000), (20_011, 9)]:
        layout = lossless_layout(NUMEL, room8 + more8, room16 + more16)
        message = poisoned(layout.nbytes)
        check("lossless_encode_", (new, held, starts, message, room8 + more8, room16 + more16), [3])
        own = lossless_layout(NUMEL, room8, room16)
        assert torch.equal(message[: own.room8_offset + room8], tight[: own.room8_offset + room8])
        assert not message[own.room8_offset + room8 : layout.room16_offset].any()
        words = slice(layout.room16_offset, layout.room16_offset + 2 * room16)
        assert torch.equal(message[words], tight[own.room16_offset :][: 2 * room16])
        assert not message[words.stop :].any()


def test_rooms_that_are_too_small() -> None:
    """Escapes without a place are lost. All other elements are decoded correctly."""
    new, held = weights(NUMEL, torch.bfloat16, 4)
    starts, (room8, room16) = counted(new, held)
    for few8, few16 in [(room8 - 1, room16 - 1), (room8 // 2, room16), (room8, 1), (0, 0)]:
        layout = lossless_layout(NUMEL, few8, few16)
        message = poisoned(layout.nbytes)
        check("lossless_encode_", (new, held, starts, message, few8, few16), [3])
        pairs = message[layout.starts_offset : layout.room8_offset].view(torch.int32).view(-1, 2)
        for column, room in enumerate((few8, few16)):
            assert torch.equal(pairs[:, column].long(), starts[column, :-1].clamp(max=room))
        out = torch.empty_like(held)
        check("lossless_decode_", (message, held, out, 1, few8, few16), [2])
        same = out.view(torch.int16) == new.view(torch.int16)
        assert int((~same).sum()) <= room8 - few8 + room16 - few16
        if (few8, few16) == (room8 - 1, room16 - 1):
            assert int((~same).sum()) >= 1


def test_starts_past_32_bits_end_at_the_room() -> None:
    """Starts above 2**32 are limited to the room in the message; wrapping to int32 would give a wrong place."""
    new, held = weights(SECTION, torch.bfloat16, 5)
    starts, rooms = counted(new, held)
    far = starts + (1 << 32)
    message = poisoned(lossless_layout(SECTION, *rooms).nbytes).to(DEVICE)
    device.lossless_encode_(*(each.to(DEVICE) for each in (new, held, far)), message, *rooms)
    layout = lossless_layout(SECTION, *rooms)
    assert message[layout.starts_offset : layout.room8_offset].view(torch.int32).tolist() == list(rooms)


def spoilt(message: Tensor, part: slice, seed: int) -> Tensor:
    bad = message.clone()
    noise = torch.randint(0, 256, bad[part].shape, generator=torch.Generator().manual_seed(seed))
    bad[part] = noise.to(torch.uint8)
    return bad


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("part", ["codes", "starts", "everything"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_damaged_message_is_read_within_its_bounds(count: int, part: str, seed: int) -> None:
    """Kernel and reference give equal bits, whatever bytes surround the messages; the kernel writes only its output."""
    new, held = weights(NUMEL, torch.bfloat16, 6)
    starts, (room8, room16) = counted(new, held)
    rooms = (room8, room16) if seed % 2 else (room8 // 2 + 3, room16 // 2)
    layout = lossless_layout(NUMEL, *rooms)
    message = poisoned(layout.nbytes)
    reference.lossless_encode_(new, held, starts, message, *rooms)
    bounds = {
        "codes": slice(0, layout.codes_nbytes),
        "starts": slice(layout.starts_offset, layout.room8_offset),
        "everything": slice(0, layout.nbytes),
    }[part]
    messages = torch.cat([spoilt(message, bounds, 10 * seed + index) for index in range(count)])
    held = held.repeat(count)
    expected = torch.empty_like(held)
    reference.lossless_decode_(messages, held, expected, count, *rooms)
    for guard in (0x00, 0x5A):
        around = torch.full((messages.numel() + 2 * 8192,), guard, dtype=torch.uint8, device=DEVICE)
        inner = around[8192:-8192]
        inner.copy_(messages)
        out = torch.full((held.numel() + 2 * 4096,), 3.0, dtype=torch.bfloat16, device=DEVICE)
        device.lossless_decode_(inner, held.to(DEVICE), out[4096:-4096], count, *rooms)
        assert torch.equal(out[4096:-4096].view(torch.int16).cpu(), expected.view(torch.int16))
        assert bool((out[:4096] == 3.0).all()) and bool((out[-4096:] == 3.0).all())


@pytest.mark.parametrize("pair", [(-1, -1), (-(1 << 31), -(1 << 31)), ((1 << 31) - 1, (1 << 31) - 1), (1 << 30, -5)])
def test_starts_outside_the_rooms_are_taken_as_their_ends(pair: tuple[int, int]) -> None:
    new, held = weights(NUMEL, torch.bfloat16, 7)
    starts, rooms = counted(new, held)
    layout = lossless_layout(NUMEL, *rooms)
    message = poisoned(layout.nbytes)
    reference.lossless_encode_(new, held, starts, message, *rooms)
    ends = message.clone()
    nearest = [min(max(each, 0), room) for each, room in zip(pair, rooms, strict=True)]
    for target, values in ((message, pair), (ends, nearest)):
        pairs = target[layout.starts_offset : layout.room8_offset].view(torch.int32).view(-1, 2)
        pairs[1] = torch.tensor(values, dtype=torch.int32)
    found, expected = torch.empty_like(held), torch.empty_like(held)
    check("lossless_decode_", (message, held, found, 1, *rooms), [2])
    check("lossless_decode_", (ends, held, expected, 1, *rooms), [2])
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
