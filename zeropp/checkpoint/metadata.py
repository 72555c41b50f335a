"""``metadata.json``: what a checkpoint holds, where each part lies, and the checksums of every file.

The file that makes a directory a checkpoint, written last. Its own checksum comes first in it.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import math
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from zeropp.checkpoint.boxes import Box, BoxIndex
from zeropp.checkpoint.checksums import Checksums
from zeropp.checkpoint.dtypes import DTYPES, dtype_code
from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.values import tensors_in

__all__ = [
    "DTYPES",
    "FORMAT",
    "METADATA",
    "NO_RENAMES",
    "BoxEntry",
    "CodedEntry",
    "FileEntry",
    "Metadata",
    "TensorEntry",
    "begins_as_ours",
    "dtype_code",
    "end_write",
    "sync_folder",
    "write_synced",
    "written_first",
]

METADATA = "metadata.json"
FORMAT = 1
"""Version of the format; a reader refuses later ones."""

NO_RENAMES = (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP)
"""Errors of file systems that cannot rename, and of sandboxes that do not allow it."""

_HEAD = b'{"checksum": "'
_MIDDLE = b'", "checkpoint": '
_TAIL = b"}\n"


class _Entry(BaseModel):
    # Strict: a number in quotes is not one, and what is not known was written by something else.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileEntry(_Entry):
    """One file of tensors: its size in bytes, and a checksum of each stretch of it, packed and in base64."""

    name: str
    nbytes: int
    sums: str

    def checksums(self, width: int) -> list[int]:
        """One for each stretch, of so many bytes each."""
        packed = base64.b64decode(self.sums, validate=True)
        return list(struct.unpack(f"<{len(packed) // width}{ {4: 'I', 8: 'Q'}[width] }", packed))

    @staticmethod
    def pack(sums: Iterable[int], width: int) -> str:
        """As :meth:`checksums` reads it."""
        found = list(sums)
        return base64.b64encode(struct.pack(f"<{len(found)}{ {4: 'I', 8: 'Q'}[width] }", *found)).decode()


class BoxEntry(_Entry):
    """The place of a part of a tensor: number of the file, first byte in it, offsets and sizes of the box."""

    file: int
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The part."""
        return Box(self.offsets, self.sizes)


