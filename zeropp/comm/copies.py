"""Copies between the memories of the host and of a device, which the host need not wait for."""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp.comm.events import DONE, Event

__all__ = ["copy", "issued_here"]


def copy(into: Tensor, values: Tensor) -> Event:
    """Copy, on the current stream of whichever is a card's; ``values`` must stay as they are until the event.

    What the host does after waiting for the event finds the copy made. Page-locked memory of the host lets it go on
    meanwhile; other memory has it wait here.
    """
    card = into if into.is_cuda else values
    into.copy_(values, non_blocking=card.is_cuda)
    return issued_here(card.device)


def issued_here(device: torch.device) -> Event:
    """The end of what a device's current stream has been given, for the host to wait for."""
    if device.type != "cuda":
        return DONE
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return _Ended(event)


class _Ended:
    """The host waits, and no stream: it is the one that uses the memory next."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, timeout: float) -> bool:
        """See :class:`zeropp.comm.events.Event`."""
        # A copy is a matter of seconds at most; nothing else that the device does comes before it on its stream.
        self._event.synchronize()
        return True

    def done(self) -> bool:
        """See :class:`zeropp.comm.events.Event`."""
        return bool(self._event.query())
