"""Directories of jobs, and files of extents in them: owners that die, full disks, stretches that are used again."""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import json
import logging
import os
import pickle
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.offload import open_descriptors
from tests.tmpfs import tmpfs
from zeropp.offload import directory, memory
from zeropp.offload.directory import SwapDirectory
from zeropp.offload.errors import SwapError
from zeropp.offload.file_system import file_system_of
from zeropp.offload.memory import aligned
from zeropp.offload.stretches import Stretches
from zeropp.offload.swap import SwapFile

PROGRAM = """
import signal, sys, time
from pathlib import Path
# Ignored where whoever started the tests runs them in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
import torch
from zeropp.config.runtime import AioConfig
from zeropp.offload.directory import SwapDirectory
from zeropp.offload.swap import SwapFile
from zeropp.offload.transfer import Transfers
place = SwapDirectory(sys.argv[1], sys.argv[2], int(sys.argv[3]))
file = SwapFile(place.path)
extent = file.allocate(1 << 20, torch.float32)
transfers = Transfers(AioConfig(block_size=65536))
transfers.write(extent, 0, torch.ones(1 << 20)).wait(60)
print("ready", flush=True)
"""
FOR_EVER = PROGRAM + "while True: transfers.write(extent, 0, torch.ones(1 << 20))\n"


