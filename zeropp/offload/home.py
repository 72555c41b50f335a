"""Homes: where rows of numbers lie between their uses, in a device's memory, the host's, or files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from zeropp.comm.streams import Event, copy

__all__ = ["PLACES", "Home", "HostMemory", "Memory", "MemoryRow", "Place", "Row", "host_memory"]

Place = Literal["device", "host", "disk"]
PLACES: tuple[Place, ...] = ("device", "host", "disk")
"""Whose bytes a row takes: of the device that trains, of the host where that is another, or of a disk."""


class Row(Protocol):
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


@dataclass(frozen=True)
class MemoryRow:
    """A tensor."""

    tensor: Tensor
    place: Place = "device"
    in_memory = True

    @property
    def at_hand(self) -> bool:
        """See :class:`Row`."""
        return self.tensor.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        """See :class:`Row`."""
        return self.tensor.untyped_storage().nbytes()

    def read(self, start: int, into: Tensor) -> Event:
        """See :class:`Row`; of one memory, it is done when this returns."""
        return copy(into, self.tensor[start : start + into.numel()])

    def write(self, start: int, values: Tensor) -> Event:
        """See :class:`Row`; of one memory, it is done when this returns."""
        # By ``.data``, which raises no version: steps of the host write here, and only the user's edits are to show.
        return copy(self.tensor.data[start : start + values.numel()], values)


class Home(Protocol):
    """A place for rows."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Row:
        """A row of zeros.

        Raises:
            OSError: there is no space for it.
        """
        ...

    def serves(self, device: torch.device) -> bool:
        """Whether what runs on a device finds rows in its own memory."""
        ...

    def accepts(self, row: Row) -> bool:
        """Whether a row of another kind of number, in the home that it has, would serve for one of this home."""
        ...


@dataclass(frozen=True)
class Memory:
    """The memory of a device, or of the host."""

    device: torch.device
    place: Place = "device"

    def allocate(self, numel: int, dtype: torch.dtype) -> Row:
        """See :class:`Home`."""
        # Zeros, since padding is stepped with the rest, and states begin with them.
        return MemoryRow(torch.zeros(numel, dtype=dtype, device=self.device), self.place)

    def serves(self, device: torch.device) -> bool:
        """See :class:`Home`."""
        # By type: a process trains on one device of a kind, whether or not its number is given.
        return self.place == "device" and self.device.type == device.type

    def accepts(self, row: Row) -> bool:
        """See :class:`Home`."""
        return row.place == self.place


class HostMemory(Memory):
    """The host's memory, where another device trains."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), "host")


def host_memory(device: torch.device) -> Memory:
    """The memory of the host of a device, which may be that device's own."""
    return Memory(device) if device.type == "cpu" else HostMemory()
