"""Files of other programs as a source of tensors: safetensors, ``torch.save``, torch.distributed.checkpoint.

Safetensors files are one, several with an index, or all of a folder, as Hugging Face has them. ``torch.save`` wrote
one file, or a folder with an index. A folder of torch.distributed.checkpoint (FSDP2, torchtitan) has ``.metadata``,
a pickle of DCP's own classes; each box of a tensor is a file of ``torch.save`` inside another file. Extensions read
further formats (`zeropp._extensions`).

Plain torch and DCP nest dicts and lists in different ways. Here both are a flat dict of paths with dots between, as
torch itself writes them: which are the model's, and which are its optimizer's states and settings.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeropp._extensions import extensions
from zeropp.checkpoint.boxes import MODEL, STATE, CheckpointError, row_major
from zeropp.checkpoint.conversions import convert_source
from zeropp.checkpoint.metadata import (
    DTYPES,
    FORMAT,
    METADATA,
    STRETCH,
    BoxEntry,
    FileEntry,
    Metadata,
    TensorEntry,
    dtype_code,
    encode,
)
from zeropp.checkpoint.save_plan import model_names
from zeropp.checkpoint.tensor_reader import StridedBox, TensorReader
from zeropp.checkpoint.torch_files import Record, TorchFileTensor, read_torch_file, refused
from zeropp.config.base import warn_user
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = [
    "DCP_METADATA",
    "TORCH_INDEX",
    "TORCH_SINGLE",
    "FoundValues",
    "LazyValue",
    "Named",
    "box_of",
    "entry_of",
    "find_dcp",
    "find_torch",
    "foreign_source",
    "indexed_names",
    "metadata_of",
    "named_source",
    "paths_of",
    "safetensors_metadata",
]


_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_HEADER = 100_000_000  # bytes, as the safetensors library has it


def safetensors_metadata(path: Path) -> tuple[Path, Metadata]:
    """The folder of files, and what they hold, as a checkpoint of a model says it.

    Args:
        path: a file, or a folder with ``model.safetensors``, an index, or any files.

    Raises:
        CheckpointError: there are none, or one is damaged.
    """
    if path.is_file():
        folder = path.parent
        names = [path.name]
    else:
        folder = path
        names = _names(path)
    files: list[FileEntry] = []
    tensors: dict[str, TensorEntry] = {}
    for number, name in enumerate(names):
        nbytes, found = _read_header(folder / name, number)
        files.append(FileEntry(name=name, nbytes=nbytes, sums=""))
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise CheckpointError(f"{str(folder)!r} has {twice[0].removeprefix(MODEL)!r} in more than one file")
        tensors |= found
    return folder, Metadata(
        format=FORMAT,
        zeropp="",
        torch="",
        world=0,
        algorithm="crc32",
        stretch=STRETCH,
        files=tuple(files),
        tensors=tensors,
        aliases={},
        coded={},
        values={},
        ranks=(),
    )


def _names(folder: Path) -> list[str]:
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    if (folder / _INDEX).is_file():
        try:
            found = json.loads((folder / _INDEX).read_bytes())["weight_map"].values()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{str(folder / _INDEX)!r} is no index of safetensors files: {error!r}") from error
        names = sorted(set(found))
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise CheckpointError(f"{str(folder / _INDEX)!r} names files that do not lie in its own folder")
        return names
    names = sorted(each.name for each in folder.glob("*.safetensors")) if folder.is_dir() else []
    if not names:
        raise CheckpointError(f"{str(folder)!r} has no safetensors files")
    return names


def _read_header(path: Path, number: int) -> tuple[int, dict[str, TensorEntry]]:
    """Size of a file, and its tensors."""
    try:
        with path.open("rb") as file:
            nbytes = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            # Looked at before the header is read: a file of another kind may begin with any number.
            if nbytes < 8 or length > min(nbytes - 8, _MOST_HEADER):
                raise CheckpointError(f"{str(path)!r} is no safetensors file: its header would be {length} bytes long")
            header: dict[str, Any] = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is no safetensors file: {error}") from error
    found: dict[str, TensorEntry] = {}
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            shape = tuple(entry["shape"])
            (begin, end) = entry["data_offsets"]
            box = BoxEntry(file=number, begin=8 + length + begin, offsets=(0,) * len(shape), sizes=shape)
            tensor = TensorEntry(dtype=entry["dtype"], shape=shape, boxes=(box,))
            if tensor.dtype not in DTYPES:
                raise CheckpointError(
                    f"{str(path)!r} has {name!r} of the dtype {tensor.dtype!r}, which is not known here"
                )
            if (
                end - begin != tensor.numel * DTYPES[tensor.dtype].itemsize
                or not 0 <= begin <= end <= nbytes - 8 - length
            ):
                raise CheckpointError(
                    f"{str(path)!r} is damaged: {name!r} of shape {shape} would be bytes {begin} to {end}"
                )
            found[MODEL + name] = tensor
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} has a header that is damaged: {error!r}") from error
    return nbytes, found


# What the model that is trained is kept under, and wrappers around it.
_USUAL = frozenset({"model", "state_dict", "model_state_dict", "module", "_orig_mod"})


@dataclass(frozen=True)
class LazyValue:
    """A value that lies in a file of its own and is read when it is wanted."""

    read: Callable[[], object]


@dataclass
class FoundValues:
    """The contents of files.

    Attributes:
        place: of them, for errors.
        folder: that they are in.
        files: with their sizes.
        entries: tensors, values, and values that are read later, by path.
        locate: as in :class:`~zeropp.checkpoint.tensor_reader.TensorReader`.
    """

    place: Path
    folder: Path
    files: list[FileEntry] = field(default_factory=list)
    entries: dict[tuple[str, ...], Any] = field(default_factory=dict)
    locate: Callable[[BoxEntry], BoxEntry] | None = None


@dataclass
class Named:
    """Tensors by their names in a checkpoint, and an optimizer's numbers and groups, as its metadata has them."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None

    def add_state(self, name: str, key: str, value: object) -> None:
        """Add a state of a parameter: a tensor of its shape, or a number."""
        if not isinstance(value, TensorEntry):
            self.numbers.setdefault(name, {})[key] = encode(value, f"{STATE}{name}.{key}", {})
            return
        full = f"{STATE}{name}.{key}"
        weight = self.tensors.get(MODEL + name)
        self.tensors[full] = value
        # A parameter that is one number itself has moments that are: "step" alone is known to count.
        if key == "step" or (not value.shape and weight is not None and weight.shape):
            self.numbers.setdefault(name, {})[key] = {"~tensor": full}

    def add_group(self, names: Iterable[str], settings: Mapping[str, Any], known: Iterable[str]) -> None:
        """Add the settings of some parameters: those that this optimizer knows."""
        own = {key: settings[key] for key in known if key in settings and key not in ("params", "param_names")}
        encoded = encode(own, "the settings of a group", {})
        self.groups = [*(self.groups or []), {"parameters": list(names), "settings": encoded}]


