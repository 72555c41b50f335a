"""Reads and writes between extents and memory, by threads that block in the system's calls.

A transfer is cut into pieces (`cut`). A thread takes one at a time and moves it past the page cache, or through it
where the piece has parts of blocks or the file system has no direct I/O (`move`).

[Note: threads of transfers] A call with O_DIRECT returns when the disk has done it, so a thread keeps one request under
way, and as many requests are under way as there are threads: ``queue_depth`` for each of ``intra_op_parallelism``
groups. Groups would differ in nothing, so all threads take from one queue. Above 64 the disk gains nothing, as each
request has ``block_size`` bytes, and Python's lock, which each takes between calls, loses: no more are started. They
need a core only between two calls, so 8 on a small machine do no harm.
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
    """Settings of the reads and writes of files.

    Attributes:
        block_size: bytes of one request.
        queue_depth: times ``intra_op_parallelism`` requests are under way, and at most 64.
        intra_op_parallelism: see ``queue_depth``.
        single_submit: of each transfer one request at most is under way.
        overlap_events: requests of several transfers are under way; without it those of the oldest only.
        use_gds: files are read straight into a card's memory; see `zeropp.offload.read_ahead`.
    """

    block_size: int = 1 << 20
    queue_depth: int = 8
    intra_op_parallelism: int = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class Transfers:
    """Reads and writes of extents, in threads of its own; see [Note: threads of transfers].

    Transfers run beside each other, also those of the same bytes: a read that should see a write begins after that
    write's event. Memory that begins on a page, as that of :func:`~zeropp.offload.swap.aligned`, is read and written
    in place if it also lies in step with the blocks of the file; other memory by way of a copy. Parts of blocks, except
    the end of an extent, are written through the page cache.

    Args:
        io: sizes and numbers of requests.
    """

    def __init__(self, io: IoOptions) -> None:
        self._block = io.block_size
        self._queue = _Queue(io)
        count = min(io.intra_op_parallelism * io.queue_depth, _THREADS)
        # Whatever would be moved after the end of the program is of no use to anyone.
        self._threads = Threads(self._queue.close, at_exit=self._queue.cancel)
        for number in range(count):
            self._threads.start(f"offload {number}", _serve, self._queue)

    def read(self, extent: Extent, start_nbytes: int, into: Tensor) -> Event:
        """Read bytes of an extent from ``start_nbytes`` on, as many as ``into`` has.

        Args:
            extent: from which.
            start_nbytes: the first byte, counted in the extent.
            into: contiguous, on the CPU, of any dtype; nobody else reads or writes it until the end.

        Returns:
            The end. Its ``wait`` raises :class:`~zeropp.offload.swap.SwapError` if the system refused, or if the
            program ended first.

        Raises:
            ValueError: the tensor is not contiguous, not on the CPU, or reaches out of the extent.
            RuntimeError: this is closed, or was made in the parent of this process.
        """
        return self._begin_transfer(extent, start_nbytes, into, reads=True)

    def write(self, extent: Extent, start_nbytes: int, source: Tensor) -> Event:
        """Write the bytes of ``source`` to an extent from ``start_nbytes`` on; otherwise as :meth:`read`."""
        return self._begin_transfer(extent, start_nbytes, source, reads=False)

    def _begin_transfer(self, extent: Extent, start: int, memory: Tensor, *, reads: bool) -> Event:
        self._threads.require_here()
        word = "read into" if reads else "written from"
        nbytes = memory.numel() * memory.itemsize
        if memory.device.type != "cpu" or not memory.is_contiguous():
            form = f"shape {list(memory.shape)} and strides {list(memory.stride())} on {memory.device}"
            raise ValueError(f"the tensor {word} has {form}; expected a contiguous one on the CPU")
        if start < 0 or start + nbytes > extent.nbytes:
            given = f"bytes {start} to {start + nbytes} are {word}"
            raise ValueError(f"{given}, and the extent has bytes 0 to {extent.nbytes}")
        transfer = _Transfer(extent, start, memory, self._block, reads=reads)
        if transfer.pieces:
            self._queue.put(transfer)
        else:
            _finish(transfer)
        return transfer.event

    def close(self) -> None:
        """Let threads end after what was begun, and wait a while for them: a disk that hangs must not hang this."""
        self._threads.stop()
        self._threads.join()


class _Transfer:
    """One read or write, and how far it is; its fields change under the queue's lock."""

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
    """Pieces of all transfers, in order; threads hold this, not the `Transfers`, so that a dropped one ends them."""

    def __init__(self, io: IoOptions) -> None:
        self._one_by_one = io.single_submit
        self._overlap = io.overlap_events
        # Its lock may be taken again by the thread that has it: garbage collected inside may be a dropped Transfers.
        self._changed = threading.Condition(threading.RLock())
        # Those of which no thread has taken all pieces, and the one that others wait for.
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
        """The next piece to move; waits for one. None when there will be no more."""
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
        """A piece has been moved, or could not be: then the rest of its transfer is left, and the first error told."""
        with self._changed:
            transfer.under_way -= 1
            if error is not None:
                transfer.error = transfer.error or error
                self._drop(transfer)
            over = not transfer.pieces and not transfer.under_way
            if over and transfer is self._alone:
                self._alone = None
            # Else this thread takes what is next, and no other has waited for this.
            if self.closed or not self._overlap:
                self._changed.notify_all()
        if over:
            _finish(transfer)

    def _drop(self, transfer: _Transfer) -> None:
        if transfer.pieces:
            transfer.pieces.clear()
            self._waiting.remove(transfer)

    def close(self) -> None:
        """Take no more; threads end after what is there."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Close it, and leave what no thread has taken."""
        with self._changed:
            for transfer in list(self._waiting):
                folder = transfer.extent.descriptors.folder
                transfer.error = transfer.error or SwapError.make(errno.ECANCELED, folder, "the program ends")
                self._drop(transfer)
                if not transfer.under_way:
                    _finish(transfer)
            self.close()


