"""``metadata.json``: tensors and values of a checkpoint, the place of each box in its file, and checksums of all files.

``metadata.json`` is written last; a folder without it is not a checkpoint. The file starts with a checksum of its text.

Values other than the model's tensors (settings, state dicts, positions of data loaders) are stored as JSON and named
tensors. Nothing is pickled, so reading a checkpoint runs no code. JSON has no tuples, and its keys are strings; tuples,
other keys and references to tensors are stored as objects with a single key that begins with ``~``.

A file of tensors has one checksum per stretch (1 MiB): XXH3 if the package xxhash is installed, else zlib's CRC-32.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import importlib
import json
import math
import os
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json
from torch import Tensor, nn

from zeropp.checkpoint.boxes import DTYPES, Box, BoxIndex, CheckpointError, as_bytes, dtype_code

__all__ = [
    "DTYPES",
    "FORMAT",
    "METADATA",
    "NO_RENAMES",
    "STRETCH",
    "BoxEntry",
    "Checksums",
    "CodedEntry",
    "FileEntry",
    "Metadata",
    "TensorEntry",
    "begins_as_ours",
    "comparable",
    "decode",
    "dtype_code",
    "encode",
    "end_write",
    "sync_folder",
    "tensors_in",
    "write_synced",
    "written_first",
]


_Json = Any
_TENSORS = ("~tensor", "~array", "~scalar")
# Each level of a value takes at most three levels of JSON, and the JSON parser refuses more than 200.
_DEPTH = 50
_INTEGER_BITS = 128  # the state of numpy's default generator, which data loaders save, has integers of 128 bits


def encode(value: object, name: str, tensors: dict[str, Tensor]) -> _Json:
    """Encode a value as JSON, with its tensors moved to a separate dict.

    Args:
        value: None, a bool, number, string, tensor or numpy array, or a nested dict, list or tuple of these.
        name: name of the value; prefix of the names of its tensors, and used in error messages.
        tensors: dict that receives the tensors inside ``value``, each under a unique name.

    Returns:
        JSON that :func:`decode` turns back into the value.

    Raises:
        CheckpointError: the value contains an object of another type or is nested too deep; the message names it.
    """
    return _encode(value, name, tensors, 0)


def _encode(value: object, name: str, tensors: dict[str, Tensor], depth: int) -> _Json:
    """Encode a value that lies ``depth`` levels deep in the value given to :func:`encode`."""
    if depth > _DEPTH:
        raise CheckpointError(
            f"{name[:60]}... is nested more than {_DEPTH} deep, or contains itself; give it as tensors, or flatter"
        )
    # Compare exact types: an enum member or another subclass of int would be decoded as a plain int.
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        if value.bit_length() > _INTEGER_BITS:
            raise CheckpointError(
                f"{name} is an integer of {value.bit_length()} bits; {_INTEGER_BITS} are the most. Give it as a string"
            )
        return value
    if type(value) is str:
        _require_text(value, name)
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"~float": repr(value)}
    if isinstance(value, Tensor):
        return {"~tensor": _keep(_plain(value, name), name, tensors)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, name, tensors, depth)
    if type(value) in (list, tuple):
        assert isinstance(value, (list, tuple))
        found = [_encode(each, f"{name}.{index}", tensors, depth + 1) for index, each in enumerate(value)]
        return found if isinstance(value, list) else {"~tuple": found}
    array = _encode_array(value, name, tensors)
    if array is not None:
        return array
    raise CheckpointError(
        f"{name} is {_short(value)}, a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
        "keep: it has numbers, strings, None, tensors, numpy arrays, and dicts, lists and tuples of such. Give its "
        "state as one of these, or leave it out"
    )


def _require_text(value: str, name: str) -> None:
    """Raise CheckpointError if a string cannot be encoded as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # JSON parsers reject a lone surrogate, so the checkpoint could not be read.
        raise CheckpointError(
            f"{name} is {ascii(value)[:60]}, a string with half of a surrogate pair, as of a file's name that is no "
            "UTF-8; give it as list(os.fsencode(...)), or leave it out"
        ) from error


