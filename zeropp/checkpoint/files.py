"""Read and write safetensors files: the files of a checkpoint, and files of whole tensors for other programs.

:func:`plan_files` places tensors in files by their dtypes and shapes. In a checkpoint, a tensor that lies completely in
one box has its own name in the file. A smaller box has the name with its index ranges appended, such as
``model.weight[0:3, 128:256]``, so the files are valid safetensors files.

Files are transferred in blocks by several threads, with O_DIRECT (past the page cache) if the file system supports it.
To write a block, a thread fills an aligned buffer, computes a checksum of each stretch (1 MiB) and writes the buffer to
its place in the file. To read a block, a thread reads the buffer, verifies stretches and copies ranges to their
destinations. Threads run in parallel because copies, checksums and system calls release the GIL.
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
"""Bytes of a block: large enough that few system calls keep a disk busy, small enough that the buffers, one per thread,
take little memory."""

# Alignment in bytes of the addresses, file offsets and lengths given to O_DIRECT. Most disks need 512; a page is enough
# for all.
_ALIGNED = 4096
_THREADS = 4
# Errors of open() on file systems without O_DIRECT, and of posix_fallocate() where it is not supported.
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def view_of(buffer: Tensor) -> memoryview:
    """Return a memoryview of a contiguous uint8 CPU tensor's memory, for system calls."""
    # Do not use Tensor.numpy(): numpy may not be installed.
    return memoryview((ctypes.c_ubyte * buffer.numel()).from_address(buffer.data_ptr())).cast("B")


