"""Files of tensors in the safetensors format, one or more a rank, none larger than a limit.

A tensor that a file has in full is there under its name; a box of one under the name with its ranges, as in
``model.weight[0:3, 128:256]``, so that other programs read the files as well.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zeropp.checkpoint.boxes import Box
from zeropp.checkpoint.checksums import Checksums
from zeropp.checkpoint.disk import as_bytes, write_blocks
from zeropp.checkpoint.metadata import BoxEntry, FileEntry, dtype_code
from zeropp.checkpoint.parts import Part
from zeropp.checkpoint.progress import Progress

__all__ = ["FILE_NBYTES", "Written", "require_file_nbytes", "write_files"]

FILE_NBYTES = 5_000_000_000
"""Largest size of a file, as Hugging Face has it."""

# Data begins at a multiple of it, so that a reader may map the file and use tensors where they lie.
_ALIGNED = 4096


@dataclass(frozen=True)
class Written:
    """Files that one rank has written, and of each tensor dtype, shape and boxes, by number of the file."""

    files: list[FileEntry]
    tensors: dict[str, tuple[str, tuple[int, ...], list[BoxEntry]]]


def require_file_nbytes(limit: object, least: int = 1) -> None:
    """Make sure that a size of files is one.

    Raises:
        ValueError: it is no number of bytes, or too small.
    """
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < least:
        raise ValueError(f"file_nbytes is {limit!r}; expected a number of bytes, {least} or more")


def write_files(
    folder: Path,
    stem: str,
    parts: Sequence[Part],
    checks: Checksums,
    limit: int = FILE_NBYTES,
    progress: Progress | None = None,
) -> Written:
    """Write parts of tensors to ``<stem>-00000.safetensors`` and on, and sync them.

    Args:
        folder: that exists.
        stem: of the files' names; no other rank's.
        parts: to write; no two of one tensor with common elements.
        checks: algorithm of checksums.
        limit: largest size of a file in bytes, headers aside.
        progress: told of what is written.

    Raises:
        CheckpointError: a dtype that such files cannot hold.
        OSError: a file cannot be written; what is there of it stays.
    """
    found, progress = Written([], {}), progress or Progress()
    for part in parts:
        # In no file, and read again all the same.
        if not part.values.numel():
            found.tensors[part.name] = dtype_code(part.values.dtype, part.name), part.shape, []
    groups = [(group, *_header(group)) for group in _grouped(parts, limit)]
    progress.expect(sum(len(head) + sum(part.values.nbytes for part in group) for group, head, _ in groups))
    for number, (group, head, begins) in enumerate(groups):
        name = f"{stem}-{number:05d}.safetensors"
        data = [torch.frombuffer(bytearray(head), dtype=torch.uint8), *(part.values for part in group)]
        nbytes = len(head) + sum(part.values.nbytes for part in group)
        content = _Content(data, [0, *begins])
        sums = write_blocks(folder / name, nbytes, content.fill, checks.of_bytes, progress.add)
        found.files.append(FileEntry(name=name, nbytes=nbytes, sums=FileEntry.pack(sums, checks.width)))
        for part, begin in zip(group, begins, strict=True):
            entry = BoxEntry(file=number, begin=begin, offsets=part.box.offsets, sizes=part.box.sizes)
            code = dtype_code(part.values.dtype, part.name)
            found.tensors.setdefault(part.name, (code, part.shape, []))[2].append(entry)
    return found


def _grouped(parts: Sequence[Part], limit: int) -> Iterator[list[Part]]:
    """Parts for each file: wide dtypes first, since values that begin aligned can be used where they lie."""
    small = [piece for part in parts if part.values.numel() for piece in _split(part, limit)]
    group: list[Part] = []
    nbytes = 0
    for part in sorted(small, key=lambda part: -part.values.itemsize):
        if group and nbytes + part.values.nbytes > limit:
            yield group
            group, nbytes = [], 0
        group.append(part)
        nbytes += part.values.nbytes
    if group:
        yield group


def _split(part: Part, limit: int) -> Iterator[Part]:
    """A part in halves, and those again, until none is larger than a file may be."""
    dimension = next((d for d, size in enumerate(part.box.sizes) if size > 1), None)
    if part.values.nbytes <= limit or dimension is None:
        yield part
        return
    size = part.box.sizes[dimension]
    for begin, count in ((0, size // 2), (size // 2, size - size // 2)):
        offsets, sizes = list(part.box.offsets), list(part.box.sizes)
        offsets[dimension] += begin
        sizes[dimension] = count
        values = part.values.narrow(dimension, begin, count)
        yield from _split(Part(part.name, part.shape, Box(tuple(offsets), tuple(sizes)), values), limit)


def _header(group: Sequence[Part]) -> tuple[bytes, list[int]]:
    """The header of a file, with its length in front; and where each part begins in the file."""
    sizes = [part.values.nbytes for part in group]
    ends = list(itertools.accumulate(sizes))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for part, size, end in zip(group, sizes, ends, strict=True):
        entries[_key(part)] = {
            "dtype": dtype_code(part.values.dtype, part.name),
            "shape": list(part.box.sizes),
            "data_offsets": [end - size, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Spaces, which the format allows behind the JSON.
    text = text.ljust(-(-(len(text) + 8) // _ALIGNED) * _ALIGNED - 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + end - size for size, end in zip(sizes, ends, strict=True)]


def _key(part: Part) -> str:
    if part.box.sizes == part.shape:
        return part.name
    ranges = (f"{offset}:{offset + size}" for offset, size in zip(part.box.offsets, part.box.sizes, strict=True))
    return f"{part.name}[{', '.join(ranges)}]"


class _Content:
    """The bytes of a file that is to be: tensors one behind the other.

    Args:
        data: on any device, of any strides.
        begins: where each begins in the file.
    """

    def __init__(self, data: Sequence[Tensor], begins: Sequence[int]) -> None:
        # A transposed weight is copied here; all others are read where they are.
        self._rows = [as_bytes(tensor.contiguous()) for tensor in data]
        self._begins = begins

    def fill(self, begin: int, room: Tensor) -> None:
        """Put bytes of the file into ``room``, uint8 on the CPU."""
        number = bisect.bisect_right(self._begins, begin) - 1
        done = 0
        while done < room.numel():
            place = begin + done - self._begins[number]
            count = min(room.numel() - done, self._rows[number].numel() - place)
            room[done : done + count].copy_(self._rows[number][place : place + count])
            done += count
            number += 1
