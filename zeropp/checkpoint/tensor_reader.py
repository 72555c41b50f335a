"""Read the boxes that a rank needs from the files of a checkpoint.

Some frozen parameters exist only as 8-bit codes and scales. A checkpoint saves and restores codes and scales, because
encoding decoded values again would change some of them. They are decoded only for readers that need plain values.
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
from zeropp.params.flat_buffer import FlatBuffer
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
"""Prefixes of the names of a quantized parameter's tensors: codes, uint8 [blocks, 256], and scales, bfloat16 [blocks].
Blocks have 256 elements and follow the parameter's memory order."""


class Encoded:
    """Plain values to read from a checkpoint for parameters that this model stores as codes.

    These are the parameters whose codes in the checkpoint cannot be used: the checkpoint stores plain values, or codes
    in another memory order.

    Args:
        engine: engine of the model.
        matched: name in the checkpoint of each of the model's tensors, by its name in the model.
        metadata: metadata of the checkpoint.

    Attributes:
        parts: boxes of temporary tensors to read the values into; call :meth:`encode` afterwards.
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
                # If the checkpoint has codes with the same strides, they are copied without decoding.
                if there is not None and (entry is None or entry.strides != slot.strides):
                    row = torch.empty(each.stop - each.start, dtype=buffer.main_dtype, device=buffer.device)
                    self._rows.append((buffer, each, row))
                    self.parts += parts_of_range(MODEL + slot.name, slot, each.start, row)

    def encode(self) -> None:
        """Encode the values of ``parts`` into the shards; to be called after the values have been read."""
        for buffer, fragment, row in self._rows:
            buffer.put(fragment, row, row.dtype)


def decoded(codes: Tensor, scales: Tensor, entry: CodedEntry) -> Tensor:
    """Decode a quantized parameter.

    Args:
        codes: uint8 [blocks, 256], on the CPU.
        scales: bfloat16 [blocks], on the CPU.
        entry: the parameter's metadata.

    Returns:
        The values on the CPU, with the dtype, shape and strides of ``entry``.
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
_SAMPLE = 16  # verify="sample" verifies one of this many stretches
_BATCH_NBYTES = (
    1 << 28
)  # maximum bytes of temporary tensors for values that cannot be read directly to their destination


def require_verify(verify: Verify) -> Verify:
    """Return the argument ``verify`` unchanged if it is valid.

    Raises:
        ValueError: ``verify`` is not "all", "sample" or "none".
    """
    if verify not in ("all", "sample", "none"):
        raise ValueError(f'verify is {verify!r}; expected "all", "sample" or "none"')
    return verify


