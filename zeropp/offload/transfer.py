"""Reads and writes between extents and memory, by threads that block in system calls.

A transfer is cut into pieces (`cut`). A thread takes one piece at a time and moves it (`move`): with direct I/O past
the page cache, or through the page cache if the piece has parts of blocks to write or the file system has no direct
I/O.

[Note: threads of transfers] A system call with O_DIRECT returns when the disk has finished, so a thread has one request
in flight, and there are as many requests in flight as threads: ``queue_depth * intra_op_parallelism``, but at most 64.
``intra_op_parallelism`` adds threads only, because groups of threads with a queue each would not behave differently:
all threads take pieces from one queue. With more than 64 threads, the disk gains nothing because each request has
``block_size`` bytes, and contention for Python's lock grows. Threads need a core only between two calls, so 8 threads
on a small machine do no harm.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.comm.streams import Event, ThreadEvent
from zeropp.comm.threads import Threads
from zeropp.offload import swap
from zeropp.offload.swap import REFUSED, Descriptors, Extent, SwapError, aligned, copy_bytes, view_of

__all__ = ["Bounce", "IoOptions", "Transfers", "cut", "move"]

_THREADS = 64


@dataclass(frozen=True)
class IoOptions:
    """Settings for reads and writes of files.

    Attributes:
        block_size: bytes of one request.
        queue_depth: requests in flight are ``queue_depth * intra_op_parallelism``, at most 64.
        intra_op_parallelism: factor of the requests in flight, see ``queue_depth``.
        single_submit: True for at most one request in flight per transfer.
        overlap_events: True if requests of several transfers may be in flight; False for those of the oldest transfer
            only.
        use_gds: True to read files directly into GPU memory; see `zeropp.offload.read_ahead`.
    """

    block_size: int = 1 << 20
    queue_depth: int = 8
    intra_op_parallelism: int = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class Transfers:
    """Reads and writes of extents, in threads of this object; see [Note: threads of transfers].

    Transfers run concurrently, also those of the same bytes. To read bytes that a transfer writes, wait for the write's
    event first. A piece of whole blocks is moved without a copy if its address in memory is a multiple of the block's
    alignment, as for memory from :func:`~zeropp.offload.swap.aligned`. Other pieces are copied through an aligned
    buffer. Parts of blocks are written through the page cache, except at the end of an extent.

    Args:
        io: sizes and numbers of requests.
    """

    def __init__(self, io: IoOptions) -> None:
        self._block = io.block_size
        self._queue = _Queue(io)
        count = min(io.intra_op_parallelism * io.queue_depth, _THREADS)
        # At the end of the program, pending transfers are cancelled, because their results can no longer be used.
        self._threads = Threads(self._queue.close, at_exit=self._queue.cancel)
        for number in range(count):
            self._threads.start(f"offload {number}", _serve, self._queue)

    def read(self, extent: Extent, start_nbytes: int, into: Tensor) -> Event:
        """Start to read bytes of an extent into a tensor; the number of bytes is that of ``into``.

        Args:
            extent: the extent to read from.
            start_nbytes: first byte to read, counted from the start of the extent.
            into: contiguous tensor on the CPU, any dtype; nothing else may use it before the end of the read.

        Returns:
            An event for the end of the read. Its ``wait`` raises :class:`~zeropp.offload.swap.SwapError` if the system
            reported an error, or if the program ended first.

        Raises:
            ValueError: the tensor is not contiguous or not on the CPU, or the bytes are not all in the extent.
            RuntimeError: this object was closed, or was made in the parent of this forked process.
        """
        return self._begin_transfer(extent, start_nbytes, into, reads=True)

    def write(self, extent: Extent, start_nbytes: int, source: Tensor) -> Event:
        """Start to write the bytes of a tensor to an extent; arguments, result and errors are those of :meth:`read`.

        Args:
            extent: the extent to write to.
            start_nbytes: first byte to write, counted from the start of the extent.
            source: contiguous tensor on the CPU, any dtype; it must not change before the end of the write.
        """
        return self._begin_transfer(extent, start_nbytes, source, reads=False)

    def _begin_transfer(self, extent: Extent, start: int, memory: Tensor, *, reads: bool) -> Event:
        self._threads.require_here()
        word = "read into" if reads else "written from"
        nbytes = memory.numel() * memory.itemsize
        if memory.device.type != "cpu" or not memory.is_contiguous():
            form = f"shape {list(memory.shape)} and strides {list(memory.stride())} on {memory.device}"
            raise ValueError(f"the tensor {word} has {form}; expected a contiguous one on the CPU")
        if start < 0 or start + nbytes > extent.nbytes:
            given = f"the tensor {word} needs bytes {start} to {start + nbytes}"
            raise ValueError(f"{given}, but the extent has bytes 0 to {extent.nbytes}")
        transfer = _Transfer(extent, start, memory, self._block, reads=reads)
        if transfer.pieces:
            self._queue.put(transfer)
        else:
            _finish(transfer)
        return transfer.event

    def close(self) -> None:
        """Let the threads end after the transfers begun so far, and wait for them for a limited time.

        The wait is limited because a disk that hangs must not hang this call.
        """
        self._threads.stop()
        self._threads.join()


class _Transfer:
    """One read or write and its progress. The fields change only under the queue's lock."""

    __slots__ = ("address", "error", "event", "extent", "memory", "pieces", "reads", "start", "under_way")

    def __init__(self, extent: Extent, start: int, memory: Tensor, block: int, *, reads: bool) -> None:
        self.extent = extent
        self.start = start
        self.memory = memory
        self.reads = reads
        self.address = memory.data_ptr()
        end = start + memory.numel() * memory.itemsize
        self.pieces = deque(cut(start, end, block, extent))
        self.under_way = 0
        self.error: BaseException | None = None
        self.event = ThreadEvent()