def _encode_mapping(value: Mapping[Any, Any], name: str, tensors: dict[str, Tensor], depth: int) -> _Json:
    """Encode a mapping: as a JSON object if its keys allow that, else as a list of (key, value) pairs."""
    pairs = []
    for index, (key, each) in enumerate(value.items()):
        if type(key) not in (str, int, float, bool, tuple) and key is not None:
            raise CheckpointError(
                f"{name} has the key {_short(key)}, a {type(key).__module__}.{type(key).__qualname__}; expected "
                "strings, numbers or tuples"
            )
        # A key that is not a string cannot be part of a tensor's name, so the entry's index is used instead.
        inner = f"{name}.{key}" if isinstance(key, str) else f"{name}.~{index}"
        pairs.append((_encode(key, f"{name}.~{index}.key", tensors, depth + 1), each, inner))
    # MultiStepLR stores its milestones in a Counter and looks up missing keys, which a dict would refuse.
    tag = "~counter" if isinstance(value, Counter) else "~dict"
    if tag == "~dict" and all(isinstance(key, str) and not key.startswith("~") for key, _, _ in pairs):
        return {key: _encode(each, inner, tensors, depth + 1) for key, each, inner in pairs}
    return {tag: [[key, _encode(each, inner, tensors, depth + 1)] for key, each, inner in pairs]}


def _encode_array(value: object, name: str, tensors: dict[str, Tensor]) -> _Json | None:
    """Encode a numpy array or scalar; None if the value is neither."""
    # Do not import numpy, which may not be installed. If the value is a numpy array, numpy has been imported.
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    if isinstance(value, numpy.ndarray) and type(value) not in (numpy.ndarray, numpy.memmap):
        # Subclasses carry a mask, record fields or units, which would be lost.
        raise CheckpointError(
            f"{name} is an array of class {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
            "cannot keep: it has plain arrays. Give it as one, or leave it out"
        )
    array = numpy.array(value)
    try:
        tensor = torch.from_numpy(array.reshape(-1)).reshape(array.shape)
    except (TypeError, ValueError):
        raise CheckpointError(
            f"{name} is of numpy with the dtype {array.dtype.str}, which no tensor has; give it as numbers or strings, "
            "or in another dtype or the machine's order of bytes"
        ) from None
    tag = "~scalar" if isinstance(value, numpy.generic) else "~array"
    return {tag: _keep(_plain(tensor, name), name, tensors)}


def _plain(value: Tensor, name: str) -> Tensor:
    """Return a detached dense tensor with the same values, or raise CheckpointError if files cannot store it."""
    kind = type(value)
    # Check the class before data_ptr(): some tensor subclasses have no memory, and calling data_ptr() on them may crash
    # the process.
    if kind not in (Tensor, nn.Parameter):
        raise _not_plain(name, f"of class {kind.__module__}.{kind.__qualname__}")
    if value.is_nested or value.layout is not torch.strided:
        raise _not_plain(name, "nested" if value.is_nested else f"of layout {value.layout}")
    dtype_code(value.dtype, name)
    try:
        found = value.detach().resolve_conj().resolve_neg()
        there = found.numel() == 0 or found.data_ptr() != 0
    except RuntimeError:
        there = False
    if not there or value.device.type == "meta":
        raise _not_plain(name, f"without values, on {value.device}")
    return found


def _not_plain(name: str, what: str) -> CheckpointError:
    """Return the error for a tensor that files cannot store; ``what`` describes the tensor."""
    return CheckpointError(
        f"{name} is a tensor {what}, which a checkpoint cannot keep: it has plain dense tensors with values. Give it "
        "as one, or leave it out"
    )


