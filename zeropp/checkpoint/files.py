"""Files in the safetensors format: one or more a rank of a checkpoint's parts, or of whole tensors as others read them.

:func:`plan_files` decides from dtypes and shapes where each tensor lies. In a checkpoint a tensor that a file has in
full is there under its name; a box of one under the name with its ranges, as in ``model.weight[0:3, 128:256]``, so that
other programs read the files as well.

Bytes to a file and back, past the page cache where the file system allows it, by several threads.

A file is a sequence of blocks. Each is put together in an aligned buffer, summed stretch by stretch, and written at its
place; or read, checked and taken apart. Threads share nothing but the number of the next block: copies, checksums and
system calls all give the interpreter away.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zeropp.checkpoint.boxes import Box, TensorBox, as_bytes
from zeropp.checkpoint.metadata import STRETCH, BoxEntry, Checksums, FileEntry, dtype_code, sync_folder, write_synced
from zeropp.checkpoint.rank_sync import Progress, in_threads

__all__ = [
    "FILE_NBYTES",
    "ReadRange",
    "WholeFiles",
    "Written",
    "completes",
    "is_ours",
    "plan_files",
    "read_blocks",
    "require_file_nbytes",
    "write_blocks",
    "write_files",
]


BLOCK_NBYTES = 8 * STRETCH
"""Bytes of a block: enough to keep a disk busy with few calls, few enough that buffers are no burden."""

_ALIGNED = 4096  # what O_DIRECT asks of addresses, places and lengths: 512 on most disks, a page on all
_THREADS = 4
# Where the file system has no O_DIRECT, it says so when the file is opened or written first.
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def view_of(buffer: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor on the CPU, for system calls."""
    # Not by way of numpy, which PyTorch does not need.
    return memoryview((ctypes.c_ubyte * buffer.numel()).from_address(buffer.data_ptr())).cast("B")