class _Queue:
    """Queue of the pieces of all transfers, in order.

    The threads refer to this object, not to ``Transfers``, so that they end when the ``Transfers`` object is dropped.
    """

    def __init__(self, io: IoOptions) -> None:
        self._one_by_one = io.single_submit
        self._overlap = io.overlap_events
        # A reentrant lock: garbage collection in a thread that holds it may drop a Transfers object, which closes this
        # queue.
        self._changed = threading.Condition(threading.RLock())
        # _waiting: transfers with pieces that no thread has taken. _alone: without overlap_events, the transfer that is
        # being moved, for which all others wait.
        self._waiting = deque[_Transfer]()
        self._alone: _Transfer | None = None
        self.closed = False

    def put(self, transfer: _Transfer) -> None:
        with self._changed:
            if self.closed:
                raise RuntimeError("these transfers are closed; begin reads and writes before close()")
            self._waiting.append(transfer)
            self._changed.notify(1 if self._one_by_one else len(transfer.pieces))

    def take_piece(self) -> tuple[_Transfer, tuple[int, int]] | None:
        """Wait for a piece to move and return (transfer, piece). Return None if the queue is closed and empty."""
        with self._changed:
            while (transfer := self._next()) is None:
                if self.closed and not self._waiting:
                    return None
                self._changed.wait()
            piece = transfer.pieces.popleft()
            transfer.under_way += 1
            if not self._overlap:
                self._alone = transfer
            if not transfer.pieces:
                self._waiting.remove(transfer)
            return transfer, piece

    def _next(self) -> _Transfer | None:
        for transfer in self._waiting:
            if self._alone is not None and self._alone is not transfer:
                return None
            if not (self._one_by_one and transfer.under_way):
                return transfer
        return None

    def ended(self, transfer: _Transfer, error: BaseException | None) -> None:
        """Note that a piece has been moved, or has failed.

        After the first error, the transfer's remaining pieces are dropped. The transfer's event ends with that error.
        """
        with self._changed:
            transfer.under_way -= 1
            if error is not None:
                transfer.error = transfer.error or error
                self._drop(transfer)
            over = not transfer.pieces and not transfer.under_way
            if over and transfer is self._alone:
                self._alone = None
            # Wake the threads that may wait for this piece's end. In other cases this thread itself takes the next
            # piece.
            if self.closed or not self._overlap:
                self._changed.notify_all()
        if over:
            _finish(transfer)

    def _drop(self, transfer: _Transfer) -> None:
        if transfer.pieces:
            transfer.pieces.clear()
            self._waiting.remove(transfer)

    def close(self) -> None:
        """Refuse further transfers; threads end after the queued ones."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Close the queue and end its transfers with an error; pieces that threads are moving are finished first."""
        with self._changed:
            for transfer in list(self._waiting):
                folder = transfer.extent.descriptors.folder
                transfer.error = transfer.error or SwapError.make(errno.ECANCELED, folder, "the program ends")
                self._drop(transfer)
                if not transfer.under_way:
                    _finish(transfer)
            self.close()


def _finish(transfer: _Transfer) -> None:
    # Drop the references before the event is set: a thread that waits for it may free the extent and reuse the memory.
    del transfer.extent, transfer.memory
    transfer.event.finish(transfer.error)


