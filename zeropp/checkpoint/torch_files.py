"""Read the values of ``torch.save`` files, and the place of each tensor in the file, without reading tensor data.

``torch.load(weights_only=True, map_location="meta")`` unpickles the values, so no code that a file names is run. It
returns tensors on the meta device, with the offset of their storage in the file. The file is not memory-mapped, because
a file that is truncated while it is mapped would crash the process.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zeropp.checkpoint.boxes import CheckpointError

__all__ = ["Record", "TorchFileTensor", "read_torch_file", "refused"]

_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # first bytes of a file written by torch before 1.6
# Zip local file header: its fixed size in bytes, and the byte offset of the lengths of name and extra field in it.
_HEADER, _LENGTHS = 30, 26


class Record:
    """An inert stand-in for an unpickled object whose class is not imported.

    Attributes:
        name: name of the object's class.
        args: arguments in the pickle for the object's constructor.
        state: state in the pickle for the object, usually a dict of its attributes.
    """

    name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: object) -> Record:
        made = super().__new__(cls)
        made.args = args
        made.state = {}
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state

    def get(self, key: str) -> Any:
        """Return one attribute of the object; None if the object does not have it."""
        return self.state.get(key) if isinstance(self.state, dict) else None


@dataclass(frozen=True)
class TorchFileTensor:
    """The place of a tensor in a ``torch.save`` file.

    Attributes:
        begin: first byte of the tensor's first element in the file.
        dtype: dtype of the tensor.
        shape: shape of the tensor.
        strides: strides of the tensor in elements.
    """

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Window(io.RawIOBase):
    """A byte range of a file, presented as a file."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        self._file = file
        self._begin = begin
        self._length = length
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence])
        return self._place

    def readinto(self, memory: Any) -> int:
        self._file.seek(self._begin + self._place)
        data = self._file.read(min(len(memory), max(0, self._length - self._place)))
        memory[: len(data)] = data
        self._place += len(data)
        return len(data)


