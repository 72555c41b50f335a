"""Safetensors files that others wrote, as Hugging Face has them: one, several with an index, or all of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zeropp.checkpoint.checksums import STRETCH
from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.metadata import DTYPES, FORMAT, BoxEntry, FileEntry, Metadata, TensorEntry
from zeropp.checkpoint.parts import MODEL

__all__ = ["safetensors_metadata"]

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
        folder, names = path.parent, [path.name]
    else:
        folder, names = path, _names(path)
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
        format=FORMAT, zeropp="", torch="", world=0, algorithm="crc32", stretch=STRETCH, files=tuple(files),
        tensors=tensors, aliases={}, coded={}, values={}, ranks=(),
    )  # fmt: skip


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
            shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
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