def _keep(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Add a tensor to ``tensors`` and return its name: ``name``, with a number appended if that is taken."""
    found, number = name, 1
    while found in tensors:
        number += 1
        found = f"{name}~{number}"
    tensors[found] = tensor
    return found


def decode(value: _Json, tensor: Callable[[str], Tensor]) -> Any:
    """Decode a value from the JSON that :func:`encode` returned.

    Args:
        value: the JSON.
        tensor: returns the tensor with a given name.

    Returns:
        The value that was encoded.

    Raises:
        CheckpointError: the JSON has a tag that this version does not know.
    """
    if isinstance(value, list):
        return [decode(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("~"):
        return {key: decode(each, tensor) for key, each in value.items()}
    inner = value[tag]
    if tag == "~float":
        return float(inner)
    if tag == "~tensor":
        return tensor(inner)
    if tag == "~utf8":
        # encode() does not write this tag, but checkpoints from before the first release may contain it.
        return bytes.fromhex(inner).decode("utf-8", "surrogatepass")
    if tag in ("~array", "~scalar"):
        array = tensor(inner).numpy()
        return array if tag == "~array" else array[()]
    if tag == "~tuple":
        return tuple(decode(each, tensor) for each in inner)
    if tag in ("~dict", "~counter"):
        found = {decode(key, tensor): decode(each, tensor) for key, each in inner}
        return Counter(found) if tag == "~counter" else found
    raise CheckpointError(f"a value is of the unknown kind {tag!r}; it was written by a later version of zeropp")


def tensors_in(value: _Json) -> Iterator[str]:
    """Yield the names of the tensors that :func:`decode` looks up for this JSON."""
    if isinstance(value, list):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        tag = next(iter(value), "")
        if len(value) == 1 and tag in _TENSORS:
            yield value[tag]
        else:
            yield from tensors_in(list(value.values()))


def comparable(value: _Json, tensor: Callable[[str], Tensor]) -> str:
    """Return a string that is equal for equal values, even if their tensors have different names.

    Args:
        value: JSON that :func:`encode` returned.
        tensor: returns the tensor with a given name, on the CPU.
    """
    told = {}
    for name in tensors_in(value):
        found = tensor(name)
        told[name] = f"{found.dtype} {tuple(found.shape)} {as_bytes(found.contiguous()).tolist()}"
    return json.dumps(_with_names(value, told), sort_keys=True)


def _with_names(value: _Json, names: Mapping[str, str]) -> _Json:
    """Return the JSON of :func:`encode` with each tensor name replaced by ``names[name]``."""
    if isinstance(value, list):
        return [_with_names(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (tag := next(iter(value))) in _TENSORS:
        return {tag: names[value[tag]]}
    return {key: _with_names(each, names) for key, each in value.items()}


def _short(value: object) -> str:
    """Return the repr of a value, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


STRETCH = 1 << 20
"""Bytes that one checksum covers. A rank that verifies its reads must read whole stretches."""


@dataclass(frozen=True)
class Checksums:
    """A checksum algorithm.

    Attributes:
        name: name of the algorithm in ``metadata.json``.
        width: size of a checksum in bytes.
        of_bytes: function that returns the checksum of an object with the buffer protocol.
    """

    name: str
    width: int
    of_bytes: Callable[[Any], int]

    def hexdigest(self, data: bytes) -> str:
        """Return the checksum of ``data`` in hexadecimal digits."""
        return f"{self.of_bytes(data):0{2 * self.width}x}"

    @staticmethod
    def best() -> Checksums:
        """Return the fastest algorithm that is installed here."""
        found = _xxhash()
        return found if found is not None else _CRC32

    @staticmethod
    def common(names: Iterable[str]) -> Checksums:
        """Return the fastest algorithm that all ranks have.

        Args:
            names: name of the algorithm that :meth:`best` returned on each rank, this rank included.
        """
        best = Checksums.best()
        return best if all(name == best.name for name in names) else _CRC32

    @staticmethod
    def crc32() -> Checksums:
        """Return CRC-32, which is always installed."""
        return _CRC32

    @staticmethod
    def by_name(name: object) -> Checksums:
        """Return the algorithm with the given name.

        Raises:
            CheckpointError: the algorithm is unknown, or its package is not installed.
        """
        if name == _CRC32.name:
            return _CRC32
        if name == "xxh3_64":
            found = _xxhash()
            if found is not None:
                return found
            raise CheckpointError(
                "the checkpoint has XXH3 checksums, which need the package xxhash: pip install xxhash"
            )
        raise CheckpointError(f"the checkpoint has checksums of the unknown kind {name!r}")


_CRC32 = Checksums("crc32", 4, zlib.crc32)


def _xxhash() -> Checksums | None:
    """Return XXH3, or None if the package xxhash is not installed."""
    try:
        module = importlib.import_module("xxhash")
    except ImportError:
        return None
    return Checksums("xxh3_64", 8, module.xxh3_64_intdigest)


METADATA = "metadata.json"
FORMAT = 1
"""Version of the checkpoint format. A reader refuses later versions."""

NO_RENAMES = (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP)
"""errno values with which ``os.replace`` fails on file systems or in sandboxes that do not support renaming."""

_HEAD = b'{"checksum": "'
_MIDDLE = b'", "checkpoint": '
_TAIL = b"}\n"


class _Entry(BaseModel):
    """Base class of the records in ``metadata.json``."""

    # strict: do not accept a number in quotes. extra="forbid": unknown keys mean that another program wrote the file.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileEntry(_Entry):
    """One file of tensors.

    Attributes:
        name: name of the file in the checkpoint's folder.
        nbytes: size of the file in bytes.
        sums: checksums of the file's stretches, packed by :meth:`pack`.
    """

    name: str
    nbytes: int
    sums: str

    def checksums(self, width: int) -> list[int]:
        """Return the checksum of each stretch; ``width`` is the size of a checksum in bytes, 4 or 8."""
        packed = base64.b64decode(self.sums, validate=True)
        return list(struct.unpack(f"<{len(packed) // width}{ {4: 'I', 8: 'Q'}[width] }", packed))

    @staticmethod
    def pack(sums: Iterable[int], width: int) -> str:
        """Return checksums as base64 of little-endian integers with ``width`` bytes each."""
        found = list(sums)
        return base64.b64encode(struct.pack(f"<{len(found)}{ {4: 'I', 8: 'Q'}[width] }", *found)).decode()


class BoxEntry(_Entry):
    """The place of one box of a tensor.

    Attributes:
        file: index of the file in :attr:`Metadata.files`.
        begin: first byte of the box in the file.
        offsets: first index of the box in each dimension of the tensor.
        sizes: number of indices of the box in each dimension.
    """

    file: int
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The box as a :class:`~zeropp.checkpoint.boxes.Box`."""
        return Box(self.offsets, self.sizes)


class TensorEntry(_Entry):
    """One tensor of a checkpoint.

    Attributes:
        dtype: safetensors name of the dtype.
        shape: shape of the whole tensor.
        boxes: places of the boxes that make up the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[BoxEntry, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)


class CodedEntry(_Entry):
    """A frozen parameter that the checkpoint stores as 8-bit codes and scales.

    Attributes:
        dtype: safetensors name of the dtype of the decoded values.
        shape: shape of the parameter.
        strides: strides of the parameter in elements; the codes follow its memory order.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Metadata(_Entry):
    """The contents of ``metadata.json``.

    Attributes:
        format: version of the checkpoint format.
        zeropp, torch: versions of zeropp and torch that wrote the checkpoint.
        world: number of ranks that wrote the checkpoint; 0 for metadata made of another program's files.
        algorithm: name of the checksum algorithm.
        stretch: bytes that one checksum covers; the last stretch of a file may be shorter.
        files: the files of tensors.
        tensors: entries of the tensors, by name.
        aliases: first name of each tied tensor, by its other names; without the prefix "model.".
        coded: parameters stored as codes and scales, by name; see `zeropp.checkpoint.tensor_reader`.
        values: values that are the same for all ranks, by name, as JSON of :func:`encode`.
        ranks: values of each rank, by name, as JSON of :func:`encode`.
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
        """Write ``metadata.json`` to ``folder`` and sync it to disk. The file appears complete or not at all.

        Raises:
            CheckpointError: the metadata could not be read back; nothing is written.
        """
        body = json.dumps(self.model_dump(mode="json"), separators=(",", ":"), allow_nan=True).encode()
        self._check_loads(body)
        checks = Checksums.by_name(self.algorithm)
        text = _HEAD + checks.hexdigest(body).encode() + _MIDDLE + body + _TAIL
        write_synced(folder / METADATA, text)

    @classmethod
    def read(cls, folder: Path) -> Metadata:
        """Read and check the ``metadata.json`` of a folder.

        Raises:
            CheckpointError: the file is missing, damaged, or has a later format.
        """
        path = folder / METADATA
        try:
            return cls.parse(path)
        except CheckpointError:
            # The file may have been cut off while it was overwritten in place. The first copy is complete then.
            if not path.exists() or not written_first(path).exists():
                raise
            with contextlib.suppress(CheckpointError):
                return cls.parse(written_first(path))
            raise

    @classmethod
    def parse(cls, path: Path) -> Metadata:
        """Read and check one file with the contents of ``metadata.json``.

        Raises:
            CheckpointError: the file is missing, damaged, or has a later format.
        """
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
        # Check the version before the checksum, because a later format may use other checksums.
        if isinstance(version, int) and version > FORMAT:
            raise CheckpointError(
                f"{path} is of format {version}, and this version of zeropp reads formats up to {FORMAT}; read it with "
                f"zeropp {found.get('zeropp')} or later"
            )
        checks = Checksums.by_name(algorithm)
        if checks.hexdigest(body).encode() != text[len(_HEAD) : end]:
            raise CheckpointError(f"{path} is damaged: its checksum is not that of its text")
        try:
            metadata = cls.model_validate_json(body)
        except ValidationError as error:
            raise CheckpointError(f"{path} does not have the form of format {FORMAT}: {error}") from error
        metadata._check_entries(path)
        return metadata

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a model's parameter or buffer; None if the checkpoint does not have it."""
        entry = self.tensors.get(f"model.{name}") or self.coded.get(name)
        return None if entry is None else entry.shape

    def _check_loads(self, body: bytes) -> None:
        """Raise CheckpointError if the metadata could not be read back or refers to tensors that were not written."""
        try:
            # json.dumps writes some text that the parser used for reading refuses, such as deep nesting.
            from_json(body)
        except ValueError as error:
            raise CheckpointError(f"the metadata of the checkpoint could not be read again: {error}") from error
        lacking = [name for name in tensors_in([self.values, list(self.ranks)]) if name not in self.tensors]
        if lacking:
            raise CheckpointError(f"the tensors {lacking[:5]} were not written, and the checkpoint would not load")

    def _check_entries(self, path: Path) -> None:
        """Raise CheckpointError for inconsistent entries.

        File names must stay in the folder, boxes must lie inside their tensors and files and cover each tensor exactly
        once, and the values that every rank saves must be present.
        """
        for file in self.files:
            # With a name such as "../x", reads and removals would touch files outside of the checkpoint.
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
            # The boxes have tensor.numel elements in total. If none overlap, they cover the tensor completely.
            index = BoxIndex(tensor.shape, [(each.box, each) for each in tensor.boxes])
            if any(sum(1 for _ in index.overlapping(each.box)) > 1 for each in tensor.boxes):
                raise CheckpointError(f"{path} has parts of {name!r} that overlap")
        whole = self.world == len(self.ranks) > 0 and all("random" in rank for rank in self.ranks)
        if not whole or ("groups" in self.values) != ("skipped_steps" in self.values):
            raise CheckpointError(f"{path} lacks values that each of {self.world} ranks, or the optimizer, saves")


def _why_none(folder: Path) -> str:
    """Return the message for a folder without ``metadata.json``."""
    if not folder.exists():
        return f"there is no checkpoint {str(folder)!r}: nothing of that name is there"
    names = sorted(each.name for each in folder.iterdir())[:5] if folder.is_dir() else []
    return (
        f"{str(folder)!r} is no complete checkpoint: it has no {METADATA}, which is written last"
        f"{f'; it has {names}' if names else ''}"
    )


def written_first(path: Path) -> Path:
    """Return the path of the first copy that :func:`write_synced` writes before the file itself.

    Readers use the copy if the file itself is damaged.
    """
    # The name is fixed, so a copy that a killed program leaves is overwritten by the next write.
    return path.with_name(f".{path.name}.writing")


def write_synced(path: Path, data: bytes) -> None:
    """Write a small file atomically and sync it to disk.

    The data is written to the path of :func:`written_first`, which is then renamed to ``path``. On file systems that
    cannot rename, ``path`` is overwritten in place while the first copy exists, and the copy is removed afterwards.
    """
    _write_file(written_first(path), data)
    try:
        os.replace(written_first(path), path)
    except OSError as error:
        if error.errno not in NO_RENAMES:
            raise
        sync_folder(path.parent)
        _write_file(path, data)
        written_first(path).unlink()
    sync_folder(path.parent)


def end_write(path: Path, check: Callable[[Path], object]) -> None:
    """Complete an in-place write of :func:`write_synced` that was interrupted, using the first copy.

    Args:
        path: the file.
        check: raises CheckpointError if the file at the given path is damaged.

    Raises:
        CheckpointError: the file is damaged, and the first copy is damaged or missing.
    """
    try:
        check(path)
    except CheckpointError:
        check(written_first(path))
        # Do not use write_synced: it would truncate the first copy, the only complete one at this point.
        _write_file(path, written_first(path).read_bytes())
        sync_folder(path.parent)


def _write_file(path: Path, data: bytes) -> None:
    """Create or overwrite a file and sync it to disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], done)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that the names of its files survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems cannot sync folders
    finally:
        os.close(descriptor)


def begins_as_ours(path: Path) -> bool:
    """Return True if a file begins like a ``metadata.json`` of zeropp.

    The file may be damaged or have a later format.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(len(_HEAD) + 40 + len(_MIDDLE))
    except OSError:
        return False
    return begin.startswith(_HEAD) and _MIDDLE in begin
