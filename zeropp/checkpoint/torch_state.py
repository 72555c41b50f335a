"""State dicts that ``torch.save`` wrote: one file, or a folder with an index as Hugging Face had them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zeropp.checkpoint.boxes import row_major
from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.metadata import BoxEntry, FileEntry, TensorEntry, dtype_code
from zeropp.checkpoint.named import Found
from zeropp.checkpoint.source import StridedBox
from zeropp.checkpoint.torch_files import Stored, read_torch_file

__all__ = ["TORCH_INDEX", "TORCH_SINGLE", "box_of", "entry_of", "find_torch", "indexed_names", "paths_of"]

TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def find_torch(place: Path) -> Found:
    """The tensors of a file or a folder, and their places.

    Raises:
        CheckpointError: a file is missing, is none of ``torch.save``, or names what is not known.
    """
    if place.is_file():
        folder, names = place.parent, [place.name]
    else:
        folder = place
        names = indexed_names(folder / TORCH_INDEX) if (folder / TORCH_INDEX).is_file() else [TORCH_SINGLE]
    found = Found(place, folder)
    for number, name in enumerate(names):
        tree = read_torch_file(folder / name)
        if not isinstance(tree, Mapping):
            raise CheckpointError(f"{str(folder / name)!r} holds a {type(tree).__name__}, expected a dict of tensors")
        found.files.append(FileEntry(name=name, nbytes=(folder / name).stat().st_size, sums=""))
        for path, value in _all_paths(tree, folder / name):
            found.entries[path] = entry_of(value, number, ".".join(path)) if isinstance(value, Stored) else value
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


def box_of(stored: Stored, number: int) -> BoxEntry:
    """All of a tensor of a file as one box, counted from its own first element."""
    offsets = (0,) * len(stored.shape)
    # Strides of dimensions of one element may be anything.
    given = [s for s, size in zip(stored.strides, stored.shape, strict=True) if size > 1]
    usual = [s for s, size in zip(row_major(stored.shape), stored.shape, strict=True) if size > 1]
    if given == usual or 0 in stored.shape:
        return BoxEntry(file=number, begin=stored.begin, offsets=offsets, sizes=stored.shape)
    return StridedBox(file=number, begin=stored.begin, offsets=offsets, sizes=stored.shape, strides=stored.strides)


def entry_of(stored: Stored, number: int, name: str) -> TensorEntry:
    """A tensor of a file, as a checkpoint's metadata has it."""
    return TensorEntry(dtype=dtype_code(stored.dtype, name), shape=stored.shape, boxes=(box_of(stored, number),))
