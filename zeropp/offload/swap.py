"""Swap files: a file on a disk with extents that are allocated, freed and allocated again, as memory is.

`SwapFile` allocates extents; `ExtentAllocator` keeps track of the free parts of the file. Bytes are moved only by
`read_at` and `write_at`. Callers call them through this module (``swap.read_at``), so that a test can replace them for
all callers. Direct I/O needs memory that starts on a page, which `aligned` allocates. `page_locked` allocates memory
for copies between host and GPU.

[Note: mapping beside direct I/O] An extent is accessed in two ways: through its tensor, which is a shared mapping in
the page cache, and by transfers past the page cache (direct I/O). Linux keeps the two coherent if they do not overlap
in time: before a direct read or write it writes back dirty cached pages, and after a direct write it drops cached
pages. If they overlap, pages that are read or written through the cache during a direct write may stay cached with old
contents, and may even be written back over the new ones. Therefore two rules hold. Code that uses an extent's tensor
first waits for every transfer of that extent. While a transfer writes to any extent of a file, no tensor of that file
is written to, because the page cache may keep the end of one extent and the start of the next in one page, which is
dirty or clean as a whole.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import logging
import mmap
import os
import sys
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
    "page_locked",
    "read_at",
    "view_of",
    "write_at",
    "zero_range",
]

_log = logging.getLogger("zeropp")
# Mappings must start on a page, and pages have more than 4096 bytes on some processors.
ALIGNED = max(4096, mmap.PAGESIZE)
"""Least alignment of extents in bytes. O_DIRECT needs at most 4096 on existing disks, a mapping whole pages."""

_PORTABLE = 1  # cudaHostRegisterPortable: the memory counts as page-locked for all GPUs of the process

REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Error numbers that mean "no O_DIRECT on this file system", when a file is opened or at the first read or write."""

_ZEROS = 1 << 20  # bytes of one write in _write_zeros
_REMEDY = "nvme_path must be a directory on a mounted local disk that this user may write to, or a new name in one"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.memcpy.restype = ctypes.c_void_p
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_ZERO_RANGE = 0x10  # FALLOC_FL_ZERO_RANGE, a flag of fallocate


class SwapError(OSError):
    """A swap directory cannot be used, its disk is full, or a read or write failed.

    ``errno`` is the system's error number. ``filename`` is the directory, because a swap file has no name.
    """

    @classmethod
    def make(cls, number: int, path: Path | str, what: str, remedy: str = "") -> SwapError:
        """Return an error with a text made of its parts: "what: text of errno; remedy".

        Args:
            number: the system's error number, such as ``errno.ENOSPC``.
            path: the directory of the swap file.
            what: the operation that failed, with numbers.
            remedy: advice to the user; "" for none.
        """
        text = f"{what}: {os.strerror(number)}"
        return cls(number, f"{text}; {remedy}" if remedy else text, str(path))


# The file, its extents, and its free parts.