def read_torch_file(path: Path, records: Collection[str] = (), begin: int = 0, length: int | None = None) -> Any:
    """Read a file of ``torch.save``, with a :class:`TorchFileTensor` in place of each tensor.

    Args:
        path: path of the file.
        records: names of packages whose classes are replaced by :class:`Record`.
        begin: first byte of the zip archive in the file.
        length: length of the archive in bytes; None for the rest of the file.

    Returns:
        The saved object, usually a dict.

    Raises:
        CheckpointError: the file cannot be read, was not written by ``torch.save``, is compressed, or names a class or
            function that is not allowed. No such function is called.
    """
    try:
        with path.open("rb") as file:
            nbytes = path.stat().st_size
            length = nbytes - begin if length is None else length
            if begin < 0 or length < 0 or begin + length > nbytes:
                raise CheckpointError(f"{str(path)!r} has {nbytes} bytes, expected {begin + length}; it was cut short")
            window = cast(IO[bytes], _Window(file, begin, length))
            storages = _storages(path, window)
            return _Notes(path, begin, storages).replace(_load(path, window, records))
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged file may lead to any exception, such as names that are not UTF-8 or unknown zip versions.
        raise CheckpointError(
            f"{str(path)!r} is no file of torch.save with its usual pickle_protocol, or is damaged: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from error


def refused(path: Path, names: Collection[str]) -> CheckpointError:
    """Return the error for a file whose pickle names classes or functions that are not allowed."""
    shown = f"{', '.join(sorted(names)[:5])}{' and others' if len(names) > 5 else ''}"
    return CheckpointError(
        f"{str(path)!r} is refused: it names {shown}, which unpickling would call. Nothing was called: values, tensors "
        "and records of the format are all that is read. Save it again without such objects"
    )


def _storages(path: Path, file: IO[bytes]) -> dict[int, int]:
    """Return the length in bytes of each entry's data, by the offset of the data from the start of the archive."""
    if file.read(len(_OLD)) == _OLD:
        raise CheckpointError(
            f"{str(path)!r} is of the format of torch before 1.6, of which no part can be read alone; load it with "
            "torch.load(weights_only=True) and save it again"
        )
    found = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(
                    f"{str(path)!r} has compressed entries, of which no part can be read alone; load it with "
                    "torch.load(weights_only=True) and save it again"
                )
            # All entries lie in one folder of the archive, named after the file.
            if info.filename.partition("/")[2] == "byteorder" and archive.read(info) != b"little":
                raise CheckpointError(f"{str(path)!r} is in big-endian order; save it again on this machine")
            # Read the header's lengths from the header itself: torch pads its extra field to align the data, which the
            # archive's central directory does not show.
            file.seek(info.header_offset + _LENGTHS)
            name, padding = struct.unpack("<HH", file.read(4))
            found[info.header_offset + _HEADER + name + padding] = info.file_size
    return found


def _load(path: Path, file: IO[bytes], records: Collection[str]) -> Any:
    """Unpickle a file with tensors on the meta device; classes of the packages ``records`` become :class:`Record`."""
    file.seek(0)
    unknown = get_unsafe_globals_in_checkpoint(file)
    if others := [name for name in unknown if name.split(".")[0] not in records]:
        raise refused(path, others)
    inert: list[Any] = [(type("Record", (Record,), {"name": name.rpartition(".")[2]}), name) for name in unknown]
    file.seek(0)
    with safe_globals(inert):
        return torch.load(file, map_location="meta", weights_only=True)


class _Notes:
    """Replacement of the meta tensors in a loaded object by :class:`TorchFileTensor`.

    Args:
        path: path of the file, for errors.
        begin: first byte of the archive in the file.
        storages: length of each entry's data, by its offset in the archive.
    """

    def __init__(self, path: Path, begin: int, storages: dict[int, int]) -> None:
        self._path = path
        self._begin = begin
        self._storages = storages
        # id -> (value, replacement). The value is kept because Python could give its id to another object otherwise.
        self._done: dict[int, tuple[object, object]] = {}

    def replace(self, value: Any) -> Any:
        """Return a value with its tensors replaced; dicts, lists and records are changed in place."""
        if isinstance(value, Tensor):
            return self._note(value)
        if not isinstance(value, dict | list | tuple | Record):
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        found: Any = value
        self._done[id(value)] = value, found
        if isinstance(value, tuple):
            found = tuple(map(self.replace, value))
            self._done[id(value)] = value, found
        elif isinstance(value, dict):
            for key, each in value.items():
                value[key] = self.replace(each)
        elif isinstance(value, list):
            value[:] = map(self.replace, value)
        else:
            value.args = self.replace(value.args)
            value.state = self.replace(value.state)
        return found

    def _note(self, tensor: Tensor) -> TorchFileTensor:
        """Return the place of a meta tensor, or raise CheckpointError if the tensor cannot be read from its bytes."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise self._error(
                f"of class {type(tensor).__module__}.{type(tensor).__qualname__}, with layout {tensor.layout}; "
                "expected plain dense ones. Save it again with such instead"
            )
        if tensor.is_conj() or tensor.is_neg():
            raise self._error(
                "that was saved as a conjugated or negated view, whose values are not those in the file; save it again "
                "after resolve_conj().resolve_neg()"
            )
        storage = tensor.untyped_storage()
        begin: int = getattr(storage, "_checkpoint_offset", -1)
        # torch computes the offset of a storage without looking at the archive, so check that an entry of sufficient
        # length begins there.
        if storage.nbytes() > self._storages.get(begin, -1):
            raise self._error(
                f"of shape {tuple(tensor.shape)}, whose {storage.nbytes()} bytes are no entry of it: it is damaged, or "
                "was not written by torch.save; load it with torch.load(weights_only=True) and save it again"
            )
        begin += self._begin + int(tensor.storage_offset()) * tensor.dtype.itemsize
        return TorchFileTensor(begin, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def _error(self, what: str) -> CheckpointError:
        """Return an error about a tensor in the file; ``what`` continues "has a tensor"."""
        return CheckpointError(f"{str(self._path)!r} has a tensor {what}")
