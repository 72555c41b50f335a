"""Folders of torch.distributed.checkpoint, as FSDP2's and torchtitan's jobs write them.

``.metadata`` is a pickle of DCP's own classes; each box of a tensor is a file of ``torch.save`` inside another file.
"""

from __future__ import annotations

import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.metadata import BoxEntry, FileEntry, TensorEntry, dtype_code
from zeropp.checkpoint.named import Found, Later
from zeropp.checkpoint.torch_files import Record, Stored, read_torch_file, refused
from zeropp.checkpoint.torch_state import box_of

__all__ = ["DCP_METADATA", "find_dcp"]

DCP_METADATA = ".metadata"
_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",  # where torch before 2.3 had two of them
)
_CLASSES = {
    "BytesStorageMetadata", "ChunkStorageMetadata", "MEM_FORMAT_ENCODING", "Metadata", "MetadataIndex", "StorageMeta",
    "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_StoragePrefix",
}  # fmt: skip


# Functions and types that are called, all of them types that a pickle cannot change.
_CALLED = {("torch", "Size"): tuple, ("torch.serialization", "_get_layout"): str, ("collections", "OrderedDict"): dict}


class _Unpickler(pickle.Unpickler):
    """A reader of ``.metadata``, for which DCP's classes are records, and which calls nothing else that it names.

    torch's own restricted reader knows pickle's protocol 2 alone, and DCP writes Python's newest.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the pickle stands for."""
        # A path is there to say where the folder was.
        is_path = module in ("pathlib", "pathlib._local") and name.endswith("Path") and name.isidentifier()
        if is_path or (module in _MODULES and name in _CLASSES):
            return type("Record", (Record,), {"name": name})
        if (module, name) in _CALLED:
            return _CALLED[module, name]
        # Of what is there: asked for, some attributes of torch would be imported.
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise refused(self._path, [f"{module}.{name}"])


def find_dcp(folder: Path) -> Found:
    """The contents of a folder: tensors by their boxes, each of which is located when it is read.

    Raises:
        CheckpointError: its metadata is damaged, or names what is not DCP's.
    """
    return _Folder(folder).find()


class _Folder:
    def __init__(self, folder: Path) -> None:
        self._path = folder / DCP_METADATA
        self._folder = folder
        self._numbers: dict[str, int] = {}
        self._items: dict[tuple[int, int], int] = {}
        self._located: dict[tuple[int, int], BoxEntry] = {}
        self._dtypes: dict[tuple[int, int], torch.dtype] = {}
        self._names: dict[tuple[int, int], str] = {}

    def find(self) -> Found:
        try:
            entries = dict(self._entries(_Unpickler(self._path).load()))
        except OSError as error:
            raise CheckpointError(f"{str(self._path)!r} cannot be read: {error}") from error
        except CheckpointError:
            raise
        except Exception as error:
            # A damaged pickle may lead to any error.
            raise CheckpointError(f"{str(self._path)!r} is damaged: {type(error).__name__}: {error}") from error
        files = [FileEntry(name=name, nbytes=self._nbytes(name), sums="") for name in self._numbers]
        return Found(self._folder, self._folder, files, entries, self.locate)

    def _nbytes(self, name: str) -> int:
        try:
            return (self._folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{str(self._folder / name)!r} cannot be read: {error}") from error

    def _entries(self, metadata: Any) -> Any:
        stored: dict[tuple[str, tuple[int, ...] | None], Any] = {}
        for index, info in metadata.get("storage_data").items():
            offset = index.get("offset")
            stored[index.get("fqn"), None if offset is None else tuple(offset)] = info
        # torch flattens nested dicts to names with dots, and keeps the paths here.
        paths = metadata.get("planner_data") or {}
        for name, entry in metadata.get("state_dict_metadata").items():
            path = tuple(map(str, paths[name])) if name in paths else (name,)
            if entry.name == "BytesStorageMetadata":
                yield path, Later(partial(self._value, name, stored[name, None]))
                continue
            dtype, shape = entry.get("properties").state[0], tuple(entry.get("size"))
            yield path, self._tensor(name, dtype, shape, entry.get("chunks"), stored)

    def _tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: Any, stored: Any) -> TensorEntry:
        boxes = []
        for chunk in chunks:
            offsets, sizes = tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))
            number, begin = self._item(name, stored[name, offsets])
            box = BoxEntry(file=number, begin=begin, offsets=offsets, sizes=sizes)
            if len(offsets) != len(shape) or not box.box.inside(shape):
                raise CheckpointError(f"{str(self._path)!r} gives {name!r} of shape {shape} a part {box} outside of it")
            self._dtypes[number, begin], self._names[number, begin] = dtype, name
            boxes.append(box)
        if sum(box.box.numel for box in boxes) < torch.Size(shape).numel():
            raise CheckpointError(f"{str(self._path)!r} has only a part of {name!r} of shape {shape}")
        return TensorEntry(dtype=dtype_code(dtype, name), shape=shape, boxes=tuple(boxes))

    def _item(self, name: str, info: Record) -> tuple[int, int]:
        """Number of the file that an item is in, and its first byte there."""
        path, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{str(self._path)!r} has {name!r} compressed by {info.get('transform_descriptors')}, of which no part "
                "can be read alone; save it without compression"
            )
        if Path(path).name != path or type(offset) is not int or type(length) is not int:
            raise CheckpointError(f"{str(self._path)!r} has {name!r} in {path!r}, which is no file of its folder")
        number = self._numbers.setdefault(path, len(self._numbers))
        self._items[number, offset] = length
        return number, offset

    def _value(self, name: str, info: Record) -> object:
        number, begin = self._item(name, info)
        path = self._folder / list(self._numbers)[number]
        value = self._read(name, path, begin, self._items[number, begin])
        if isinstance(value, Stored):
            raise CheckpointError(f"{str(path)!r} has a tensor where {name!r} is said to be a value")
        return value

    def locate(self, entry: BoxEntry) -> BoxEntry:
        """A box with its first byte, counted from its own first element; its strides are what its file says."""
        key = entry.file, entry.begin
        if key not in self._located:
            path = self._folder / list(self._numbers)[entry.file]
            stored = self._read(self._names[key], path, entry.begin, self._items[key])
            if not isinstance(stored, Stored) or (stored.shape, stored.dtype) != (entry.sizes, self._dtypes[key]):
                raise CheckpointError(
                    f"{str(path)!r} has {stored} at byte {entry.begin}, where {str(self._path)!r} has a tensor of "
                    f"shape {entry.sizes} and dtype {self._dtypes[key]}"
                )
            self._located[key] = box_of(stored, entry.file)
        return self._located[key]

    def _read(self, name: str, path: Path, begin: int, length: int) -> Any:
        try:
            return read_torch_file(path, begin=begin, length=length)
        except CheckpointError as error:
            raise CheckpointError(f"{error} (at byte {begin}, where {name!r} lies)") from None