class SwapFile:
    """A file of extents that has no name, so the system removes it however the process ends.

    Args:
        folder: directory for the file, the user's ``nvme_path``. It is created if its parent exists.

    Attributes:
        alignment: alignment of extents in bytes: their offsets and lengths in the file are multiples of it.

    Raises:
        SwapError: the file cannot be created.
    """

    def __init__(self, folder: Path | str) -> None:
        # Absolute, so that messages are still right after the program has changed its directory.
        self._folder = Path(os.path.abspath(folder))
        self._open: Descriptors | None = Descriptors(self._folder)
        block = os.fstatvfs(self._open.cached).f_frsize
        self.alignment = max(ALIGNED, block)
        self._guard = threading.Lock()
        self._extents = ExtentAllocator()
        self._spaced = 0  # bytes from the start of the file that have disk space
        # Extents may be freed on any thread, also by garbage collection in a thread that holds the lock above.
        # Appending to a deque needs no lock, so this cannot deadlock.
        self._freed = deque[tuple[int, int]]()

    @property
    def nbytes(self) -> int:
        """Bytes of the file that extents have used so far, free parts included; :meth:`reserve` may make it longer."""
        return self._extents.end

    def reserve(self, nbytes: int) -> None:
        """Allocate disk space for ``nbytes`` more bytes of extents.

        Raises:
            SwapError: the disk has no room. The file is unchanged then.
        """
        descriptors = self._descriptors()
        with self._guard:
            try:
                self._take_space(descriptors, self._extents.end + nbytes)
            except OSError as error:
                raise self._refused(error, nbytes, descriptors) from error

    def allocate(self, numel: int, dtype: torch.dtype) -> Extent:
        """Allocate an extent of zeros with its disk space.

        A freed part of the file that is used again is set to zero by the file system (``FALLOC_FL_ZERO_RANGE``, which
        keeps the disk space and writes nothing), or by writing zeros where the file system cannot do that.

        Args:
            numel: elements, 0 or more.
            dtype: any dtype.

        Raises:
            SwapError: the disk has no room (the message has the requested and the free bytes), or this file is closed.
            ValueError: ``numel`` is negative.
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
                # The callback refers to the deque, not to this object. So there is no reference cycle, and an extent
                # may be freed after this object is gone.
                freed = partial(self._freed.append, (offset, nbytes))
                tensor = mapped(descriptors.cached, offset, nbytes, numel, dtype, freed)
            except OSError as error:
                self._extents.undo_allocation(offset, nbytes, before)
                raise self._refused(error, nbytes, descriptors) from error
        return Extent(tensor, offset, self.alignment, descriptors)

    def close(self) -> None:
        """Refuse further allocations. Existing extents and transfers in flight keep the file open."""
        self._open = None

    def _descriptors(self) -> Descriptors:
        if self._open is None:
            raise SwapError.make(
                errno.EBADF, self._folder, "the swap file is closed", "allocate extents before close()"
            )
        return self._open

    def _prepare(self, descriptors: Descriptors, offset: int, nbytes: int, end: int) -> None:
        """Set ``nbytes`` bytes from ``offset`` on to zero, with disk space; bytes from ``end`` on were never used."""
        used = max(min(offset + nbytes, end) - offset, 0)
        if used and not zero_range(descriptors.cached, offset, used):
            _write_zeros(descriptors.cached, offset, used)
        self._take_space(descriptors, offset + nbytes)

    def _take_space(self, descriptors: Descriptors, end: int) -> None:
        """Allocate zeroed disk space up to byte ``end`` of the file."""
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
                # The file system has no fallocate. Writing zeros allocates space, too.
                _write_zeros(file, begin, end - begin)
        except OSError:
            # Some file systems keep the space that they found before the disk was full. Give it back.
            os.ftruncate(file, begin)
            raise
        self._spaced = end

    def _refused(self, error: OSError, nbytes: int, descriptors: Descriptors) -> SwapError:
        number = error.errno or errno.EIO
        what = f"cannot allocate {nbytes} bytes ({nbytes / 2**30:.3f} GiB) in a swap file of {self.nbytes} bytes"
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
    """A part of a swap file that is in use, as a tensor and for transfers.

    Its part of the file is free again when nothing refers to the extent, its tensor, or a view of the tensor.

    Attributes:
        tensor: [numel], a mapping of the part through the page cache; see [Note: mapping beside direct I/O].
        nbytes: bytes of the tensor.
        offset: first byte in the file, a multiple of ``alignment``.
        alignment: bytes; the extent takes ``nbytes`` rounded up to a multiple of it.
        descriptors: descriptors of the file.
    """

    __slots__ = ("alignment", "descriptors", "nbytes", "offset", "tensor")

    def __init__(self, tensor: Tensor, offset: int, alignment: int, descriptors: Descriptors) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel() * tensor.itemsize
        self.offset = offset
        self.alignment = alignment
        self.descriptors = descriptors


class Descriptors:
    """A new file without a name, open twice: through the page cache, and with O_DIRECT past it.

    The file never has a name (``O_TMPFILE``), or is removed right after it is opened where the file system does not
    support that. So the system frees its disk space with the last descriptor and mapping, however the process ends. The
    descriptors are closed when nothing refers to this object. A transfer that outlasts ``SwapFile.close`` refers to it,
    because otherwise the system could give the same descriptor numbers to another file.

    Attributes:
        folder: directory of the file, for messages.
        cached: descriptor for reads and writes through the page cache.
        direct: descriptor with O_DIRECT; None where the system or the file system has no O_DIRECT.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._guard = threading.Lock()
        try:
            # exist_ok, because several ranks may create the folder at once. Parents are not created: a missing parent
            # is probably an unmounted disk or a typing error, and the swap file should not fill another disk.
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                self.cached = os.dup(file.fileno())
        except OSError as error:
            raise SwapError.make(error.errno or errno.EIO, folder, "cannot make a swap file", _REMEDY) from error
        when_dropped(self, os.close, self.cached)
        self.direct = self._open_direct()

    def _open_direct(self) -> int | None:
        try:
            # The file has no name, but Linux can open it again through its descriptor.
            direct = os.open(f"/proc/self/fd/{self.cached}", os.O_RDWR | os.O_DIRECT)
        # AttributeError: only Linux has O_DIRECT.
        except (AttributeError, OSError) as error:
            self._warn(str(error))
            return None
        # Pass the number, because the attribute is set to None if the file system refuses O_DIRECT later.
        when_dropped(self, os.close, direct)
        # Switch off the kernel's read-ahead. Parts of blocks are read and written through the page cache. Read-ahead
        # would bring neighbouring blocks into the cache while direct I/O uses them.
        # See [Note: mapping beside direct I/O].
        os.posix_fadvise(self.cached, 0, 0, os.POSIX_FADV_RANDOM)
        return direct

    def stop_direct(self, number: int) -> None:
        """Stop using direct I/O, with one warning, after the file system has refused it with error ``number``."""
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
    """Free parts of a file, and the end of the file, which moves up when no free part is large enough.

    Attributes:
        end: bytes from the start of the file that have ever been in use.
    """

    def __init__(self) -> None:
        self.end = 0
        # (offset, nbytes) of free parts in ascending order; adjacent parts are merged.
        self._free: list[tuple[int, int]] = []

    def allocate_extent(self, nbytes: int) -> int:
        """Return the offset of a part of ``nbytes``: in the smallest free part that is large enough, or at the end."""
        fitting = [(size, begin) for begin, size in self._free if size >= nbytes]
        if fitting:
            size, begin = min(fitting)
            self._free.remove((begin, size))
            if size > nbytes:
                bisect.insort(self._free, (begin + nbytes, size - nbytes))
            return begin
        begin = self.end
        if self._free and sum(self._free[-1]) == self.end:
            # Start at a free part right before the end, so that extents that grow do not leave a hole each time.
            begin, _ = self._free.pop()
        self.end = begin + nbytes
        return begin

    def free_extent(self, begin: int, nbytes: int) -> None:
        """Mark ``nbytes`` bytes from ``begin`` on as free."""
        place = bisect.bisect(self._free, (begin, nbytes))
        if place < len(self._free) and self._free[place][0] == begin + nbytes:
            nbytes += self._free.pop(place)[1]
        if place > 0 and sum(self._free[place - 1]) == begin:
            begin, before = self._free.pop(place - 1)
            nbytes += before
        bisect.insort(self._free, (begin, nbytes))

    def undo_allocation(self, begin: int, nbytes: int, end: int) -> None:
        """Undo the last :meth:`allocate_extent`, before which ``self.end`` was ``end``."""
        if self.end > end:
            self.end = end
            nbytes = end - begin
        if nbytes:
            self.free_extent(begin, nbytes)