def _serve(queue: _Queue) -> None:
    bounce = Bounce()
    while (taken := queue.take_piece()) is not None:
        transfer, (begin, end) = taken
        address = transfer.address + begin - transfer.start
        failed: BaseException | None = None
        try:
            move(transfer.extent, begin, end, address, bounce, reads=transfer.reads)
        except BaseException as error:
            # The error is passed on without this thread's frames, which would keep the extent alive.
            failed = error.with_traceback(None)
        queue.ended(transfer, failed)
        # An idle thread must not keep an error or the objects of its last piece alive.
        del taken, transfer, failed


# Pieces of a transfer. One thread moves each piece.


def cut(begin: int, end: int, block: int, extent: Extent) -> list[tuple[int, int]]:
    """Cut bytes [begin, end) of an extent into pieces, and return (begin, end) of each in order.

    Parts of file blocks are pieces of their own, separate from whole blocks, which need no copy. A partial block at the
    end of the extent counts as whole, because the bytes up to the next extent are unused.

    Args:
        begin: first byte.
        end: last byte + 1.
        block: largest number of bytes in a piece, rounded up to whole blocks of the file.
        extent: the extent, for its length and alignment.
    """
    unit = extent.alignment
    first = min(-(-begin // unit) * unit, end)
    last = end if end == extent.nbytes else max(end // unit * unit, first)
    borders = sorted({begin, *range(first, last, -(-block // unit) * unit), last, end})
    return list(itertools.pairwise(borders))


def move(extent: Extent, begin: int, end: int, address: int, bounce: Bounce, *, reads: bool) -> None:
    """Read or write one whole piece.

    Args:
        extent: extent of the piece.
        begin: first byte of the piece in the extent.
        end: last byte of the piece + 1.
        address: address of the piece's first byte in memory; the caller must keep the memory alive.
        bounce: aligned buffer of this thread.
        reads: True to read from the extent into memory, False to write.

    Raises:
        SwapError: the system reported an error, or the file has ended.
    """
    unit = extent.alignment
    low = begin // unit * unit
    high = -(-end // unit) * unit
    # Bytes of a block outside of the piece may be read, but not written: another thread may write them at the same
    # time, and its bytes would be overwritten with old ones. The padding after an extent may be written.
    whole = begin == low and (end == high or end == extent.nbytes)
    if extent.descriptors.direct is None or not (reads or whole):
        memory = view_of(address, end - begin)
        _call(extent.descriptors, memory, extent.offset + begin, unit, reads=reads, direct=False)
    elif whole and end == high and address % unit == 0:
        memory = view_of(address, end - begin)
        _call(extent.descriptors, memory, extent.offset + begin, unit, reads=reads, direct=True)
    else:
        room = bounce.address(high - low)
        if not reads:
            copy_bytes(room, address, end - begin)
        _call(extent.descriptors, view_of(room, high - low), extent.offset + low, unit, reads=reads, direct=True)
        if reads:
            copy_bytes(address, room + begin - low, end - begin)


def _call(descriptors: Descriptors, memory: memoryview, offset: int, unit: int, *, reads: bool, direct: bool) -> None:
    done = 0
    count = len(memory)
    while done < count:
        # If a call stopped within a block, O_DIRECT would refuse the rest, so the rest goes through the page cache.
        past = descriptors.direct if direct and done % unit == 0 else None
        descriptor = descriptors.cached if past is None else past
        call = swap.read_at if reads else swap.write_at
        # EIO if no byte was moved without an error: the file has ended, or repeating the write would never end.
        number = errno.EIO
        try:
            moved = call(descriptor, memory[done:], offset + done)
        except OSError as error:
            moved = 0
            number = error.errno or errno.EIO
        if moved > 0:
            done += moved
        elif past is not None and number in REFUSED:
            descriptors.stop_direct(number)
        else:
            # The error is raised outside of the except block: the caught error would keep its frames, and with them the
            # tensor.
            word = "read" if reads else "write"
            what = f"cannot {word} {count - done} bytes at byte {offset + done} of a swap file"
            raise SwapError.make(number, descriptors.folder, what)


class Bounce:
    """Aligned memory of one thread, for pieces that direct I/O cannot move in place; allocated at first use."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def address(self, nbytes: int) -> int:
        """Return the address of aligned memory for ``nbytes`` bytes."""
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = aligned(nbytes, torch.uint8)
        return self._memory.data_ptr()
