"""Directories of jobs: who has one, who may remove it, and what is left by owners that die."""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tmpfs import tmpfs
from zeropp.offload import directory
from zeropp.offload.directory import SwapDirectory
from zeropp.offload.errors import SwapError
from zeropp.offload.file_system import file_system_of

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


@pytest.mark.parametrize("look", range(4))
def test_another_rank_makes_the_path_between_two_looks(look: int, tmp_path: Path, monkeypatch: Any) -> None:
    above, looks = tmp_path / "swap", itertools.count()

    def seen(plain: Callable[[Path], bool]) -> Callable[[Path], bool]:
        def of(path: Path) -> bool:
            found = plain(path)
            if path == above and next(looks) == look:
                above.mkdir()
            return found

        return of

    for name in ("is_dir", "exists", "is_symlink"):
        monkeypatch.setattr(Path, name, seen(getattr(Path, name)))
    own = SwapDirectory(above, "job", 0)
    assert own.path.parent == above
    own.close()


def test_a_dropped_directory_goes(tmp_path: Path) -> None:
    own: SwapDirectory | None = SwapDirectory(tmp_path, "job", 0)
    assert own is not None and own.path.exists()
    del own
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", ["pass", "raise KeyboardInterrupt"])
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


def left_behind(above: Path) -> Path:
    """A directory whose owner has died."""
    path = above / "zeropp-left-rank0"
    path.mkdir()
    (path / "lock").write_text(json.dumps({"host": socket.gethostname()}))
    (path / "swap").write_text("old")
    return path


def test_what_other_users_have_left_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this one could remove it, as root can."""
    left = left_behind(tmp_path)
    other = os.geteuid() + 1
    monkeypatch.setattr(directory.os, "geteuid", lambda: other)
    SwapDirectory(tmp_path, "job", 0).close()
    assert (left / "swap").read_text() == "old"
    monkeypatch.undo()
    SwapDirectory(tmp_path, "job", 0).close()
    assert not left.exists()


def test_a_directory_that_is_there_is_closed_to_others(tmp_path: Path) -> None:
    there = tmp_path / "zeropp-job-rank0"
    there.mkdir(mode=0o755)
    (there / "of before").write_text("x")
    own = SwapDirectory(tmp_path, "job", 0)
    assert own.path == there and stat.S_IMODE(there.stat().st_mode) == 0o700
    own.close()


def test_a_lock_of_a_directory_that_was_made_anew_meanwhile_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the file and locking it somebody removes all of it, and a third one makes it again."""
    left, plain = left_behind(tmp_path), fcntl.flock

    def late(lock: int, how: int) -> None:
        if (left / "swap").exists():
            shutil.rmtree(left)
            left_behind(tmp_path)
            (left / "swap").rename(left / "in use")
        plain(lock, how)

    monkeypatch.setattr(directory.fcntl, "flock", late)
    SwapDirectory(tmp_path, "job", 0).close()
    assert (left / "in use").exists()


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


def test_a_signal_in_mid_write_leaves_no_space_in_use(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk") as place:
        before = os.statvfs(place).f_bfree
        process = start(place, "job")
        assert (before - os.statvfs(place).f_bfree) * 4096 >= 4 << 20
        end(process, signal.SIGKILL)
        assert (before - os.statvfs(place).f_bfree) * 4096 < 64 << 10, "beside the lock file"
