"""``metadata.json``: the tensors and values of a checkpoint, the place of each part, and the checksums of every file.

It makes a folder a checkpoint, and is written last. Its own checksum comes first in it.

Values besides the model's tensors (settings, state_dicts, positions) are JSON and named tensors. Nothing is pickled,
so nothing runs when a checkpoint is read. JSON has no tuples and no keys but strings; they, and tensors, are objects
of one key that begins with ``~``.

Checksums are those of stretches of files: XXH3 where the package xxhash is installed, else zlib's CRC-32.
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
# Three levels of JSON for each at most, and what reads it takes 200.
_DEPTH = 50
_INTEGER_BITS = 128  # in the state of numpy's usual generator, which data loaders keep


def encode(value: object, name: str, tensors: dict[str, Tensor]) -> _Json:
    """JSON that stands for a value.

    Args:
        value: None, a bool, number, string, tensor, numpy array, or a dict, list or tuple of such.
        name: of the value, for tensors inside and for errors.
        tensors: takes the tensors inside, by name; no two have one.

    Raises:
        CheckpointError: it is, or has inside, something else, or is nested too deep; with its name.
    """
    return _encode(value, name, tensors, 0)


def _encode(value: object, name: str, tensors: dict[str, Tensor], depth: int) -> _Json:
    if depth > _DEPTH:
        raise CheckpointError(
            f"{name[:60]}... is nested more than {_DEPTH} deep, or contains itself; give it as tensors, or flatter"
        )
    # The exact types: a numpy number, an enumeration or a user's int would come back as something else.
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
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # Readers of JSON refuse it.
        raise CheckpointError(
            f"{name} is {ascii(value)[:60]}, a string with half of a surrogate pair, as of a file's name that is no "
            "UTF-8; give it as list(os.fsencode(...)), or leave it out"
        ) from error


def _encode_mapping(value: Mapping[Any, Any], name: str, tensors: dict[str, Tensor], depth: int) -> _Json:
    pairs = []
    for index, (key, each) in enumerate(value.items()):
        if type(key) not in (str, int, float, bool, tuple) and key is not None:
            raise CheckpointError(
                f"{name} has the key {_short(key)}, a {type(key).__module__}.{type(key).__qualname__}; expected "
                "strings, numbers or tuples"
            )
        # Numbered where the key is no name.
        inner = f"{name}.{key}" if isinstance(key, str) else f"{name}.~{index}"
        pairs.append((_encode(key, f"{name}.~{index}.key", tensors, depth + 1), each, inner))
    # torch's MultiStepLR counts its milestones, and asks them for more than a dict has.
    tag = "~counter" if isinstance(value, Counter) else "~dict"
    if tag == "~dict" and all(isinstance(key, str) and not key.startswith("~") for key, _, _ in pairs):
        return {key: _encode(each, inner, tensors, depth + 1) for key, each, inner in pairs}
    return {tag: [[key, _encode(each, inner, tensors, depth + 1)] for key, each, inner in pairs]}


def _encode_array(value: object, name: str, tensors: dict[str, Tensor]) -> _Json | None:
    # PyTorch does not need numpy: what is its array has imported it.
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    if isinstance(value, numpy.ndarray) and type(value) not in (numpy.ndarray, numpy.memmap):
        # A mask, fields or units would be lost.
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
    """A tensor in the form that files can hold."""
    kind = type(value)
    # Others have no memory of their own, or mean something else by it; to ask them for it may end the process.
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
    return CheckpointError(
        f"{name} is a tensor {what}, which a checkpoint cannot keep: it has plain dense tensors with values. Give it "
        "as one, or leave it out"
    )


def _keep(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Add a tensor under its name, or one like it if another has that already."""
    found, number = name, 1
    while found in tensors:
        number += 1
        found = f"{name}~{number}"
    tensors[found] = tensor
    return found


def decode(value: _Json, tensor: Callable[[str], Tensor]) -> Any:
    """The values that JSON of :func:`encode` stands for.

    Args:
        value: the JSON.
        tensor: gives the tensor of a name.

    Raises:
        CheckpointError: it is none that :func:`encode` makes.
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
        # Such strings are no longer written; checkpoints from before the first release may have them.
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
    """Names of the tensors that :func:`decode` will ask for."""
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
    """Equal where values are, whatever their tensors are called.

    Args:
        value: JSON of :func:`encode`.
        tensor: gives the tensor of a name, on the CPU.
    """
    told = {}
    for name in tensors_in(value):
        found = tensor(name)
        told[name] = f"{found.dtype} {tuple(found.shape)} {as_bytes(found.contiguous()).tolist()}"
    return json.dumps(_with_names(value, told), sort_keys=True)


def _with_names(value: _Json, names: Mapping[str, str]) -> _Json:
    """JSON of :func:`encode` with other names of its tensors."""
    if isinstance(value, list):
        return [_with_names(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (tag := next(iter(value))) in _TENSORS:
        return {tag: names[value[tag]]}
    return {key: _with_names(each, names) for key, each in value.items()}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


STRETCH = 1 << 20
"""Bytes that one checksum covers: what a rank reads of a file is rounded to them."""


@dataclass(frozen=True)
class Checksums:
    """One algorithm.

    Attributes:
        name: as files say it.
        width: bytes of a checksum.
        of_bytes: the checksum of anything that has a buffer.
    """

    name: str
    width: int
    of_bytes: Callable[[Any], int]

    def hexdigest(self, data: bytes) -> str:
        """A checksum in hexadecimal digits."""
        return f"{self.of_bytes(data):0{2 * self.width}x}"

    @staticmethod
    def best() -> Checksums:
        """The faster one that is there."""
        found = _xxhash()
        return found if found is not None else _CRC32

    @staticmethod
    def common(names: Iterable[str]) -> Checksums:
        """The faster one that all ranks have.

        Args:
            names: of :meth:`best` of each, this one's among them.
        """
        best = Checksums.best()
        return best if all(name == best.name for name in names) else _CRC32

    @staticmethod
    def crc32() -> Checksums:
        """The one that is always there."""
        return _CRC32

    @staticmethod
    def by_name(name: object) -> Checksums:
        """The algorithm of that name.

        Raises:
            CheckpointError: it is not here.
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
    try:
        module = importlib.import_module("xxhash")
    except ImportError:
        return None
    return Checksums("xxh3_64", 8, module.xxh3_64_intdigest)


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
        coded: tensors of the model that are there in codes, by name; see `zeropp.checkpoint.tensor_reader`.
        values: what is no tensor and one for all ranks, by name; see `zeropp.checkpoint.metadata`.
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
        checks = Checksums.by_name(self.algorithm)
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

    def _check_entries(self, path: Path) -> None:
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
            if any(sum(1 for _ in index.overlapping(each.box)) > 1 for each in tensor.boxes):
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
        _write_file(path, written_first(path).read_bytes())
        sync_folder(path.parent)


def _write_file(path: Path, data: bytes) -> None:
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
