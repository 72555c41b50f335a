"""Storage tiers: the memory of a device, the host's memory, and files, with the tensors that lie there between uses.

A `StoredTensor` is read and written in parts, wherever it lies. A `StorageTier` allocates rows. Rows in files are read
and written past the page cache where work is waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from zeropp.comm.streams import Event, copy
from zeropp.offload.swap import Extent
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
"""Whose bytes a row takes: of the device that trains, of the host where that is another, or of a disk."""


class StoredTensor(Protocol):
    """Numbers of one kind that belong to one buffer's shard.

    Attributes:
        tensor: [numel] all of them; of a file it is a mapping, which waits for the disk as it is read.
        in_memory: whether ``tensor`` is as good as any memory.
        place: where it is.
        at_hand: whether the host computes with ``tensor`` as it is.
        nbytes: that it takes there.
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
        """Fill a tensor of the row's dtype with the numbers from ``start`` on; it must stay until the event."""
        ...

    def write(self, start: int, values: Tensor) -> Event:
        """Let the numbers from ``start`` on be those of a tensor, which must stay as it is until the event."""
        ...


class StorageTier(Protocol):
    """A storage tier: a device's memory, the host's, or files."""

    def allocate_tensor(self, numel: int, dtype: torch.dtype) -> StoredTensor:
        """A row of zeros.

        Raises:
            OSError: there is no space for it.
        """
        ...

    def serves(self, device: torch.device) -> bool:
        """Tell whether work on a device finds rows in its own memory."""
        ...

    def accepts(self, row: StoredTensor) -> bool:
        """Tell whether a row that was allocated for another kind of number could serve as one of this tier."""
        ...


# Memory.


@dataclass(frozen=True)
class MemoryTensor:
    """A tensor."""

    tensor: Tensor
    place: Place = "device"
    in_memory = True

    @property
    def at_hand(self) -> bool:
        """See :class:`StoredTensor`."""
        return self.tensor.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        """See :class:`StoredTensor`."""
        return self.tensor.untyped_storage().nbytes()

    def read(self, start: int, into: Tensor) -> Event:
        """See :class:`StoredTensor`; of one memory, it is done when this returns."""
        return copy(into, self.tensor[start : start + into.numel()])

    def write(self, start: int, values: Tensor) -> Event:
        """See :class:`StoredTensor`; of one memory, it is done when this returns."""
        # By ``.data``, which raises no version: steps of the host write here, and only the user's edits are to show.
        return copy(self.tensor.data[start : start + values.numel()], values)


@dataclass(frozen=True)
class Memory:
    """The memory of a device, or of the host."""

    device: torch.device
    place: Place = "device"

    def allocate_tensor(self, numel: int, dtype: torch.dtype) -> StoredTensor:
        """See :class:`StorageTier`."""
        # Zeros, since padding is stepped with the rest, and states begin with them.
        return MemoryTensor(torch.zeros(numel, dtype=dtype, device=self.device), self.place)

    def serves(self, device: torch.device) -> bool:
        """See :class:`StorageTier`."""
        # By type: a process trains on one device of a kind, whether or not its number is given.
        return self.place == "device" and self.device.type == device.type

    def accepts(self, row: StoredTensor) -> bool:
        """See :class:`StorageTier`."""
        return row.place == self.place


class HostMemory(Memory):
    """The host's memory, where another device trains."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), "host")


def host_memory(device: torch.device) -> Memory:
    """The memory of the host of a device, which may be that device's own."""
    return Memory(device) if device.type == "cpu" else HostMemory()


# Files.


@dataclass(frozen=True)
class FileTensor:
    """An extent of a swap file."""

    extent: Extent
    transfers: Transfers
    in_memory = False
    at_hand = False
    place: Place = "disk"

    @property
    def nbytes(self) -> int:
        """See :class:`StoredTensor`; extents are whole blocks."""
        return -(-self.extent.nbytes // self.extent.alignment) * self.extent.alignment

    @property
    def tensor(self) -> Tensor:
        """See :class:`StoredTensor`."""
        return self.extent.tensor

    def read(self, start: int, into: Tensor) -> Event:
        """See :class:`StoredTensor`."""
        return self.transfers.read(self.extent, start * into.itemsize, into)

    def write(self, start: int, values: Tensor) -> Event:
        """See :class:`StoredTensor`."""
        return self.transfers.write(self.extent, start * values.itemsize, values)


@dataclass(frozen=True)
class Files:
    """A rank's swap file.

    Attributes:
        in_file: allocates a row there.
        least: bytes of a row that is worth a file.
        memory: of the host, where smaller ones are.
    """

    in_file: Callable[[int, torch.dtype], StoredTensor]
    least: int
    memory: StorageTier

    def allocate_tensor(self, numel: int, dtype: torch.dtype) -> StoredTensor:
        """See :class:`StorageTier`."""
        if numel * dtype.itemsize < self.least:
            # A request for less than a block takes as long as one for a block, and a biased layer has many of them.
            return self.memory.allocate_tensor(numel, dtype)
        # Its space is taken now, so that a disk that is too small shows before training begins.
        return self.in_file(numel, dtype)

    def serves(self, device: torch.device) -> bool:
        """See :class:`StorageTier`."""
        # Not even the CPU: through the mapping each page would be waited for where it is first touched.
        return False

    def accepts(self, row: StoredTensor) -> bool:
        """See :class:`StorageTier`."""
        # Smaller rows are in memory here, too.
        return not row.in_memory or row.tensor.nbytes < self.least


class PartlyInMemory:
    """Files behind so many elements of the host's memory, for what is asked for first."""

    def __init__(self, files: Files, numel: int) -> None:
        self._files = files
        self._left = numel

    def allocate_tensor(self, numel: int, dtype: torch.dtype) -> StoredTensor:
        """See :class:`StorageTier`."""
        # Whole rows: what is asked for first is wanted first in forward, when nothing has been read ahead.
        if numel > self._left:
            return self._files.allocate_tensor(numel, dtype)
        self._left -= numel
        return self._files.memory.allocate_tensor(numel, dtype)

    def serves(self, device: torch.device) -> bool:
        """See :class:`StorageTier`."""
        return False

    def accepts(self, row: StoredTensor) -> bool:
        """See :class:`StorageTier`."""
        # One that would fit is worth a copy in memory, which is what the setting asks for.
        return row.tensor.numel() > self._left and self._files.accepts(row)
