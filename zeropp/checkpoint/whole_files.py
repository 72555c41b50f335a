"""Safetensors files of whole tensors, as transformers reads them: planned first, then filled tensor by tensor.

What is known of the tensors decides where each lies, so that several ranks may write, each its own files, and none
needs more than the tensor at hand.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zeropp.checkpoint.disk import as_bytes, view_of
from zeropp.checkpoint.metadata import dtype_code, sync_folder, write_synced
from zeropp.checkpoint.progress import Progress

__all__ = ["WholeFiles", "completes", "is_ours"]

_SINGLE = "model.safetensors"
_INDEX = f"{_SINGLE}.index.json"
_NAME = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
_MADE_BY = {"format": "pt", "writer": "zeropp"}
"""Of each header: the format is what transformers asks for."""


@dataclass(frozen=True)
class _Place:
    file: int
    begin: int


class WholeFiles:
    """Files in a folder that is there, and has none of their names.

    Args:
        folder: of the files.
        tensors: name, dtype and shape of each.
        limit: largest size of a file in bytes, headers aside; None for one file.
        progress: told of what is written.

    Attributes:
        names: of the files.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        limit: int | None,
        progress: Progress | None = None,
    ) -> None:
        self._folder = folder
        self._progress = progress or Progress()
        self._tensors = dict(tensors)
        groups: list[list[str]] = [[]]
        nbytes = 0
        # Wide dtypes first, so that what lies behind them is aligned, too.
        for name in sorted(tensors, key=lambda name: -tensors[name][0].itemsize):
            size = self._nbytes(name)
            if limit is not None and groups[-1] and nbytes + size > limit:
                groups.append([])
                nbytes = 0
            groups[-1].append(name)
            nbytes += size
        count = len(groups)
        self.names = (
            [_SINGLE]
            if count == 1
            else [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
        )
        self._heads: list[bytes] = []
        self._places: dict[str, _Place] = {}
        for number, group in enumerate(groups):
            self._plan(number, group)
        self._open: dict[int, int] = {}

    def _nbytes(self, name: str) -> int:
        dtype, shape = self._tensors[name]
        return int(torch.Size(shape).numel()) * dtype.itemsize

    def _plan(self, number: int, group: list[str]) -> None:
        entries: dict[str, object] = {"__metadata__": _MADE_BY}
        end = 0
        for name in group:
            dtype, shape = self._tensors[name]
            entries[name] = {
                "dtype": dtype_code(dtype, name),
                "shape": list(shape),
                "data_offsets": [end, end + self._nbytes(name)],
            }
            end += self._nbytes(name)
        text = json.dumps(entries, separators=(",", ":")).encode()
        # The format allows spaces behind the header, so that tensors begin at a multiple of 8 bytes.
        text = text.ljust(-(-len(text) // 8) * 8)
        head = len(text).to_bytes(8, "little") + text
        self._heads.append(head)
        begin = len(head)
        for name in group:
            self._places[name] = _Place(number, begin)
            begin += self._nbytes(name)

    def file_of(self, name: str) -> int:
        """Number of the file that a tensor is in."""
        return self._places[name].file

    def expect(self, numbers: Collection[int]) -> None:
        """Tell of what is to be written: files of these numbers."""
        names = (name for name, place in self._places.items() if place.file in numbers)
        self._progress.expect(sum(map(self._nbytes, names)))

    def write(self, name: str, values: Tensor) -> None:
        """Write one tensor, converted to its dtype there.

        Raises:
            OSError: it cannot be written.
        """
        place = self._places[name]
        dtype, shape = self._tensors[name]
        assert tuple(values.shape) == shape  # both are of the same model
        row = as_bytes(values.detach().to("cpu", dtype).contiguous())
        memory, done = view_of(row) if row.numel() else memoryview(b""), 0
        descriptor = self._descriptor(place.file)
        # Linux writes at most 2 GiB a call.
        while done < len(memory):
            done += os.pwrite(descriptor, memory[done:], place.begin + done)
        self._progress.add(done)

    def _descriptor(self, number: int) -> int:
        if number not in self._open:
            path = self._folder / self.names[number]
            self._open[number] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            os.pwrite(self._open[number], self._heads[number], 0)
        return self._open[number]

    def close(self, numbers: Iterable[int]) -> None:
        """Sync and close files; those of ``numbers`` are there then, also without a tensor in them."""
        try:
            for number in numbers:
                self._descriptor(number)
            for descriptor in self._open.values():
                os.fsync(descriptor)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close what is open, as it is."""
        while self._open:
            os.close(self._open.popitem()[1])

    def write_index(self) -> None:
        """Write the index that tells each tensor's file, if there are several."""
        if len(self.names) > 1:
            index = {
                "metadata": {"total_size": sum(map(self._nbytes, self._tensors))},
                "weight_map": {name: self.names[place.file] for name, place in sorted(self._places.items())},
            }
            write_synced(self._folder / _INDEX, json.dumps(index, indent=2).encode())
        sync_folder(self._folder)


def completes(name: str) -> bool:
    """Tell whether a file of this name makes a folder an export: it is there alone, or the index of others."""
    return name in (_SINGLE, _INDEX)


def is_ours(path: Path) -> bool:
    """Tell whether :class:`WholeFiles` has written a file, by its name and header; of an index by its name."""
    if not _NAME.fullmatch(path.name) or not path.is_file():
        return path.name == _INDEX
    begin = json.dumps({"__metadata__": _MADE_BY}, separators=(",", ":")).encode()[:-1]
    with path.open("rb") as file:
        # The first 8 bytes of such a file are the length of its header.
        return file.read(8 + len(begin))[8:] == begin
