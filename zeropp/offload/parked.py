"""Storages whose device memory is freed for a time; host memory keeps their bytes if they are needed again."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from zeropp._compat import unguarded
from zeropp.comm.streams import DONE, Event, copy, used_here

__all__ = ["Parked"]


class Parked:
    """One storage that is resized to zero bytes; all tensors that view it stay valid objects: see [Note: storage].

    Attributes:
        nbytes: bytes of device memory that were freed.
    """

    def __init__(self, tensor: Tensor, *, keep: bool, pinned: bool, non_blocking: bool) -> None:
        """Copy the bytes to host memory if ``keep`` is set, then free the device memory.

        Args:
            tensor: a tensor on the storage. Only a weak reference to it is kept: if it is dropped, nothing is restored.
            keep: True to copy the bytes. False to drop them: the storage comes back as zeros and takes no host memory.
            pinned: True to copy into page-locked memory.
            non_blocking: True to return before a device has finished the copy.

        Raises:
            RuntimeError, MemoryError: host memory is full. The storage is unchanged then.
        """
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        # A weak reference, so that an optimizer state that is dropped in the meantime is not kept alive here.
        self._tensor = weakref.ref(tensor)
        self._host: Tensor | None = None
        self._copied: Event = DONE
        if keep:
            self._host = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            whole = _whole(tensor)
            self._copied = copy(self._host, whole)
            if not non_blocking:
                self._copied.wait(threading.TIMEOUT_MAX)
            # The memory may belong to a comm stream. Without this, the allocator could give it to new work on that
            # stream before this copy has read it.
            used_here(whole)
        # Resize last, so that an error before it leaves the storage unchanged.
        storage.resize_(0)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return the values of a dense tensor that spans the storage, as a view of the host copy."""
        assert self._host is not None  # only called for storages with keep=True
        self._copied.wait(threading.TIMEOUT_MAX)
        with unguarded():
            return self._host.view(tensor.dtype).view(tensor.shape)

    def bring_back(self, *, non_blocking: bool) -> None:
        """Allocate the storage's device memory again, and restore its bytes or, without a copy, fill it with zeros.

        Args:
            non_blocking: True to return before a device has finished the copy.

        Raises:
            torch.OutOfMemoryError: the device has no room. This object can be used again then.
        """
        # The tensor was dropped in the meantime, as zero_grad drops gradients.
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
    """Return all bytes of a tensor's storage, uint8 [nbytes]."""
    # A new tensor on the same storage has a version counter of its own. So autograd and the gradient reports do not see
    # the copy as an edit of the tensor.
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