class StridedBox(BoxEntry):
    """A box whose values are not contiguous in its file, such as a transposed weight that another program saved.

    Attributes:
        strides: strides of the box in the file, in elements.
    """

    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Number of elements in the file from the first to the last element of the box, both included."""
        return self.box.within(self.box).last(self.strides) + 1 if self.box.numel else 0


@dataclass(frozen=True)
class ConvertedTensors:
    """A conversion that computes tensors from stored tensors while a checkpoint is read.

    Attributes:
        key: identity of the conversion. The reader caches the outputs of the last key, because boxes of one tensor are
            usually requested one after the other.
        make: called with a function that returns the stored tensor of a given name; returns the outputs by name.
    """

    key: str
    make: Callable[[Callable[[str], Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class _Request:
    """A request to read a part of a stored box.

    Attributes:
        entry: place of the stored box in its file.
        dtype: dtype in the file.
        part: the requested part, with offsets relative to the first element of the stored box.
        into: destination with the sizes of ``part``; any dtype, strides and device.
    """

    entry: BoxEntry
    dtype: torch.dtype
    part: Box
    into: Tensor

    @property
    def in_place(self) -> bool:
        """True if the file's bytes can be read directly into ``into``, without conversion or a temporary tensor."""
        # The elements of a strided box have another order in the file than in the destination.
        if isinstance(self.entry, StridedBox):
            return False
        return self.into.dtype == self.dtype and self.into.is_contiguous() and self.into.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file."""
        return self.part.numel * self.dtype.itemsize


class TensorReader:
    """Reader of the tensors of one checkpoint.

    Args:
        folder: folder of the files.
        metadata: metadata of the checkpoint.
        verify: "all" to verify every byte that is read, "sample" to verify some stretches, "none" for no verification.
        progress: progress to update.
        built: initial value of the attribute ``built``; None for no conversions.
        locate: value of the attribute ``locate``.

    Attributes:
        metadata: metadata of the checkpoint.
        nbytes_read: bytes that this rank has read so far, without ``nbytes_converted``.
        nbytes_converted: bytes that this rank has read so far as inputs of conversions, or to compare tied tensors.
        built: conversions of the tensors that are listed in the metadata but are not stored in any file, by name.
        locate: function that completes the place of a box by reading its file; None if ``metadata`` has all places.
            A checkpoint of torch.distributed.checkpoint stores the first byte of a box only in the file of the box.
        progress: progress to update.

    Raises:
        CheckpointError: the package for the checksums is not installed, or they cover another number of bytes.
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
        # Look up the algorithm only if it is used, because its package may not be installed.
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
        # Per file: (first byte, bytes, tensor name) of each box, to name the tensors in a damaged stretch.
        self._begins: dict[int, list[tuple[int, int, str]]] = {}

    def read_boxes(self, parts: Iterable[TensorBox]) -> None:
        """Read the values of boxes from the files, converted to the dtypes of their destinations.

        Args:
            parts: the boxes; ``values`` of each is overwritten.

        Raises:
            CheckpointError: a tensor is missing or has another shape, or a file is missing, damaged or too short. Some
                boxes may have been read already.
        """
        by_file: defaultdict[int, list[_Request]] = defaultdict(list)
        for part in parts:
            # A box of values does not consist of whole blocks of codes, so decode the whole parameter and copy the box.
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
        """Look up the places of boxes in the files without reading their values.

        Raises:
            CheckpointError: a tensor has another shape, or ``locate`` failed.
        """
        for part in parts:
            if part.name in self.metadata.tensors:
                # Iterating checks name and shape, and calls ``locate``.
                for _ in self._requests(part):
                    pass

    def check_sizes(self, share: int, shares: int) -> None:
        """Check existence and size of this rank's share of the files: those with ``number % shares == share``.

        Args:
            share: this rank.
            shares: number of ranks.

        Raises:
            CheckpointError: a file is missing or has another size.
        """
        for number in range(share, len(self.metadata.files), shares):
            self._path_of(number)

    def room(self, name: str) -> TensorBox:
        """Allocate CPU memory for a whole tensor; returns it as a box to pass to :meth:`read_boxes`.

        Raises:
            CheckpointError: the checkpoint has no tensor with this name.
        """
        entry = self.metadata.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{str(self._folder)!r} has no tensor {name!r}")
        return whole(name, torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu"))

    def tensor(self, name: str) -> Tensor:
        """Read a whole tensor to the CPU.

        Raises:
            CheckpointError: the tensor is missing, or a file cannot be read.
        """
        part = self.room(name)
        self.read_boxes([part])
        return part.values

    def _make(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor that a conversion computes. The other outputs of the conversion are cached for later calls.

        Args:
            name: name of the tensor.
            shape: shape that the model expects.

        Raises:
            CheckpointError: the conversion does not make the tensor, or makes one of another shape.
        """
        built = self.built[name]
        if self._made is None or self._made[0] != built.key:
            # Drop the cached outputs before running the next conversion, so that both never exist at once.
            self._made = None
            before = self.nbytes_read
            self._made = built.key, built.make(self.tensor)
            # Count the bytes that tensor() has read as converted instead of read.
            self.nbytes_converted += self.nbytes_read - before
            self.nbytes_read = before
        found = self._made[1].get(name)
        if found is None or tuple(found.shape) != shape:
            made = "nothing" if found is None else f"one of shape {tuple(found.shape)}"
            raise CheckpointError(
                f"{name.removeprefix(MODEL)!r} is of shape {shape} here, but the conversion of the tensors in "
                f"{str(self._folder)!r} made {made} for it"
            )
        return found

    def _decoded(self, name: str) -> Tensor:
        """Return the decoded values of a quantized parameter.

        The last parameter is cached, because its boxes are usually requested one after the other.
        """
        if self._last is None or self._last[0] != name:
            self._last = None
            values = decoded(self.tensor(CODES + name), self.tensor(SCALES + name), self.metadata.coded[name])
            self._last = name, values
        return self._last[1]

    def weight(self, name: str) -> Tensor:
        """Read a whole parameter or buffer of the model to the CPU; decoded if it is stored as codes."""
        return self._decoded(name) if name in self.metadata.coded else self.tensor(MODEL + name)

    def verify_rest(self, share: int, shares: int) -> None:
        """Verify the stretches that this rank has not verified yet, in its share of the files.

        Does nothing unless the reader was made with ``verify="all"``.

        Args:
            share: this rank. Its share are the files with ``number % shares == share``.
            shares: number of ranks.

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
        """Yield a request for each stored box that overlaps ``part``."""
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
            # A checkpoint of torch.distributed.checkpoint stores the first byte of a box only in the file itself.
            found = self.locate(found) if self.locate is not None else found
            yield _Request(found, DTYPES[entry.dtype], common.within(box), place.of(part.values))

    def _read_batch(self, number: int, batch: Sequence[_Request]) -> None:
        """Read requests from one file, through temporary tensors where values must be converted or moved."""
        wanted: list[ReadRange] = []
        waiting: list[tuple[Tensor, Tensor]] = []
        strided: dict[StridedBox, Tensor] = {}
        for request in batch:
            values = request.into
            if isinstance(request.entry, StridedBox):
                # Read the whole box once for all requests, because the elements of a part are spread over all its
                # bytes.
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
        """Return the numbers of the stretches to verify when the given ranges are read."""
        found: set[int] = set()
        if self._verify != "none":
            for each in wanted:
                found.update(range(each.begin // STRETCH, -(-each.end // STRETCH)))
        if self._verify == "sample":
            found = {stretch for stretch in found if stretch % _SAMPLE == 0}
        return found

    def _read_file(self, number: int, wanted: Sequence[ReadRange], verified: set[int]) -> None:
        """Read byte ranges of a file and verify the given stretches."""
        file = self.metadata.files[number]
        path = self._path_of(number)
        try:
            sums = self._sums_of(number)

            def verify(stretch: int, memory: memoryview) -> None:
                assert self._checks is not None
                if self._checks.of_bytes(memory) != sums[stretch]:
                    raise CheckpointError(
                        f"{str(path)!r} is damaged between bytes {stretch * STRETCH} and "
                        f"{stretch * STRETCH + len(memory)}, where {self._names(number, stretch)} lie: the checksum "
                        "differs from that of the bytes that were written"
                    )

            self.nbytes_read += read_blocks(path, file.nbytes, wanted, verified, verify, self.progress.add)
        except OSError as error:
            raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
        self._verified[number] |= verified

    def _path_of(self, number: int) -> Path:
        """Return the path of a file, or raise CheckpointError if the file is missing or has another size."""
        file = self.metadata.files[number]
        path = self._folder / file.name
        try:
            there = os.stat(path).st_size
        except OSError as error:
            raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
        # If checksums are not verified, only the size shows that a file was cut short.
        if there != file.nbytes:
            raise CheckpointError(
                f"{str(path)!r} has {there} bytes, and was written with {file.nbytes}; it was cut short or replaced"
            )
        return path

    def _sums_of(self, number: int) -> list[int]:
        """Return the checksums of a file's stretches; empty if nothing is verified. Unpacked once per file."""
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
        """Return the names of the tensors in a stretch of a file, for an error message."""
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
    """Divide requests into batches whose temporary tensors together have at most ``_BATCH_NBYTES`` bytes."""
    batch: list[_Request] = []
    nbytes = 0
    for request in requests:
        # A request that is read directly to its destination needs no temporary tensor.
        more = 0 if request.in_place else request.nbytes
        if batch and nbytes + more > _BATCH_NBYTES:
            yield batch
            batch = []
            nbytes = 0
        batch.append(request)
        nbytes += more
    if batch:
        yield batch
