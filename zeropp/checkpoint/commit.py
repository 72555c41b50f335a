"""One attempt to write a checkpoint, by all ranks, into the checkpoint's folder.

The checkpoint becomes visible at one instant: ``os.replace`` in :func:`~zeropp.checkpoint.metadata.write_synced`
gives ``metadata.json`` its name when the files of all ranks are on the disk. Files of tensors bear the name of the
attempt that wrote them, and ``metadata.json`` says which of them are the checkpoint. Files of the checkpoint before
are removed only after that. A job that ends in the middle, or a disk that fills, leaves files that no metadata
names; the next save to the same place removes them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from zeropp.checkpoint.boxes import CheckpointError
from zeropp.checkpoint.contents import Contents
from zeropp.checkpoint.files import Written, write_files
from zeropp.checkpoint.metadata import (
    FORMAT,
    METADATA,
    STRETCH,
    BoxEntry,
    Checksums,
    FileEntry,
    Metadata,
    TensorEntry,
    begins_as_ours,
    dtype_code,
    end_write,
    sync_folder,
    written_first,
)
from zeropp.checkpoint.together import Meeting, Progress
from zeropp_kernels import __version__

__all__ = [
    "Attempt",
    "check_target",
    "clear",
    "has_files_of",
    "is_under_way",
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


_T = TypeVar("_T")
_UNTOUCHED = "Nothing was saved, and what was there before is as it was"
_IN_PLACE = "It is in place and complete, but a crash of the machine may undo that, and old ones may be left"


@dataclass(eq=False)
class Attempt:
    """One rank's part in writing a checkpoint.

    Attributes:
        path: the checkpoint's folder; what symbolic links on the way lead to.
        token: of this attempt alone, the same on every rank.
        contents: of this rank; only read.
        checks: algorithm of checksums.
        limit: largest size of a file.
        progress: of this rank.
        completed: called on the first rank when the checkpoint is in place.
    """

    path: Path
    token: str
    contents: Contents
    checks: Checksums
    limit: int
    progress: Progress
    completed: Callable[[], None] | None = None
    # How things are, for errors; only the first rank's comes to change.
    _left: str = field(default=_UNTOUCHED, init=False)
    _made: bool = field(default=False, init=False)
    _discarded: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # Two links to one folder are one path for is_under_way(). Of each rank: nodes may have other links.
        self.path = Path(os.path.realpath(self.path))

    def run(self, meeting: Meeting) -> None:
        """Write it; every rank calls this.

        Raises:
            CheckpointError: some rank could not; on every rank, with its cause.
        """
        first = meeting.rank == 0
        try:
            self._together(meeting, "making a folder for a checkpoint", self._make if first else _nothing)
            stem, parts, own = stem_of(meeting.rank, self.token), self.contents.parts, self.contents.own
            written = self._together(
                meeting, "writing a checkpoint",
                lambda: (write_files(self.path, stem, parts, self.checks, self.limit, self.progress), own),
            )  # fmt: skip
            self._together(
                meeting, "completing a checkpoint",
                (lambda: self._finish(self._metadata(written))) if first else _nothing,
            )  # fmt: skip
        except BaseException:
            # Unless all ranks know of the error, and it was done in their rounds.
            if first and not self._discarded:
                self._discard()
            raise
        finally:
            _under_way.discard(self)
            self.progress.close()

    def _together(self, meeting: Meeting, doing: str, work: Callable[[], _T]) -> list[_T]:
        """Every rank's result, or an error on every rank if one has failed."""
        try:
            result, error, told = meeting.do(work, doing, self.progress)
            answers = meeting.exchange((result, told, self._left), doing)
        except RuntimeError as lost:
            if self._left == _UNTOUCHED:
                raise
            raise CheckpointError(f"{lost}. {self._left}") from lost
        failed = {rank: told for rank, (_, told, _) in enumerate(answers) if told is not None}
        if failed:
            # A large one may take long to remove, and a lost rank is the next call's concern.
            with contextlib.suppress(RuntimeError):
                meeting.do(self._discard if meeting.rank == 0 else _nothing, "removing what was written", self.progress)
            if error is not None and not isinstance(error, Exception):
                raise error
            _, _, left = answers[0]  # the first rank's, which alone puts it in place
            raise CheckpointError(
                f"{doing} at {str(self.path)!r} failed on rank{'s'[: len(failed) - 1]} {', '.join(map(str, failed))}: "
                f"{next(iter(failed.values()))}. {left}; saving again is possible"
            ) from error
        return [result for result, _, _ in answers]  # type: ignore[misc]

    def _make(self) -> None:
        """Make the folder, or remove what attempts that were cut off have left in it."""
        if is_under_way(self.path):
            raise CheckpointError(
                "another checkpoint is being written there by this process; wait() for it first, or give each model a "
                "path of its own"
            )
        _under_way.add(self)
        check_target(self.path)
        self._made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        clear(self.path)

    def _discard(self) -> None:
        self._discarded = True
        if self not in _under_way:
            return  # the place is another's
        with contextlib.suppress(OSError):
            remove_attempt(self.path, self.token)
            if self._made:
                self.path.rmdir()  # which fails, as it should, where the checkpoint is in it

    def _metadata(self, ranks: Iterable[tuple[Written, dict[str, Any]]]) -> Metadata:
        written, own = zip(*ranks, strict=True)
        contents = self.contents
        files, tensors = _merged(written, contents)
        return Metadata(
            format=FORMAT, zeropp=__version__, torch=torch.__version__, world=len(own),
            algorithm=self.checks.name, stretch=STRETCH, files=tuple(files), tensors=tensors, aliases=contents.aliases,
            coded=contents.coded, values=contents.values, ranks=tuple(own),
        )  # fmt: skip

    def _finish(self, metadata: Metadata) -> None:
        require_files(self.path, (file.name for file in metadata.files))
        try:
            # The names of the files are on the disk before the metadata that names them.
            sync_folder(self.path)
            sync_folder(self.path.parent)
            metadata.write(self.path)
        except BaseException:
            # It may have its name all the same, and not be synced.
            if has_files_of(self.path, self.token):
                self._left = _IN_PLACE
            raise
        self._left = _IN_PLACE
        remove_others(self.path, keep={file.name for file in metadata.files})
        self._complete()

    def _complete(self) -> None:
        if self.completed is not None:
            self.completed()
        self._left = "It is complete all the same"


