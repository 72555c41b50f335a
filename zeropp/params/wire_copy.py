"""The offloaded copy that gathers and refreshes start from when the shard is not on the device.

It is a second copy, in the form in which it travels: values in the dtype that is computed with, or a message of codes.
Where each use gathers from it, it is kept between uses, in a tier of its own. Where weights are only sent on after a
step, to what caches them, it lasts until they have been.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp.comm.streams import Event, copy, used_here
from zeropp.offload.read_ahead import Arriving, GdsTensor, ReadAhead
from zeropp.offload.storage_tiers import StoredTensor
from zeropp.wire.codecs import Codec

__all__ = ["WireCopy"]


class WireCopy:
    """One buffer's.

    Attributes:
        row: what is kept; it may be the row of the main weights. None where nothing is kept.
        dtype: of new weights that are sent on, or kept as values.
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
        """Know where everything lies.

        Args:
            main: weights.
            row: what is kept between uses.
            dtype: in which weights are sent on where nothing is kept.
            codec: of the message that is kept; None for values.
            device: that trains.
            reader: brings what is kept to the device; None if it is there.
        """
        self.row = row
        self._main = main
        self.dtype = main.tensor.dtype if codec is not None else dtype
        self._codec = codec
        self._device = device
        self._reader = reader
        # New values: until they are sent on, or encoded.
        self._new: Tensor | None = None
        self._seen: int | None = None  # version of the main weights, while they may be edited

    @property
    def follows(self) -> bool:
        """True if the source has to be told of new main weights, since it is another copy of them."""
        return self.row is not self._main

    @property
    def encodes(self) -> bool:
        """True if a message of codes is kept in place of values."""
        return self._codec is not None

    @property
    def new_nbytes(self) -> int:
        """Bytes of new values that have not been sent on."""
        return 0 if self._new is None else self._new.untyped_storage().nbytes()

    def begin_gather(self, after: Event | None) -> Tensor | Arriving | GdsTensor:
        """The tensor that each gather starts from; it is read now, or when weights are stepped ``after`` an event."""
        assert self.row is not None
        return self.row.tensor if self._reader is None else self._reader.begin_read(self.row, after)

    def new(self) -> Tensor:
        """New main weights in the device's memory, for what caches them."""
        # After a load or an edit nobody has brought them here.
        if self._new is None:
            self._new = self._main.tensor.to(self._device, self.dtype)
        # Allocated where it was filled, and forgotten when what reads it here is queued.
        used_here(self._new)
        return self._new

    def drop_new(self) -> None:
        """They have been sent on."""
        self._new = None

    # New main weights.

    def take_new_weights(self, start: int, values: Tensor) -> Event:
        """Main weights from ``start`` on are new.

        Args:
            start: element of the shard.
            values: on the host, in ``dtype``.

        Returns:
            An event until which ``values`` must stay as they are.
        """
        if self.row is not None and self._codec is None:
            # Straight to where gathers read: nothing of it passes through the device.
            return self.row.write(start, values)
        if self._new is None:
            self._new = torch.empty(self._main.tensor.numel(), dtype=self.dtype, device=self._device)
        return copy(self._new[start : start + values.numel()], values)

    def finish_taking(self) -> None:
        """All of them have been taken."""
        if self._codec is not None and self._new is not None:
            self._encode(self._new)
            # The message holds it all; on a device with little memory the values must not stay.
            self._new = None

    def expect_edits(self) -> None:
        """From here on main weights may be edited, until :meth:`take_edits`; nothing writes to them otherwise."""
        self._seen = self._main.tensor._version

    def take_edits(self) -> None:
        """Begin anew with main weights that have been edited in place."""
        if self._seen not in (None, self._main.tensor._version):
            self.renew()
        self._seen = None

    def renew(self) -> None:
        """Main weights were changed otherwise: begin with them anew."""
        self._new = None
        if self.row is None or not self.follows:
            # Made from main weights when it is asked for, or these themselves.
            return
        if self._codec is not None:
            self._encode(self._main.tensor.to(self._device))
        else:
            self.row.tensor.copy_(self._main.tensor)

    def _encode(self, values: Tensor) -> None:
        assert self._codec is not None and self.row is not None
        # On the device, whose kernels encode; the message is a half or a quarter of the values.
        message = self._codec.empty(values.numel(), 1, self._device)
        self._codec.encode_(message, values)
        self.row.tensor.copy_(message)