def metadata_of(files: Iterable[FileEntry], named: Named) -> Metadata:
    """The metadata of a checkpoint that has the same contents."""
    values = {} if named.groups is None else {"groups": named.groups, "skipped_steps": 0}
    # A world of 0: nothing that ranks of zeropp would have saved for themselves is expected.
    return Metadata(
        format=FORMAT,
        zeropp="",
        torch="",
        world=0,
        algorithm="crc32",
        stretch=STRETCH,
        files=tuple(files),
        tensors=named.tensors,
        aliases=named.aliases,
        coded={},
        values=values,
        ranks=({"numbers": named.numbers},),
    )


def named_source(
    found: FoundValues,
    names: Mapping[str, Tensor],
    optimizer: ZeroOptimizer | None,
    prefix: str | None,
) -> TensorReader:
    """The tensors of files under the names of a checkpoint.

    Args:
        found: the files.
        names: of the model's parameters and buffers.
        optimizer: whose states are wanted, or None.
        prefix: of the model's names there, its dot included; None for what most of them have. Of several that fit
            equally well, none or a usual one ("model.", "state_dict.", "module.") is taken, with a warning.

    Raises:
        CheckpointError: no tensor has one of the names; several prefixes fit equally well, and it is not clear which is
            meant; states are there in a form that is not known.
    """
    flat = {".".join(path): value for path, value in found.entries.items()}
    tensors = {name: value for name, value in flat.items() if isinstance(value, TensorEntry)}
    if prefix is None:
        prefix = _prefix(str(found.place), tensors, names)
    if not any(prefix + name in tensors for name in names):
        raise CheckpointError(
            f"{str(found.place)!r} has none of the model's tensors under the prefix {prefix!r}: it has "
            f"{sorted(tensors)[:5]}, expected {prefix}{next(iter(names), '')} and others; give the prefix"
        )
    named = Named()
    for path, value in found.entries.items():
        full = ".".join(path)
        # At the top, what lies deeper is of something else.
        if isinstance(value, TensorEntry) and full.startswith(prefix) and (prefix or len(path) == 1):
            named.tensors[MODEL + full.removeprefix(prefix)] = value
    if optimizer is not None:
        _Optimizer(found, flat, prefix, named, optimizer, {id(each): name for name, each in names.items()}).add()
    return TensorReader(found.folder, metadata_of(found.files, named), "none", locate=found.locate)


