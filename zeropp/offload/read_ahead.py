"""Reading ahead: rows on their way from their home to a device, through a ring, in the order they are asked for.

A thread reads, and whoever asked takes what has come, in the same order; so a buffer of the ring is always on its way
to be free again, and a row may be larger than all of them together.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue

from torch import Tensor

from zeropp.comm.streams import Event, ThreadStream
from zeropp.offload.files import FileRow
from zeropp.offload.home import Row
from zeropp.offload.ring import Ring
from zeropp.offload.straight import Straight, StraightReads

__all__ = ["Arriving", "ReadAhead"]

_Part = tuple[int, Tensor, Tensor, Event]  # first element, values, the ring's buffer that they are in, when they are


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
        done, error = 0, None
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
                self._ring.give_back(buffer)
            done += values.numel()
        if error is not None:
            raise error


class ReadAhead:
    """The thread that reads.

    Attributes:
        ring: of staging buffers, on their way from being read into to being free.
    """

    def __init__(self, ring: Ring, straight: StraightReads | None = None) -> None:
        """Start it.

        Args:
            ring: takes what is read.
            straight: for rows in files, which then do without; None where all go through the ring.
        """
        self.ring = ring
        self._straight = straight
        self._stream = ThreadStream("read")

    def begin(self, row: Row, after: Event | None) -> Arriving | Straight:
        """Read a row, behind those asked for before, once ``after`` has happened."""
        if self._straight is not None and isinstance(row, FileRow):
            return Straight(row, self._straight)
        arriving = Arriving(self.ring, row.tensor.numel())
        self._stream.run(lambda: self._read(row, arriving, after))
        return arriving

    def _read(self, row: Row, arriving: Arriving, after: Event | None) -> None:
        try:
            # Here and not by the stream: after an error this thread still has to tell whoever waits.
            if after is not None:
                after.wait(threading.TIMEOUT_MAX)
            dtype, numel = row.tensor.dtype, row.tensor.numel()
            most = self.ring.nbytes // dtype.itemsize
            for start in range(0, numel, most):
                # Here it waits, with as many reads under way as there are buffers.
                buffer = self.ring.take()
                values = buffer[: min(most, numel - start) * dtype.itemsize].view(dtype)
                try:
                    event = row.read(start, values)
                except BaseException:
                    self.ring.give_back(buffer)
                    raise
                arriving.parts.put((start, values, buffer, event))
        except BaseException as error:
            # Whoever takes it is on another thread.
            arriving.parts.put(error)

    def close(self) -> None:
        """End the thread; nobody takes anything any more."""
        self.ring.close()
        self._stream.close()
