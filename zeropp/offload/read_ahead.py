"""Reading ahead: stored tensors are read from their tier into staging buffers before a gather needs them.

A thread reads rows (stored tensors) in the order in which they were requested, part by part, into the buffers of a
`Ring`. The gathers take the parts in the same order and return the buffers. So each buffer becomes free again, and a
row may be larger than all buffers together.

With ``aio.use_gds``, rows in files are read directly into GPU memory by kvikio, which uses NVIDIA's GPUDirect Storage.
Where disks, file system or CUDA do not support that, kvikio goes through its own host memory. In both cases the rows in
files are not read ahead: each is read into the gather's own memory when the gather runs. Gathers are issued ahead.
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
from zeropp.offload.swap import Descriptors, SwapError, aligned, page_locked

__all__ = ["GdsReader", "GdsTensor", "PendingRead", "ReadAhead", "Ring"]

_Part = tuple[int, Tensor, Tensor, Event]  # first element, values, ring buffer of the values, end of the read


class ReadAhead:
    """A thread that reads stored tensors into staging buffers.

    Attributes:
        ring: staging buffers for the parts that are being read or copied.
    """

    def __init__(self, ring: Ring, straight: GdsReader | None = None) -> None:
        """Start the thread.

        Args:
            ring: staging buffers to read into.
            straight: reader for rows in files, which then bypass the ring; None if all rows go through the ring.
        """
        self.ring = ring
        self._straight = straight
        self._stream = ThreadStream("read")

    def begin_read(self, row: StoredTensor, after: Event | None) -> PendingRead | GdsTensor:
        """Request a row; the thread reads it behind earlier requests.

        Args:
            row: the stored tensor.
            after: event before which the row must not be read, for example the end of its optimizer step. Not used for
                rows read by GPUDirect Storage, whose read runs inside the gather.

        Returns:
            An object whose ``copy_to`` waits for the values and copies them.
        """
        if self._straight is not None and isinstance(row, FileTensor):
            return GdsTensor(row, self._straight)
        arriving = PendingRead(self.ring, row.tensor.numel())
        self._stream.run(lambda: self._read(row, arriving, after))
        return arriving

    def _read(self, row: StoredTensor, arriving: PendingRead, after: Event | None) -> None:
        try:
            # Wait here instead of in ThreadStream.run, so that an error of the event reaches the waiting gather, too.
            if after is not None:
                after.wait(threading.TIMEOUT_MAX)
            dtype = row.tensor.dtype
            numel = row.tensor.numel()
            most = self.ring.nbytes // dtype.itemsize
            for start in range(0, numel, most):
                # take_buffer waits until a buffer is free, so at most ring.count reads are in flight.
                buffer = self.ring.take_buffer()
                values = buffer[: min(most, numel - start) * dtype.itemsize].view(dtype)
                try:
                    event = row.read(start, values)
                except BaseException:
                    self.ring.return_buffer(buffer)
                    raise
                arriving.parts.put((start, values, buffer, event))
        except BaseException as error:
            # Pass the error to the thread that waits in PendingRead.copy_to.
            arriving.parts.put(error)

    def close(self) -> None:
        """End the thread; copy_to must not be called any more."""
        self.ring.close()
        self._stream.close()


class PendingRead:
    """A row that is being read ahead.

    Attributes:
        parts: queue of parts whose reads have begun, each with the event of its end; or the error of the read.
    """

    def __init__(self, ring: Ring, numel: int) -> None:
        self.parts: SimpleQueue[_Part | BaseException] = SimpleQueue()
        self._ring = ring
        self._numel = numel

    def numel(self) -> int:
        """Return the number of elements of the row."""
        return self._numel

    def copy_to(self, target: Tensor) -> None:
        """Copy the whole row into a tensor [numel] of any dtype. Can be called once.

        Raises:
            OSError: the row could not be read.
            RuntimeError: the ring was closed.
            Exception: the event ``after`` of :meth:`ReadAhead.begin_read` raised this error.
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
                # Take the remaining parts in spite of the error, because the next reads need their buffers.
                error = error or caught
            finally:
                self._ring.return_buffer(buffer)
            done += values.numel()
        if error is not None:
            raise error


