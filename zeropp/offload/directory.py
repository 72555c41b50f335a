"""One directory for each job and rank below the user's ``nvme_path``, and what others have left behind there.

[Note: owner of a directory] A directory belongs to the process that holds the lock (flock) on the file ``lock`` in it.
The system frees the lock when that process ends, whatever ends it, so a free lock says that the owner is gone; numbers
of processes, which are used again, say nothing. Whoever removes a directory takes its lock first, checks that the
locked file is still the one of that name, and removes it last. Whoever makes one takes the lock, too, and begins anew
if the file is no longer there: it was removed between its making and its locking.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import stat
import time
import weakref
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from zeropp.offload.errors import SwapError
from zeropp.offload.file_system import LOCAL, file_system_of

__all__ = ["SwapDirectory"]

_log = logging.getLogger("zeropp")
_LOCK = "lock"
_JOB = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME = re.compile(rf"zeropp-{_JOB.pattern}-rank\d+")
_PATIENCE = 5.0  # seconds in which another process has removed what it found there
_PAUSE = 0.01  # seconds
_REMEDY = "let nvme_path name a directory on a local disk that this user may write to"


class SwapDirectory:
    """``<nvme_path>/zeropp-<job>-rank<rank>``, of mode 0700, as long as this object, or the program, lives.

    It is removed with all that is in it by :meth:`close`, when the object is dropped, and when Python ends, also by
    KeyboardInterrupt. After a signal that Python does not see, the next job on this path and host removes it: it names
    in one warning what directories of this user have been left behind, and how large they were.

    Args:
        nvme_path: where directories go. One that is missing is made if its parent is there; if that is missing, too, it
            is more likely that a disk is not mounted, or the path misspelt, and training should not fill another disk.
        job: what all ranks of a job have in common and no other job has: letters, digits, ``.``, ``_`` and ``-``.
        rank: of this process.

    Attributes:
        path: of the directory, absolute.

    Raises:
        ValueError: the job's name has other characters, or is longer than 64.
        SwapError: the path is no directory, or cannot be made or written to, or the disk is full; or a process that
            lives has this directory.
    """

    def __init__(self, nvme_path: Path | str, job: str, rank: int) -> None:
        if not _JOB.fullmatch(job):
            raise ValueError(f"job is {job!r}; expected 1 to 64 letters, digits, '.', '_' or '-'")
        # Absolute, so that a program that changes its directory still removes the right one.
        above = Path(os.path.abspath(nvme_path))
        self.path = above / f"zeropp-{job}-rank{rank}"
        with _told(above):
            if not above.is_dir():
                _make_above(above)
            _remove_left(above, own=self.path)
            self._lock = _take(self.path, job, rank)
        # Its own end of the program, so that no other room's order matters.
        self._remove = weakref.finalize(self, _end, self.path, self._lock, os.getpid())
        _directories.add(self)

    def close(self) -> None:
        """Remove it, with all that is in it; twice does no harm."""
        self._remove()

    def forget(self) -> None:
        """In a process that was forked: leave it to the other one, whose end the lock must not outlast."""
        if self._remove.detach() is not None:
            os.close(self._lock)


_directories: weakref.WeakSet[SwapDirectory] = weakref.WeakSet()


def _forget_all() -> None:
    for each in list(_directories):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn the system's errors into ours."""
    try:
        yield
    except SwapError:
        raise
    except OSError as error:
        what = f"no directory for swap files can be made below {str(path)!r}"
        raise SwapError.of(error.errno or errno.EIO, error.filename or path, what, _REMEDY) from error


def _make_above(above: Path) -> None:
    # In this order: another rank may make it in between, and what is not there first is a directory afterwards.
    if (above.exists() or above.is_symlink()) and not above.is_dir():
        raise SwapError.of(errno.ENOTDIR, above, "nvme_path is something else than a directory", _REMEDY)
    if not above.parent.is_dir():
        what = f"neither nvme_path nor the directory above it, {str(above.parent)!r}, is there"
        raise SwapError.of(errno.ENOENT, above, what, "mount the disk, or correct the path")
    # Other ranks may be faster.
    above.mkdir(exist_ok=True)