# System calls that move bytes of a file.


def read_at(descriptor: int, memory: memoryview, offset: int) -> int:
    """Read up to ``memory.nbytes`` bytes from ``offset`` on and return the number of bytes read."""
    return os.preadv(descriptor, [memory], offset)


def write_at(descriptor: int, memory: memoryview, offset: int) -> int:
    """Write up to ``memory.nbytes`` bytes from ``offset`` on and return the number of bytes written."""
    return os.pwritev(descriptor, [memory], offset)


def zero_range(descriptor: int, offset: int, nbytes: int) -> bool:
    """Set a part of a file to zero without writing, with its disk space kept. Return False if that is not supported."""
    call = getattr(_libc, "fallocate", None)
    if call is None:
        return False
    done = call(descriptor, _ZERO_RANGE, ctypes.c_int64(offset), ctypes.c_int64(nbytes))
    return bool(done == 0)


# Memory that starts on a page, for direct I/O, and mappings of a file.


def aligned(numel: int, dtype: torch.dtype) -> Tensor:
    """Return zeros [numel] on the CPU that start on a page, which direct I/O can use without a copy.

    The memory is returned to the system when the last view is gone.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    # Private, not shared as by Python's default: shared pages are accounted as files, and a forked process would write
    # to this process's memory.
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=numel)


class _LockedPages(mmap.mmap):
    """Memory that is page-locked for CUDA until nothing refers to it."""

    address = 0  # 0 while the memory is not page-locked
    device: torch.device

    def lock(self, address: int, nbytes: int, device: torch.device) -> None:
        # With the model's device as the current one: CUDA makes a context on the current device, which takes memory of
        # that GPU.
        self.device = device
        with torch.cuda.device(device):
            code = torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)
        if int(code):
            raise RuntimeError(
                f"cannot page-lock {nbytes:,} bytes of host memory (CUDA error {int(code)}); free host memory, raise "
                "the limit of locked memory, or set pin_memory to false in offload_optimizer and offload_param"
            )
        self.address = address

    def __del__(self) -> None:
        # At the end of the program, CUDA may be gone, and the system unlocks the memory.
        if self.address and not sys.is_finalizing():
            with torch.cuda.device(self.device):
                torch.cuda.cudart().cudaHostUnregister(self.address)


def page_locked(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [numel] in page-locked host memory, which GPUs copy to and from directly.

    Unlike torch's allocator, which rounds sizes up to powers of two, this function takes exactly the memory it needs,
    in whole pages.

    Args:
        numel: number of elements.
        dtype: dtype of the elements.
        device: the GPU that trains.

    Raises:
        RuntimeError: CUDA cannot page-lock the memory.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    nbytes = numel * dtype.itemsize
    # Shared, because Linux would copy locked private pages for every process that is forked, such as workers of a data
    # loader. In exchange, a forked process that writes to this memory changes it here, too.
    pages = _LockedPages(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(pages, dtype=dtype, count=numel)
    pages.lock(tensor.data_ptr(), nbytes, device)
    return tensor


def mapped(
    descriptor: int, offset: int, nbytes: int, numel: int, dtype: torch.dtype, freed: Callable[[], None]
) -> Tensor:
    """Return a tensor [numel] that maps a part of a file through the page cache, for reading and writing.

    Args:
        descriptor: descriptor of the file, open for reading and writing; may be closed afterwards.
        offset: first byte of the part, a multiple of the page size.
        nbytes: bytes of the part, whole pages.
        numel: elements of the tensor; the part may be longer.
        dtype: dtype of the tensor.
        freed: called once after the mapping is gone, when nothing refers to the tensor or a view of it. The call may be
            on any thread at any point of its code.

    Raises:
        OSError: the system allows no further mapping.
    """
    # Not Python's mmap, which keeps a descriptor open per mapping: thousands of rows would use up all descriptors.
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, offset)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    pages = (ctypes.c_ubyte * nbytes).from_address(address)
    # The tensor's storage refers to pages, so views of the tensor keep the mapping. when_dropped does not run at the
    # end of the program, when other code may still read tensors.
    when_dropped(pages, _unmap, address, nbytes, freed)
    return torch.frombuffer(pages, dtype=dtype, count=numel)


def _unmap(address: int, nbytes: int, freed: Callable[[], None]) -> None:
    _libc.munmap(address, nbytes)
    # Only after munmap: the part may be allocated again at once, and writes through the old mapping would corrupt it.
    freed()


def view_of(address: int, nbytes: int) -> memoryview:
    """Return the memory at an address as a memoryview for system calls; the caller must keep its owner alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def copy_bytes(into: int, source: int, nbytes: int) -> None:
    """Copy bytes between two addresses; ctypes releases Python's lock meanwhile.

    Tensor.copy_ is not used, because it would start a pool of threads for each thread that calls it.
    """
    _libc.memcpy(into, source, nbytes)
