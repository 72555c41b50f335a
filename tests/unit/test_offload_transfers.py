"""Transfers move the right bytes by every way of I/O; short, failing and refused system calls are handled."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.disk_faults import Calls, wait_until
from zeropp.comm.streams import ThreadEvent
from zeropp.offload import swap, transfer
from zeropp.offload.swap import Extent, SwapError, SwapFile, aligned
from zeropp.offload.transfer import IoOptions, Transfers

LONG = 60.0  # seconds after which a wait counts as a hang
Start = Callable[..., Transfers]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SwapFile]:
    """A swap file whose descriptor for direct I/O is a plain one, so that calls may stop at any byte."""
    made = SwapFile(tmp_path)
    descriptors = made.allocate(0, torch.uint8).descriptors
    plain = descriptors.direct = os.dup(descriptors.cached)
    yield made
    os.close(plain)


@pytest.fixture
def start(file: SwapFile) -> Iterator[Start]:
    """Return a function that makes transfers, which are closed before the file's descriptors."""
    made = []

    def begin(**aio: int) -> Transfers:
        made.append(Transfers(IoOptions(**aio)))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def filled(file: SwapFile, nbytes: int) -> Extent:
    """Return an extent of random bytes."""
    extent = file.allocate(nbytes, torch.uint8)
    extent.tensor.random_()
    return extent


def memory_of(nbytes: int, shift: int = 0) -> Tensor:
    """Return random bytes [nbytes] that start ``shift`` bytes after the start of a page."""
    return aligned(shift + nbytes, torch.uint8).random_()[shift:]