def start(place: Path, job: str, rank: int = 0, program: str = FOR_EVER) -> subprocess.Popen[str]:
    """Another process with a directory and a file that it is writing, once it says so."""
    command = [sys.executable, "-c", program, str(place), job, str(rank)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", process.communicate()[1]
    return process


def end(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)
    process.communicate(timeout=120)


# directories


def test_a_directory_says_whose_it_is_and_goes(tmp_path: Path) -> None:
    own = SwapDirectory(tmp_path, "job-1", 3)
    assert own.path == tmp_path / "zeropp-job-1-rank3"
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o700
    about = json.loads((own.path / "lock").read_text())
    assert (about["pid"], about["host"], about["rank"]) == (os.getpid(), socket.gethostname(), 3)
    assert about["time"].startswith("20") and about["job"] == "job-1"
    (own.path / "more").mkdir()
    (own.path / "more" / "file").write_text("x")
    own.close()
    own.close()
    assert list(tmp_path.iterdir()) == []


def test_a_dropped_directory_goes(tmp_path: Path) -> None:
    own: SwapDirectory | None = SwapDirectory(tmp_path, "job", 0)
    assert own is not None and own.path.exists()
    del own
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(3)", "raise KeyboardInterrupt", "1 / 0"])
def test_a_program_that_ends_leaves_nothing(ending: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM + ending, str(tmp_path), "job", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "ready\n" and list(tmp_path.iterdir()) == []


def test_a_process_that_was_forked_leaves_it_to_its_parent(tmp_path: Path) -> None:
    own = SwapDirectory(tmp_path, "job", 0)
    pid = os.fork()
    if pid == 0:
        # What Python's end would run, without the rest of pytest's.
        own.close()
        try:
            os.fstat(own._lock)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the lock would outlast the owner"
    assert own.path.exists()
    own.close()
    assert not own.path.exists()


def test_what_a_killed_process_left_is_named_and_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of those who live, of another name, or of no lock goes with it."""
    killed, lives = start(tmp_path, "killed"), start(tmp_path, "lives")
    end(killed, signal.SIGKILL)
    left = tmp_path / "zeropp-killed-rank0"
    assert left.is_dir()
    (left / "named").write_bytes(bytes(3 << 20))
    names = ("zeropp-killed-rank", "zeropp--rank0", "Zeropp-a-rank0", "zeropp-a-rank0.old")
    others = [tmp_path / name for name in names]
    for other in others:
        other.mkdir()
        (other / "lock").write_text("{}")
    (tmp_path / "zeropp-a-rank0").write_text("a file")
    (tmp_path / "zeropp-without-rank0").mkdir()
    (tmp_path / "zeropp-without-rank0" / "data").write_text("not ours")
    (tmp_path / "zeropp-link-rank0").symlink_to(others[0])
    before = {path.name for path in tmp_path.iterdir()}
    with caplog.at_level(logging.WARNING, "zeropp"):
        own = SwapDirectory(tmp_path, "next", 0)
    after = {path.name for path in tmp_path.iterdir()}
    assert after == before - {left.name} | {own.path.name}
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(left) in message and "3.0 MiB" in message and f'"pid": {killed.pid}' in message
    own.close()
    end(lives, signal.SIGINT)
    assert not (tmp_path / "zeropp-lives-rank0").exists(), "an interrupt is a clean end"


def test_locks_of_other_machines_count_where_they_can_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "zeropp-other-rank0"
    left.mkdir()
    (left / "lock").write_text(json.dumps({"host": "elsewhere"}))
    monkeypatch.setattr(directory, "file_system_of", lambda path: "nfs4")
    SwapDirectory(tmp_path, "job", 0).close()
    assert left.exists()
    monkeypatch.undo()
    SwapDirectory(tmp_path, "job", 0).close()
    assert not left.exists()


def test_two_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs and ranks side by side; the same one twice is an error that says who has it."""
    monkeypatch.setattr(directory, "_PATIENCE", 0.05)
    made = [SwapDirectory(tmp_path, job, rank) for job in ("a", "b") for rank in (0, 1)]
    with pytest.raises(SwapError, match=rf"(?s)another process.*{os.getpid()}.*give each job its own name") as caught:
        SwapDirectory(tmp_path, "a", 1)
    assert caught.value.errno == errno.EBUSY
    assert len(list(tmp_path.iterdir())) == 4
    for each in made:
        each.close()
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_start_at_once(tmp_path: Path) -> None:
    """Each looks through what others are just making, and what is left of an earlier time, its own name included."""
    for rank in range(16):
        left = tmp_path / f"zeropp-job-rank{rank}"
        left.mkdir()
        if rank % 2:
            (left / "lock").write_text("{}")
    made, errors = [], []

    def begin(rank: int) -> None:
        try:
            made.append(SwapDirectory(tmp_path, "job", rank))
        except BaseException as error:
            errors.append(error)

    for _ in range(5):
        threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == [] and len(made) == 16
        assert len(list(tmp_path.glob("zeropp-job-rank*/lock"))) == 16
        for each in made:
            with (each.path / "lock").open() as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        while made:
            made.pop().close()


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    SwapDirectory(tmp_path / "new", "job", 0).close()
    assert (tmp_path / "new").is_dir(), "a missing one is made if its parent is there"
    with pytest.raises(SwapError, match=r"neither.*mount the disk"):
        SwapDirectory(tmp_path / "no" / "where", "job", 0)
    with pytest.raises(SwapError, match="something else than a directory"):
        SwapDirectory(tmp_path / "file", "job", 0)
    with pytest.raises(ValueError, match=r"job is 'a/b'"):
        SwapDirectory(tmp_path, "a/b", 0)


@pytest.mark.parametrize(("options", "number"), [("ro", errno.EROFS), ("nr_inodes=2", errno.ENOSPC)])
def test_disks_that_cannot_be_written_to(options: str, number: int, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "-o", options) as place:
        with pytest.raises(SwapError, match=r"no directory for swap files.*local disk.*write to") as caught:
            SwapDirectory(place, "job", 0)
        assert caught.value.errno == number and str(place) in str(caught.value)
        assert list(place.iterdir()) == []


def test_errors_may_be_sent() -> None:
    again = pickle.loads(pickle.dumps(SwapError.of(errno.EIO, "/here", "cannot read", "look")))
    assert (again.errno, again.filename) == (errno.EIO, "/here")
    assert str(again) == "[Errno 5] cannot read: Input/output error; look: '/here'"


def test_file_systems_have_names(tmp_path: Path) -> None:
    assert file_system_of(Path("/proc/self")) == "proc"
    with tmpfs(tmp_path / "a disk") as place:
        assert file_system_of(place) == "tmpfs"


# files


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_in_mid_write_leaves_no_space_in_use(number: int, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk") as place:
        before = os.statvfs(place).f_bfree
        process = start(place, "job")
        assert (before - os.statvfs(place).f_bfree) * 4096 >= 4 << 20
        end(process, number)
        assert (before - os.statvfs(place).f_bfree) * 4096 < 64 << 10, "beside the lock file"


def test_rows(tmp_path: Path) -> None:
    """Any dtype and odd sizes: zeros on blocks of their own, which the file has space for."""
    file = SwapFile(tmp_path)
    assert list(tmp_path.iterdir()) == [], "the file has no name"
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
    assert os.fstat(extent.descriptors.cached).st_blocks * 512 >= nbytes, "with its space"


def test_the_file_does_not_grow(tmp_path: Path) -> None:
    """Ten thousand extents of many sizes, a few at a time; no descriptor each, and none left behind."""
    chosen = random.Random(0)
    file = SwapFile(tmp_path)
    before = open_descriptors()
    extents = [file.allocate(chosen.randrange(1, 60_000), torch.uint8) for _ in range(10)]
    for _ in range(10_000):
        extents[chosen.randrange(10)] = file.allocate(chosen.randrange(1, 60_000), torch.uint8)
    assert file.nbytes <= 3 * 11 * 61_440
    assert open_descriptors() == before
    del extents
    assert file.allocate(file.nbytes, torch.uint8).offset == 0, "neighbours that are free are one"


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
    """None is given twice, and what is free is found again."""
    chosen, stretches, used = random.Random(1), Stretches(), dict[int, int]()
    for _ in range(3000):
        if used and chosen.random() < 0.5:
            begin = chosen.choice(list(used))
            stretches.free(begin, used.pop(begin))
        else:
            before, nbytes = stretches.end, chosen.randrange(1, 20)
            begin = stretches.take(nbytes)
            if chosen.random() < 0.2:
                stretches.give_back(begin, nbytes, before)
                assert stretches.end == before
                continue
            used[begin] = nbytes
        spans = sorted((begin, begin + nbytes) for begin, nbytes in used.items())
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
        free = sum(nbytes for _, nbytes in stretches._free)
        assert free + sum(used.values()) == stretches.end


def test_a_full_disk(tmp_path: Path) -> None:
    """Said when an extent is allocated, with numbers; what there was is as before, and fits still."""
    with tmpfs(tmp_path / "disk", "-o", "size=8m") as place:
        file = SwapFile(place)
        extent = file.allocate(1 << 20, torch.float32)
        extent.tensor.fill_(2)
        for _ in range(3):
            expected = r"cannot allocate an extent of 8388608 bytes.* 4\d{6} bytes .*are free"
            with pytest.raises(SwapError, match=expected) as caught:
                file.allocate(2 << 20, torch.float32)
            assert caught.value.errno == errno.ENOSPC and "nvme_path" in str(caught.value)
        assert file.nbytes == 4 << 20 and extent.tensor.eq(2).all()
        assert file.allocate(3 << 20, torch.uint8).offset == 4 << 20


def test_no_more_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SwapFile(tmp_path)
    first = file.allocate(1, torch.uint8)
    monkeypatch.setattr(memory._libc, "mmap", lambda *_: memory._FAILED)
    monkeypatch.setattr(memory.ctypes, "get_errno", lambda: errno.ENOMEM)
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


def test_a_name_that_is_taken_stays(tmp_path: Path) -> None:
    (tmp_path / "swap").write_text("another's")
    with pytest.raises(SwapError, match="cannot make a swap file: File exists"):
        SwapFile(tmp_path)
    assert (tmp_path / "swap").read_text() == "another's"


def test_aligned_memory() -> None:
    for numel, dtype in [(1, torch.bfloat16), (5000, torch.float32), (0, torch.int8)]:
        tensor = aligned(numel, dtype)
        assert tensor.shape == (numel,) and tensor.dtype == dtype and not tensor.any()
        assert tensor.data_ptr() % 4096 == 0
