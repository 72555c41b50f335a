"""The offloaded copy of a shard that gathers and refreshes start from when the shard is not in device memory.

The copy has the form in which weights travel: values in the compute dtype, or one codec message. There are two cases:

- Weights are gathered from the shards at each use. The copy is kept between uses, in the storage tier for gather
  sources (`Tiers.weights`), and each step writes new weights to it. If the main weights can be gathered as they are,
  they serve as the copy.
- Weights are cached between uses (hpZ, persistent parameters). No copy is kept. New main weights stay on the device
  from the step until the refresh has sent them.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue

import torch
from torch import Tensor

from zeropp.comm.streams import Event, copy, used_here
from zeropp.offload.read_ahead import GdsTensor, PendingRead, ReadAhead, Ring
from zeropp.offload.storage_tiers import StoredTensor
from zeropp.wire.codecs import Codec

__all__ = ["Upload", "WireCopy"]


_Sent = tuple["WireCopy", int, Tensor, Tensor, bool]


class WireCopy:
    """The offloaded source of one flat buffer's gathers and refreshes.

    Attributes:
        row: stored tensor that gathers read, kept between uses; the row of the main weights if they serve as the copy.
            None if no copy is kept because only refreshes read this source.
        dtype: dtype of the new main weights that a step hands over with :meth:`take_new_weights`.
    """

    def __init__(
        self,
        main: StoredTensor,
        row: StoredTensor | None,
        dtype: torch.dtype,
        codec: Codec | None,
        device: torch.device,
        reader: ReadAhead | None,
    ) -> None:
        """Store where the main weights and the kept copy are. No values are copied yet.

        Args:
            main: this rank's shard of the main weights.
            row: stored tensor kept between uses for gathers; ``main`` if it serves as the copy, None if no copy is
                kept.
            dtype: dtype of new weights if no codec is given. With a codec they have the dtype of ``main``.
            codec: codec of the message in ``row``; None if ``row`` holds plain values.
            device: device that trains.
            reader: read-ahead thread for a ``row`` in a file; None if ``row`` is in memory or is None.
        """
        self.row = row
        self._main = main
        self.dtype = main.tensor.dtype if codec is not None else dtype
        self._codec = codec
        self._device = device
        self._reader = reader
        # New main weights on the device, kept until a refresh has sent them or until they are encoded into ``row``.
        self._new: Tensor | None = None
        self._seen: int | None = None  # autograd version of the main weights when edits were first allowed

    @property
    def follows(self) -> bool:
        """True if this source is a copy apart from the main weights, so that each step must pass new weights to it."""
        return self.row is not self._main

    @property
    def reads(self) -> bool:
        """True if each gather reads ``row`` from a file."""
        return self._reader is not None

    @property
    def encodes(self) -> bool:
        """True if ``row`` holds a codec message instead of plain values."""
        return self._codec is not None

    @property
    def new_nbytes(self) -> int:
        """Bytes on the device of new main weights that no refresh has sent yet."""
        return 0 if self._new is None else self._new.untyped_storage().nbytes()

    def begin_gather(self, after: Event | None) -> Tensor | PendingRead | GdsTensor:
        """Return the source of one gather, and start reading it if it is in a file.

        Args:
            after: event at which the step that writes the row has ended; the read waits for it. None to read at once.

        Returns:
            The row's tensor if it is in memory, else a handle that delivers the row once it has been read.
        """
        assert self.row is not None
        return self.row.tensor if self._reader is None else self._reader.begin_read(self.row, after)

    def new(self) -> Tensor:
        """Return the new main weights on the device, [numel of the shard] in ``dtype``, for a refresh."""
        # After a load or an edit, no step has brought the new main weights to the device, so copy them now.
        if self._new is None:
            self._new = self._main.tensor.to(self._device, self.dtype)
        # The tensor was allocated on another stream and is dropped once the refresh is queued. Record its use on this
        # stream, or the allocator may reuse the memory while the refresh still reads it.
        used_here(self._new)
        return self._new

    def drop_new(self) -> None:
        """Free the new main weights on the device, because a refresh has sent them."""
        self._new = None

    # Updates, after main weights have changed.

    @property
    def uploads(self) -> bool:
        """True if new weights go to the device, from a staging buffer that the host has filled."""
        return self.row is None or self._codec is not None or self.row.place == "device"

    def new_in_place(self, start: int, stop: int) -> Tensor | None:
        """Return the part of ``row`` to which the host itself may write new weights.

        Args:
            start: first element of the part in the shard.
            stop: last element + 1.

        Returns:
            [stop - start] in ``dtype``; None if the row is not in host memory, or if new weights must be encoded first.
        """
        if self.uploads or self.row is None or not self.row.in_memory:
            return None
        # ``data`` leaves the version counter as it is: versions must change only when the user edits weights.
        return self.row.tensor.data[start:stop]

    def take_new_weights(self, start: int, values: Tensor) -> Event:
        """Take over new main weights, beginning at element ``start`` of the shard.

        Args:
            start: index of the first element in the shard.
            values: new weights on the host, in ``dtype``.

        Returns:
            An event. The caller must not change ``values`` before it has happened.
        """
        if self.row is not None and self._codec is None:
            # Write to the row directly. A detour through the device would take device memory for nothing.
            return self.row.write(start, values)
        if self._new is None:
            self._new = torch.empty(self._main.tensor.numel(), dtype=self.dtype, device=self._device)
        return copy(self._new[start : start + values.numel()], values)

    def finish_taking(self) -> None:
        """Encode the new weights into ``row`` if a codec is used. Called after the last part of the shard was taken."""
        if self._codec is not None and self._new is not None:
            self._encode(self._new)
            # Free the values. The message contains them, and a device that offloads weights is short of memory.
            self._new = None

    def expect_edits(self) -> None:
        """Record the version of the main weights, so that :meth:`take_edits` can detect edits made after this call."""
        self._seen = self._main.tensor._version

    def take_edits(self) -> None:
        """Renew this copy if the main weights were edited in place since :meth:`expect_edits`."""
        if self._seen not in (None, self._main.tensor._version):
            self.renew()
        self._seen = None

    def renew(self) -> None:
        """Renew this copy from the main weights after they were changed by something else than a step."""
        self._new = None
        if self.row is None or not self.follows:
            # Nothing to copy: either :meth:`new` reads the main weights when a refresh asks for them, or gathers read
            # the main weights themselves.
            return
        if self._codec is not None:
            self._encode(self._main.tensor.to(self._device))
        else:
            self.row.tensor.copy_(self._main.tensor)

    def _encode(self, values: Tensor) -> None:
        assert self._codec is not None and self.row is not None
        # Encode on the device, where the codec's kernels run, then copy the message. It has a half or a quarter of the
        # bytes of the values.
        message = self._codec.empty(values.numel(), 1, self._device)
        self._codec.encode_(message, values)
        self.row.tensor.copy_(message)


class Upload:
    """The copies that end a unit's step on the host: new weights to the device, and writes to files.

    The thread that steps the unit calls :meth:`take_buffer`, :meth:`send`, and in the end :meth:`end` or :meth:`fail`.
    It can then step the next unit. The thread of another stream calls :meth:`run`, which returns when the copies have
    ended.
    """

    def __init__(self, ring: Ring | None) -> None:
        """Prepare the copies.

        Args:
            ring: staging buffers for new weights on their way to the device; None if none go there.
        """
        self._ring = ring
        self._parts: SimpleQueue[_Sent | list[Event] | BaseException] = SimpleQueue()

    def take_buffer(self) -> Tensor:
        """Wait for a free staging buffer and return it, uint8 [nbytes]."""
        assert self._ring is not None  # made if any new weights go to the device
        return self._ring.take_buffer()

    def send(self, source: WireCopy, start: int, values: Tensor, buffer: Tensor, *, last: bool) -> None:
        """Send new weights of one flat buffer to the device.

        Args:
            source: the offloaded source of the flat buffer's gathers.
            start: first element of ``values`` in the shard.
            values: new weights in ``source.dtype``, in the staging buffer.
            buffer: the staging buffer, which returns to the ring after the copy.
            last: True if these are the last new weights of the shard.
        """
        self._parts.put((source, start, values, buffer, last))

    def end(self, written: list[Event]) -> None:
        """Mark the end of the unit's step; ``written`` are the events of its writes to files."""
        self._parts.put(written)

    def fail(self, error: BaseException) -> None:
        """Make :meth:`run` raise the error that ended the unit's step."""
        self._parts.put(error)

    def run(self) -> None:
        """Copy everything that is sent, wait for the writes, and return when all have ended.

        Raises:
            BaseException: the error given to :meth:`fail`, or that of a copy or a write.
        """
        while not isinstance(part := self._parts.get(), list):
            if isinstance(part, BaseException):
                raise part
            assert self._ring is not None  # the part is in one of its buffers
            source, start, values, buffer, last = part
            try:
                source.take_new_weights(start, values).wait(threading.TIMEOUT_MAX)
                if last:
                    source.finish_taking()
            except BaseException:
                # Nobody returns buffers after this, so the step must not wait for one.
                self._ring.close()
                raise
            self._ring.return_buffer(buffer)
        for event in part:
            event.wait(threading.TIMEOUT_MAX)