def _take(path: Path, job: str, rank: int) -> int:
    """Make a directory and lock it; returns the descriptor that holds the lock."""
    until = time.monotonic() + _PATIENCE
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            lock = _locked(path, create=True)
        except OSError:
            # A disk may have room for a directory and none for a file in it; what somebody uses is not empty.
            with contextlib.suppress(OSError):
                path.rmdir()
            raise
        if lock is not None:
            break
        # Somebody removes it, which takes a moment; or has it.
        if time.monotonic() > until:
            raise SwapError.of(
                errno.EBUSY, path, f"another process has this directory ({_said(path)!r})", "give each job its own name"
            )
        time.sleep(_PAUSE)
    try:
        about = {"pid": os.getpid(), "host": socket.gethostname(), "job": job, "rank": rank,
                 "time": datetime.now(timezone.utc).isoformat(timespec="seconds")}  # fmt: skip
        # Of an owner that is gone and could not be removed.
        os.ftruncate(lock, 0)
        os.write(lock, json.dumps(about).encode() + b"\n")
        # It may have been there, open to others.
        path.chmod(0o700)
    except BaseException:
        _end(path, lock, os.getpid())
        raise
    return lock


def _locked(path: Path, *, create: bool = False) -> int | None:
    """A descriptor with the lock of a directory; None if somebody else has it, or has removed it meanwhile."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # See [Note: owner of a directory].
        if os.path.samestat(os.fstat(lock), os.stat(path / _LOCK)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _end(path: Path, lock: int, pid: int) -> None:
    """Remove a directory whose lock this process holds, and let go of it."""
    if os.getpid() != pid:
        return
    with contextlib.suppress(OSError):
        for each in set(os.listdir(path)) - {_LOCK}:
            if stat.S_ISDIR(os.lstat(path / each).st_mode):
                shutil.rmtree(path / each)
            else:
                os.unlink(path / each)
        # Last, and after it only what is empty: while it is there nobody else may touch the rest.
        os.unlink(path / _LOCK)
        os.rmdir(path)
    os.close(lock)


def _said(path: Path) -> str:
    try:
        return (path / _LOCK).read_text(errors="replace").strip()
    except OSError:
        return ""


def _remove_left(above: Path, own: Path) -> None:
    """Remove what owners that are gone have left, and say so once; this rank's name of an earlier time included."""
    found = []
    for path in above.iterdir():
        # Whatever goes wrong with what others have left, and they may be at it, too, must not stop this job.
        with contextlib.suppress(OSError):
            if not _NAME.fullmatch(path.name) or not _is_ours(path):
                continue
            lock = _locked(path)
            if lock is not None:
                said, size = _said(path), _nbytes(path)
                if _is_of_here(said, above) or path == own:
                    _end(path, lock, os.getpid())
                    # A lock file without text: another rank was just making it, and begins anew.
                    found += [f"{str(path)!r} ({size / 2**20:.1f} MiB; {said})"] if said else []
                else:
                    os.close(lock)
            elif not (path / _LOCK).exists():
                # Its removal was cut off; or it is being made, and whoever makes it begins anew. Only if it is empty.
                os.rmdir(path)
    if found:
        _log.warning("removed what jobs that did not end cleanly left below nvme_path: %s", ", ".join(sorted(found)))


def _is_ours(path: Path) -> bool:
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _is_of_here(said: str, above: Path) -> bool:
    """Whether its lock can be relied on: on file systems of several machines, some see only their own locks."""
    try:
        host = json.loads(said)["host"]
    except (ValueError, KeyError, TypeError):
        # Cut off before it was written.
        return True
    return bool(host == socket.gethostname()) or file_system_of(above) in LOCAL


def _nbytes(path: Path) -> int:
    """Bytes that files below take on the disk."""
    files = [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
    return sum(os.lstat(file).st_blocks * 512 for file in files)
