"""The folder that the files of an attempt go to: one beside the checkpoint's, or the checkpoint's own.

A file system that exchanges the names of two folders at once, as local disks do, gives a folder its name at once, too.
On others (most of networks and object stores) a rename may be missing, or a copy of file after file that can be cut
off. There, and where the folder has to stay, files have names of their own attempt in the checkpoint's own folder, and
``metadata.json``, which comes last, says which of them are the checkpoint; those of the one before go after that.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.metadata import METADATA, NO_RENAMES, Metadata, begins_as_ours, end_write, written_first

__all__ = [
    "BESIDE",
    "clear",
    "exchange_names",
    "exchanges_names",
    "has_files_of",
    "is_unfinished",
    "others_in",
    "put_in_place",
    "remove",
    "remove_cut_off",
    "remove_others",
    "require_files",
    "stays",
    "stem_of",
]

BESIDE = ".saving-"
"""In the names of folders that are being written."""

_EXCHANGE = 2  # of renameat2: both names are there, before and after
_FILE = re.compile(r"rank-\d{5,}(-[0-9a-f]{8})?-\d{5,}\.safetensors")
_OF_NFS = re.compile(r"\.nfs[0-9a-f]+")  # files that are removed and still open: NFS takes them away itself


def exchange_names(one: Path, other: Path) -> bool:
    """Let two folders have each other's name, at once; whether this system can.

    Raises:
        OSError: it can, and did not.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_current = -100
    done = call(at_current, os.fsencode(one), at_current, os.fsencode(other), ctypes.c_uint(_EXCHANGE))
    if done != 0 and ctypes.get_errno() not in NO_RENAMES:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))
    return bool(done == 0)


def exchanges_names(folder: Path) -> bool:
    """Tell whether folders beside this one, which is there, can exchange their names."""
    probe = folder.with_name(f"{folder.name}-probe")
    probe.mkdir()
    try:
        return exchange_names(probe, folder)
    finally:
        probe.rmdir()


def stays(folder: Path) -> bool:
    """Tell whether a folder, of a path without symbolic links, cannot be exchanged for another one.

    A disk is mounted there, or this process works in it and would be left in a folder that is gone.
    """
    with contextlib.suppress(OSError):
        return os.path.samefile(folder, os.curdir) or _is_mount_point(folder)
    return False


def _is_mount_point(folder: Path) -> bool:
    if os.path.ismount(folder):
        return True
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    # A folder that is bound to another place of its own disk; spaces and the like are there as octal numbers.
    points = (line.split(b" ")[4] for line in lines)
    return os.fsencode(folder) in {re.sub(rb"\\(\d{3})", lambda m: bytes([int(m[1], 8)]), each) for each in points}


def stem_of(rank: int, token: str = "") -> str:
    """Beginning of the names of a rank's files; with the token of an attempt no other attempt's."""
    return f"rank-{rank:05d}-{token}" if token else f"rank-{rank:05d}"


def is_unfinished(folder: Path) -> bool:
    """Tell whether a path is a folder with nothing in it but files of attempts that were cut off."""
    return folder.is_dir() and not (folder / METADATA).exists() and not others_in(folder)


def others_in(folder: Path) -> list[str]:
    """Names of what is in a folder and is of no checkpoint: a ``metadata.json`` of something else, too; in order."""
    metadata, first = folder / METADATA, written_first(folder / METADATA)
    # While it is written over it may be empty.
    own = {first.name, METADATA} if begins_as_ours(metadata) or begins_as_ours(first) else {first.name}
    names = sorted(each.name for each in folder.iterdir())
    return [name for name in names if name not in own and not _FILE.fullmatch(name) and not _OF_NFS.fullmatch(name)]


def has_files_of(folder: Path, token: str) -> bool:
    """Tell whether the checkpoint that is there is that of an attempt."""
    try:
        return any(f"-{token}-" in file.name for file in Metadata.read(folder).files)
    except CheckpointError:
        return False


def clear(folder: Path) -> None:
    """Make a folder, or take away what attempts that were cut off have left in it beside its checkpoint."""
    folder.mkdir(exist_ok=True)
    path, first = folder / METADATA, written_first(folder / METADATA)
    named: set[str] = set()
    try:
        named = {file.name for file in Metadata.read(folder).files}
    except CheckpointError:
        if path.exists():
            # Damaged, or of a later version: it stays until there is another.
            return
    else:
        end_write(path, Metadata.parse)
    first.unlink(missing_ok=True)
    remove_others(folder, keep=named)


def remove_others(folder: Path, *, keep: Collection[str] = (), of: str = "") -> None:
    """Remove files of tensors.

    Args:
        folder: where they are.
        keep: names of those that stay.
        of: token of the attempt whose files go; those of any if it is empty.
    """
    for each in folder.iterdir():
        if _FILE.fullmatch(each.name) and each.name not in keep and of in each.name:
            each.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Take a checkpoint away, and its folder unless something else is in it, which stays."""
    # First what makes it one, so that a half-deleted one is none.
    written_first(folder / METADATA).unlink(missing_ok=True)
    (folder / METADATA).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        remove_others(folder)
        folder.rmdir()


def require_files(folder: Path, names: Iterable[str]) -> None:
    """Make sure that what was written is still there before it gets its name.

    Raises:
        CheckpointError: something is gone.
    """
    gone = sorted(set(names).difference(os.listdir(folder)))
    if gone:
        raise CheckpointError(f"{gone[:5]} of {str(folder)!r} are gone since they were written; something removed them")


def remove_cut_off(path: Path) -> None:
    """Remove what jobs that ended while they wrote have left beside a place.

    Two jobs that write to one place would not end well anyway. What was being replaced by :func:`put_in_place` gets its
    name back, if nothing has it.
    """
    if not path.exists() and _replaced(path).exists():
        os.rename(_replaced(path), path)
    for left in path.parent.glob(f".{glob.escape(path.name)}{BESIDE}*"):
        shutil.rmtree(left, ignore_errors=True)


def put_in_place(beside: Path, path: Path) -> Path | None:
    """Give a finished folder its name; returns where what had it is now."""
    if not path.exists():
        os.rename(beside, path)
        return None
    if exchange_names(beside, path):
        return beside
    # For a moment none has the name; the older one is complete, beside.
    old = _replaced(path)
    shutil.rmtree(old, ignore_errors=True)
    os.rename(path, old)
    try:
        os.rename(beside, path)
    except BaseException:
        # A signal's, too.
        if not path.exists():
            os.rename(old, path)
        raise
    return old


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}{BESIDE}replaced")
