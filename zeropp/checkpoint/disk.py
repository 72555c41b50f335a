"""Bytes to a file and back, past the page cache where the file system allows it, by several threads.

A file is a sequence of blocks. Each is put together in an aligned buffer, summed stretch by stretch, and written at its
place; or read, checked and taken apart. Threads share nothing but the number of the next block: copies, checksums and
system calls all give the interpreter away.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zeropp.checkpoint.checksums import STRETCH
from zeropp.checkpoint.tasks import in_threads

__all__ = ["Wanted", "read_blocks", "write_blocks"]

BLOCK_NBYTES = 8 * STRETCH
"""Bytes of a block: enough to keep a disk busy with few calls, few enough that buffers are no burden."""

_ALIGNED = 4096  # what O_DIRECT asks of addresses, places and lengths: 512 on most disks, a page on all
_THREADS = 4
# Where the file system has no O_DIRECT, it says so when the file is opened or written first.
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def view_of(buffer: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor on the CPU, for system calls."""
    # Not by way of numpy, which PyTorch does not need.
    return memoryview((ctypes.c_ubyte * buffer.numel()).from_address(buffer.data_ptr())).cast("B")


def _aligned(nbytes: int) -> Tensor:
    room = torch.empty(nbytes + _ALIGNED, dtype=torch.uint8, device="cpu")
    begin = -room.data_ptr() % _ALIGNED
    return room[begin : begin + nbytes]


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[tuple[int, bool]]:
    """A descriptor, and whether it is past the page cache."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        descriptor = os.open(path, flags | direct, 0o644)
    except OSError as error:
        if not direct or error.errno not in _REFUSED:
            raise
        descriptor, direct = os.open(path, flags, 0o644), 0
    try:
        yield descriptor, bool(direct)
    finally:
        os.close(descriptor)


def write_blocks(
    path: Path,
    nbytes: int,
    fill: Callable[[int, Tensor], None],
    check: Callable[[memoryview], int],
    done: Callable[[int], None] = lambda nbytes: None,
) -> list[int]:
    """Write a new file, and sync it.

    Args:
        path: that does not exist.
        nbytes: of the file.
        fill: ``fill(begin, room)`` puts bytes [begin, begin + room.numel()) of the file into ``room``; called by
            several threads.
        check: checksum of a stretch.
        done: told how many bytes more are written, by several threads.

    Returns:
        The checksum of each stretch.
    """
    sums = [0] * -(-nbytes // STRETCH)
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as (descriptor, direct):
        if nbytes and hasattr(os, "posix_fallocate"):
            # A disk that is full says so here, and blocks of several threads lie side by side.
            _reserve(descriptor, nbytes)

        def work(numbers: Iterator[int]) -> None:
            buffer = _aligned(BLOCK_NBYTES)
            memory = view_of(buffer)
            for number in numbers:
                begin = number * BLOCK_NBYTES
                count = min(BLOCK_NBYTES, nbytes - begin)
                fill(begin, buffer[:count])
                for place in range(0, count, STRETCH):
                    sums[(begin + place) // STRETCH] = check(memory[place : min(place + STRETCH, count)])
                # Of a last block that is not aligned, the rest goes beyond the end, and is cut off below.
                padded = -(-count // _ALIGNED) * _ALIGNED if direct else count
                _write_all(descriptor, memory[:padded], begin)
                done(count)

        in_threads(-(-nbytes // BLOCK_NBYTES), work, _THREADS)
        os.ftruncate(descriptor, nbytes)
        os.fsync(descriptor)
    return sums


def _reserve(descriptor: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise


def _write_all(descriptor: int, memory: memoryview, begin: int) -> None:
    done = 0
    while done < len(memory):
        done += os.pwrite(descriptor, memory[done:], begin + done)


@dataclass(frozen=True)
class Wanted:
    """Bytes of a file, and where they go: contiguous uint8 of that length on the CPU."""

    begin: int
    into: Tensor

    @property
    def end(self) -> int:
        """First byte behind them."""
        return self.begin + self.into.numel()


def read_blocks(
    path: Path,
    nbytes: int,
    wanted: Sequence[Wanted],
    verified: Collection[int],
    verify: Callable[[int, memoryview], None],
    done: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Read parts of a file.

    Args:
        path: of the file.
        nbytes: that it has.
        wanted: what to read.
        verified: numbers of stretches that are read whole, whether wanted or not, and given to ``verify``.
        verify: raises if a stretch, of that number and with those bytes, is not as it was written.
        done: told how many bytes more are read, by several threads.

    Returns:
        Bytes that were read.

    Raises:
        OSError: the file cannot be read, or ends early.
    """
    wanted = sorted((each for each in wanted if each.into.numel()), key=lambda each: each.begin)
    begins = [each.begin for each in wanted]
    # Ends need not ascend: tied weights that are apart here are the same bytes there.
    reach = list(itertools.accumulate((each.end for each in wanted), max))
    spans = _spans(wanted, verified, nbytes)
    counts: list[int] = []
    with _opened(path, os.O_RDONLY) as (descriptor, _):

        def work(numbers: Iterator[int]) -> None:
            buffer = _aligned(BLOCK_NBYTES)
            memory = view_of(buffer)
            for number in numbers:
                begin, end = spans[number]
                _read_all(descriptor, memory, begin, end, path)
                counts.append(end - begin)
                for stretch in range(begin // STRETCH, -(-end // STRETCH)):
                    if stretch in verified:
                        low, high = stretch * STRETCH, min((stretch + 1) * STRETCH, nbytes)
                        verify(stretch, memory[low - begin : high - begin])
                place = bisect.bisect_right(reach, begin)
                while place < len(wanted) and begins[place] < end:
                    each = wanted[place]
                    low, high = max(each.begin, begin), min(each.end, end)
                    if low < high:
                        each.into[low - each.begin : high - each.begin].copy_(buffer[low - begin : high - begin])
                    place += 1
                done(end - begin)

        in_threads(len(spans), work, _THREADS)
    return sum(counts)


def _spans(wanted: Sequence[Wanted], verified: Collection[int], nbytes: int) -> list[tuple[int, int]]:
    """Ranges of a file to read, none longer than a block and none across the border of two."""
    ranges = [(each.begin, each.end) for each in wanted]
    ranges += [(stretch * STRETCH, min((stretch + 1) * STRETCH, nbytes)) for stretch in verified]
    spans: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        low = begin // _ALIGNED * _ALIGNED
        while low < end:
            high = min(low // BLOCK_NBYTES * BLOCK_NBYTES + BLOCK_NBYTES, end)
            same = spans and low // BLOCK_NBYTES == spans[-1][0] // BLOCK_NBYTES
            # A gap of a stretch costs less than another call.
            if same and low - spans[-1][1] <= STRETCH:
                spans[-1] = spans[-1][0], max(high, spans[-1][1])
            elif not spans or high > spans[-1][1]:
                spans.append((low, high))
            low = low // BLOCK_NBYTES * BLOCK_NBYTES + BLOCK_NBYTES
    return spans


def _read_all(descriptor: int, memory: memoryview, begin: int, end: int, path: Path) -> None:
    done, count = 0, end - begin
    # Rounded up, as O_DIRECT wants it; what is behind the end of the file is not there, and does not count.
    padded = -(-count // _ALIGNED) * _ALIGNED
    while done < count:
        got = os.preadv(descriptor, [memory[done:padded]], begin + done)
        if got == 0:
            raise OSError(errno.EIO, f"the file ends at byte {begin + done}, before {end}", str(path))
        done += got