def _aligned(nbytes: int) -> Tensor:
    room = torch.empty(nbytes + _ALIGNED, dtype=torch.uint8, device="cpu")
    begin = -room.data_ptr() % _ALIGNED
    return room[begin : begin + nbytes]


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[tuple[int, bool]]:
    """A descriptor, and whether it is past the page cache."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        descriptor = os.open(path, flags | direct, 0o644)
    except OSError as error:
        if not direct or error.errno not in _REFUSED:
            raise
        descriptor = os.open(path, flags, 0o644)
        direct = 0
    try:
        yield descriptor, bool(direct)
    finally:
        os.close(descriptor)


def write_blocks(
    path: Path,
    nbytes: int,
    fill: Callable[[int, Tensor], None],
    check: Callable[[memoryview], int],
    done: Callable[[int], None] = lambda nbytes: None,
) -> list[int]:
    """Write a new file, and sync it.

    Args:
        path: that does not exist.
        nbytes: of the file.
        fill: ``fill(begin, room)`` puts bytes [begin, begin + room.numel()) of the file into ``room``; called by
            several threads.
        check: checksum of a stretch.
        done: told how many bytes more are written, by several threads.

    Returns:
        The checksum of each stretch.
    """
    sums = [0] * -(-nbytes // STRETCH)
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as (descriptor, direct):
        if nbytes and hasattr(os, "posix_fallocate"):
            # A disk that is full says so here, and blocks of several threads lie side by side.
            _reserve(descriptor, nbytes)

        def work(numbers: Iterator[int]) -> None:
            buffer = _aligned(BLOCK_NBYTES)
            memory = view_of(buffer)
            for number in numbers:
                begin = number * BLOCK_NBYTES
                count = min(BLOCK_NBYTES, nbytes - begin)
                fill(begin, buffer[:count])
                for place in range(0, count, STRETCH):
                    sums[(begin + place) // STRETCH] = check(memory[place : min(place + STRETCH, count)])
                # Of a last block that is not aligned, the rest goes beyond the end, and is cut off below.
                padded = -(-count // _ALIGNED) * _ALIGNED if direct else count
                _write_all(descriptor, memory[:padded], begin)
                done(count)

        in_threads(-(-nbytes // BLOCK_NBYTES), work, _THREADS)
        os.ftruncate(descriptor, nbytes)
        os.fsync(descriptor)
    return sums


def _reserve(descriptor: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise


def _write_all(descriptor: int, memory: memoryview, begin: int) -> None:
    done = 0
    while done < len(memory):
        done += os.pwrite(descriptor, memory[done:], begin + done)


@dataclass(frozen=True)
class ReadRange:
    """Bytes of a file, and where they go: contiguous uint8 of that length on the CPU."""

    begin: int
    into: Tensor

    @property
    def end(self) -> int:
        """First byte behind them."""
        return self.begin + self.into.numel()


def read_blocks(
    path: Path,
    nbytes: int,
    wanted: Sequence[ReadRange],
    verified: Collection[int],
    verify: Callable[[int, memoryview], None],
    done: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Read parts of a file.

    Args:
        path: of the file.
        nbytes: that it has.
        wanted: what to read.
        verified: numbers of stretches that are read whole, whether wanted or not, and given to ``verify``.
        verify: raises if a stretch, of that number and with those bytes, is not as it was written.
        done: told how many bytes more are read, by several threads.

    Returns:
        Bytes that were read.

    Raises:
        OSError: the file cannot be read, or ends early.
    """
    wanted = sorted((each for each in wanted if each.into.numel()), key=lambda each: each.begin)
    begins = [each.begin for each in wanted]
    # Ends need not ascend: tied weights that are apart here are the same bytes there.
    reach = list(itertools.accumulate((each.end for each in wanted), max))
    spans = _spans(wanted, verified, nbytes)
    counts: list[int] = []
    with _opened(path, os.O_RDONLY) as (descriptor, _):

        def work(numbers: Iterator[int]) -> None:
            buffer = _aligned(BLOCK_NBYTES)
            memory = view_of(buffer)
            for number in numbers:
                begin, end = spans[number]
                _read_all(descriptor, memory, begin, end, path)
                counts.append(end - begin)
                for stretch in range(begin // STRETCH, -(-end // STRETCH)):
                    if stretch in verified:
                        low = stretch * STRETCH
                        high = min((stretch + 1) * STRETCH, nbytes)
                        verify(stretch, memory[low - begin : high - begin])
                place = bisect.bisect_right(reach, begin)
                while place < len(wanted) and begins[place] < end:
                    each = wanted[place]
                    low = max(each.begin, begin)
                    high = min(each.end, end)
                    if low < high:
                        each.into[low - each.begin : high - each.begin].copy_(buffer[low - begin : high - begin])
                    place += 1
                done(end - begin)

        in_threads(len(spans), work, _THREADS)
    return sum(counts)


def _spans(wanted: Sequence[ReadRange], verified: Collection[int], nbytes: int) -> list[tuple[int, int]]:
    """Ranges of a file to read, none longer than a block and none across the border of two."""
    ranges = [(each.begin, each.end) for each in wanted]
    ranges += [(stretch * STRETCH, min((stretch + 1) * STRETCH, nbytes)) for stretch in verified]
    spans: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        low = begin // _ALIGNED * _ALIGNED
        while low < end:
            high = min(low // BLOCK_NBYTES * BLOCK_NBYTES + BLOCK_NBYTES, end)
            same = spans and low // BLOCK_NBYTES == spans[-1][0] // BLOCK_NBYTES
            # A gap of a stretch costs less than another call.
            if same and low - spans[-1][1] <= STRETCH:
                spans[-1] = spans[-1][0], max(high, spans[-1][1])
            elif not spans or high > spans[-1][1]:
                spans.append((low, high))
            low = low // BLOCK_NBYTES * BLOCK_NBYTES + BLOCK_NBYTES
    return spans


def _read_all(descriptor: int, memory: memoryview, begin: int, end: int, path: Path) -> None:
    done = 0
    count = end - begin
    # Rounded up, as O_DIRECT wants it; what is behind the end of the file is not there, and does not count.
    padded = -(-count // _ALIGNED) * _ALIGNED
    while done < count:
        got = os.preadv(descriptor, [memory[done:padded]], begin + done)
        if got == 0:
            raise OSError(errno.EIO, f"the file ends at byte {begin + done}, before {end}", str(path))
        done += got


FILE_NBYTES = 5_000_000_000
"""Largest size of a file, as Hugging Face has it."""

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""

# Data begins at a multiple of it, so that a reader may map the file and use tensors where they lie.
_TENSOR_ALIGNMENT = 4096
_MADE_BY = {"format": "pt", "writer": "zeropp"}
"""Of each header: the format is what transformers asks for."""
_SINGLE = "model.safetensors"
_INDEX = f"{_SINGLE}.index.json"
_NAME = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")


@dataclass(frozen=True)
class PlannedFile:
    """A file that is to be written.

    Attributes:
        head: its header, with the length in front.
        members: numbers of its tensors.
        begins: first byte of each.
        nbytes: of the whole file.
    """

    head: bytes
    members: list[int]
    begins: list[int]
    nbytes: int


def plan_files(names: Sequence[str], kinds: Sequence[Kind], limit: int | None) -> list[PlannedFile]:
    """Share tensors out to files, of which there is at least one.

    Args:
        names: of the tensors, in the files.
        kinds: of each.
        limit: largest size of a file in bytes, its header aside; only a single tensor may be larger. None for one file.

    Raises:
        CheckpointError: a dtype that such files cannot hold.
    """
    sizes = [_nbytes(kind) for kind in kinds]
    groups: list[list[int]] = [[]]
    nbytes = 0
    # Wide dtypes first, since values that begin aligned can be used where they lie.
    for number in sorted(range(len(kinds)), key=lambda number: -kinds[number][0].itemsize):
        if limit is not None and groups[-1] and nbytes + sizes[number] > limit:
            groups.append([])
            nbytes = 0
        groups[-1].append(number)
        nbytes += sizes[number]
    found = []
    for group in groups:
        ends = list(itertools.accumulate(sizes[number] for number in group))
        entries: dict[str, object] = {"__metadata__": _MADE_BY}
        for number, end in zip(group, ends, strict=True):
            dtype, shape = kinds[number]
            place = [end - sizes[number], end]
            code = dtype_code(dtype, names[number])
            entries[names[number]] = {"dtype": code, "shape": list(shape), "data_offsets": place}
        text = json.dumps(entries, separators=(",", ":")).encode()
        # Spaces, which the format allows behind the JSON.
        text = text.ljust(-(-(len(text) + 8) // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT - 8)
        head = len(text).to_bytes(8, "little") + text
        begins = [len(head) + end - sizes[number] for number, end in zip(group, ends, strict=True)]
        found.append(PlannedFile(head, group, begins, len(head) + (ends[-1] if ends else 0)))
    return found


def _nbytes(kind: Kind) -> int:
    dtype, shape = kind
    return int(torch.Size(shape).numel()) * dtype.itemsize


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
    parts: Sequence[TensorBox],
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
    found = Written([], {})
    progress = progress or Progress()
    for part in parts:
        # In no file, and read again all the same.
        if not part.values.numel():
            found.tensors[part.name] = dtype_code(part.values.dtype, part.name), part.shape, []
    small = [piece for part in parts if part.values.numel() for piece in _split(part, limit)]
    kinds = [(part.values.dtype, part.box.sizes) for part in small]
    planned = plan_files([_key(part) for part in small], kinds, limit) if small else []
    progress.expect(sum(file.nbytes for file in planned))
    for number, file in enumerate(planned):
        name = f"{stem}-{number:05d}.safetensors"
        group = [small[member] for member in file.members]
        data = [torch.frombuffer(bytearray(file.head), dtype=torch.uint8), *(part.values for part in group)]
        content = _Content(data, [0, *file.begins])
        sums = write_blocks(folder / name, file.nbytes, content.fill, checks.of_bytes, progress.add)
        found.files.append(FileEntry(name=name, nbytes=file.nbytes, sums=FileEntry.pack(sums, checks.width)))
        for part, begin in zip(group, file.begins, strict=True):
            entry = BoxEntry(file=number, begin=begin, offsets=part.box.offsets, sizes=part.box.sizes)
            code = dtype_code(part.values.dtype, part.name)
            found.tensors.setdefault(part.name, (code, part.shape, []))[2].append(entry)
    return found


def _split(part: TensorBox, limit: int) -> Iterator[TensorBox]:
    """A part in halves, and those again, until none is larger than a file may be."""
    dimension = next((d for d, size in enumerate(part.box.sizes) if size > 1), None)
    if part.values.nbytes <= limit or dimension is None:
        yield part
        return
    size = part.box.sizes[dimension]
    for begin, count in ((0, size // 2), (size // 2, size - size // 2)):
        offsets = list(part.box.offsets)
        sizes = list(part.box.sizes)
        offsets[dimension] += begin
        sizes[dimension] = count
        values = part.values.narrow(dimension, begin, count)
        yield from _split(TensorBox(part.name, part.shape, Box(tuple(offsets), tuple(sizes)), values), limit)


def _key(part: TensorBox) -> str:
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


class WholeFiles:
    """Files of whole tensors, as transformers reads them, in a folder that is there and has none of their names.

    They are planned first, then filled tensor by tensor: several ranks may write, each its own files, and none needs
    more than the tensor at hand.

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
        tensors: Mapping[str, Kind],
        limit: int | None,
        progress: Progress | None = None,
    ) -> None:
        self._folder = folder
        self._progress = progress or Progress()
        self._tensors = dict(tensors)
        ordered = list(tensors)
        planned = plan_files(ordered, list(tensors.values()), limit)
        count = len(planned)
        self.names = (
            [_SINGLE] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
        )
        self._heads = [file.head for file in planned]
        # Of each tensor the number of its file, and its first byte there.
        self._places = {
            ordered[member]: (number, begin)
            for number, file in enumerate(planned)
            for member, begin in zip(file.members, file.begins, strict=True)
        }
        self._open: dict[int, int] = {}

    def file_of(self, name: str) -> int:
        """Number of the file that a tensor is in."""
        return self._places[name][0]

    def expect(self, numbers: Collection[int]) -> None:
        """Tell of what is to be written: files of these numbers."""
        names = (name for name in self._places if self.file_of(name) in numbers)
        self._progress.expect(sum(_nbytes(self._tensors[name]) for name in names))

    def write(self, name: str, values: Tensor) -> None:
        """Write one tensor, converted to its dtype there.

        Raises:
            OSError: it cannot be written.
        """
        number, begin = self._places[name]
        dtype, shape = self._tensors[name]
        assert tuple(values.shape) == shape  # both are of the same model
        row = as_bytes(values.detach().to("cpu", dtype).contiguous())
        memory = view_of(row) if row.numel() else memoryview(b"")
        done = 0
        descriptor = self._descriptor(number)
        # Linux writes at most 2 GiB a call.
        while done < len(memory):
            done += os.pwrite(descriptor, memory[done:], begin + done)
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
            self.close_unfinished()

    def close_unfinished(self) -> None:
        """Close what is open, as it is."""
        while self._open:
            os.close(self._open.popitem()[1])

    def write_index(self) -> None:
        """Write the index that tells each tensor's file, if there are several."""
        if len(self.names) > 1:
            index = {
                "metadata": {"total_size": sum(map(_nbytes, self._tensors.values()))},
                "weight_map": {name: self.names[number] for name, (number, _) in sorted(self._places.items())},
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