def _aligned(nbytes: int) -> Tensor:
    """Allocate a uint8 CPU tensor [nbytes] whose address is aligned for O_DIRECT."""
    room = torch.empty(nbytes + _ALIGNED, dtype=torch.uint8, device="cpu")
    begin = -room.data_ptr() % _ALIGNED
    return room[begin : begin + nbytes]


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[tuple[int, bool]]:
    """Open a file, with O_DIRECT if possible. Yield its descriptor, and True if O_DIRECT is in use."""
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
    """Write a new file and sync it to disk.

    Args:
        path: path of the file, which must not exist.
        nbytes: size of the file in bytes.
        fill: ``fill(begin, room)`` copies bytes [begin, begin + room.numel()) of the file to ``room``, a uint8 CPU
            tensor. Called from several threads.
        check: returns the checksum of a stretch.
        done: called from several threads with the number of bytes just written.

    Returns:
        The checksum of each stretch, in file order.

    Raises:
        OSError: the file exists or cannot be written.
    """
    sums = [0] * -(-nbytes // STRETCH)
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as (descriptor, direct):
        if nbytes and hasattr(os, "posix_fallocate"):
            # Reserve the space first: a full disk fails at once, and the file is not fragmented by blocks that several
            # threads write in any order.
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
                # O_DIRECT needs an aligned length. The padding of the last block is cut off by ftruncate below.
                padded = -(-count // _ALIGNED) * _ALIGNED if direct else count
                _write_all(descriptor, memory[:padded], begin)
                done(count)

        in_threads(-(-nbytes // BLOCK_NBYTES), work, _THREADS)
        os.ftruncate(descriptor, nbytes)
        os.fsync(descriptor)
    return sums


def _reserve(descriptor: int, nbytes: int) -> None:
    """Reserve disk space for a file; do nothing if the file system does not support it."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise


def _write_all(descriptor: int, memory: memoryview, begin: int) -> None:
    """Write ``memory`` at byte ``begin`` of a file; os.pwrite may write only a part per call."""
    done = 0
    while done < len(memory):
        done += os.pwrite(descriptor, memory[done:], begin + done)


@dataclass(frozen=True)
class ReadRange:
    """A byte range of a file and its destination.

    Attributes:
        begin: first byte in the file.
        into: contiguous uint8 CPU tensor [nbytes] that receives the bytes.
    """

    begin: int
    into: Tensor

    @property
    def end(self) -> int:
        """End of the range in the file (exclusive)."""
        return self.begin + self.into.numel()


def read_blocks(
    path: Path,
    nbytes: int,
    wanted: Sequence[ReadRange],
    verified: Collection[int],
    verify: Callable[[int, memoryview], None],
    done: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Read byte ranges of a file, and verify some of its stretches.

    Args:
        path: path of the file.
        nbytes: size of the file in bytes.
        wanted: the byte ranges and their destinations; ranges may overlap.
        verified: numbers of the stretches to read completely and pass to ``verify``, even if no range needs them.
        verify: ``verify(number, bytes)`` raises if the stretch is damaged. Called from several threads.
        done: called from several threads with the number of bytes just read.

    Returns:
        Number of bytes read, including alignment and stretches that only ``verify`` needed.

    Raises:
        OSError: the file cannot be read or is shorter than expected.
    """
    wanted = sorted((each for each in wanted if each.into.numel()), key=lambda each: each.begin)
    begins = [each.begin for each in wanted]
    # Ranges may overlap, because two parameters here can have been one tied parameter when they were saved. So ends do
    # not ascend like begins do; reach[i] is the largest end of ranges 0 to i.
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
    """Merge the wanted ranges and the verified stretches into ascending spans that do not cross a block boundary."""
    ranges = [(each.begin, each.end) for each in wanted]
    ranges += [(stretch * STRETCH, min((stretch + 1) * STRETCH, nbytes)) for stretch in verified]
    spans: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        low = begin // _ALIGNED * _ALIGNED
        while low < end:
            high = min(low // BLOCK_NBYTES * BLOCK_NBYTES + BLOCK_NBYTES, end)
            same = spans and low // BLOCK_NBYTES == spans[-1][0] // BLOCK_NBYTES
            # Reading through a gap of at most one stretch is cheaper than another system call.
            if same and low - spans[-1][1] <= STRETCH:
                spans[-1] = spans[-1][0], max(high, spans[-1][1])
            elif not spans or high > spans[-1][1]:
                spans.append((low, high))
            low = low // BLOCK_NBYTES * BLOCK_NBYTES + BLOCK_NBYTES
    return spans


def _read_all(descriptor: int, memory: memoryview, begin: int, end: int, path: Path) -> None:
    """Read bytes [begin, end) of a file to the start of ``memory``."""
    done = 0
    count = end - begin
    # O_DIRECT needs an aligned length. At the end of the file, preadv returns fewer bytes than requested.
    padded = -(-count // _ALIGNED) * _ALIGNED
    while done < count:
        got = os.preadv(descriptor, [memory[done:padded]], begin + done)
        if got == 0:
            raise OSError(errno.EIO, f"the file ends at byte {begin + done}, before {end}", str(path))
        done += got


FILE_NBYTES = 5_000_000_000
"""Default maximum size of a file in bytes. transformers uses the same default."""

Kind = tuple[torch.dtype, tuple[int, ...]]
"""(dtype, shape) of a tensor."""

# The data after the header begins at a multiple of this, so a reader can memory-map the file and use tensors in place.
_TENSOR_ALIGNMENT = 4096
_MADE_BY = {"format": "pt", "writer": "zeropp"}
"""Metadata in the header of each file. transformers requires "format"; "writer" marks files that zeropp wrote."""
_SINGLE = "model.safetensors"
_INDEX = f"{_SINGLE}.index.json"
_NAME = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")


@dataclass(frozen=True)
class PlannedFile:
    """The layout of a safetensors file that is not written yet.

    Attributes:
        head: header of the file, with its length in front, as bytes.
        members: indices of the file's tensors in the arguments of :func:`plan_files`, in file order.
        begins: first byte of each of these tensors in the file.
        nbytes: size of the whole file in bytes.
    """

    head: bytes
    members: list[int]
    begins: list[int]
    nbytes: int


def plan_files(names: Sequence[str], kinds: Sequence[Kind], limit: int | None) -> list[PlannedFile]:
    """Distribute tensors over files.

    Args:
        names: names of the tensors in the files.
        kinds: (dtype, shape) of each tensor.
        limit: maximum size of a file in bytes, without its header. A tensor that is larger gets a file of its own. None
            for a single file.

    Returns:
        The layout of each file; at least one file, even without tensors.

    Raises:
        CheckpointError: safetensors cannot store a tensor's dtype.
    """
    sizes = [_nbytes(kind) for kind in kinds]
    groups: list[list[int]] = [[]]
    nbytes = 0
    # Place wide dtypes first: then every tensor begins at a multiple of its element size and can be used in place.
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
        # Pad the JSON with spaces, which the format allows, so that the data begins aligned.
        text = text.ljust(-(-(len(text) + 8) // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT - 8)
        head = len(text).to_bytes(8, "little") + text
        begins = [len(head) + end - sizes[number] for number, end in zip(group, ends, strict=True)]
        found.append(PlannedFile(head, group, begins, len(head) + (ends[-1] if ends else 0)))
    return found


def _nbytes(kind: Kind) -> int:
    """Return the size in bytes of a tensor."""
    dtype, shape = kind
    return int(torch.Size(shape).numel()) * dtype.itemsize


@dataclass(frozen=True)
class Written:
    """The files that one rank has written.

    Attributes:
        files: size and checksums of each file.
        tensors: (safetensors dtype, shape of the whole tensor, boxes in these files), by name. ``BoxEntry.file`` is an
            index into ``files``.
    """

    files: list[FileEntry]
    tensors: dict[str, tuple[str, tuple[int, ...], list[BoxEntry]]]


def require_file_nbytes(limit: object, least: int = 1) -> None:
    """Check the argument ``file_nbytes`` of a user's call.

    Args:
        limit: the argument.
        least: smallest valid value in bytes.

    Raises:
        ValueError: ``limit`` is not an integer or is smaller than ``least``.
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
    """Write boxes of tensors to files ``<stem>-00000.safetensors``, ``<stem>-00001.safetensors`` ... and sync them.

    Args:
        folder: an existing folder.
        stem: start of the file names, different on each rank.
        parts: the boxes to write; boxes of the same tensor must not overlap.
        checks: checksum algorithm.
        limit: maximum size of a file in bytes, without its header.
        progress: progress to update.

    Returns:
        The files, and the places of the boxes in them.

    Raises:
        CheckpointError: safetensors cannot store a dtype.
        OSError: a file cannot be written; the incomplete file is not removed.
    """
    found = Written([], {})
    progress = progress or Progress()
    for part in parts:
        # An empty tensor has no bytes in any file, but the metadata must list it, so that a load finds it.
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
    """Split a box in halves along its first divisible dimension until no part has more than ``limit`` bytes."""
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
    """Return the name of a box in a file: the tensor's name, with index ranges if the box is not the whole tensor."""
    if part.box.sizes == part.shape:
        return part.name
    ranges = (f"{offset}:{offset + size}" for offset, size in zip(part.box.offsets, part.box.sizes, strict=True))
    return f"{part.name}[{', '.join(ranges)}]"


class _Content:
    """The contents of a file to write: tensors in file order.

    Args:
        data: the tensors, on any device, with any strides.
        begins: first byte of each tensor in the file.
    """

    def __init__(self, data: Sequence[Tensor], begins: Sequence[int]) -> None:
        # contiguous() copies only strided tensors, such as a transposed weight; the others are read in place.
        self._rows = [as_bytes(tensor.contiguous()) for tensor in data]
        self._begins = begins

    def fill(self, begin: int, room: Tensor) -> None:
        """Copy bytes [begin, begin + room.numel()) of the file to ``room``, a uint8 CPU tensor."""
        number = bisect.bisect_right(self._begins, begin) - 1
        done = 0
        while done < room.numel():
            place = begin + done - self._begins[number]
            count = min(room.numel() - done, self._rows[number].numel() - place)
            room[done : done + count].copy_(self._rows[number][place : place + count])
            done += count
            number += 1


class WholeFiles:
    """Writer of safetensors files with whole tensors, named as transformers expects them.

    The layout of all files is planned first, then tensors are written one by one. Several ranks may write at once if
    each writes different files. A rank needs memory only for the tensor that it is writing.

    Args:
        folder: an existing folder without files of the same names.
        tensors: (dtype, shape) of each tensor, by name.
        limit: maximum size of a file in bytes, without its header; None for a single file.
        progress: progress to update.

    Attributes:
        names: names of the files. The index of a file in this list is its number.
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
        # Tensor name -> (number of its file, first byte in the file).
        self._places = {
            ordered[member]: (number, begin)
            for number, file in enumerate(planned)
            for member, begin in zip(file.members, file.begins, strict=True)
        }
        self._open: dict[int, int] = {}

    def file_of(self, name: str) -> int:
        """Return the number of the file that contains a tensor."""
        return self._places[name][0]

    def expect(self, numbers: Collection[int]) -> None:
        """Add the bytes of the files with these numbers to the progress as expected bytes."""
        names = (name for name in self._places if self.file_of(name) in numbers)
        self._progress.expect(sum(_nbytes(self._tensors[name]) for name in names))

    def write(self, name: str, values: Tensor) -> None:
        """Write one tensor, converted to the dtype that was planned for it.

        Args:
            name: name of the tensor.
            values: the values, with the planned shape; any dtype and device.

        Raises:
            OSError: the tensor cannot be written.
        """
        number, begin = self._places[name]
        dtype, shape = self._tensors[name]
        assert tuple(values.shape) == shape  # the plan and the values come from the same model
        row = as_bytes(values.detach().to("cpu", dtype).contiguous())
        memory = view_of(row) if row.numel() else memoryview(b"")
        done = 0
        descriptor = self._descriptor(number)
        # Linux writes at most 2 GiB per call.
        while done < len(memory):
            done += os.pwrite(descriptor, memory[done:], begin + done)
        self._progress.add(done)

    def _descriptor(self, number: int) -> int:
        """Return the descriptor of a file; create the file with its header if it is not open yet."""
        if number not in self._open:
            path = self._folder / self.names[number]
            self._open[number] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            os.pwrite(self._open[number], self._heads[number], 0)
        return self._open[number]

    def close(self, numbers: Iterable[int]) -> None:
        """Sync and close all open files. Files in ``numbers`` without tensors are created with their header."""
        try:
            for number in numbers:
                self._descriptor(number)
            for descriptor in self._open.values():
                os.fsync(descriptor)
        finally:
            self.close_unfinished()

    def close_unfinished(self) -> None:
        """Close all open files without syncing them."""
        while self._open:
            os.close(self._open.popitem()[1])

    def write_index(self) -> None:
        """Write the index (tensor name -> file name) if there are several files, and sync the folder."""
        if len(self.names) > 1:
            index = {
                "metadata": {"total_size": sum(map(_nbytes, self._tensors.values()))},
                "weight_map": {name: self.names[number] for name, (number, _) in sorted(self._places.items())},
            }
            write_synced(self._folder / _INDEX, json.dumps(index, indent=2).encode())
        sync_folder(self._folder)


def completes(name: str) -> bool:
    """Return True for the file that a reader of an export opens first: the single file, or the index of several."""
    return name in (_SINGLE, _INDEX)


def is_ours(path: Path) -> bool:
    """Return True if a file was written by :class:`WholeFiles`. An index is recognized by its name alone."""
    if not _NAME.fullmatch(path.name) or not path.is_file():
        return path.name == _INDEX
    begin = json.dumps({"__metadata__": _MADE_BY}, separators=(",", ":")).encode()[:-1]
    with path.open("rb") as file:
        # The first 8 bytes of a safetensors file are the length of its header.
        return file.read(8 + len(begin))[8:] == begin
