"""Present checkpoints of other programs as checkpoints of zeropp: safetensors, ``torch.save``, DCP.

- Safetensors, as Hugging Face writes them: one file, several files with an index, or all files of a folder.
- ``torch.save``: one file, or a folder with ``pytorch_model.bin`` or an index of several files.
- torch.distributed.checkpoint (DCP; FSDP2, torchtitan): a folder with ``.metadata``, a pickle of DCP's own classes.
  Each box of a tensor is a ``torch.save`` archive inside a larger file.
- Extensions read further formats (`zeropp._extensions`).

torch.save and DCP nest dicts and lists in different ways. This module flattens both to paths joined by dots, finds the
prefix of the model's names, and picks out the optimizer's states and settings.
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
_MOST_HEADER = 100_000_000  # maximum bytes of a header; the limit of the safetensors library


def safetensors_metadata(path: Path) -> tuple[Path, Metadata]:
    """Read the headers of safetensors files and describe the files as a checkpoint of a model.

    Args:
        path: a file, or a folder with ``model.safetensors``, an index, or any safetensors files.

    Returns:
        (folder of the files, metadata of a checkpoint with the same tensors).

    Raises:
        CheckpointError: there are no files, or a file is damaged.
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
    """Return the names of the safetensors files of a folder: the single file, those of the index, or all."""
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
    """Return the size in bytes of safetensors file ``number``, and the entries of its tensors by prefixed name."""
    try:
        with path.open("rb") as file:
            nbytes = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            # Check the length before reading the header, because another kind of file may start with any number.
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


# Usual keys of the trained model in a checkpoint's dict, and attribute names of wrappers around a model.
_USUAL = frozenset({"model", "state_dict", "model_state_dict", "module", "_orig_mod"})


@dataclass(frozen=True)
class LazyValue:
    """A value that is read from its file only when it is needed.

    Attributes:
        read: function that reads and returns the value.
    """

    read: Callable[[], object]


@dataclass
class FoundValues:
    """The contents of the files of another program's checkpoint.

    Attributes:
        place: path given by the user, for errors.
        folder: folder of the files.
        files: names and sizes of the files.
        entries: the leaves of the checkpoint's nested dicts by path: :class:`TensorEntry`, :class:`LazyValue` or
            values.
        locate: function that completes the place of a box by reading its file; None if ``entries`` has all places.
    """

    place: Path
    folder: Path
    files: list[FileEntry] = field(default_factory=list)
    entries: dict[tuple[str, ...], Any] = field(default_factory=dict)
    locate: Callable[[BoxEntry], BoxEntry] | None = None


@dataclass
class Named:
    """Tensors and optimizer values of another program's checkpoint, under the names of a checkpoint of zeropp.

    Attributes:
        tensors: entries of the tensors, by name with prefix.
        aliases: first name of each tied tensor, by its other names.
        numbers: encoded single-number optimizer states, by parameter name and key.
        groups: parameter names and encoded settings of each group; None without an optimizer.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None

    def add_state(self, name: str, key: str, value: object) -> None:
        """Add an optimizer state of a parameter.

        Args:
            name: name of the parameter; ``tensors`` should have its weight already.
            key: key of the state, such as "exp_avg".
            value: a :class:`TensorEntry`, or a plain value.
        """
        if not isinstance(value, TensorEntry):
            self.numbers.setdefault(name, {})[key] = encode(value, f"{STATE}{name}.{key}", {})
            return
        full = f"{STATE}{name}.{key}"
        weight = self.tensors.get(MODEL + name)
        self.tensors[full] = value
        # A scalar tensor is a single number per parameter, unless the parameter is a scalar itself: then its moments
        # are scalars, too, and only "step" is known to be a count.
        if key == "step" or (not value.shape and weight is not None and weight.shape):
            self.numbers.setdefault(name, {})[key] = {"~tensor": full}

    def add_group(self, names: Iterable[str], settings: Mapping[str, Any], known: Iterable[str]) -> None:
        """Add a parameter group.

        Args:
            names: names of the group's parameters.
            settings: settings of the group.
            known: keys of the settings that the optimizer here has; other settings are dropped.
        """
        own = {key: settings[key] for key in known if key in settings and key not in ("params", "param_names")}
        encoded = encode(own, "the settings of a group", {})
        self.groups = [*(self.groups or []), {"parameters": list(names), "settings": encoded}]


def metadata_of(files: Iterable[FileEntry], named: Named) -> Metadata:
    """Return the metadata of a checkpoint of zeropp with the given files and contents."""
    values = {} if named.groups is None else {"groups": named.groups, "skipped_steps": 0}
    # world = 0 marks another program's files, which lack the values that ranks of zeropp save for themselves.
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
    """Make a reader that finds the tensors of files under the names of a checkpoint of zeropp.

    Args:
        found: contents of the files.
        names: parameters and buffers of the model, by name.
        optimizer: optimizer to find states for; None for weights only.
        prefix: prefix of the model's names in the files, with its dot; None for the prefix under which most names are
            found. If several prefixes fit equally well, an empty or a usual one ("model.", "state_dict.", "module.") is
            taken, with a warning.

    Raises:
        CheckpointError: no tensor has one of the names, several prefixes fit and none or several are usual, or the
            optimizer states cannot be matched with the optimizer's groups.
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
        # With an empty prefix, take only top-level entries: nested entries belong to something else.
        if isinstance(value, TensorEntry) and full.startswith(prefix) and (prefix or len(path) == 1):
            named.tensors[MODEL + full.removeprefix(prefix)] = value
    if optimizer is not None:
        _Optimizer(found, flat, prefix, named, optimizer, {id(each): name for name, each in names.items()}).add()
    return TensorReader(found.folder, metadata_of(found.files, named), "none", locate=found.locate)


