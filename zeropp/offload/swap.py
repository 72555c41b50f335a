"""Swap files: a file of extents on a disk, which are allocated, freed and allocated again, as memory is.

`SwapFile` hands out extents; `ExtentAllocator` knows which parts of the file are free. Bytes move by `read_at` and
`write_at` alone. Callers name this module (``swap.read_at``), so that a test that puts a function in their place
reaches them all. Direct I/O wants memory that begins on a page, which `aligned` allocates.

[Note: mapping beside direct I/O] An extent is reached in two ways: by its tensor, a shared mapping in the page cache,
and by transfers past the cache. Linux keeps them coherent one after the other: before a direct read or write it writes
back what is dirty in the cache, and after a direct write it drops what is cached. It cannot while both are at work:
what is read into the cache, or written to it, during a direct write may stay there, older than the disk, and even be
written back over it. So whoever uses an extent's tensor waits first for every transfer of that extent. And while any
extent of a file is being written by a transfer, no tensor of that file is written to: the cache may keep the end of one
extent and the beginning of the next in one piece, which is dirty or clean as a whole.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import logging
import mmap
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from zeropp.comm.threads import when_dropped

__all__ = [
    "ALIGNED",
    "REFUSED",
    "Descriptors",
    "Extent",
    "ExtentAllocator",
    "SwapError",
    "SwapFile",
    "aligned",
    "copy_bytes",
    "mapped",
    "read_at",
    "view_of",
    "write_at",
    "zero_range",
]

_log = logging.getLogger("zeropp")
# Mappings begin on pages, which are larger than 4096 bytes on some processors.
ALIGNED = max(4096, mmap.PAGESIZE)
"""Bytes of which stretches are multiples, at least: O_DIRECT asks for at most 4096 on the disks there are."""

REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Error numbers of a file system without O_DIRECT, for a file that is opened, or first read or written."""

_ZEROS = 1 << 20  # bytes that are written at once where zeros have to be written
_REMEDY = "nvme_path must be a directory on a mounted local disk that this user may write to, or a new name in one"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.memcpy.restype = ctypes.c_void_p
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_ZERO_RANGE = 0x10  # of fallocate


class SwapError(OSError):
    """A directory cannot be used, a disk is full, or a read or write failed.

    It has the system's ``errno``; ``filename`` is the directory of the swap file, which has no name of its own.
    """

    @classmethod
    def make(cls, number: int, path: Path | str, what: str, remedy: str = "") -> SwapError:
        """Make one.

        Args:
            number: of the system's error, such as ``errno.ENOSPC``.
            path: of what it is about.
            what: what could not be done, with numbers.
            remedy: what to do about it, if anything can be done.
        """
        text = f"{what}: {os.strerror(number)}"
        return cls(number, f"{text}; {remedy}" if remedy else text, str(path))


# The file, its extents, and which parts of it are free.