def _finish(transfer: _Transfer) -> None:
    # Before anyone hears of the end: whoever waits may count on the extent and the memory being free of this.
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
            # Handed to whoever waits, without this thread's frames, which would keep the extent.
            failed = error.with_traceback(None)
        queue.ended(transfer, failed)
        # An idle thread must not keep an error, nor the rest of what it did last.
        del taken, transfer, failed


# Pieces of a transfer: each is moved by one thread.


def cut(begin: int, end: int, block: int, extent: Extent) -> list[tuple[int, int]]:
    """Bytes [begin, end) of an extent as pieces (begin, end), in order.

    Parts of blocks of the file are apart from whole ones, which need no copy. The end of the extent counts as whole:
    what is between it and the next extent belongs to nobody.

    Args:
        begin: first byte.
        end: behind the last one.
        block: bytes of a piece at most; rounded up to whole blocks of the file.
        extent: with its length and alignment.
    """
    unit = extent.alignment
    first = min(-(-begin // unit) * unit, end)
    last = end if end == extent.nbytes else max(end // unit * unit, first)
    borders = sorted({begin, *range(first, last, -(-block // unit) * unit), last, end})
    return list(itertools.pairwise(borders))


def move(extent: Extent, begin: int, end: int, address: int, bounce: Bounce, *, reads: bool) -> None:
    """Move a piece, whole.

    Args:
        extent: where the piece lies.
        begin: of the piece in the extent, in bytes.
        end: behind its last byte.
        address: of the first byte in memory; whoever calls keeps what owns it.
        bounce: of this thread.
        reads: from the extent into memory; otherwise the other way.

    Raises:
        SwapError: the system refused, or the file has ended.
    """
    unit = extent.alignment
    low = begin // unit * unit
    high = -(-end // unit) * unit
    # The padding behind an extent may be read and written, other bytes of a block only read: whoever writes those at
    # the same moment would have them undone.
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
        # A call that stopped within a block leaves a rest that O_DIRECT would refuse; the cache takes it.
        past = descriptors.direct if direct and done % unit == 0 else None
        descriptor = descriptors.cached if past is None else past
        call = swap.read_at if reads else swap.write_at
        # Read 0 bytes, the file has ended; written 0, nothing would go on for ever.
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
            # Outside of the ``except``: with that error would come its frames, and with those the tensor.
            word = "read" if reads else "write"
            what = f"cannot {word} {count - done} bytes at byte {offset + done} of a swap file"
            raise SwapError.make(number, descriptors.folder, what)


class Bounce:
    """Aligned memory of a thread, for what direct I/O cannot move in place; made when first used, and kept."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def address(self, nbytes: int) -> int:
        """The address of room for ``nbytes``."""
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = aligned(nbytes, torch.uint8)
        return self._memory.data_ptr()