def _prefix(place: str, tensors: Mapping[str, object], names: Mapping[str, object]) -> str:
    """Return the prefix under which most of the model's names are found; raise CheckpointError if that is ambiguous."""
    # Search with the names that have the most dots. A short name such as "weight" is the end of many other names.
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
        raise CheckpointError(f"{told}; choose one, such as prefix={best[0]!r}")
    warn_user(f"{told}; those under {usual[0]!r} are taken; give prefix= to take others")
    return usual[0]


class _Optimizer:
    """Search of a checkpoint for an optimizer's states and settings, in any of the forms that torch saves."""

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
        # Strip the model's wrappers and the key of its state dict from the prefix, to get the prefix of the dict that
        # also contains the optimizer. "model_state_dict." takes two steps: "state_dict." and "model_".
        for end in ("module.", "_orig_mod.", "model.", "state_dict.", "model_"):
            head = head.removesuffix(end)
        candidates = [f"{head}{key}." for key in ("optimizer", "optimizer_state_dict", "optim", "optimizer_states.0")]
        self._flat: dict[str, Any] = {}
        for each in candidates:
            self._flat = {full.removeprefix(each): value for full, value in flat.items() if full.startswith(each)}
            if self._flat:
                break

    def add(self) -> None:
        """Add the optimizer's states and groups to ``named``, with the model's parameter names."""
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
        # This form has settings per parameter. Parameters with equal settings become one group.
        alike: dict[str, tuple[list[str], dict[str, Any]]] = {}
        for name, settings in groups.items():
            alike.setdefault(json.dumps(settings, default=repr, sort_keys=True), ([], settings))[0].append(name)
        for own, settings in alike.values():
            self._named.add_group(own, settings, self._known)

    def _groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (number of a group, or name of a parameter; its settings), depending on the form of the checkpoint."""
        found: dict[str, dict[str, Any]] = {}
        for full, value in self._flat.items():
            if full.startswith("param_groups."):
                there, _, key = full.removeprefix("param_groups.").rpartition(".")
                if key in ("params", "param_names") or key in self._known:
                    found.setdefault(there, {})[key] = self._setting(_value(value), full)
        yield from found.items()

    def _setting(self, value: object, name: str) -> object:
        """Return a setting as a plain value; a setting that is stored as a tensor, such as lr, is read."""
        if not isinstance(value, TensorEntry):
            return value
        one = metadata_of(self._found.files, Named(tensors={name: value}))
        return TensorReader(self._found.folder, one, "none", locate=self._found.locate).tensor(name).tolist()

    def _numbered(self, listed: Mapping[str, dict[str, Any]]) -> dict[str, str]:
        """Return the names of parameters that the checkpoint numbers, by number.

        The names come from ``param_names`` if all groups have them. Otherwise parameters are matched by their order in
        the groups, as ``torch.optim.Optimizer.load_state_dict`` does. The result is empty if the groups list names.

        Args:
            listed: settings of each group, by number of the group.

        Raises:
            CheckpointError: the groups have other sizes than those of the optimizer here.
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
    """Return a value, read from its file if it is a :class:`LazyValue`."""
    return value.read() if isinstance(value, LazyValue) else value


TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def find_torch(place: Path) -> FoundValues:
    """Find the values of ``torch.save`` files, and the places of their tensors.

    Args:
        place: a file, or a folder with ``pytorch_model.bin`` or its index.

    Raises:
        CheckpointError: a file is missing, was not written by ``torch.save``, or names a class or function that is not
            allowed.
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
    """Return the leaves of :func:`paths_of`; raise CheckpointError for a dict that contains itself."""
    try:
        return list(paths_of(tree))
    except RecursionError:
        raise CheckpointError(f"{str(path)!r} has a dict that contains itself, or is nested too deep") from None


def indexed_names(index: Path) -> list[str]:
    """Return the sorted names of the files that a Hugging Face index lists.

    Raises:
        CheckpointError: the index is damaged, or lists files outside of its folder.
    """
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{str(index)!r} is no index of files: {error!r}") from error
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(f"{str(index)!r} names files that do not lie in its own folder")
    return names


def paths_of(tree: Mapping[Any, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, leaf) for all leaves of nested dicts and lists of dicts.

    Args:
        tree: the outermost dict.
        above: path of ``tree`` itself.
    """
    for key, value in tree.items():
        path = (*above, str(key))
        if isinstance(value, Mapping):
            yield from paths_of(value, path)
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            yield from paths_of(dict(enumerate(value)), path)
        else:
            yield path, value


def box_of(stored: TorchFileTensor, number: int) -> BoxEntry:
    """Return the place of a stored tensor as one box that covers the whole tensor; a StridedBox if not contiguous.

    Args:
        stored: the tensor in its file.
        number: number of the file.
    """
    offsets = (0,) * len(stored.shape)
    # Ignore the strides of dimensions of size 1, which have no meaning.
    given = [s for s, size in zip(stored.strides, stored.shape, strict=True) if size > 1]
    usual = [s for s, size in zip(row_major(stored.shape), stored.shape, strict=True) if size > 1]
    if given == usual or 0 in stored.shape:
        return BoxEntry(file=number, begin=stored.begin, offsets=offsets, sizes=stored.shape)
    return StridedBox(file=number, begin=stored.begin, offsets=offsets, sizes=stored.shape, strides=stored.strides)


def entry_of(stored: TorchFileTensor, number: int, name: str) -> TensorEntry:
    """Return the metadata entry of a stored tensor.

    Args:
        stored: the tensor in its file.
        number: number of the file.
        name: name of the tensor, for errors.
    """
    return TensorEntry(dtype=dtype_code(stored.dtype, name), shape=stored.shape, boxes=(box_of(stored, number),))


DCP_METADATA = ".metadata"
_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",  # the module of two of the classes in torch before 2.3
)
_CLASSES = {
    "BytesStorageMetadata", "ChunkStorageMetadata", "MEM_FORMAT_ENCODING", "Metadata", "MetadataIndex", "StorageMeta",
    "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_StoragePrefix",
}  # fmt: skip


# Builtin types that replace functions and types which a pickle of DCP calls. A pickle cannot modify builtin types.
_CALLED = {("torch", "Size"): tuple, ("torch.serialization", "_get_layout"): str, ("collections", "OrderedDict"): dict}


class _Unpickler(pickle.Unpickler):
    """A restricted unpickler for ``.metadata``: DCP's classes and pathlib's paths become :class:`Record`.

    torch's dtypes, torch.Size and the other names in ``_CALLED`` are accepted, too. All other names are refused.
    torch's own restricted unpickler supports only pickle protocol 2, but DCP writes Python's default protocol.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(path.read_bytes()))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement for a class or function in the pickle.

        Raises:
            CheckpointError: the name is not allowed.
        """
        # The metadata contains a pathlib path of the original folder.
        is_path = module in ("pathlib", "pathlib._local") and name.endswith("Path") and name.isidentifier()
        if is_path or (module in _MODULES and name in _CLASSES):
            return type("Record", (Record,), {"name": name})
        if (module, name) in _CALLED:
            return _CALLED[module, name]
        # Use vars() instead of getattr(), because accessing some attributes of torch imports a module.
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise refused(self._path, [f"{module}.{name}"])