class Ring:
    """Staging buffers of equal size, in one allocation.

    Attributes:
        count: number of buffers.
        nbytes: bytes of one buffer.
    """

    def __init__(self, count: int, nbytes: int, *, pinned: torch.device | None = None) -> None:
        """Allocate ``count`` buffers of ``nbytes`` bytes, page-locked for the GPU ``pinned`` unless it is None."""
        self.count = count
        self.nbytes = nbytes
        # One allocation for all buffers, because page-locking is slow. Memory that torch allocates does not start on a
        # page, so direct I/O would need an extra copy.
        total = count * nbytes
        self._memory = aligned(total, torch.uint8) if pinned is None else page_locked(total, torch.uint8, pinned)
        self._free = [self._memory[index * nbytes : (index + 1) * nbytes] for index in range(count)]
        self._changed = threading.Condition()
        self._closed = False

    def take_buffer(self) -> Tensor:
        """Wait for a free buffer and return it, uint8 [nbytes].

        Raises:
            RuntimeError: the ring was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            # The engine was closed after an error while a comm stream waited here. The result of that stream is not
            # needed.
            if self._closed:
                raise RuntimeError("the staging buffers were closed while a copy waited for one")
            return self._free.pop()

    @contextlib.contextmanager
    def taken(self) -> Iterator[Tensor]:
        """Return a context manager that takes a buffer and returns it to the ring at the end."""
        buffer = self.take_buffer()
        try:
            yield buffer
        finally:
            self.return_buffer(buffer)

    @contextlib.contextmanager
    def all_taken(self) -> Iterator[list[Tensor]]:
        """Return a context manager that takes all buffers and returns them to the ring at the end.

        Only one caller may wait for several buffers at a time. Two callers with some buffers each would wait for ever.
        """
        # Other users hold one buffer and return it without waiting for another, so all buffers become free.
        buffers = [self.take_buffer() for _ in range(self.count)]
        try:
            yield buffers
        finally:
            for buffer in buffers:
                self.return_buffer(buffer)

    def return_buffer(self, buffer: Tensor) -> None:
        """Return a buffer to the ring; nothing may use it any more."""
        with self._changed:
            self._free.append(buffer)
            # One buffer is free, so wake one waiter.
            self._changed.notify()

    def close(self) -> None:
        """Make all waits for a buffer raise RuntimeError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


# Reads directly from files into GPU memory.


class GdsTensor:
    """A row in a file that is read into GPU memory when ``copy_to`` is called."""

    def __init__(self, row: FileTensor, reads: GdsReader) -> None:
        self._row = row
        self._reads = reads

    def numel(self) -> int:
        """Return the number of elements of the row."""
        return self._row.tensor.numel()

    def copy_to(self, target: Tensor) -> None:
        """Read the whole row into a tensor [numel] of any dtype.

        Raises:
            SwapError: the row could not be read.
        """
        # No event to wait for: copy_to is called by a gather, which is queued behind the step of these weights.
        dtype = self._row.tensor.dtype
        if target.dtype == dtype and target.is_contiguous():
            self._reads.read_row(self._row, target)
        else:
            values = torch.empty(self.numel(), dtype=dtype, device=target.device)
            self._reads.read_row(self._row, values)
            target.copy_(values)


class GdsReader:
    """Reader of swap files through kvikio (GPUDirect Storage)."""

    def __init__(self, device: torch.device) -> None:
        """Import kvikio.

        Args:
            device: the GPU to read into.

        Raises:
            ValueError: the device is not an NVIDIA GPU.
            ImportError: kvikio is not installed, or it finds no CUDA.
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
        # Weak keys, so that kvikio's file is closed together with its descriptors.
        self._files: weakref.WeakKeyDictionary[Descriptors, Any] = weakref.WeakKeyDictionary()

    def read_row(self, row: FileTensor, into: Tensor) -> None:
        """Fill a tensor with a row, and return when the values are there.

        Args:
            row: the row to read.
            into: [numel], the row's dtype, contiguous, on the GPU.

        Raises:
            SwapError: the read failed or was short.
        """
        # The read is on no CUDA stream, so wait for all work issued before that may still use this memory.
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
        # Several comm streams may read at the same time.
        with self._guard:
            if descriptors not in self._files:
                # Open by descriptor, because the file has no name any more.
                self._files[descriptors] = self._kvikio.CuFile(f"/proc/self/fd/{descriptors.cached}", "r")
            return self._files[descriptors]
