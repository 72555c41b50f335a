"""Storage tiers: device memory, host memory and files, and the tensors that are stored there between uses.

A `StoredTensor`, called a row, holds one kind of numbers (main weights, gradients, an optimizer state, ...) of one flat
buffer's shard. It is read and written in parts, in any tier. A `StorageTier` allocates rows. Reads and writes of rows
in files use direct I/O, past the page cache, if the file system has it; the row's ``tensor`` is a mapping through the
page cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from zeropp.comm.streams import Event, copy
from zeropp.offload.swap import Extent, page_locked
from zeropp.offload.transfer import Transfers

__all__ = [
    "PLACES",
    "FileTensor",
    "Files",
    "HostMemory",
    "Memory",
    "MemoryTensor",
    "PartlyInMemory",
    "Place",
    "StorageTier",
    "StoredTensor",
    "host_memory",
]

Place = Literal["device", "host", "disk"]
PLACES: tuple[Place, ...] = ("device", "host", "disk")
"""Kinds of memory: of the device that trains ("device"), of the host if another device trains ("host"), or a disk."""


class StoredTensor(Protocol):
    """A row: one kind of numbers of one flat buffer's shard, in some tier.

    Attributes:
        tensor: all numbers, [numel]. For a row in a file it is a memory mapping, so reading it may wait for the disk.
        in_memory: True if ``tensor`` is in memory; False if it maps a file.
        place: kind of memory of the row.
        at_hand: True if the host can compute with ``tensor`` directly, without reading it into a staging buffer.
        nbytes: bytes of memory or disk that the row takes.
    """

    @property
    def tensor(self) -> Tensor: ...

    @property
    def in_memory(self) -> bool: ...

    @property
    def place(self) -> Place: ...

    @property
    def at_hand(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    def read(self, start: int, into: Tensor) -> Event:
        """Start to copy elements from ``start`` on into ``into``, and return an event for the end.

        Args:
            start: first element.
            into: tensor of the row's dtype; nothing else may use it until the event.
        """
        ...

    def write(self, start: int, values: Tensor) -> Event:
        """Start to copy ``values`` to the elements from ``start`` on, and return an event for the end.

        Args:
            start: first element.
            values: tensor of the row's dtype; it must not change until the event.
        """
        ...


class StorageTier(Protocol):
    """A storage tier, which allocates rows in one kind of memory, in files, or in both."""

    def allocate_tensor(self, numel: int, dtype: torch.dtype) -> StoredTensor:
        """Allocate a row of zeros.

        Args:
            numel: elements.
            dtype: dtype of the row.

        Raises:
            OSError: the tier has no space.
        """
        ...

    def serves(self, device: torch.device) -> bool:
        """Return True if rows of this tier are in the memory of ``device``, so that its work can use them directly."""
        ...

    def accepts(self, row: StoredTensor) -> bool:
        """Return True if a row allocated in another tier can be used in place of a new row in this tier."""
        ...


# Rows in memory.


@dataclass(frozen=True)
class MemoryTensor:
    """A row in memory.

    Attributes:
        tensor: all numbers, [numel].
        place: kind of memory of the tensor.
        locked: True if the tensor is in page-locked host memory.
    """

    tensor: Tensor
    place: Place = "device"
    locked: bool = False
    in_memory = True

    @property
    def at_hand(self) -> bool:
        """True if the tensor is on the CPU."""
        return self.tensor.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's storage."""
        return self.tensor.untyped_storage().nbytes()

    def read(self, start: int, into: Tensor) -> Event:
        """Copy elements from ``start`` on into ``into``. If both are on the CPU, the copy is finished on return."""
        return copy(into, self.tensor[start : start + into.numel()])

    def write(self, start: int, values: Tensor) -> Event:
        """Copy ``values`` to the elements from ``start`` on. If both are on the CPU, the copy is finished on return."""
        # The copy goes through .data, which does not change the version counter. Versions must change only when the
        # user edits weights, and host steps write here.
        return copy(self.tensor.data[start : start + values.numel()], values)


@dataclass(frozen=True)
class Memory:
    """The memory of a device, or of the host.

    Attributes:
        device: device of the rows.
        place: kind of memory of the rows.
        locked: GPU for which the rows are page-locked, so that it copies to and from them without staging buffers; None
            if they are not.
    """

    device: torch.device
    place: Place = "device"
    locked: torch.device | None = None

    def allocate_tensor(self, numel: int, dtype: torch.dtype) -> StoredTensor:
        """Allocate a row of zeros in this memory.

        Raises:
            RuntimeError: the row cannot be page-locked.
        """
        # Zeros, because padding is stepped with the rest and optimizer states start from zeros.
        if self.locked is not None:
            return MemoryTensor(page_locked(numel, dtype, self.locked), self.place, locked=True)
        return MemoryTensor(torch.zeros(numel, dtype=dtype, device=self.device), self.place)

    def serves(self, device: torch.device) -> bool:
        """Return True if rows are in the memory of ``device``."""
        # Compare types only, because a process trains on one device of a type, and the index may be missing.
        return self.place == "device" and self.device.type == device.type

    def accepts(self, row: StoredTensor) -> bool:
        """Return True if the row is in the same kind of memory."""
        return row.place == self.place


