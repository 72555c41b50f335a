"""Swap files: extents are allocated, freed and allocated again, also on disks that are full or cannot be used."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import logging
import mmap
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.disk_faults import open_descriptors
from tests.support.tmpfs import tmpfs
from zeropp.offload import swap
from zeropp.offload.swap import ExtentAllocator, SwapError, SwapFile, aligned, page_locked
from zeropp.offload.transfer import IoOptions, Transfers


def test_rows(tmp_path: Path) -> None:
    """Extents of any dtype and size are zero, start on a block, do not overlap, and have reserved disk space."""
    file = SwapFile(tmp_path)
    assert list(tmp_path.iterdir()) == [], "the file must have no name"
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn]
    extents = [file.allocate(numel, dtype) for dtype in dtypes for numel in (1, 4095, 4097, 100_001)]
    for extent in extents:
        assert extent.offset % file.alignment == 0 and extent.nbytes == extent.tensor.numel() * extent.tensor.itemsize
        assert not extent.tensor.view(torch.uint8).any() if not extent.tensor.is_complex() else not extent.tensor.any()
        extent.tensor.fill_(1)
    spans = sorted((extent.offset, extent.offset + extent.nbytes) for extent in extents)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    status = os.fstat(extents[0].descriptors.cached)
    assert status.st_size == file.nbytes and status.st_blocks * 512 >= file.nbytes and status.st_mode & 0o777 == 0o600
    for extent in extents:
        read = extent.tensor.float() if extent.tensor.dtype == torch.float8_e4m3fn else extent.tensor
        assert read.eq(1).all()
    empty = file.allocate(0, torch.float32)
    assert empty.nbytes == 0 and empty.tensor.shape == (0,)
    with pytest.raises(ValueError, match="numel is -1"):
        file.allocate(-1, torch.float32)


def test_a_row_lives_as_long_as_a_view_of_it(tmp_path: Path) -> None:
    file = SwapFile(tmp_path)
    extent = file.allocate(10_000, torch.float32)
    view = extent.tensor[5000:].view(100, 50)[3]
    view.fill_(7)
    offset = extent.offset
    del extent
    gc.collect()
    assert file.allocate(10_000, torch.float32).offset != offset and view.eq(7).all()
    del view
    gc.collect()
    assert file.allocate(10_000, torch.float32).offset == offset


@pytest.mark.parametrize("by", ["the file system", "writing"])
def test_stretches_are_used_again_as_zeros(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "writing":
        monkeypatch.setattr("zeropp.offload.swap.zero_range", lambda *_: False)
    file = SwapFile(tmp_path)
    file.allocate(700_001, torch.float32).tensor.fill_(3)
    nbytes = file.nbytes
    extent = file.allocate(700_001, torch.float32)
    assert extent.offset == 0 and file.nbytes == nbytes and not extent.tensor.any()
    assert os.fstat(extent.descriptors.cached).st_blocks * 512 >= nbytes, "the disk space must stay reserved"


def test_the_file_does_not_grow(tmp_path: Path) -> None:
    """Freed space is reused over 10,000 allocations of many sizes, and no file descriptor is left open."""
    chosen = random.Random(0)
    file = SwapFile(tmp_path)
    before = open_descriptors()
    extents = [file.allocate(chosen.randrange(1, 60_000), torch.uint8) for _ in range(10)]
    for _ in range(10_000):
        extents[chosen.randrange(10)] = file.allocate(chosen.randrange(1, 60_000), torch.uint8)
    assert file.nbytes <= 3 * 11 * 61_440
    assert open_descriptors() == before
    del extents
    assert file.allocate(file.nbytes, torch.uint8).offset == 0, "adjacent free extents must be merged"


def test_thousands_of_rows_need_no_descriptor_each(tmp_path: Path) -> None:
    file = SwapFile(tmp_path)
    before = open_descriptors()
    extents = [file.allocate(100, torch.float32) for _ in range(3000)]
    assert open_descriptors() == before
    assert extents[-1].offset == 2999 * file.alignment


def test_a_thousand_files_leave_no_descriptor(tmp_path: Path) -> None:
    before = open_descriptors()
    for number in range(1000):
        file = SwapFile(tmp_path)
        extent = file.allocate(10, torch.float32)
        if number % 2:
            file.close()
    del file, extent
    gc.collect()
    assert open_descriptors() == before and list(tmp_path.iterdir()) == []


def test_stretches_at_random() -> None:
    """Allocated extents never overlap, and the freed ones and the used ones together are the whole file."""
    chosen, stretches, used = random.Random(1), ExtentAllocator(), dict[int, int]()
    for _ in range(3000):
        if used and chosen.random() < 0.5:
            begin = chosen.choice(list(used))
            stretches.free_extent(begin, used.pop(begin))
        else:
            before, nbytes = stretches.end, chosen.randrange(1, 20)
            begin = stretches.allocate_extent(nbytes)
            if chosen.random() < 0.2:
                stretches.undo_allocation(begin, nbytes, before)
                assert stretches.end == before
                continue
            used[begin] = nbytes
        spans = sorted((begin, begin + nbytes) for begin, nbytes in used.items())
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
        free = sum(nbytes for _, nbytes in stretches._free)
        assert free + sum(used.values()) == stretches.end


def test_a_full_disk(tmp_path: Path) -> None:
    """The error comes at the allocation, with numbers. Existing extents stay intact, and smaller ones still fit."""
    with tmpfs(tmp_path / "disk", "-o", "size=8m") as place:
        file = SwapFile(place)
        extent = file.allocate(1 << 20, torch.float32)
        extent.tensor.fill_(2)
        for _ in range(3):
            expected = r"cannot allocate 8388608 bytes.* 4\d{6} bytes .*are free"
            with pytest.raises(SwapError, match=expected) as caught:
                file.allocate(2 << 20, torch.float32)
            assert caught.value.errno == errno.ENOSPC and "nvme_path" in str(caught.value)
        assert file.nbytes == 4 << 20 and extent.tensor.eq(2).all()
        assert file.allocate(3 << 20, torch.uint8).offset == 4 << 20


def test_space_that_is_reserved(tmp_path: Path) -> None:
    """Reserved space stays usable if other files fill the disk. A reservation that does not fit takes no space."""
    with tmpfs(tmp_path / "disk", "-o", "size=8m") as place:
        file = SwapFile(place)
        with pytest.raises(SwapError, match=r"cannot allocate 9437184 bytes .* in a .* of 0 bytes; 8388608 bytes"):
            file.reserve(9 << 20)
        file.reserve(6 << 20)
        (place / "another").write_bytes(b"x" * (2 << 20))
        extents = [file.allocate(1 << 19, torch.float32) for _ in range(3)]
        assert all(extent.tensor.eq(0).all() for extent in extents) and file.nbytes == 6 << 20
        with pytest.raises(SwapError, match=r"in a swap file of 6291456 bytes; 0 bytes"):
            file.allocate(1, torch.uint8)
        extents[2].tensor.fill_(1)
        del extents[2]
        assert file.allocate(1 << 19, torch.float32).tensor.eq(0).all()
        with pytest.raises(SwapError, match="cannot allocate 4096 bytes"):
            file.reserve(4096)


def test_a_partly_failed_allocation_is_truncated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems keep the part that they allocated before space ran out, so the file is truncated again."""
    file = SwapFile(tmp_path)
    before = file.allocate(1, torch.uint8)

    def half(descriptor: int, begin: int, nbytes: int) -> None:
        os.ftruncate(descriptor, begin + nbytes // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(swap.os, "posix_fallocate", half)
    with pytest.raises(SwapError, match="cannot allocate 1048576 bytes"):
        file.reserve(1 << 20)
    assert os.fstat(before.descriptors.cached).st_size == file.nbytes == file.alignment


def test_no_more_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SwapFile(tmp_path)
    first = file.allocate(1, torch.uint8)
    monkeypatch.setattr(swap._libc, "mmap", lambda *_: swap._FAILED)
    monkeypatch.setattr(swap.ctypes, "get_errno", lambda: errno.ENOMEM)
    with pytest.raises(SwapError, match=r"vm\.max_map_count"):
        file.allocate(1, torch.uint8)
    assert file.nbytes == first.offset + file.alignment


def test_a_closed_file(tmp_path: Path) -> None:
    file = SwapFile(tmp_path)
    extent = file.allocate(3, torch.float32)
    file.close()
    file.close()
    extent.tensor.fill_(1)
    with pytest.raises(SwapError, match="the swap file is closed"):
        file.allocate(3, torch.float32)


@pytest.mark.parametrize("nameless", [True, False], ids=["O_TMPFILE", "removed"])
def test_ranks_that_begin_at_once_in_a_new_directory(
    nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks can create the directory at the same time; each has its own file, which has no name."""
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", nameless)
    # All ranks must find no directory before the first rank creates it.
    together, plain = threading.Barrier(16), Path.mkdir

    def mkdir(*arguments: Any, **settings: Any) -> None:
        together.wait(20)
        plain(*arguments, **settings)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with ThreadPoolExecutor(16) as ranks:
        files = list(ranks.map(lambda rank: SwapFile(tmp_path / "new"), range(16)))
    extents = [file.allocate(1000, torch.float32) for file in files]
    for number, extent in enumerate(extents):
        extent.tensor.fill_(number)
    assert all(extent.tensor.eq(number).all() for number, extent in enumerate(extents))
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("kind", ["no parent", "a file", "a link to nothing", "below a file"])
def test_directories_that_cannot_be_used(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    path, number = {
        "no parent": (tmp_path / "no" / "where", errno.ENOENT),
        "a file": (tmp_path / "file", errno.EEXIST),
        "a link to nothing": (tmp_path / "link", errno.EEXIST),
        "below a file": (tmp_path / "file" / "new", errno.ENOTDIR),
    }[kind]
    expected = rf"cannot make a swap file: {os.strerror(number)}; nvme_path must be .*mounted.*write to.*{path}"
    with pytest.raises(SwapError, match=expected) as caught:
        SwapFile(path)
    assert caught.value.errno == number and sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.parametrize(("options", "number"), [("ro", errno.EROFS), ("nr_inodes=1", errno.ENOSPC)])
@pytest.mark.parametrize("name", ["", "new"], ids=["there", "new"])
def test_disks_that_cannot_be_written_to(options: str, number: int, name: str, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "-o", options) as place:
        with pytest.raises(SwapError, match=r"cannot make a swap file: .*nvme_path must be.*write to") as caught:
            SwapFile(place / name)
        assert caught.value.errno == number and caught.value.filename == str(place / name)


def test_errors_may_be_sent() -> None:
    again = pickle.loads(pickle.dumps(SwapError.make(errno.EIO, "/here", "cannot read", "look")))
    assert (again.errno, again.filename) == (errno.EIO, "/here")
    assert str(again) == "[Errno 5] cannot read: Input/output error; look: '/here'"


@pytest.mark.parametrize("missing", ["/proc", "O_DIRECT", "in the file system"])
def test_without_direct_io(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning with the reason is logged, and the file is read and written through the page cache."""
    plain, reason = os.open, {"/proc": "No such file", "O_DIRECT": "O_DIRECT", "in the file system": "Invalid argument"}
    number = errno.ENOENT if missing == "/proc" else errno.EINVAL

    def refuse(path: Any, *arguments: Any, **settings: Any) -> int:
        if str(path).startswith("/proc/self/fd/"):
            raise OSError(number, os.strerror(number), path)
        return plain(path, *arguments, **settings)

    if missing == "O_DIRECT":
        monkeypatch.delattr(os, "O_DIRECT")
    else:
        monkeypatch.setattr(os, "open", refuse)
    with caplog.at_level(logging.WARNING, "zeropp"):
        extent = SwapFile(tmp_path).allocate(5000, torch.float32)
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(tmp_path) in message and "page cache" in message and reason[missing] in message
    assert extent.descriptors.direct is None
    transfers = Transfers(IoOptions())
    values, found = torch.randn(5000), torch.empty(5000)
    assert transfers.write(extent, 0, values).wait(20) and transfers.read(extent, 0, found).wait(20)
    assert torch.equal(found, values)
    transfers.close()


FOR_EVER = """
import signal, sys
# SIGINT is ignored if the tests run in the background of a shell, so install Python's handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
import torch
from zeropp.offload.swap import SwapFile
from zeropp.offload.transfer import IoOptions, Transfers
extent = SwapFile(sys.argv[1]).allocate(1 << 20, torch.float32)
transfers = Transfers(IoOptions(block_size=65536))
transfers.write(extent, 0, torch.ones(1 << 20)).wait(60)
print("ready", flush=True)
while True: transfers.write(extent, 0, torch.ones(1 << 20))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_signal_in_mid_write_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk") as place:
        before = os.statvfs(place).f_bfree
        command = [sys.executable, "-c", FOR_EVER, str(place)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "ready\n", process.communicate()[1]
        assert (before - os.statvfs(place).f_bfree) * 4096 >= 4 << 20
        process.send_signal(number)
        process.communicate(timeout=120)
        assert os.statvfs(place).f_bfree == before and list(place.iterdir()) == []


def test_aligned_memory() -> None:
    for numel, dtype in [(1, torch.bfloat16), (5000, torch.float32), (0, torch.int8)]:
        tensor = aligned(numel, dtype)
        assert tensor.shape == (numel,) and tensor.dtype == dtype and not tensor.any()
        assert tensor.data_ptr() % 4096 == 0


CARD = torch.device("cuda", 0)


class Runtime:
    """A stand-in for CUDA's runtime that notes page-locked memory.

    Attributes:
        locked: bytes by address.
        code: result of ``cudaHostRegister``; 0 for success.
    """

    def __init__(self, code: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.code = code

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked |= {} if self.code else {address: nbytes}
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]


def test_page_locked_memory_is_unlocked_with_its_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    tensor = page_locked(5000, torch.float32, CARD)
    assert not tensor.any() and tensor.data_ptr() % mmap.PAGESIZE == 0
    assert runtime.locked == {tensor.data_ptr(): 20_000}, "exactly the bytes that were asked for"
    view = tensor[4000:].view(torch.uint8)
    del tensor
    gc.collect()
    assert runtime.locked and not view.any()
    del view
    gc.collect()
    assert not runtime.locked
    assert page_locked(0, torch.float32, CARD).numel() == 0 and not runtime.locked


def test_memory_that_cannot_be_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(code=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    with pytest.raises(RuntimeError, match=r"cannot page-lock 4,000 bytes of host memory \(CUDA error 2\).*pin_memory"):
        page_locked(1000, torch.float32, CARD)
    gc.collect()  # must not unlock what was not locked


def test_a_forked_process_shares_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux copies locked private pages for each forked process, such as the workers of a data loader."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    tensor = page_locked(4096, torch.uint8, CARD)
    if os.fork() == 0:
        tensor.fill_(7)
        os._exit(0)
    os.wait()
    assert tensor.eq(7).all()