class TensorEntry(_Entry):
    """One tensor: dtype as safetensors spells it, shape, parts."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[BoxEntry, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


class CodedEntry(_Entry):
    """A tensor that is there in 8-bit codes: dtype, shape and strides of its values."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Metadata(_Entry):
    """All that a checkpoint says of itself.

    Attributes:
        format: version of this format.
        zeropp, torch: versions of what wrote it.
        world: ranks that wrote it.
        algorithm: of checksums.
        stretch: bytes that one checksum covers; the last of a file may be shorter.
        files, tensors: what is there.
        aliases: other names of tensors, of tied parameters.
        coded: tensors of the model that are there in codes, by name; see `zeropp.checkpoint.coded`.
        values: what is no tensor and one for all ranks, by name; see `zeropp.checkpoint.values`.
        ranks: what each rank has for itself, likewise.
    """

    format: int
    zeropp: str
    torch: str
    world: int
    algorithm: str
    stretch: int
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str]
    coded: dict[str, CodedEntry]
    values: dict[str, Any]
    ranks: tuple[dict[str, Any], ...]

    def write(self, folder: Path) -> None:
        """Write and sync ``metadata.json`` in ``folder``; it is there whole or not at all.

        Raises:
            CheckpointError: it would not load; nothing is written.
        """
        body = json.dumps(self.model_dump(mode="json"), separators=(",", ":"), allow_nan=True).encode()
        self._check_loads(body)
        checks = Checksums.of(self.algorithm)
        text = _HEAD + checks.hexdigest(body).encode() + _MIDDLE + body + _TAIL
        write_synced(folder / METADATA, text)

    @classmethod
    def read(cls, folder: Path) -> Metadata:
        """Read and check what :meth:`write` wrote.

        Raises:
            CheckpointError: there is none, it is damaged, or of a later format.
        """
        path = folder / METADATA
        try:
            return cls.parse(path)
        except CheckpointError:
            # Perhaps it was being written over; then the first copy is whole.
            if not path.exists() or not written_first(path).exists():
                raise
            with contextlib.suppress(CheckpointError):
                return cls.parse(written_first(path))
            raise

    @classmethod
    def parse(cls, path: Path) -> Metadata:
        """As :meth:`read`, of one file."""
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(_why_none(path.parent)) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        end = text.find(_MIDDLE, len(_HEAD), len(_HEAD) + 40)
        if not text.startswith(_HEAD) or end < 0 or not text.endswith(_TAIL):
            raise CheckpointError(
                f"{path} is damaged, or was not written by zeropp: it does not begin and end as such a file does"
            )
        body = text[end + len(_MIDDLE) : -len(_TAIL)]
        try:
            found = json.loads(body)
            version, algorithm = found["format"], found["algorithm"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        # Before anything else: a later format may have other checksums, too.
        if isinstance(version, int) and version > FORMAT:
            raise CheckpointError(
                f"{path} is of format {version}, and this version of zeropp reads formats up to {FORMAT}; read it with "
                f"zeropp {found.get('zeropp')} or later"
            )
        checks = Checksums.of(algorithm)
        if checks.hexdigest(body).encode() != text[len(_HEAD) : end]:
            raise CheckpointError(f"{path} is damaged: its checksum is not that of its text")
        try:
            metadata = cls.model_validate_json(body)
        except ValidationError as error:
            raise CheckpointError(f"{path} does not have the form of format {FORMAT}: {error}") from error
        metadata._check(path)
        return metadata

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Shape of one of the model's tensors, if it is there."""
        entry = self.tensors.get(f"model.{name}") or self.coded.get(name)
        return None if entry is None else entry.shape

    def _check_loads(self, body: bytes) -> None:
        try:
            # What reads it refuses some of what json writes.
            from_json(body)
        except ValueError as error:
            raise CheckpointError(f"the metadata of the checkpoint could not be read again: {error}") from error
        lacking = [name for name in tensors_in([self.values, list(self.ranks)]) if name not in self.tensors]
        if lacking:
            raise CheckpointError(f"the tensors {lacking[:5]} were not written, and the checkpoint would not load")

    def _check(self, path: Path) -> None:
        """Check what types do not say: names that stay in the folder, boxes inside tensors, bytes inside files."""
        for file in self.files:
            # A name with folders in it could lead reads, and removals, out of the checkpoint.
            if Path(file.name).name != file.name or file.name in ("", ".", "..") or "\0" in file.name:
                raise CheckpointError(f"{path} names a file {file.name!r}, which is no plain name")
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPES:
                raise CheckpointError(f"{path} gives {name!r} the unknown dtype {tensor.dtype!r}")
            itemsize = DTYPES[tensor.dtype].itemsize
            for each in tensor.boxes:
                fits = len(each.offsets) == len(each.sizes) == len(tensor.shape) and each.box.inside(tensor.shape)
                if not fits or not 0 <= each.file < len(self.files):
                    raise CheckpointError(f"{path} gives {name!r} of shape {tensor.shape} a part {each} outside of it")
                if each.begin < 0 or each.begin + each.box.numel * itemsize > self.files[each.file].nbytes:
                    raise CheckpointError(f"{path} gives {name!r} a part {each} beyond the end of its file")
            if sum(each.box.numel for each in tensor.boxes) != tensor.numel:
                raise CheckpointError(
                    f"{path} has {sum(each.box.numel for each in tensor.boxes)} of {tensor.numel} elements of {name!r}"
                )
            # So many elements in all, and none twice: then each is there.
            index = BoxIndex(tensor.shape, [(each.box, each) for each in tensor.boxes])
            if any(sum(1 for _ in index.meeting(each.box)) > 1 for each in tensor.boxes):
                raise CheckpointError(f"{path} has parts of {name!r} that overlap")
        whole = self.world == len(self.ranks) > 0 and all("random" in rank for rank in self.ranks)
        if not whole or ("groups" in self.values) != ("skipped_steps" in self.values):
            raise CheckpointError(f"{path} does not have what each of {self.world} ranks, and the optimizer, save")


def _why_none(folder: Path) -> str:
    if not folder.exists():
        return f"there is no checkpoint {str(folder)!r}: nothing of that name is there"
    names = sorted(each.name for each in folder.iterdir())[:5] if folder.is_dir() else []
    return (
        f"{str(folder)!r} is no complete checkpoint: it has no {METADATA}, which is written last"
        f"{f'; it has {names}' if names else ''}"
    )


def written_first(path: Path) -> Path:
    """The first copy that :func:`write_synced` writes; readers take it if the file itself is not whole."""
    # One name, so that what a program leaves that is killed here is written over by the next.
    return path.with_name(f".{path.name}.writing")


def write_synced(path: Path, data: bytes) -> None:
    """Write a small file by way of another name, and see that it is on the disk.

    Where files cannot be renamed it is written over, and the first copy goes after that.
    """
    _write(written_first(path), data)
    try:
        os.replace(written_first(path), path)
    except OSError as error:
        if error.errno not in NO_RENAMES:
            raise
        sync_folder(path.parent)
        _write(path, data)
        written_first(path).unlink()
    sync_folder(path.parent)


def end_write(path: Path, check: Callable[[Path], object]) -> None:
    """If a file was cut off while it was written over, write it from the first copy.

    Args:
        path: of the file.
        check: raises CheckpointError if a file is not whole.
    """
    try:
        check(path)
    except CheckpointError:
        check(written_first(path))
        # Over the file alone: the copy is what there is until then.
        _write(path, written_first(path).read_bytes())
        sync_folder(path.parent)


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], done)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """See that the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems sync no folders
    finally:
        os.close(descriptor)


def begins_as_ours(path: Path) -> bool:
    """Tell whether a file begins as a ``metadata.json`` of zeropp, of this format or a later one, whole or damaged."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(_HEAD) + 40 + len(_MIDDLE))
    except OSError:
        return False
    return begin.startswith(_HEAD) and _MIDDLE in begin