class SwapFile:
    """A file of extents without a name: nothing of it is left behind, however the process ends.

    Args:
        folder: the user's ``nvme_path``, where the file is made. It is made, too, if its parent exists.

    Attributes:
        alignment: bytes; begins and lengths of stretches are multiples of it.

    Raises:
        SwapError: the file cannot be made.
    """

    def __init__(self, folder: Path | str) -> None:
        # Absolute, so that messages are clear in a program that changes its directory.
        self._folder = Path(os.path.abspath(folder))
        self._open: Descriptors | None = Descriptors(self._folder)
        block = os.fstatvfs(self._open.cached).f_frsize
        self.alignment = max(ALIGNED, block)
        self._guard = threading.Lock()
        self._extents = ExtentAllocator()
        self._spaced = 0  # bytes from the beginning that have space on the disk
        # Rows end on any thread, even on one that holds the lock above, when Python collects garbage in between; a
        # deque takes what is freed without a lock.
        self._freed = deque[tuple[int, int]]()

    @property
    def nbytes(self) -> int:
        """Bytes of all extents there are, and free ones between them; the file may have more, see :meth:`reserve`."""
        return self._extents.end

    def reserve(self, nbytes: int) -> None:
        """Take space for extents of so many bytes, beyond what they have now.

        Raises:
            SwapError: the disk has no room for them; it is as it was.
        """
        descriptors = self._descriptors()
        with self._guard:
            try:
                self._take_space(descriptors, self._extents.end + nbytes)
            except OSError as error:
                raise self._refused(error, nbytes, descriptors) from error

    def allocate(self, numel: int, dtype: torch.dtype) -> Extent:
        """An extent of zeros, with its space on the disk.

        A stretch that is used again is made zeros by the file system (``FALLOC_FL_ZERO_RANGE``, which keeps its space
        and writes nothing), or where that cannot be done by writing them.

        Args:
            numel: elements; may be 0.
            dtype: of any kind.

        Raises:
            SwapError: the disk has no room, with what was asked and what is free; or the file is closed.
            ValueError: the number of elements is negative.
        """
        if numel < 0:
            raise ValueError(f"numel is {numel}; expected 0 or more")
        descriptors = self._descriptors()
        nbytes = -(-numel * dtype.itemsize // self.alignment) * self.alignment
        if nbytes == 0:
            return Extent(torch.empty(0, dtype=dtype, device="cpu"), 0, self.alignment, descriptors)
        with self._guard:
            while self._freed:
                self._extents.free_extent(*self._freed.popleft())
            before = self._extents.end
            offset = self._extents.allocate_extent(nbytes)
            try:
                self._prepare(descriptors, offset, nbytes, before)
                # No cycle and no way back to this object: what is freed after it is dropped does no harm.
                freed = partial(self._freed.append, (offset, nbytes))
                tensor = mapped(descriptors.cached, offset, nbytes, numel, dtype, freed)
            except OSError as error:
                self._extents.undo_allocation(offset, nbytes, before)
                raise self._refused(error, nbytes, descriptors) from error
        return Extent(tensor, offset, self.alignment, descriptors)

    def close(self) -> None:
        """Close it: nothing can be allocated any more. Rows, and transfers under way, keep what they need."""
        self._open = None

    def _descriptors(self) -> Descriptors:
        if self._open is None:
            raise SwapError.make(
                errno.EBADF, self._folder, "the swap file is closed", "allocate extents before close()"
            )
        return self._open

    def _prepare(self, descriptors: Descriptors, offset: int, nbytes: int, end: int) -> None:
        """Make a stretch zeros that have space; the file ended at ``end`` so far."""
        used = max(min(offset + nbytes, end) - offset, 0)
        if used and not zero_range(descriptors.cached, offset, used):
            _write_zeros(descriptors.cached, offset, used)
        self._take_space(descriptors, offset + nbytes)

    def _take_space(self, descriptors: Descriptors, end: int) -> None:
        """Let the file have space, and be zeros, from where it has none up to ``end``."""
        begin = self._spaced
        file = descriptors.cached
        if end <= begin:
            return
        try:
            try:
                os.posix_fallocate(file, begin, end - begin)
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                # Written zeros have space, too.
                _write_zeros(file, begin, end - begin)
        except OSError:
            # Some file systems keep what they had found when the rest was missing.
            os.ftruncate(file, begin)
            raise
        self._spaced = end

    def _refused(self, error: OSError, nbytes: int, descriptors: Descriptors) -> SwapError:
        number = error.errno or errno.EIO
        what = f"cannot take {nbytes} bytes ({nbytes / 2**30:.3f} GiB) beside {self.nbytes} bytes"
        remedy = ""
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            room = os.fstatvfs(descriptors.cached)
            free = room.f_bavail * room.f_frsize
            what += f"; {free} bytes ({free / 2**30:.3f} GiB) are free on that file system"
            remedy = "free some, let nvme_path name a larger disk, or offload less"
        elif number == errno.ENOMEM:
            remedy = "the process may have no more mappings; raise the limit vm.max_map_count"
        return SwapError.make(number, self._folder, what, remedy)


def _write_zeros(descriptor: int, offset: int, nbytes: int) -> None:
    zeros = aligned(min(nbytes, _ZEROS), torch.uint8)
    memory = view_of(zeros.data_ptr(), zeros.numel())
    end = offset + nbytes
    while offset < end:
        offset += write_at(descriptor, memory[: end - offset], offset)


class Extent:
    """A stretch of a file that is in use, as a tensor and for transfers.

    It is free, and may be allocated again, when nobody refers to the extent, its tensor, or a view of that.

    Attributes:
        tensor: [numel], the stretch itself through the page cache; see [Note: mapping beside direct I/O].
        nbytes: of the tensor.
        offset: of its first byte in the file, a multiple of ``alignment``.
        alignment: bytes; the stretch goes on to the next multiple of it.
        descriptors: of the file.
    """

    __slots__ = ("alignment", "descriptors", "nbytes", "offset", "tensor")

    def __init__(self, tensor: Tensor, offset: int, alignment: int, descriptors: Descriptors) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel() * tensor.itemsize
        self.offset = offset
        self.alignment = alignment
        self.descriptors = descriptors


class Descriptors:
    """A new file without a name, open twice: with the page cache and past it.

    The file has no name from the start (``O_TMPFILE``; where the file system has no such files, it is removed as soon
    as it is open), so the system frees its space with the last descriptor and mapping, however the process ends. The
    descriptors are closed when nobody refers to this object, so a transfer that outlasts ``SwapFile.close`` keeps them:
    otherwise another file could get their numbers meanwhile.

    Attributes:
        folder: that the file was made in, for messages.
        cached: descriptor for reads and writes through the page cache.
        direct: descriptor with O_DIRECT; None where the system or the file system has none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._guard = threading.Lock()
        try:
            # Several ranks may make the same folder at once. Its parent must exist: a missing one is probably a disk
            # that is not mounted, or a typing error, and training should not fill another disk.
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                self.cached = os.dup(file.fileno())
        except OSError as error:
            raise SwapError.make(error.errno or errno.EIO, folder, "cannot make a swap file", _REMEDY) from error
        when_dropped(self, os.close, self.cached)
        self.direct = self._open_direct()

    def _open_direct(self) -> int | None:
        try:
            # The file has no name, but Linux opens it again by its descriptor.
            direct = os.open(f"/proc/self/fd/{self.cached}", os.O_RDWR | os.O_DIRECT)
        # AttributeError: other systems than Linux have no O_DIRECT.
        except (AttributeError, OSError) as error:
            self._warn(str(error))
            return None
        # By number: the attribute becomes None when the file system refuses later.
        when_dropped(self, os.close, direct)
        # Parts of blocks are read and written through the cache, beside direct I/O to the blocks around them, which
        # reading ahead would bring into the cache. See [Note: mapping beside direct I/O].
        os.posix_fadvise(self.cached, 0, 0, os.POSIX_FADV_RANDOM)
        return direct

    def stop_direct(self, number: int) -> None:
        """Use no direct I/O from here on, with one warning: the file system has refused it with this ``errno``."""
        with self._guard:
            if self.direct is None:
                return
            self.direct = None
        os.posix_fadvise(self.cached, 0, 0, os.POSIX_FADV_NORMAL)
        self._warn(os.strerror(number))

    def _warn(self, reason: str) -> None:
        _log.warning(
            "a swap file in %s has no direct I/O (O_DIRECT: %s); reads and writes go through the page cache, which "
            "takes memory and time; let nvme_path name a directory on a local disk",
            self.folder,
            reason,
        )


class ExtentAllocator:
    """Free stretches before an end that moves up when none of them fits.

    Attributes:
        end: bytes that were ever in use.
    """

    def __init__(self) -> None:
        self.end = 0
        # (begin, nbytes) in order of their begins; neighbours are one.
        self._free: list[tuple[int, int]] = []

    def allocate_extent(self, nbytes: int) -> int:
        """Return the begin of a stretch of ``nbytes``: of the smallest free one that holds it, or at the end."""
        fitting = [(size, begin) for begin, size in self._free if size >= nbytes]
        if fitting:
            size, begin = min(fitting)
            self._free.remove((begin, size))
            if size > nbytes:
                bisect.insort(self._free, (begin + nbytes, size - nbytes))
            return begin
        begin = self.end
        if self._free and sum(self._free[-1]) == self.end:
            # What is free before the end becomes a part of it: extents that grow would leave a hole each.
            begin, _ = self._free.pop()
        self.end = begin + nbytes
        return begin

    def free_extent(self, begin: int, nbytes: int) -> None:
        """Take a stretch back."""
        place = bisect.bisect(self._free, (begin, nbytes))
        if place < len(self._free) and self._free[place][0] == begin + nbytes:
            nbytes += self._free.pop(place)[1]
        if place > 0 and sum(self._free[place - 1]) == begin:
            begin, before = self._free.pop(place - 1)
            nbytes += before
        bisect.insort(self._free, (begin, nbytes))

    def undo_allocation(self, begin: int, nbytes: int, end: int) -> None:
        """Undo the last :meth:`allocate_extent`, before which the end was at ``end``."""
        if self.end > end:
            self.end = end
            nbytes = end - begin
        if nbytes:
            self.free_extent(begin, nbytes)


# System calls that move bytes of a file.


def read_at(descriptor: int, memory: memoryview, offset: int) -> int:
    """Read up to ``memory.nbytes`` bytes from ``offset`` on; returns how many there were."""
    return os.preadv(descriptor, [memory], offset)


def write_at(descriptor: int, memory: memoryview, offset: int) -> int:
    """Write up to ``memory.nbytes`` bytes from ``offset`` on; returns how many it took."""
    return os.pwritev(descriptor, [memory], offset)


def zero_range(descriptor: int, offset: int, nbytes: int) -> bool:
    """Make a stretch of a file zeros without writing them, its space still reserved; whether the file system can."""
    call = getattr(_libc, "fallocate", None)
    if call is None:
        return False
    done = call(descriptor, _ZERO_RANGE, ctypes.c_int64(offset), ctypes.c_int64(nbytes))
    return bool(done == 0)


# Memory by pages: of no file, for direct I/O, and of a file's stretch.


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
    # Tensors may be read after Python's last functions have run.
    when_dropped(pages, _unmap, address, nbytes, freed)
    return torch.frombuffer(pages, dtype=dtype, count=numel)


def _unmap(address: int, nbytes: int, freed: Callable[[], None]) -> None:
    _libc.munmap(address, nbytes)
    # After the mapping is gone: whoever gets the stretch next must not be written to through it.
    freed()


def view_of(address: int, nbytes: int) -> memoryview:
    """Memory at an address, for system calls; whoever calls keeps what owns it."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def copy_bytes(into: int, source: int, nbytes: int) -> None:
    """Copy between two addresses, without Python's lock.

    Not ``Tensor.copy_``, which starts a pool of threads of its own on each thread that calls it.
    """
    _libc.memcpy(into, source, nbytes)