# Of this process, on first ranks.
_under_way: set[Attempt] = set()


def is_under_way(path: Path) -> bool:
    """Tell whether this process writes a checkpoint to a path, which has no symbolic links."""
    return any(each.path == path for each in list(_under_way))  # other threads add to it


def _nothing() -> None:
    pass


def check_target(path: Path) -> None:
    """Refuse to write over what is no checkpoint, or has more in it.

    Raises:
        CheckpointError: something else is there.
    """
    if not path.exists():
        return
    others = others_in(path) if path.is_dir() else [path.name]
    if not others:
        return
    if METADATA in others or not (path / METADATA).exists():
        raise CheckpointError(
            f"{str(path)!r} is there, and is no checkpoint of zeropp; it is left as it is: it has {others[:5]}. Choose "
            "another path"
        )
    raise CheckpointError(
        f"the checkpoint {str(path)!r} has more in it: {others[:5]}; it is left as it is. Move that elsewhere, or "
        "choose another path"
    )


def _merged(written: Iterable[Written], contents: Contents) -> tuple[list[FileEntry], dict[str, TensorEntry]]:
    files: list[FileEntry] = []
    found: dict[str, tuple[str, tuple[int, ...], list[BoxEntry]]] = {}
    # A tensor without elements is among no rank's boxes, and has to be named all the same.
    for name, (dtype, shape) in contents.shapes.items():
        found[name] = dtype_code(dtype, name), shape, []
    for each in written:
        for name, (code, shape, boxes) in each.tensors.items():
            entry = found.setdefault(name, (code, shape, []))
            if entry[:2] != (code, shape):
                raise CheckpointError(
                    f"ranks have {name!r} with different dtypes or shapes, {entry[:2]} and {(code, shape)}; build the "
                    "same model on every rank"
                )
            entry[2].extend(box.model_copy(update={"file": len(files) + box.file}) for box in boxes)
        files += each.files
    tensors = {n: TensorEntry(dtype=code, shape=shape, boxes=tuple(boxes)) for n, (code, shape, boxes) in found.items()}
    for name, tensor in tensors.items():
        there = sum(box.box.numel for box in tensor.boxes)
        if there != tensor.numel:
            raise CheckpointError(
                f"ranks have {there} of {tensor.numel} elements of {name!r}, and the checkpoint would be incomplete"
            )
    return files, tensors
