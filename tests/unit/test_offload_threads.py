"""Threads of transfers: the number of requests in flight, refused calls, and the end of threads."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.disk_faults import Calls, offload_threads, wait_until
from zeropp.comm import threads
from zeropp.comm.streams import ThreadEvent
from zeropp.offload import transfer
from zeropp.offload.swap import Extent, SwapError, SwapFile
from zeropp.offload.transfer import IoOptions, Transfers

LONG = 60.0  # seconds after which a wait counts as a hang
SHORT = 0.05  # seconds to wait for an event that must not happen
Start = Callable[..., Transfers]


@pytest.fixture
def file(tmp_path: Path) -> SwapFile:
    """A swap file without direct I/O, because the threads do not depend on the descriptor."""
    made = SwapFile(tmp_path)
    made.allocate(0, torch.uint8).descriptors.direct = None
    return made


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that makes transfers, which are closed after the test."""
    made = []

    def begin(**aio: int) -> Transfers:
        made.append(Transfers(IoOptions(**aio)))
        return made[-1]

    yield begin
    for each in made:
        each.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event that is set after the test, so that closing transfers does not wait for it."""
    event = threading.Event()
    yield event
    event.set()


def blocks(file: SwapFile, count: int) -> tuple[Extent, Tensor]:
    """Return an extent of ``count`` blocks and a tensor of random bytes for it."""
    nbytes = count * file.alignment
    return file.allocate(nbytes, torch.uint8), torch.empty(nbytes, dtype=torch.uint8).random_()


# Requests in flight.


@pytest.mark.parametrize(
    ("aio", "count"),
    [
        ({}, 8),
        ({"queue_depth": 1}, 1),
        ({"queue_depth": 3}, 3),
        ({"queue_depth": 2, "intra_op_parallelism": 2}, 4),
        ({"queue_depth": 9, "intra_op_parallelism": 8}, 64),
    ],
    ids=str,
)
def test_so_many_requests_are_under_way(
    aio: dict[str, int], count: int, file: SwapFile, start: Start, gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    before = set(offload_threads())
    transfers, seen = start(block_size=1, **aio), Calls(gate=gate).put(monkeypatch)
    assert len(set(offload_threads()) - before) == count
    extent, memory = blocks(file, count + 3)
    event = transfers.write(extent, 0, memory)
    assert wait_until(lambda: seen.most == count)
    assert not wait_until(lambda: seen.most > count, SHORT)
    gate.set()
    assert event.wait(LONG) and torch.equal(extent.tensor, memory)
    assert seen.most == count and len(seen.seen) == count + 3


@pytest.mark.parametrize(
    ("part", "more", "sizes"),
    [(0, 1, [1] * 7), (3, 0, [3, 3, 1]), (2, 1, [3, 3, 1]), (7, 0, [7]), (6, 0, [6, 1]), (50, 0, [7])],
)
def test_a_request_has_block_size_at_most(
    part: int, more: int, sizes: list[int], file: SwapFile, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size is ``block_size`` rounded up to whole blocks, and requests begin at blocks of the file."""
    unit, seen = file.alignment, Calls().put(monkeypatch)
    extent, memory = blocks(file, 9)
    transfers = start(block_size=part * unit + more, queue_depth=1)
    assert transfers.read(extent, unit, memory[: 7 * unit]).wait(LONG)
    assert [nbytes // unit for _, _, nbytes, _ in seen.seen] == sizes
    seen.seen.clear()
    assert transfers.write(extent, unit - 3, memory[: 7 * unit + 8]).wait(LONG)
    asked = [nbytes for _, _, nbytes, _ in seen.seen]
    assert asked == [3, *(size * unit for size in sizes), 5]
    begins = [extent.offset + unit - 3 + sum(asked[:number]) for number in range(len(asked))]
    assert [offset for *_, offset in seen.seen] == begins, "requests must be in order, without gaps"


def test_one_request_of_each_transfer(
    file: SwapFile, start: Start, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers, seen = start(block_size=1, queue_depth=4, single_submit=True), Calls(gate=gate).put(monkeypatch)
    both = [blocks(file, 3) for _ in range(2)]
    events = [transfers.write(extent, 0, memory) for extent, memory in both]
    assert wait_until(lambda: len(seen.seen) == 2)
    assert not wait_until(lambda: len(seen.seen) > 2, SHORT)
    assert {call[3] for call in seen.seen} == {extent.offset for extent, _ in both}
    gate.set()
    for event, (extent, memory) in zip(events, both, strict=True):
        assert event.wait(LONG) and torch.equal(extent.tensor, memory)
    assert seen.most == 2 and len(seen.seen) == 6


@pytest.mark.parametrize("overlap", [True, False])
def test_transfers_one_after_another(
    overlap: bool, file: SwapFile, start: Start, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request of the first transfer is slow. Without overlap, the second transfer waits for it."""
    transfers, together = start(block_size=1, queue_depth=4, overlap_events=overlap), threading.Barrier(4)
    (first, one), (second, other) = blocks(file, 2), blocks(file, 4)

    def late(call: tuple[str, int, int, int]) -> int:
        if call[3] == first.offset + file.alignment:
            gate.wait(LONG)
        elif call[3] >= second.offset and not overlap:
            together.wait(20)
        return 0

    seen = Calls(error=late).put(monkeypatch)
    events = [transfers.write(first, 0, one), transfers.write(second, 0, other)]
    if overlap:
        assert events[1].wait(LONG) and not events[0].wait(0)
    else:
        assert wait_until(lambda: len(seen.seen) == 2)
        assert not wait_until(lambda: len(seen.seen) > 2, SHORT)
        assert {call[3] for call in seen.seen} == {first.offset, first.offset + file.alignment}
    gate.set()
    assert all(event.wait(LONG) for event in events)
    assert torch.equal(first.tensor, one) and torch.equal(second.tensor, other)


# Refused calls.


def test_arguments_that_cannot_be(file: SwapFile, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, transfers, extent = Calls().put(monkeypatch), start(), file.allocate(100, torch.float32)
    with pytest.raises(ValueError, match=r"read into has shape \[3, 2\] and strides \[1, 3\] on cpu; expected a conti"):
        transfers.read(extent, 0, torch.zeros(2, 3).t())
    with pytest.raises(ValueError, match=r"written from has shape \[4\] and strides \[1\] on meta; expected .* CPU"):
        transfers.write(extent, 0, torch.empty(4, device="meta"))
    for begin, numel in [(-1, 4), (-8, 1), (397, 1), (0, 101), (401, 0)]:
        end = begin + 4 * numel
        with pytest.raises(ValueError, match=f"read into needs bytes {begin} to {end}, but the extent has .* 0 to 400"):
            transfers.read(extent, begin, torch.zeros(numel))
        with pytest.raises(ValueError, match=f"written from needs bytes {begin} to {end}, but"):
            transfers.write(extent, begin, torch.zeros(numel))
    transfers.close()
    with pytest.raises(RuntimeError, match=r"these transfers are closed; begin .* before close"):
        transfers.read(extent, 0, torch.zeros(1))
    assert seen.seen == []


# Ends of threads.


def test_close_waits_for_transfers_that_have_begun(
    file: SwapFile, start: Start, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(offload_threads())
    transfers = start(block_size=1, queue_depth=2)
    own, (extent, memory) = set(offload_threads()) - before, blocks(file, 5)
    Calls(gate=gate).put(monkeypatch)
    monkeypatch.setattr(threads, "_CLOSING", 20.0)
    events = [transfers.write(extent, 0, memory) for _ in range(2)]
    threading.Timer(0.1, gate.set).start()
    transfers.close()
    assert all(event.done() for event in events) and not any(thread.is_alive() for thread in own)
    assert torch.equal(extent.tensor, memory)
    transfers.close()  # a second close does nothing


def test_close_does_not_wait_for_ever(
    file: SwapFile, start: Start, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a disk that hangs, close returns after a limit that all threads share."""
    transfers, (extent, memory) = start(), blocks(file, 1)
    Calls(gate=gate).put(monkeypatch)
    event = transfers.write(extent, 0, memory)
    monkeypatch.setattr(threads, "_CLOSING", SHORT)
    transfers.close()
    assert not event.wait(0)
    gate.set()
    assert event.wait(LONG)
    now, asked = 0.0, list[float]()

    def join(timeout: float) -> None:
        nonlocal now
        now += timeout
        asked.append(timeout)

    hanging: Any = [SimpleNamespace(join=join) for _ in range(3)]
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: now))
    threads._join(hanging)
    assert asked == [SHORT, 0, 0]


def test_dropped_transfers_end_their_threads_after_begun_requests(
    file: SwapFile, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(offload_threads())
    transfers, (extent, memory) = Transfers(IoOptions(block_size=1, queue_depth=2)), blocks(file, 5)
    own = set(offload_threads()) - before
    assert len(own) == 2
    Calls(gate=gate).put(monkeypatch)
    event = transfers.write(extent, 0, memory)
    del transfers
    gc.collect()
    gate.set()
    assert event.wait(LONG) and torch.equal(extent.tensor, memory)
    assert wait_until(lambda: not any(thread.is_alive() for thread in own), LONG)


def test_one_that_is_dropped_inside_its_own_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage collection may run anywhere, also while a thread holds the lock of the transfers' queue."""
    # Use a separate registry of threads, so that pytest can end even if this thread hangs.
    monkeypatch.setattr(threads, "_running", weakref.WeakKeyDictionary())
    kept = [Transfers(IoOptions(queue_depth=1))]
    (queue,) = (each._queue for each in kept)

    def drop() -> None:
        with queue._changed:
            kept.clear()
            gc.collect()

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and queue.closed


@pytest.mark.parametrize("number", [0, errno.EIO])
def test_at_the_end_memory_and_extent_are_nobody_s(
    number: int, file: SwapFile, start: Start, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread drops its references before it finishes the event, although the event and its error live on."""
    transfers, (extent, memory) = start(block_size=1, queue_depth=2), blocks(file, 5)
    gone = [weakref.ref(memory), weakref.ref(extent.tensor)]
    heard = list[bool]()

    class Watched(ThreadEvent):
        def finish(self, error: BaseException | None) -> None:
            heard.append(all(each() is None for each in gone))
            super().finish(error)

    monkeypatch.setattr(transfer, "ThreadEvent", Watched)
    Calls(gate=gate, error=lambda call: number).put(monkeypatch)
    event = transfers.write(extent, 0, memory)
    del memory, extent
    gate.set()
    if number:
        with pytest.raises(SwapError):
            event.wait(LONG)
    else:
        assert event.wait(LONG)
    assert heard == [True]


def test_the_end_of_the_program_cancels_requests_not_yet_begun(
    file: SwapFile, start: Start, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Use a separate registry, so that threads of other tests keep running.
    monkeypatch.setattr(threads, "_running", weakref.WeakKeyDictionary())
    monkeypatch.setattr(threads, "_CLOSING", 20.0)
    before, seen = set(offload_threads()), Calls(gate=gate).put(monkeypatch)
    transfers, (extent, memory) = start(block_size=1, queue_depth=1), blocks(file, 2)
    own = set(offload_threads()) - before
    half, waiting = transfers.write(extent, 0, memory), transfers.write(extent, 0, memory)
    assert wait_until(lambda: len(seen.seen) == 1)
    ending = threading.Thread(target=threads._end_all, daemon=True)
    ending.start()
    with pytest.raises(SwapError, match="the program ends: ") as caught:
        waiting.wait(LONG)
    assert caught.value.errno == errno.ECANCELED and caught.value.filename == str(extent.descriptors.folder)
    assert ending.is_alive() and not half.wait(0), "the thread still writes from the memory"
    gate.set()
    with pytest.raises(SwapError, match="the program ends"):
        half.wait(LONG)
    ending.join(LONG)
    assert not any(thread.is_alive() for thread in own) and len(seen.seen) == 1
    with pytest.raises(RuntimeError, match="closed"):
        transfers.write(extent, 0, memory)


PROGRAM = """
import atexit, contextlib, sys, threading
from pathlib import Path
events, begun, gate = [], threading.Event(), threading.Event()
def tell():
    for event in events:
        try:
            print(event.wait(0))
        except OSError as error:
            print(error.errno)
# Registered before zeropp's exit handler, so that it is called after that handler.
atexit.register(tell)
import torch
from zeropp.offload import swap
from zeropp.offload.swap import SwapFile
from zeropp.offload.transfer import IoOptions, Transfers
extent = SwapFile(Path(sys.argv[1])).allocate(8, torch.float32)
def slow(descriptor, memory, offset):
    begun.set()
    gate.wait()
    with contextlib.suppress(OSError):
        events[1].wait(30)
    return len(memory)
swap.write_at = slow
transfers = Transfers(IoOptions(queue_depth=1))
events += [transfers.write(extent, 0, torch.ones(8)) for _ in range(2)]
gate.set()
begun.wait()
"""


def test_a_program_that_ends_with_transfers_waiting(tmp_path: Path) -> None:
    """The first transfer's call goes on until the second transfer has been cancelled."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, f"True\n{errno.ECANCELED}\n"), done.stderr


def test_a_forked_child_waits_for_nobody(
    file: SwapFile, start: Start, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has none of the parent's threads, and a lock that a thread held at the fork stays locked."""
    transfers, (extent, memory) = start(), blocks(file, 2)
    dropped: Transfers | None = Transfers(IoOptions(queue_depth=1))
    assert dropped is not None
    queue = dropped._queue
    Calls(gate=gate).put(monkeypatch)
    event, locked = transfers.write(extent, 0, memory), threading.Event()

    def hold() -> None:
        with transfers._queue._changed, queue._changed:
            locked.set()
            gate.wait(LONG)

    holding = threading.Thread(target=hold)
    holding.start()
    assert locked.wait(LONG)
    child = os.fork()
    if child == 0:
        try:
            # Restore the default action, which ends the child if it hangs, whatever pytest does with this signal.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            with pytest.raises(RuntimeError, match=f"process {os.getpid()} was forked from the process"):
                transfers.read(extent, 0, memory)
            transfers.close()
            threads._end_all()
            gone = weakref.ref(dropped)
            dropped = None
            gc.collect()
            os._exit(0 if gone() is None else 3)
        finally:
            os._exit(2)
    gate.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    holding.join(LONG)
    assert event.wait(LONG) and torch.equal(extent.tensor, memory)
