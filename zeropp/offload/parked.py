"""Parked storages: memory that a device gives back between two phases, while its bytes wait in the host's."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from zeropp._compat import unguarded
from zeropp.comm.streams import DONE, Event, copy, used_here

__all__ = ["Parked"]


class Parked:
    """One storage, resized to nothing. The object stays, and with it every view: see [Note: storage].

    Attributes:
        nbytes: that the device has back meanwhile.
    """

    def __init__(self, tensor: Tensor, *, keep: bool, pinned: bool, non_blocking: bool) -> None:
        """Copy the bytes, and give the memory back.

        Args:
            tensor: over the storage; whoever drops it meanwhile wants nothing back.
            keep: what it says matters; otherwise it comes back as zeros, and takes nothing on the host.
            pinned: into page-locked memory.
            non_blocking: the host goes on while a device copies.

        Raises:
            RuntimeError, MemoryError: the host has no room; nothing has changed then.
        """
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        # Weakly: a state that its optimizer drops meanwhile is not to live on here.
        self._tensor = weakref.ref(tensor)
        self._host: Tensor | None = None
        self._copied: Event = DONE
        if keep:
            self._host = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            whole = _whole(tensor)
            self._copied = copy(self._host, whole)
            if not non_blocking:
                self._copied.wait(threading.TIMEOUT_MAX)
            # Allocated on a comm stream, perhaps, which would write to it again before this copy has read it.
            used_here(whole)
        # Last, and only with the copy made: an error before leaves everything where it was.
        storage.resize_(0)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """The values of a dense tensor over all of the storage: a view of the bytes on the host."""
        assert self._host is not None  # only asked for what is kept
        self._copied.wait(threading.TIMEOUT_MAX)
        with unguarded():
            return self._host.view(tensor.dtype).view(tensor.shape)

    def bring_back(self, *, non_blocking: bool) -> None:
        """Give the storage its memory and bytes again.

        Raises:
            torch.OutOfMemoryError: the device has no room; all stays as it is.
        """
        # Forgotten meanwhile, as what is held of gradients is by ``zero_grad``.
        if (tensor := self._tensor()) is None:
            return
        with unguarded():
            tensor.untyped_storage().resize_(self.nbytes)
            whole = _whole(tensor)
        if self._host is None:
            whole.zero_()
            return
        self._copied.wait(threading.TIMEOUT_MAX)
        whole.copy_(self._host, non_blocking=non_blocking)


def _whole(tensor: Tensor) -> Tensor:
    """All bytes under a tensor, uint8 [nbytes]."""
    # A tensor of its own has a version of its own: to autograd, and to reports on gradients, nothing was edited.
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
