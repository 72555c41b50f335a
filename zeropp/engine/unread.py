"""Numbers on their way from the device to the host."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from zeropp.comm.agreement import Agreement

__all__ = ["Unread"]


class Unread:
    """A sum over ranks, as it is when this is made.

    Args:
        vector: float64, on the model's device.
    """

    def __init__(self, vector: Tensor) -> None:
        self._device = vector.device
        self._event: torch.cuda.Event | None = None
        if vector.device.type == "cuda":
            self._host = vector.to("cpu", non_blocking=True)
            # A plain tolist() would wait in the driver for ever if a rank never came; an event can be asked, and given
            # up.
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(vector.device))
        else:
            self._host = vector.clone()  # it is scaled when gradients are

    def read(self, agreement: Agreement) -> list[float]:
        """The numbers; waits until they have come.

        Raises:
            RuntimeError: the common error, if they do not come within ``hang_timeout``.
        """
        if self._event is not None:
            # Asking an event makes a context on the card that is current, which need not be the model's.
            with torch.cuda.device(self._device):
                agreement.wait(self.wait, "waiting for the sum of norms and flags")
        values: list[float] = self._host.tolist()
        return values

    def wait(self, timeout: float) -> bool:
        """Let the host wait; False after ``timeout`` seconds in vain."""
        until = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() > until:
                return False
            time.sleep(2e-5)
        return True

    def done(self) -> bool:
        """Whether they have come."""
        return self._event is None or bool(self._event.query())
