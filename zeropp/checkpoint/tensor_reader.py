"""Reading: from the parts that a rank wants to the bytes of files, and back to the tensors where they belong.

Frozen weights may exist as codes only. They are saved and restored as codes and scales, since encoding decoded
values again would change some of them; where values are wanted they are decoded.
"""

from __future__ import annotations

import os
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from zeropp.checkpoint.boxes import (
    MODEL,
    Box,
    BoxIndex,
    CheckpointError,
    TensorBox,
    as_bytes,
    fragments,
    parts_of_range,
    runs,
    whole,
)
from zeropp.checkpoint.files import ReadRange, read_blocks
from zeropp.checkpoint.metadata import DTYPES, STRETCH, BoxEntry, Checksums, CodedEntry, Metadata
from zeropp.checkpoint.rank_sync import Progress
from zeropp.engine.engine import Engine
from zeropp.params.coded_buffer import CodedBuffer
from zeropp.params.unit import FlatBuffer
from zeropp.partition.levels import Fragment
from zeropp_kernels import dequantize_, message_layout

__all__ = [
    "CODES",
    "SCALES",
    "ConvertedTensors",
    "Encoded",
    "StridedBox",
    "TensorReader",
    "Verify",
    "decoded",
    "require_verify",
]


CODES, SCALES = "zeropp.codes.", "zeropp.scales."
"""Prefixes: codes are uint8 [blocks, 256], scales bfloat16 [blocks], of the parameter in the order of its memory."""


class Encoded:
    """Values that are read for a buffer which has codes: encoded once they are there.

    Args:
        engine: of the model.
        matched: the checkpoint's names of the model's tensors.
        metadata: of the checkpoint.
    """

    def __init__(self, engine: Engine, matched: Mapping[str, str], metadata: Metadata) -> None:
        self._rows: list[tuple[FlatBuffer, Fragment, Tensor]] = []
        self.parts: list[TensorBox] = []
        for buffer in engine.buffers:
            if not isinstance(buffer, CodedBuffer):
                continue
            for slot, each in fragments(buffer, buffer.placement.mode.states, "slice"):
                there = matched.get(slot.name)
                entry = metadata.coded.get(there or "")
                # Else codes fit as they are.
                if there is not None and (entry is None or entry.strides != slot.strides):
                    row = torch.empty(each.stop - each.start, dtype=buffer.main_dtype, device=buffer.device)
                    self._rows.append((buffer, each, row))
                    self.parts += parts_of_range(MODEL + slot.name, slot, each.start, row)

    def encode(self) -> None:
        """Once the parts are read."""
        for buffer, fragment, row in self._rows:
            buffer.put(fragment, row, row.dtype)


def decoded(codes: Tensor, scales: Tensor, entry: CodedEntry) -> Tensor:
    """The values of a parameter.

    Args:
        codes: uint8 [blocks, 256].
        scales: bfloat16 [blocks].
        entry: of the parameter.
    """
    numel = codes.numel()
    layout = message_layout(numel, 8)
    message = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
    message[: layout.codes_nbytes] = codes.reshape(-1)
    message[layout.scales_offset : layout.scales_offset + 2 * layout.groups] = scales.view(torch.uint8)
    out = torch.empty(numel, dtype=torch.float32, device="cpu")
    dequantize_(message, out)
    return out.to(DTYPES[entry.dtype]).as_strided(entry.shape, entry.strides)


Verify = Literal["all", "sample", "none"]
_SAMPLE = 16  # of so many stretches one is verified
_BATCH_NBYTES = 1 << 28  # of values that cannot be read to where they belong, and wait to be converted


def require_verify(verify: Verify) -> Verify:
    """The option as it is.

    Raises:
        ValueError: it is none.
    """
    if verify not in ("all", "sample", "none"):
        raise ValueError(f'verify is {verify!r}; expected "all", "sample" or "none"')
    return verify


