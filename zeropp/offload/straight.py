"""Straight from files to a card, past the host's memory: by kvikio, which has NVIDIA's GPUDirect Storage do it.

Where the machine's disks, file system or CUDA cannot, kvikio goes through host memory of its own. There is no reading
ahead: what is read into is the gather's memory, and gathers are issued ahead themselves.
"""

from __future__ import annotations

import errno
import importlib
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from zeropp.comm.streams import issued_here
from zeropp.offload.errors import SwapError
from zeropp.offload.files import FileRow
from zeropp.offload.swap import Descriptors

__all__ = ["Straight", "StraightReads"]


class StraightReads:
    """Files that are open for kvikio."""

    def __init__(self, device: torch.device) -> None:
        """Find kvikio.

        Raises:
            ValueError: the device is no card of NVIDIA's.
            ImportError: kvikio is not installed, or finds no CUDA.
        """
        if device.type != "cuda":
            raise ValueError(
                f"aio.use_gds reads files into a card's memory, and this engine trains on {device.type!r}; leave it out"
            )
        try:
            self._kvikio: Any = importlib.import_module("kvikio")
        except ImportError as error:
            raise ImportError(
                f"aio.use_gds needs kvikio, which cannot be imported ({error}); install zeropp[gds], or leave it out"
            ) from error
        self._guard = threading.Lock()
        # A file is closed with its descriptors.
        self._files: weakref.WeakKeyDictionary[Descriptors, Any] = weakref.WeakKeyDictionary()

    def read(self, row: FileRow, into: Tensor) -> None:
        """Fill a tensor [numel] of the row's dtype, contiguous and on the card; returns when it is there.

        Raises:
            SwapError: it could not be read, or not all of it.
        """
        # No stream knows of the read: whatever was issued before must be done with the memory.
        issued_here(into.device).wait(threading.TIMEOUT_MAX)
        extent, nbytes = row.extent, into.numel() * into.itemsize
        what = f"cannot read {nbytes} bytes at {extent.offset} of a swap file into a card"
        try:
            found = self._file(extent.descriptors).pread(into.view(torch.uint8), nbytes, extent.offset).get()
        except RuntimeError as error:
            raise SwapError.of(errno.EIO, extent.descriptors.folder, f"{what} ({error})") from error
        if found != nbytes:
            raise SwapError.of(errno.EIO, extent.descriptors.folder, f"{what}, only {found}")

    def _file(self, descriptors: Descriptors) -> Any:
        # Lanes read beside each other.
        with self._guard:
            if descriptors not in self._files:
                # By the descriptor: the file has no name any more.
                self._files[descriptors] = self._kvikio.CuFile(f"/proc/self/fd/{descriptors.cached}", "r")
            return self._files[descriptors]


class Straight:
    """A row that is read where a gather wants it."""

    def __init__(self, row: FileRow, reads: StraightReads) -> None:
        self._row = row
        self._reads = reads

    def numel(self) -> int:
        """Elements of the row."""
        return self._row.tensor.numel()

    def copy_to(self, target: Tensor) -> None:
        """Put all of it into a tensor [numel], of any dtype.

        Raises:
            SwapError: it could not be read.
        """
        # By a gather, which is behind the step of what it begins with.
        dtype = self._row.tensor.dtype
        if target.dtype == dtype and target.is_contiguous():
            self._reads.read(self._row, target)
        else:
            values = torch.empty(self.numel(), dtype=dtype, device=target.device)
            self._reads.read(self._row, values)
            target.copy_(values)