def _prefix(place: str, tensors: Mapping[str, object], names: Mapping[str, object]) -> str:
    """The prefix of most of the model's names."""
    # The name of most parts says most: others are ends of many names.
    probes = sorted(names, key=lambda name: (-name.count("."), name))[:20]
    found = {full.removesuffix(name) for name in probes for full in tensors if full.endswith(name)}
    fitting = Counter({each: sum(each + name in tensors for name in names) for each in found if each[-1:] in ("", ".")})
    most = max(fitting.values(), default=0)
    best = sorted(each for each, count in fitting.items() if count == most) or [""]
    if len(best) == 1:
        return best[0]
    told = f"{place!r} has {most} of the model's {len(names)} tensors under each of the prefixes {best}"
    usual = [each for each in best if _USUAL.issuperset(each.split(".")[:-1])]
    if len(usual) != 1:
        raise CheckpointError(f"{told}; say which are meant, by prefix={best[0]!r} for one")
    warn_user(f"{told}; those under {usual[0]!r} are taken, and any others if prefix= says so")
    return usual[0]


class _Optimizer:
    """States and settings of an optimizer, found in any of the forms that torch gives them."""

    def __init__(
        self,
        found: FoundValues,
        flat: Mapping[str, Any],
        prefix: str,
        named: Named,
        optimizer: ZeroOptimizer,
        names: Mapping[int, str],
    ) -> None:
        self._place = str(found.place)
        self._found = found
        self._names = names
        self._named = named
        self._optimizer = optimizer
        self._known = [key for group in optimizer.param_groups for key in group]
        head = prefix
        # Of wrappers around the model, then what its states are kept under: "model_state_dict" is two of them.
        for end in ("module.", "_orig_mod.", "model.", "state_dict.", "model_"):
            head = head.removesuffix(end)
        candidates = [f"{head}{key}." for key in ("optimizer", "optimizer_state_dict", "optim", "optimizer_states.0")]
        self._flat: dict[str, Any] = {}
        for each in candidates:
            self._flat = {full.removeprefix(each): value for full, value in flat.items() if full.startswith(each)}
            if self._flat:
                break

    def add(self) -> None:
        groups = dict(self._groups())
        listed = {key: value for key, value in groups.items() if key.isdigit() and "params" in value}
        names = self._numbered(listed) if listed else {}
        for full, value in self._flat.items():
            if full.startswith("state."):
                there, _, key = full.removeprefix("state.").rpartition(".")
                self._named.add_state(names.get(there, there), key, _value(value))
        if listed:
            for value in listed.values():
                self._named.add_group([names.get(str(each), str(each)) for each in value["params"]], value, self._known)
            return
        # Settings are given by parameter here; those with equal ones become a group again.
        alike: dict[str, tuple[list[str], dict[str, Any]]] = {}
        for name, settings in groups.items():
            alike.setdefault(json.dumps(settings, default=repr, sort_keys=True), ([], settings))[0].append(name)
        for own, settings in alike.values():
            self._named.add_group(own, settings, self._known)

    def _groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """By number or by name of a parameter, its settings."""
        found: dict[str, dict[str, Any]] = {}
        for full, value in self._flat.items():
            if full.startswith("param_groups."):
                there, _, key = full.removeprefix("param_groups.").rpartition(".")
                if key in ("params", "param_names") or key in self._known:
                    found.setdefault(there, {})[key] = self._setting(_value(value), full)
        yield from found.items()

    def _setting(self, value: object, name: str) -> object:
        """A setting as a value; a learning rate may be a tensor there, of one number."""
        if not isinstance(value, TensorEntry):
            return value
        one = metadata_of(self._found.files, Named(tensors={name: value}))
        return TensorReader(self._found.folder, one, "none", locate=self._found.locate).tensor(name).tolist()

    def _numbered(self, listed: Mapping[str, dict[str, Any]]) -> dict[str, str]:
        """Names of parameters that are numbers there, by number: those that groups list, else by their order.

        The order is torch's own way.
        """
        if all("param_names" in value for value in listed.values()):
            pairs = (zip(value["params"], value["param_names"], strict=True) for value in listed.values())
            return {str(number): name for each in pairs for number, name in each}
        given = [value["params"] for _, value in sorted(listed.items(), key=lambda item: int(item[0]))]
        if all(isinstance(each, str) for params in given for each in params):
            return {}
        own = self._optimizer.slices.given
        if [len(params) for params in given] != [len(params) for params in own]:
            raise CheckpointError(
                f"{self._place!r} numbers the optimizer's parameters, in groups of {[len(each) for each in given]}, "
                f"and here are groups of {[len(each) for each in own]}; give this optimizer the same groups in "
                "the same order"
            )
        return {
            str(number): self._names[id(parameter)]
            for params, parameters in zip(given, own, strict=True)
            for number, parameter in zip(params, parameters, strict=True)
            if id(parameter) in self._names
        }


