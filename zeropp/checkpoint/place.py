"""Files of a checkpoint in its folder: those of the attempt that writes now, of the one before, and of others.

Files of tensors bear the name of the attempt that wrote them. ``metadata.json``, which is renamed last, says which of
them are the checkpoint; files of the checkpoint before are removed after that.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.metadata import METADATA, Metadata, begins_as_ours, end_write, written_first

__all__ = [
    "clear",
    "has_files_of",
    "is_unfinished",
    "others_in",
    "remove",
    "remove_attempt",
    "remove_others",
    "require_files",
    "stem_of",
]

# Checkpoints of earlier versions have files without the name of an attempt.
_FILE = re.compile(r"rank-\d{5,}(-[0-9a-f]{8})?-\d{5,}\.safetensors")
_OF_NFS = re.compile(r"\.nfs[0-9a-f]+")  # files that are removed and still open: NFS takes them away itself


def stem_of(rank: int, token: str) -> str:
    """Beginning of the names of a rank's files; no other attempt has the token."""
    return f"rank-{rank:05d}-{token}"


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
    """Remove from a folder the files that attempts that were cut off have left beside its checkpoint."""
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


def remove_attempt(folder: Path, token: str) -> None:
    """Remove the files of an attempt that has failed, unless they are the checkpoint by now."""
    if has_files_of(folder, token):
        return
    remove_others(folder, of=token)
    if not (folder / METADATA).exists():
        # Beside a damaged metadata.json it may be the only whole copy.
        written_first(folder / METADATA).unlink(missing_ok=True)


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
