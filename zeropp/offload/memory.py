"""Memory by pages: of no file, for direct I/O, and of a file's stretch."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

__all__ = ["aligned", "copy_bytes", "mapped", "view_of", "zero_range"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.memcpy.restype = ctypes.c_void_p
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_ZERO_RANGE = 0x10  # of fallocate


def aligned(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros [numel] on the CPU that begin on a page: what direct I/O reads and writes without a copy.

    The memory goes back to the system when the last view is gone.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    # Private, which Python's default is not: shared pages count as files, and a forked process would write to ours.
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=numel)


def mapped(
    descriptor: int, offset: int, nbytes: int, numel: int, dtype: torch.dtype, freed: Callable[[], None]
) -> Tensor:
    """A tensor [numel] that is a stretch of a file, shared: by the page cache, beside reads and writes.

    Args:
        descriptor: of the file, open for both; may be closed afterwards.
        offset: where the stretch begins, in bytes, on a page.
        nbytes: of the stretch, whole pages.
        numel: how many elements of it the tensor has.
        dtype: of them.
        freed: called once when nobody refers to the tensor or a view of it; on any thread, at any place in its code.

    Raises:
        OSError: the system has no room for another mapping.
    """
    # Not Python's mmap, which keeps a descriptor of its own for each mapping: thousands of rows would use them up.
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, offset)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    pages = (ctypes.c_ubyte * nbytes).from_address(address)
    # The storage refers to the pages, so that views of the tensor keep them, too.
    unmap = weakref.finalize(pages, partial(_unmap, address, nbytes, freed))
    # Tensors may be read after Python's last functions have run; the system takes mappings away itself.
    unmap.atexit = False
    return torch.frombuffer(pages, dtype=dtype, count=numel)


def _unmap(address: int, nbytes: int, freed: Callable[[], None]) -> None:
    _libc.munmap(address, nbytes)
    # After the mapping is gone: whoever gets the stretch next must not be written to through it.
    freed()


def zero_range(descriptor: int, offset: int, nbytes: int) -> bool:
    """Make a stretch of a file zeros without writing them, its space still reserved; whether the file system can."""
    call = getattr(_libc, "fallocate", None)
    if call is None:
        return False
    done = call(descriptor, _ZERO_RANGE, ctypes.c_int64(offset), ctypes.c_int64(nbytes))
    return bool(done == 0)


def view_of(address: int, nbytes: int) -> memoryview:
    """Memory at an address, for system calls; whoever calls keeps what owns it."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def copy_bytes(into: int, source: int, nbytes: int) -> None:
    """Copy between two addresses, without Python's lock.

    Not ``Tensor.copy_``, which starts a pool of threads of its own on each thread that calls it.
    """
    _libc.memcpy(into, source, nbytes)