def _value(value: object) -> object:
    return value.read() if isinstance(value, LazyValue) else value


TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def find_torch(place: Path) -> FoundValues:
    """The tensors of a file or a folder, and their places.

    Raises:
        CheckpointError: a file is missing, is none of ``torch.save``, or names what is not known.
    """
    if place.is_file():
        folder = place.parent
        names = [place.name]
    else:
        folder = place
        names = indexed_names(folder / TORCH_INDEX) if (folder / TORCH_INDEX).is_file() else [TORCH_SINGLE]
    found = FoundValues(place, folder)
    for number, name in enumerate(names):
        tree = read_torch_file(folder / name)
        if not isinstance(tree, Mapping):
            raise CheckpointError(f"{str(folder / name)!r} holds a {type(tree).__name__}, expected a dict of tensors")
        found.files.append(FileEntry(name=name, nbytes=(folder / name).stat().st_size, sums=""))
        for path, value in _all_paths(tree, folder / name):
            found.entries[path] = (
                entry_of(value, number, ".".join(path)) if isinstance(value, TorchFileTensor) else value
            )
    return found


def _all_paths(tree: Mapping[Any, Any], path: Path) -> list[tuple[tuple[str, ...], Any]]:
    try:
        return list(paths_of(tree))
    except RecursionError:
        raise CheckpointError(f"{str(path)!r} has a dict that contains itself, or is nested too deep") from None


def indexed_names(index: Path) -> list[str]:
    """Files that an index of Hugging Face's names, in order.

    Raises:
        CheckpointError: it is damaged, or names files elsewhere.
    """
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{str(index)!r} is no index of files: {error!r}") from error
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(f"{str(index)!r} names files that do not lie in its own folder")
    return names


