"""One attempt to write a checkpoint, by all ranks, into the checkpoint's folder.

The checkpoint becomes visible at one instant: ``os.replace`` in :func:`~zeropp.checkpoint.metadata.write_synced` gives
``metadata.json`` its name when the files of all ranks are on the disk. Files of the checkpoint before are removed only
after that. A job that ends in the middle, or a disk that fills, leaves files that no metadata names; the next save to
the same place removes them. See :mod:`~zeropp.checkpoint.place`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from zeropp.checkpoint.checksums import STRETCH, Checksums
from zeropp.checkpoint.contents import Contents
from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.files import Written, write_files
from zeropp.checkpoint.metadata import (
    FORMAT,
    METADATA,
    BoxEntry,
    FileEntry,
    Metadata,
    TensorEntry,
    dtype_code,
    sync_folder,
)
from zeropp.checkpoint.place import (
    clear,
    has_files_of,
    others_in,
    remove_attempt,
    remove_others,
    require_files,
    stem_of,
)
from zeropp.checkpoint.progress import Progress
from zeropp.checkpoint.together import Meeting
from zeropp_kernels import __version__

__all__ = ["Attempt", "check_target", "is_under_way"]

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