def record_addresses(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record (descriptor, memory address) of every call from here on, and return the list."""
    found = list[tuple[int, int]]()

    def around(real: Callable[[int, memoryview, int], int]) -> Callable[[int, memoryview, int], int]:
        def call(descriptor: int, memory: memoryview, offset: int) -> int:
            found.append((descriptor, ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))))
            return real(descriptor, memory, offset)

        return call

    patch.setattr(swap, "read_at", around(swap.read_at))
    patch.setattr(swap, "write_at", around(swap.write_at))
    return found


def move(transfers: Transfers, word: str, extent: Extent, begin: int, memory: Tensor) -> ThreadEvent:
    event = (transfers.read if word == "read" else transfers.write)(extent, begin, memory)
    assert isinstance(event, ThreadEvent)
    return event


def alike(extent: Extent, begin: int, memory: Tensor) -> bool:
    return torch.equal(extent.tensor[begin : begin + memory.numel()], memory)


# Bytes.


def move_at_random(transfers: Transfers, extents: list[Extent], times: int, seed: int) -> None:
    """Read and write at random, and compare with copies: only the given ranges may change."""
    chosen, unit = random.Random(seed), extents[0].alignment
    copies = [extent.tensor.clone() for extent in extents]

    def place(nbytes: int) -> int:
        return chosen.choice([chosen.randint(0, nbytes // unit) * unit, chosen.randint(0, nbytes), nbytes])

    for _ in range(times):
        extent, copy = chosen.choice(list(zip(extents, copies, strict=True)))
        dtype = chosen.choice([torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
        begin, end = sorted(place(extent.nbytes) for _ in range(2))
        nbytes = (end - begin) // dtype.itemsize * dtype.itemsize
        # Memory on a page, at the same offset in a page as in the file's block, or anywhere that the dtype allows.
        at = chosen.choice([0, begin % unit, chosen.randrange(unit)]) // dtype.itemsize * dtype.itemsize
        around = memory_of(unit + nbytes + unit)
        before, own = around.clone(), slice(at, at + nbytes)
        word = chosen.choice(["read", "write"])
        assert move(transfers, word, extent, begin, around[own].view(dtype)).wait(LONG)
        if word == "read":
            before[own] = copy[begin : begin + nbytes]
        else:
            copy[begin : begin + nbytes] = before[own]
        what = f"{word} {nbytes} bytes from byte {begin} of {extent.nbytes}, memory at {at}, {dtype}"
        assert torch.equal(around, before), what
        assert all(torch.equal(each.tensor, like) for each, like in zip(extents, copies, strict=True)), what


@pytest.mark.parametrize("way", ["direct", "cached"])
def test_bytes_at_random(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "direct", real direct I/O must get whole blocks and aligned memory, or the file system would refuse it."""
    file = SwapFile(tmp_path)
    unit, seen = file.alignment, Calls().put(monkeypatch)
    extents = [filled(file, nbytes) for nbytes in (3 * unit, 5 * unit + 77, 1, 4 * unit - 1, 2 * unit)]
    descriptors = extents[0].descriptors
    if way == "direct" and descriptors.direct is None:
        pytest.skip(f"the file system of {tmp_path} refuses direct I/O")
    direct = descriptors.direct = descriptors.direct if way == "direct" else None
    addresses = record_addresses(monkeypatch)
    transfers = Transfers(IoOptions(block_size=2 * unit, queue_depth=3))
    move_at_random(transfers, extents, 300, 0)
    transfers.close()
    assert descriptors.direct == direct, "the file system refused direct I/O"
    past = [(nbytes, offset) for _, descriptor, nbytes, offset in seen.seen if descriptor == direct]
    assert bool(past) == (way == "direct")
    assert all(nbytes % unit == 0 and offset % unit == 0 for nbytes, offset in past)
    assert all(address % unit == 0 for descriptor, address in addresses if descriptor == direct)


def test_nothing_to_move(file: SwapFile, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, extent, transfers = Calls().put(monkeypatch), filled(file, 100), start()
    for each, begin in [(extent, 0), (extent, 37), (extent, 100), (file.allocate(0, torch.float32), 0)]:
        for word in ("read", "write"):
            assert move(transfers, word, each, begin, torch.empty(0)).done()
    assert seen.seen == []


# Calls that move fewer bytes than requested.


def test_the_rest_of_a_block_goes_through_the_cache(
    file: SwapFile, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit, transfers = file.alignment, start(queue_depth=1)
    extent, half = filled(file, 2 * unit), unit // 2
    direct, cached = extent.descriptors.direct, extent.descriptors.cached
    seen = Calls(limit=lambda nbytes: half).put(monkeypatch)
    for word in ("read", "write"):
        seen.seen.clear()
        memory = memory_of(2 * unit)
        assert move(transfers, word, extent, 0, memory).wait(LONG) and alike(extent, 0, memory)
        assert [(descriptor, nbytes, offset - extent.offset) for _, descriptor, nbytes, offset in seen.seen] == [
            (direct, 4 * half, 0), (cached, 3 * half, half), (direct, 2 * half, 2 * half), (cached, half, 3 * half)
        ]  # fmt: skip


def test_calls_that_stop_anywhere(file: SwapFile, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, unit = random.Random(1), file.alignment
    extents = [filled(file, nbytes) for nbytes in (3 * unit, 4 * unit + 9)]
    Calls(limit=lambda nbytes: chosen.randint(1, nbytes)).put(monkeypatch)
    move_at_random(start(block_size=2 * unit, queue_depth=2), extents, 50, 2)


@pytest.mark.parametrize("word", ["read", "write"])
@pytest.mark.parametrize("number", [0, errno.EIO, errno.ENOSPC, errno.EINVAL])
def test_a_transfer_that_stops_part_way_raises_an_error(
    number: int, word: str, file: SwapFile, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call moves one of three blocks. The second fails, or returns 0 bytes each time."""
    file.allocate(1, torch.uint8)
    unit, extent = file.alignment, filled(file, 3 * file.alignment)
    folder, rest = extent.descriptors.folder, extent.offset + unit
    Calls(
        limit=lambda nbytes: unit if number or nbytes > 2 * unit else 0,
        error=lambda call: number if call[3] >= rest else 0,
    ).put(monkeypatch)
    event = move(start(), word, extent, 0, memory_of(3 * unit))
    for _ in range(2):
        with pytest.raises(SwapError) as caught:
            event.wait(LONG)
        assert not event.done() and caught.value.errno == (number or errno.EIO)
        assert caught.value.filename == str(folder) and repr(str(folder)) in str(caught.value)
        text = os.strerror(number or errno.EIO)
        assert f"cannot {word} {2 * unit} bytes at byte {rest} of a swap file: {text}" in str(caught.value)


def test_a_file_that_has_ended(file: SwapFile, start: Start) -> None:
    unit, extent = file.alignment, filled(file, 3 * file.alignment)
    os.ftruncate(extent.descriptors.cached, unit + 100)
    with pytest.raises(SwapError, match=f"cannot read {2 * unit - 100} bytes at byte {unit + 100} of") as caught:
        start().read(extent, 0, memory_of(3 * unit)).wait(LONG)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("aio", [{}, {"single_submit": 1}, {"overlap_events": 0}], ids=str)
def test_a_failure_leaves_its_transfer_and_no_other(
    aio: dict[str, int], file: SwapFile, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = file.alignment
    broken, whole = filled(file, 5 * unit), filled(file, 3 * unit)
    third, memory = broken.offset + 2 * unit, memory_of(3 * unit)
    seen = Calls(error=lambda call: errno.EIO * (call[3] == third), gate=threading.Event()).put(monkeypatch)
    transfers = start(block_size=unit, queue_depth=1, **aio)
    failed, well = transfers.read(broken, 0, memory_of(5 * unit)), transfers.write(whole, 0, memory)
    assert seen.gate is not None
    seen.gate.set()
    with pytest.raises(SwapError):
        failed.wait(LONG)
    assert well.wait(LONG) and alike(whole, 0, memory)
    begins = [*range(broken.offset, third + 1, unit), *range(whole.offset, whole.offset + 3 * unit, unit)]
    assert [call[3] for call in seen.seen] == begins, "requests must be in order, and none may follow the failure"


def test_a_failure_is_told_when_no_call_is_under_way(
    file: SwapFile, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure is reported when no call reads the memory any more. The first of two errors is reported."""
    unit, held, seen = file.alignment, threading.Event(), Calls()
    broken, other = filled(file, 2 * unit), filled(file, unit)

    def error(call: tuple[str, int, int, int]) -> int:
        if call[3] == broken.offset:
            assert wait_until(lambda: len(seen.seen) == 2)
            return errno.EIO
        if call[3] == broken.offset + unit:
            held.wait(LONG)
            return errno.ENOSPC
        return 0

    seen.error = error
    seen.put(monkeypatch)
    transfers = start(block_size=unit, queue_depth=2)
    failed = transfers.write(broken, 0, memory_of(2 * unit))
    # The only free thread does this write, after it has recorded the failure.
    assert transfers.write(other, 0, memory_of(unit)).wait(LONG)
    assert not failed.wait(0)
    held.set()
    with pytest.raises(SwapError) as caught:
        failed.wait(LONG)
    assert caught.value.errno == errno.EIO


# Direct or cached, in place or by a copy.


def ways(unit: int) -> dict[str, tuple[str, int, int, int, list[tuple[bool, bool, int, int]]]]:
    """Return cases for an extent of 4 blocks and 100 bytes: word, begin, bytes, shift of the memory, expected calls.

    A call is (direct, in place, begin, bytes): direct is True if the call goes past the page cache, in place is True if
    the call uses the caller's memory instead of a copy.
    """
    return {
        "whole, read": ("read", unit, 2 * unit, 0, [(True, True, unit, 2 * unit)]),
        "whole, written": ("write", unit, 2 * unit, 0, [(True, True, unit, 2 * unit)]),
        "out of step, read": ("read", unit, 2 * unit, 512, [(True, False, unit, 2 * unit)]),
        "out of step, written": ("write", unit, 2 * unit, 512, [(True, False, unit, 2 * unit)]),
        "part, read": ("read", unit + 5, 10, 0, [(True, False, unit, unit)]),
        "part, written": ("write", unit + 5, 10, 0, [(False, True, unit + 5, 10)]),
        "parts around a whole, read": (
            "read", unit - 3, unit + 6, unit - 3,
            [(True, False, 0, unit), (True, True, unit, unit), (True, False, 2 * unit, unit)],
        ),
        "parts around a whole, written": (
            "write", unit - 3, unit + 6, unit - 3,
            [(False, True, unit - 3, 3), (True, True, unit, unit), (False, True, 2 * unit, 3)],
        ),
        "end, read": ("read", 3 * unit, unit + 100, 0, [(True, False, 3 * unit, 2 * unit)]),
        "end, written": ("write", 3 * unit, unit + 100, 0, [(True, False, 3 * unit, 2 * unit)]),
        "part of the end, written": ("write", 4 * unit + 50, 50, 0, [(False, True, 4 * unit + 50, 50)]),
    }  # fmt: skip


@pytest.mark.parametrize("name", ways(1))
def test_blocks_go_past_the_cache_in_place_or_by_a_copy(
    name: str, file: SwapFile, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.allocate(1, torch.uint8)
    extent = filled(file, 4 * file.alignment + 100)
    word, begin, nbytes, shift, expected = ways(file.alignment)[name]
    seen, memory = Calls().put(monkeypatch), memory_of(nbytes, shift)
    addresses = record_addresses(monkeypatch)
    assert move(start(queue_depth=1), word, extent, begin, memory).wait(LONG) and alike(extent, begin, memory)
    found = []
    for (_, descriptor, count, offset), (_, address) in zip(seen.seen, addresses, strict=True):
        at = offset - extent.offset
        found.append((descriptor == extent.descriptors.direct, address - memory.data_ptr() == at - begin, at, count))
    assert found == expected


def test_the_memory_of_copies_is_kept(file: SwapFile, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    made, unit, extent = list[int](), file.alignment, filled(file, 3 * file.alignment)

    def counted(numel: int, dtype: torch.dtype) -> Tensor:
        made.append(numel)
        return aligned(numel, dtype)

    monkeypatch.setattr(transfer, "aligned", counted)
    transfers = start(queue_depth=1)
    for blocks in (1, 2, 1, 2, 3):
        transfers.write(extent, 0, memory_of(blocks * unit, 512)).wait(LONG)
    assert made == [unit, 2 * unit, 3 * unit]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP], ids=errno.errorcode.get)
@pytest.mark.parametrize(("word", "shift"), [("read", 0), ("write", 0), ("read", 512), ("write", 512)])
def test_direct_io_that_is_refused_when_first_used(
    word: str, shift: int, number: int, file: SwapFile, start: Start, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    unit, extent = file.alignment, filled(file, 6 * file.alignment + 10)
    descriptors, memory = extent.descriptors, memory_of(6 * unit + 10, shift)
    direct = descriptors.direct
    gate = threading.Event()
    seen = Calls(error=lambda call: number * (call[1] == direct), gate=gate).put(monkeypatch)
    transfers = start(block_size=unit, queue_depth=3)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "zeropp"):
        event = move(transfers, word, extent, 0, memory)
        assert wait_until(lambda: len(seen.seen) == 3)
        gate.set()
        assert event.wait(LONG) and alike(extent, 0, memory)
        assert transfers.read(extent, 0, memory).wait(LONG)
    (message,) = [record.getMessage() for record in caplog.records]
    expected = (str(descriptors.folder), "O_DIRECT", os.strerror(number), "nvme_path")
    assert all(words in message for words in expected)
    assert sum(call[1] == direct for call in seen.seen) == 3, "only calls in flight may still use direct I/O"