def paths_of(tree: Mapping[Any, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of nested dicts, and of lists of dicts, with their paths."""
    for key, value in tree.items():
        path = (*above, str(key))
        if isinstance(value, Mapping):
            yield from paths_of(value, path)
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            yield from paths_of(dict(enumerate(value)), path)
        else:
            yield path, value


def box_of(stored: TorchFileTensor, number: int) -> BoxEntry:
    """All of a tensor of a file as one box, counted from its own first element."""
    offsets = (0,) * len(stored.shape)
    # Strides of dimensions of one element may be anything.
    given = [s for s, size in zip(stored.strides, stored.shape, strict=True) if size > 1]
    usual = [s for s, size in zip(row_major(stored.shape), stored.shape, strict=True) if size > 1]
    if given == usual or 0 in stored.shape:
        return BoxEntry(file=number, begin=stored.begin, offsets=offsets, sizes=stored.shape)
    return StridedBox(file=number, begin=stored.begin, offsets=offsets, sizes=stored.shape, strides=stored.strides)


def entry_of(stored: TorchFileTensor, number: int, name: str) -> TensorEntry:
    """A tensor of a file, as a checkpoint's metadata has it."""
    return TensorEntry(dtype=dtype_code(stored.dtype, name), shape=stored.shape, boxes=(box_of(stored, number),))


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
        """The stand-in for a name in the pickle."""
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


def find_dcp(folder: Path) -> FoundValues:
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

    def find(self) -> FoundValues:
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
        return FoundValues(self._folder, self._folder, files, entries, self.locate)

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
                yield path, LazyValue(partial(self._value, name, stored[name, None]))
                continue
            dtype = entry.get("properties").state[0]
            shape = tuple(entry.get("size"))
            yield path, self._tensor(name, dtype, shape, entry.get("chunks"), stored)

    def _tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: Any, stored: Any) -> TensorEntry:
        boxes = []
        for chunk in chunks:
            offsets = tuple(chunk.get("offsets"))
            sizes = tuple(chunk.get("sizes"))
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
        path = info.get("relative_path")
        offset = info.get("offset")
        length = info.get("length")
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
        if isinstance(value, TorchFileTensor):
            raise CheckpointError(f"{str(path)!r} has a tensor where {name!r} is said to be a value")
        return value

    def locate(self, entry: BoxEntry) -> BoxEntry:
        """A box with its first byte, counted from its own first element; its strides are what its file says."""
        key = entry.file, entry.begin
        if key not in self._located:
            path = self._folder / list(self._numbers)[entry.file]
            stored = self._read(self._names[key], path, entry.begin, self._items[key])
            if not isinstance(stored, TorchFileTensor) or (stored.shape, stored.dtype) != (
                entry.sizes,
                self._dtypes[key],
            ):
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


_KNOWN = (
    "safetensors files (*.safetensors)",
    "files of torch.save (*.pt, *.pth, *.bin, also with pytorch_model.bin.index.json)",
    "a folder of torch.distributed.checkpoint (.metadata)",
)


def _known() -> str:
    return ", ".join([*_KNOWN, *(each for extension in extensions() for each in extension.checkpoint_formats)])


def foreign_source(
    place: Path,
    model: nn.Module,
    optimizer: ZeroOptimizer | None,
    strict: bool,
    prefix: str | None,
    safetensors: bool = False,
) -> TensorReader:
    """The tensors of others' files, under the names of a checkpoint.

    Args:
        place: a file or a folder.
        model: whose tensors are wanted.
        optimizer: whose states are wanted, or None.
        strict: raise if they are not there.
        prefix: of the model's names there; see :func:`zeropp.checkpoint.load_foreign`.
        safetensors: take it for safetensors files, whatever else is there.

    Raises:
        CheckpointError: it is of no known format, damaged, or of a checkpoint of zeropp itself.
    """
    names, aliases = model_names(model)
    if safetensors:
        source = TensorReader(*safetensors_metadata(place), "none")
    else:
        source = _source(place, names, optimizer, prefix)
    if source.locate is None:
        # What was saved file by file; jobs save their models' own names.
        source = convert_source(source, model, names.keys() | aliases.keys())
    if optimizer is not None and strict and "groups" not in source.metadata.values:
        raise CheckpointError(
            f"{str(place)!r} has no optimizer states that are known here; leave the optimizer out, or load with "
            "strict=False, which leaves its states as they are"
        )
    return source


def _source(
    place: Path, names: Mapping[str, Tensor], optimizer: ZeroOptimizer | None, prefix: str | None
) -> TensorReader:
    if not place.exists():
        raise CheckpointError(f"there is nothing at {str(place)!r}; expected {_known()}")
    if place.is_file() and place.suffix != ".safetensors":
        return named_source(find_torch(place), names, optimizer, prefix)
    if (place / METADATA).is_file():
        raise CheckpointError(f"{str(place)!r} is a checkpoint of zeropp; load it with zeropp.checkpoint.load")
    if (place / DCP_METADATA).is_file():
        return named_source(find_dcp(place), names, optimizer, prefix)
    keys = None if optimizer is None else frozenset(key for group in optimizer.param_groups for key in group)
    for extension in extensions():
        found = extension.read_checkpoint(place, keys)
        if found is not None:
            folder, files, named = found
            return TensorReader(folder, metadata_of(files, named), "none")
    if place.is_file() or any(place.glob("*.safetensors")):
        return TensorReader(*safetensors_metadata(place), "none")
    if (place / TORCH_INDEX).is_file() or (place / TORCH_SINGLE).is_file():
        return named_source(find_torch(place), names, optimizer, prefix)
    raise CheckpointError(
        f"{str(place)!r} is of no format that is known here: it has "
        f"{sorted(each.name for each in place.iterdir())[:5]}; expected {_known()}"
    )
