"""Reading ahead: rows on their way from their tier to a device, in the order they are asked for.

A thread reads into a `Ring` of staging buffers, and whoever asked takes what has come, in the same order; so a buffer
of the ring is always on its way to be free again, and a row may be larger than all of them together.

With ``aio.use_gds`` rows in files go straight to a card, past the host's memory: by kvikio, which has NVIDIA's
GPUDirect Storage do it. Where the machine's disks, file system or CUDA cannot, kvikio goes through host memory of its
own. Then there is no reading ahead: what is read into is the gather's memory, and gathers are issued ahead themselves.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from zeropp.comm.streams import Event, ThreadStream, issued_here
from zeropp.offload.storage_tiers import FileTensor, StoredTensor
from zeropp.offload.swap import Descriptors, SwapError, aligned

__all__ = ["Arriving", "GdsReader", "GdsTensor", "ReadAhead", "Ring"]

_Part = tuple[int, Tensor, Tensor, Event]  # first element, values, the ring's buffer that they are in, when they are


class ReadAhead:
    """The thread that reads.

    Attributes:
        ring: of staging buffers, on their way from being read into to being free.
    """

    def __init__(self, ring: Ring, straight: GdsReader | None = None) -> None:
        """Start it.

        Args:
            ring: takes what is read.
            straight: for rows in files, which then do without; None where all go through the ring.
        """
        self.ring = ring
        self._straight = straight
        self._stream = ThreadStream("read")

    def begin_read(self, row: StoredTensor, after: Event | None) -> Arriving | GdsTensor:
        """Read a row, behind those asked for before, once ``after`` has happened."""
        if self._straight is not None and isinstance(row, FileTensor):
            return GdsTensor(row, self._straight)
        arriving = Arriving(self.ring, row.tensor.numel())
        self._stream.run(lambda: self._read(row, arriving, after))
        return arriving

    def _read(self, row: StoredTensor, arriving: Arriving, after: Event | None) -> None:
        try:
            # Here and not by the stream: after an error this thread still has to tell whoever waits.
            if after is not None:
                after.wait(threading.TIMEOUT_MAX)
            dtype = row.tensor.dtype
            numel = row.tensor.numel()
            most = self.ring.nbytes // dtype.itemsize
            for start in range(0, numel, most):
                # Here it waits, with as many reads under way as there are buffers.
                buffer = self.ring.take_buffer()
                values = buffer[: min(most, numel - start) * dtype.itemsize].view(dtype)
                try:
                    event = row.read(start, values)
                except BaseException:
                    self.ring.return_buffer(buffer)
                    raise
                arriving.parts.put((start, values, buffer, event))
        except BaseException as error:
            # Whoever takes it is on another thread.
            arriving.parts.put(error)

    def close(self) -> None:
        """End the thread; nobody takes anything any more."""
        self.ring.close()
        self._stream.close()


class Arriving:
    """A row on its way."""

    def __init__(self, ring: Ring, numel: int) -> None:
        self.parts: SimpleQueue[_Part | BaseException] = SimpleQueue()
        self._ring = ring
        self._numel = numel

    def numel(self) -> int:
        """Elements of the row."""
        return self._numel

    def copy_to(self, target: Tensor) -> None:
        """Put all of it into a tensor [numel], of any dtype; once.

        Raises:
            OSError: it could not be read.
        """
        done = 0
        error = None
        while done < self._numel:
            part = self.parts.get()
            if isinstance(part, BaseException):
                raise error or part
            start, values, buffer, event = part
            try:
                event.wait(threading.TIMEOUT_MAX)
                if error is None:
                    target[start : start + values.numel()].copy_(values)
            except BaseException as caught:
                # The rest is taken all the same: its buffers are wanted by whatever is read next.
                error = error or caught
            finally:
                self._ring.return_buffer(buffer)
            done += values.numel()
        if error is not None:
            raise error


class Ring:
    """Buffers of one size, allocated together and at once.

    Attributes:
        count: how many there are.
        nbytes: of one.
    """

    def __init__(self, count: int, nbytes: int, *, pinned: bool) -> None:
        """Allocate ``count`` buffers of ``nbytes``, page-locked if ``pinned``."""
        self.count = count
        self.nbytes = nbytes
        # One allocation, which is all that `pin_memory` page-locks: page-locking is slow, and torch's allocator rounds
        # each piece up to a power of two.
        if pinned:
            self._memory = torch.empty(count * nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            # torch's own memory begins between pages, from where direct I/O goes by a copy of its own.
            self._memory = aligned(count * nbytes, torch.uint8)
        self._free = [self._memory[index * nbytes : (index + 1) * nbytes] for index in range(count)]
        self._changed = threading.Condition()
        self._closed = False

    def take_buffer(self) -> Tensor:
        """A buffer, uint8 [nbytes], when there is one.

        Raises:
            RuntimeError: the ring was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            # The engine is closed while a comm stream waits: after an error, and nobody misses what it would have done.
            if self._closed:
                raise RuntimeError("staging buffers were given up while they were waited for")
            return self._free.pop()

    @contextlib.contextmanager
    def taken(self) -> Iterator[Tensor]:
        """A buffer that is given back at the end."""
        buffer = self.take_buffer()
        try:
            yield buffer
        finally:
            self.return_buffer(buffer)

    @contextlib.contextmanager
    def all_taken(self) -> Iterator[list[Tensor]]:
        """All buffers, given back at the end; nobody else may wait for several meanwhile."""
        # Whoever holds one gives it back without waiting for another, so that this ends.
        buffers = [self.take_buffer() for _ in range(self.count)]
        try:
            yield buffers
        finally:
            for buffer in buffers:
                self.return_buffer(buffer)

    def return_buffer(self, buffer: Tensor) -> None:
        """Nothing uses a buffer any more."""
        with self._changed:
            self._free.append(buffer)
            # One is free, so one may go on.
            self._changed.notify()

    def close(self) -> None:
        """Let whoever waits for a buffer go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


# Reads straight from files to a card.


class GdsTensor:
    """A row that is read where a gather wants it."""

    def __init__(self, row: FileTensor, reads: GdsReader) -> None:
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
            self._reads.read_row(self._row, target)
        else:
            values = torch.empty(self.numel(), dtype=dtype, device=target.device)
            self._reads.read_row(self._row, values)
            target.copy_(values)


class GdsReader:
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

    def read_row(self, row: FileTensor, into: Tensor) -> None:
        """Fill a tensor [numel] of the row's dtype, contiguous and on the card; returns when it is there.

        Raises:
            SwapError: it could not be read, or not all of it.
        """
        # No stream knows of the read: whatever was issued before must be done with the memory.
        issued_here(into.device).wait(threading.TIMEOUT_MAX)
        extent = row.extent
        nbytes = into.numel() * into.itemsize
        what = f"cannot read {nbytes} bytes at {extent.offset} of a swap file into a card"
        try:
            found = self._file(extent.descriptors).pread(into.view(torch.uint8), nbytes, extent.offset).get()
        except RuntimeError as error:
            raise SwapError.make(errno.EIO, extent.descriptors.folder, f"{what} ({error})") from error
        if found != nbytes:
            raise SwapError.make(errno.EIO, extent.descriptors.folder, f"{what}, only {found}")

    def _file(self, descriptors: Descriptors) -> Any:
        # Comm streams read beside each other.
        with self._guard:
            if descriptors not in self._files:
                # By the descriptor: the file has no name any more.
                self._files[descriptors] = self._kvikio.CuFile(f"/proc/self/fd/{descriptors.cached}", "r")
            return self._files[descriptors]