class HostMemory(Memory):
    """Host memory while another device trains."""

    def __init__(self, locked: torch.device | None = None) -> None:
        super().__init__(torch.device("cpu"), "host", locked)


def host_memory(device: torch.device) -> Memory:
    """Return the host memory of ``device``; if the device is the CPU, its own memory."""
    return Memory(device) if device.type == "cpu" else HostMemory()


# Rows in files.


@dataclass(frozen=True)
class FileTensor:
    """A row in a swap file.

    Attributes:
        extent: the part of the file.
        transfers: threads that read and write it.
    """

    extent: Extent
    transfers: Transfers
    in_memory = False
    at_hand = False
    place: Place = "disk"

    @property
    def nbytes(self) -> int:
        """Bytes on disk: an extent takes whole blocks."""
        return -(-self.extent.nbytes // self.extent.alignment) * self.extent.alignment

    @property
    def tensor(self) -> Tensor:
        """Memory mapping of the row, [numel]."""
        return self.extent.tensor

    def read(self, start: int, into: Tensor) -> Event:
        """Start to read elements from ``start`` on into ``into`` (on the CPU), and return an event for the end."""
        return self.transfers.read(self.extent, start * into.itemsize, into)

    def write(self, start: int, values: Tensor) -> Event:
        """Start to write ``values`` (on the CPU) to the elements from ``start`` on, and return an event for the end."""
        return self.transfers.write(self.extent, start * values.itemsize, values)


@dataclass(frozen=True)
class Files:
    """A rank's swap file as a tier. Small rows are in host memory instead.

    Attributes:
        in_file: function that allocates a row in the file, from (numel, dtype).
        least: smallest size in bytes of a row in the file.
        memory: tier of smaller rows, host memory.
    """

    in_file: Callable[[int, torch.dtype], StoredTensor]
    least: int
    memory: StorageTier

    def allocate_tensor(self, numel: int, dtype: torch.dtype) -> StoredTensor:
        """Allocate a row of zeros in the file, or in host memory if it has fewer than ``least`` bytes."""
        if numel * dtype.itemsize < self.least:
            # A disk takes as long for a small request as for a block, and models with biases have many small rows.
            return self.memory.allocate_tensor(numel, dtype)
        # Disk space is taken now, so that a full disk raises before training starts.
        return self.in_file(numel, dtype)

    def serves(self, device: torch.device) -> bool:
        """Return False: no device can use rows in a file directly."""
        # The CPU cannot either: the first access to each page of the mapping would wait for the disk.
        return False

    def accepts(self, row: StoredTensor) -> bool:
        """Return True if the row is in a file, or is so small that it would be in host memory in this tier, too."""
        return not row.in_memory or row.tensor.nbytes < self.least


class PartlyInMemory:
    """A tier that puts rows into host memory while they fit into ``numel`` elements in total. Other rows go to files.

    A small row may still fit after a larger one did not.

    Args:
        files: tier of the rows that do not fit. It puts rows below ``least`` bytes into host memory, too, uncounted.
        numel: limit on the elements of the rows in host memory (``max_in_cpu``).
    """

    def __init__(self, files: Files, numel: int) -> None:
        self._files = files
        self._left = numel

    def allocate_tensor(self, numel: int, dtype: torch.dtype) -> StoredTensor:
        """Allocate a row of zeros in host memory if it fits into the rest of ``numel``, else in the file."""
        # Rows are not divided. The first rows belong to the first layers, which forward needs before it could read
        # anything ahead.
        if numel > self._left:
            return self._files.allocate_tensor(numel, dtype)
        self._left -= numel
        return self._files.memory.allocate_tensor(numel, dtype)

    def serves(self, device: torch.device) -> bool:
        """Return False: no device can use rows in files directly."""
        return False

    def accepts(self, row: StoredTensor) -> bool:
        """Return True if the row would not fit into the rest of host memory, and the tier of files accepts it."""
        # A row that fits into host memory should be copied there, because max_in_cpu asks for that.
        return row.tensor.numel() > self._left and self._files.accepts(row)
