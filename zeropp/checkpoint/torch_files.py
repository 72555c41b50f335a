"""Files of ``torch.save``: what they hold, and at which byte each tensor lies; no tensor is read.

Such a file is a zip archive of a pickle and, uncompressed, the memory of each storage.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.pickles import read_pickle

__all__ = ["read_torch_file"]

_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # what files of torch before 1.6 begin with
_LOCAL = struct.Struct("<4s22xHH")  # of an entry's own header: signature, lengths of name and extra field


class _Window(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._place = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence])
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._place)
        count = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._begin + self._place)
        data = self._file.read(count)
        self._place += len(data)
        return data


def read_torch_file(
    path: Path,
    records: Callable[[str, str], bool] = lambda module, name: False,
    begin: int = 0,
    length: int | None = None,
) -> Any:
    """The contents of a file of ``torch.save``, with :class:`~zeropp.checkpoint.pickles.Stored` for each tensor.

    Args:
        path: of the file.
        records: as in :func:`~zeropp.checkpoint.pickles.read_pickle`.
        begin: first byte of the archive in the file.
        length: of the archive in bytes; None for the rest of the file.

    Raises:
        CheckpointError: it cannot be read, is no such file, is compressed, or names what is not known. Nothing is run.
    """
    try:
        with path.open("rb") as file:
            nbytes = path.stat().st_size
            length = nbytes - begin if length is None else length
            if begin < 0 or length < 0 or begin + length > nbytes:
                raise CheckpointError(f"{str(path)!r} has {nbytes} bytes, expected {begin + length}; it was cut short")
            return _Archive(path, file, begin, length).read(records)
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    except CheckpointError:
        raise
    except Exception as error:
        # Whatever zipfile makes of a damaged one: names that are no text, versions that there never were.
        raise CheckpointError(f"{str(path)!r} is no file of torch.save, or is damaged: {error}") from error


class _Archive:
    def __init__(self, path: Path, file: BinaryIO, begin: int, length: int) -> None:
        self._path, self._file, self._begin = path, file, begin
        file.seek(begin)
        if file.read(len(_OLD)) == _OLD:
            raise CheckpointError(
                f"{str(path)!r} is of the format of torch before 1.6, of which no part can be read alone; load it with "
                "torch.load(weights_only=True) and save it again"
            )
        self._zip = zipfile.ZipFile(_Window(file, begin, length))
        # All entries lie in one folder, which is named after the file.
        self._entries = {info.filename.partition("/")[2]: info for info in self._zip.infolist()}

    def read(self, records: Callable[[str, str], bool]) -> Any:
        if "data.pkl" not in self._entries or "constants.pkl" in self._entries:
            raise CheckpointError(
                f"{str(self._path)!r} is no file of torch.save: it has {sorted(self._entries)[:5]}, expected data.pkl "
                "and no constants.pkl, which TorchScript has"
            )
        if "byteorder" in self._entries and self._member("byteorder") != b"little":
            raise CheckpointError(f"{str(self._path)!r} was written in big-endian order; save it again on this machine")
        return read_pickle(self._member("data.pkl"), repr(str(self._path)), records, self._storage)

    def _member(self, name: str) -> bytes:
        begin, nbytes = self._place(name)
        self._file.seek(begin)
        return self._file.read(nbytes)

    def _storage(self, key: str) -> tuple[int, int]:
        return self._place(f"data/{key}")

    def _place(self, name: str) -> tuple[int, int]:
        """First byte of an entry in the file, and its length."""
        info = self._entries.get(name)
        if info is None:
            raise CheckpointError(f"its entry {name!r} is missing")
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                f"{str(self._path)!r} has compressed entries, of which no part can be read alone; load it with "
                "torch.load(weights_only=True) and save it again"
            )
        # The directory of the archive does not tell how long this header is: torch pads it to align the data.
        self._file.seek(self._begin + info.header_offset)
        head = self._file.read(_LOCAL.size)
        if len(head) != _LOCAL.size or not head.startswith(b"PK\x03\x04"):
            raise CheckpointError(f"{str(self._path)!r} is damaged: its entry {name!r} has no header")
        _, first, second = _LOCAL.unpack(head)
        begin = self._begin + info.header_offset + _LOCAL.size + first + second
        if begin + info.file_size > self._path.stat().st_size:
            raise CheckpointError(f"{str(self._path)!r} is damaged: its entry {name!r} lies beyond its end")
        return begin, info.file_size