class StridedBox(BoxEntry):
    """A box whose values do not lie in a row, as other programs store transposed weights; strides in elements."""

    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Elements of memory from its first to its last."""
        return self.box.within(self.box).last(self.strides) + 1 if self.box.numel else 0


@dataclass(frozen=True)
class ConvertedTensors:
    """Tensors that are made of stored ones when they are read.

    Attributes:
        key: of this making; its last results stay, since boxes of one tensor are asked for in a row.
        make: gets a function from names of stored tensors to whole ones, gives what is made, by name.
    """

    key: str
    make: Callable[[Callable[[str], Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class _Request:
    """A part of a stored box, and where its values go: a view of its sizes, of any dtype, strides and device."""

    entry: BoxEntry
    dtype: torch.dtype
    part: Box  # counted from the box's first element
    into: Tensor

    @property
    def in_place(self) -> bool:
        """True if bytes of the file may go to their place as they are."""
        # Its elements do not lie in the file in the order of the view.
        if isinstance(self.entry, StridedBox):
            return False
        return self.into.dtype == self.dtype and self.into.is_contiguous() and self.into.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.part.numel * self.dtype.itemsize


class TensorReader:
    """The tensors of one checkpoint.

    Attributes:
        metadata: of it.
        nbytes_read: so far, by this rank.
        nbytes_converted: so far, of stored tensors that others were made of; not among ``nbytes_read``.
        built: tensors of the metadata that are made of others, and lie in no file themselves.
        locate: gives a box its first byte, where the metadata has no more than what to look at for it.
        progress: told of what is read.
    """

    def __init__(
        self,
        folder: Path,
        metadata: Metadata,
        verify: Verify,
        progress: Progress | None = None,
        *,
        built: Mapping[str, ConvertedTensors] | None = None,
        locate: Callable[[BoxEntry], BoxEntry] | None = None,
    ) -> None:
        require_verify(verify)
        self.metadata = metadata
        self.nbytes_read = 0
        self.nbytes_converted = 0
        self.built = built or {}
        self.locate = locate
        self.progress = progress or Progress()
        self._folder = folder
        self._verify = verify
        # Only if it is used: the package that computes it may not be installed.
        self._checks = Checksums.by_name(metadata.algorithm) if verify != "none" else None
        if verify != "none" and metadata.stretch != STRETCH:
            raise CheckpointError(
                f"{str(folder)!r} has a checksum for each {metadata.stretch} bytes, expected {STRETCH}; read it with "
                'verify="none"'
            )
        self._indices: dict[str, BoxIndex[BoxEntry]] = {}
        self._verified: defaultdict[int, set[int]] = defaultdict(set)
        self._sums: dict[int, list[int]] = {}
        self._last: tuple[str, Tensor] | None = None
        self._made: tuple[str, Mapping[str, Tensor]] | None = None
        # Where boxes begin in each file, to name what a damaged stretch has.
        self._begins: dict[int, list[tuple[int, int, str]]] = {}

    def read_boxes(self, parts: Iterable[TensorBox]) -> None:
        """Fill the values of parts, converted to the dtypes they have here.

        Raises:
            CheckpointError: a tensor is missing or of another shape; a file is missing, damaged or cut short. With
                their names; some parts may have their values by then.
        """
        by_file: defaultdict[int, list[_Request]] = defaultdict(list)
        for part in parts:
            # Codes lie in blocks in the order of memory, and boxes of values do not begin and end with them.
            if (name := part.name.removeprefix(MODEL)) in self.metadata.coded and part.name.startswith(MODEL):
                part.values.copy_(part.box.of(self._decoded(name)))
                continue
            if part.name in self.built:
                part.values.copy_(part.box.of(self._make(part.name, part.shape)))
                continue
            for request in self._requests(part):
                by_file[request.entry.file].append(request)
        self.progress.expect(sum(each.nbytes for requests in by_file.values() for each in requests))
        for number, requests in sorted(by_file.items()):
            for batch in _batches(sorted(requests, key=lambda each: each.entry.begin)):
                self._read_batch(number, batch)

    def find(self, parts: Iterable[TensorBox]) -> None:
        """Look up where the values of parts lie, and read none.

        Raises:
            CheckpointError: as :meth:`read_boxes` does, of all but the values themselves.
        """
        for part in parts:
            if part.name in self.metadata.tensors:
                # The iteration alone checks name and shape, and looks boxes up in their files.
                for _ in self._requests(part):
                    pass

    def check_sizes(self, share: int, shares: int) -> None:
        """Look whether files are there and of their sizes: of each ``shares`` the one that falls to ``share``.

        Raises:
            CheckpointError: one is not.
        """
        for number in range(share, len(self.metadata.files), shares):
            self._path_of(number)

    def room(self, name: str) -> TensorBox:
        """All of one tensor, in memory of the CPU for it that is yet to be read.

        Raises:
            CheckpointError: there is none of that name.
        """
        entry = self.metadata.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{str(self._folder)!r} has no tensor {name!r}")
        return whole(name, torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu"))

    def tensor(self, name: str) -> Tensor:
        """All of one tensor, on the CPU."""
        part = self.room(name)
        self.read_boxes([part])
        return part.values

    def _make(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """All of a tensor that is made of others; what else is made with it stays for the next call."""
        built = self.built[name]
        if self._made is None or self._made[0] != built.key:
            # The tensors made last are let go of first, or memory would hold both.
            self._made = None
            before = self.nbytes_read
            self._made = built.key, built.make(self.tensor)
            # What tensor() has read counts as converted, and not as read.
            self.nbytes_converted += self.nbytes_read - before
            self.nbytes_read = before
        found = self._made[1].get(name)
        if found is None or tuple(found.shape) != shape:
            made = "nothing" if found is None else f"one of shape {tuple(found.shape)}"
            raise CheckpointError(
                f"{name.removeprefix(MODEL)!r} is of shape {shape} here, and {made} was made for it of what "
                f"{str(self._folder)!r} has"
            )
        return found

    def _decoded(self, name: str) -> Tensor:
        """Values of a parameter that is there in codes; the last one stays, since its boxes are asked for in a row."""
        if self._last is None or self._last[0] != name:
            self._last = None
            values = decoded(self.tensor(CODES + name), self.tensor(SCALES + name), self.metadata.coded[name])
            self._last = name, values
        return self._last[1]

    def weight(self, name: str) -> Tensor:
        """All of one of the model's tensors, on the CPU, decoded if it is there in codes."""
        return self._decoded(name) if name in self.metadata.coded else self.tensor(MODEL + name)

    def verify_rest(self, share: int, shares: int) -> None:
        """Verify what nobody has read: of each ``shares`` files the one that falls to ``share``.

        Raises:
            CheckpointError: a file is damaged.
        """
        if self._verify != "all":
            return
        for number in range(share, len(self.metadata.files), shares):
            every = range(-(-self.metadata.files[number].nbytes // STRETCH))
            rest = set(every) - self._verified[number]
            self.progress.expect(len(rest) * STRETCH)
            self._read_file(number, [], rest)

    def _requests(self, part: TensorBox) -> Iterator[_Request]:
        entry = self.metadata.tensors.get(part.name)
        if entry is None:
            raise CheckpointError(f"{str(self._folder)!r} has no tensor {part.name!r}")
        if entry.shape != part.shape:
            raise CheckpointError(
                f"{part.name!r} is of shape {part.shape} here and of shape {entry.shape} in {str(self._folder)!r}; it "
                "is a checkpoint of another model"
            )
        if part.name not in self._indices:
            self._indices[part.name] = BoxIndex(entry.shape, [(each.box, each) for each in entry.boxes])
        for common, box, found in self._indices[part.name].overlapping(part.box):
            place = common.within(part.box)
            # A folder of torch.distributed.checkpoint says only in the file itself where a box begins.
            found = self.locate(found) if self.locate is not None else found
            yield _Request(found, DTYPES[entry.dtype], common.within(box), place.of(part.values))

    def _read_batch(self, number: int, batch: Sequence[_Request]) -> None:
        wanted: list[ReadRange] = []
        waiting: list[tuple[Tensor, Tensor]] = []
        strided: dict[StridedBox, Tensor] = {}
        for request in batch:
            values = request.into
            if isinstance(request.entry, StridedBox):
                # Read whole, once for all requests: a part of it is spread over all of its bytes.
                if request.entry not in strided:
                    strided[request.entry] = torch.empty(request.entry.extent, dtype=request.dtype, device="cpu")
                    wanted.append(ReadRange(request.entry.begin, as_bytes(strided[request.entry])))
                whole = strided[request.entry].as_strided(request.entry.sizes, request.entry.strides)
                waiting.append((request.into, request.part.of(whole)))
                continue
            if not request.in_place:
                values = torch.empty(request.part.sizes, dtype=request.dtype, device="cpu")
                waiting.append((request.into, values))
            row = as_bytes(values)
            size = request.dtype.itemsize
            for there, here, count in runs(request.part, request.entry.sizes):
                into = row[here * size : (here + count) * size]
                wanted.append(ReadRange(request.entry.begin + there * size, into))
        self._read_file(number, wanted, self._to_verify(wanted))
        for into, values in waiting:
            into.copy_(values)

    def _to_verify(self, wanted: Sequence[ReadRange]) -> set[int]:
        found: set[int] = set()
        if self._verify != "none":
            for each in wanted:
                found.update(range(each.begin // STRETCH, -(-each.end // STRETCH)))
        if self._verify == "sample":
            found = {stretch for stretch in found if stretch % _SAMPLE == 0}
        return found

    def _read_file(self, number: int, wanted: Sequence[ReadRange], verified: set[int]) -> None:
        file = self.metadata.files[number]
        path = self._path_of(number)
        try:
            sums = self._sums_of(number)

            def verify(stretch: int, memory: memoryview) -> None:
                assert self._checks is not None
                if self._checks.of_bytes(memory) != sums[stretch]:
                    raise CheckpointError(
                        f"{str(path)!r} is damaged between bytes {stretch * STRETCH} and "
                        f"{stretch * STRETCH + len(memory)}, where {self._names(number, stretch)} lie: the checksum is "
                        "another than when it was written"
                    )

            self.nbytes_read += read_blocks(path, file.nbytes, wanted, verified, verify, self.progress.add)
        except OSError as error:
            raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
        self._verified[number] |= verified

    def _path_of(self, number: int) -> Path:
        """The path of a file, if it has its size."""
        file = self.metadata.files[number]
        path = self._folder / file.name
        try:
            there = os.stat(path).st_size
        except OSError as error:
            raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
        # Without checksums this is all that shows a file that was cut short.
        if there != file.nbytes:
            raise CheckpointError(
                f"{str(path)!r} has {there} bytes, and was written with {file.nbytes}; it was cut short or replaced"
            )
        return path

    def _sums_of(self, number: int) -> list[int]:
        """Checksums of a file's stretches, unpacked once."""
        if self._checks is None:
            return []
        if number not in self._sums:
            file = self.metadata.files[number]
            try:
                found = file.checksums(self._checks.width)
            except (ValueError, struct.error) as error:
                raise CheckpointError(f"the checksums of {file.name!r} are damaged: {error}") from error
            if len(found) != -(-file.nbytes // STRETCH):
                raise CheckpointError(
                    f"there are {len(found)} checksums of {file.name!r}, which has {file.nbytes} bytes"
                )
            self._sums[number] = found
        return self._sums[number]

    def _names(self, number: int, stretch: int) -> str:
        """The names of tensors in a stretch of a file, for an error."""
        if number not in self._begins:
            self._begins[number] = sorted(
                (box.begin, box.box.numel * DTYPES[tensor.dtype].itemsize, name)
                for name, tensor in self.metadata.tensors.items()
                for box in tensor.boxes
                if box.file == number
            )
        low = stretch * STRETCH
        high = (stretch + 1) * STRETCH
        names = [name for begin, nbytes, name in self._begins[number] if begin < high and begin + nbytes > low]
        shown = ", ".join(map(repr, dict.fromkeys(names[:3])))
        return f"{shown}{' and others' if len(names) > 3 else ''}" if names else "the header and nothing else"


def _batches(requests: Sequence[_Request]) -> Iterator[list[_Request]]:
    batch: list[_Request] = []
    nbytes = 0
    for request in requests:
        # Bytes that go straight to their place take no memory in between.
        more = 0 if request.in_place else request.nbytes
        if batch and nbytes + more > _BATCH_NBYTES:
            yield batch
            batch = []
            nbytes = 0
        batch.append(request)
        nbytes += more
    if batch:
        yield batch