def find_dcp(folder: Path) -> FoundValues:
    """Find the contents of a folder of torch.distributed.checkpoint. Boxes are located when they are read.

    Raises:
        CheckpointError: the metadata is damaged, or names a class or function that is not allowed.
    """
    return _Folder(folder).find()


class _Folder:
    """A folder of torch.distributed.checkpoint. Keys (file number, first byte) identify the archives in its files."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / DCP_METADATA
        self._folder = folder
        self._numbers: dict[str, int] = {}
        self._items: dict[tuple[int, int], int] = {}
        self._located: dict[tuple[int, int], BoxEntry] = {}
        self._dtypes: dict[tuple[int, int], torch.dtype] = {}
        self._names: dict[tuple[int, int], str] = {}

    def find(self) -> FoundValues:
        """Read the metadata and return the folder's contents."""
        try:
            entries = dict(self._entries(_Unpickler(self._path).load()))
        except OSError as error:
            raise CheckpointError(f"{str(self._path)!r} cannot be read: {error}") from error
        except CheckpointError:
            raise
        except Exception as error:
            # A damaged pickle may raise any exception.
            raise CheckpointError(f"{str(self._path)!r} is damaged: {type(error).__name__}: {error}") from error
        files = [FileEntry(name=name, nbytes=self._nbytes(name), sums="") for name in self._numbers]
        return FoundValues(self._folder, self._folder, files, entries, self.locate)

    def _nbytes(self, name: str) -> int:
        try:
            return (self._folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{str(self._folder / name)!r} cannot be read: {error}") from error

    def _entries(self, metadata: Any) -> Any:
        """Yield (path, entry) for each item of DCP's metadata."""
        stored: dict[tuple[str, tuple[int, ...] | None], Any] = {}
        for index, info in metadata.get("storage_data").items():
            offset = index.get("offset")
            stored[index.get("fqn"), None if offset is None else tuple(offset)] = info
        # DCP flattens nested dicts to names joined by dots, and stores the original paths in planner_data.
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
        """Return the entry of a tensor. The first byte of each box is that of its archive until :meth:`locate`."""
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
        """Return (number of the file, first byte in it) of an item's archive."""
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
        """Read an item that is not a tensor."""
        number, begin = self._item(name, info)
        path = self._folder / list(self._numbers)[number]
        value = self._read(name, path, begin, self._items[number, begin])
        if isinstance(value, TorchFileTensor):
            raise CheckpointError(f"{str(path)!r} has a tensor where {name!r} is said to be a value")
        return value

    def locate(self, entry: BoxEntry) -> BoxEntry:
        """Return a box with the place and strides of its data, read from the header of its archive.

        Args:
            entry: the box; ``begin`` is the first byte of its archive.

        Raises:
            CheckpointError: the archive has no tensor with the shape and dtype in the metadata.
        """
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
        """Read the archive at a byte range of a file; errors name the item."""
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
    """Return the descriptions of all supported formats, for errors."""
    return ", ".join([*_KNOWN, *(each for extension in extensions() for each in extension.checkpoint_formats)])


def foreign_source(
    place: Path,
    model: nn.Module,
    optimizer: ZeroOptimizer | None,
    strict: bool,
    prefix: str | None,
    safetensors: bool = False,
) -> TensorReader:
    """Make a reader of another program's checkpoint, with the names of a checkpoint of zeropp.

    Args:
        place: a file or a folder.
        model: model to load.
        optimizer: optimizer to load states for; None for weights only.
        strict: raise if there are no states for ``optimizer``.
        prefix: prefix of the model's names in the files; see :func:`zeropp.checkpoint.load_foreign`.
        safetensors: read safetensors files, even if the folder has files of other formats.

    Raises:
        CheckpointError: the format is unknown, the files are damaged, or the checkpoint is one of zeropp.
    """
    names, aliases = model_names(model)
    if safetensors:
        source = TensorReader(*safetensors_metadata(place), "none")
    else:
        source = _source(place, names, optimizer, prefix)
    if source.locate is None:
        # Not for DCP, whose checkpoints come from training jobs and have the model's own names.
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
    """Find the format of a file or a folder and make its reader."""
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
