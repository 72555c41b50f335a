"""Rows in files, read and written past the page cache where work is waiting for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.comm.streams import Event
from zeropp.offload.home import Home, Place, Row
from zeropp.offload.swap import Extent
from zeropp.offload.transfer import Transfers

__all__ = ["FileRow", "Files", "PartlyInMemory"]


@dataclass(frozen=True)
class FileRow:
    """An extent of a swap file."""

    extent: Extent
    transfers: Transfers
    in_memory = False
    at_hand = False
    place: Place = "disk"

    @property
    def nbytes(self) -> int:
        """See :class:`zeropp.offload.home.Row`; extents are whole blocks."""
        return -(-self.extent.nbytes // self.extent.alignment) * self.extent.alignment

    @property
    def tensor(self) -> Tensor:
        """See :class:`zeropp.offload.home.Row`."""
        return self.extent.tensor

    def read(self, start: int, into: Tensor) -> Event:
        """See :class:`zeropp.offload.home.Row`."""
        return self.transfers.read(self.extent, start * into.itemsize, into)

    def write(self, start: int, values: Tensor) -> Event:
        """See :class:`zeropp.offload.home.Row`."""
        return self.transfers.write(self.extent, start * values.itemsize, values)


@dataclass(frozen=True)
class Files:
    """A rank's swap file.

    Attributes:
        in_file: allocates a row there.
        least: bytes of a row that is worth a file.
        memory: of the host, where smaller ones are.
    """

    in_file: Callable[[int, torch.dtype], Row]
    least: int
    memory: Home

    def allocate(self, numel: int, dtype: torch.dtype) -> Row:
        """See :class:`zeropp.offload.home.Home`."""
        if numel * dtype.itemsize < self.least:
            # A request for less than a block takes as long as one for a block, and a biased layer has many of them.
            return self.memory.allocate(numel, dtype)
        # Its space is taken now, so that a disk that is too small shows before training begins.
        return self.in_file(numel, dtype)

    def serves(self, device: torch.device) -> bool:
        """See :class:`zeropp.offload.home.Home`."""
        # Not even the CPU: through the mapping each page would be waited for where it is first touched.
        return False

    def accepts(self, row: Row) -> bool:
        """See :class:`zeropp.offload.home.Home`."""
        # Smaller rows are in memory here, too.
        return not row.in_memory or row.tensor.nbytes < self.least


class PartlyInMemory:
    """Files behind so many elements of the host's memory, for what is asked for first."""

    def __init__(self, files: Files, numel: int) -> None:
        self._files = files
        self._left = numel

    def allocate(self, numel: int, dtype: torch.dtype) -> Row:
        """See :class:`zeropp.offload.home.Home`."""
        # Whole rows: what is asked for first is wanted first in forward, when nothing has been read ahead.
        if numel > self._left:
            return self._files.allocate(numel, dtype)
        self._left -= numel
        return self._files.memory.allocate(numel, dtype)

    def serves(self, device: torch.device) -> bool:
        """See :class:`zeropp.offload.home.Home`."""
        return False

    def accepts(self, row: Row) -> bool:
        """See :class:`zeropp.offload.home.Home`."""
        # One that would fit is worth a copy in memory, which is what the setting asks for.
        return row.tensor.numel() > self._left and self._files.accepts(row)
