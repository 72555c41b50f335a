"""A file of extents: stretches on a disk that are allocated, freed and allocated again, as memory is.

[Note: mapping beside direct I/O] An extent is reached in two ways: by its tensor, a shared mapping in the page cache,
and by transfers past the cache. Linux keeps them coherent one after the other: before a direct read or write it writes
back what is dirty in the cache, and after a direct write it drops what is cached. It cannot while both are at work:
what is read into the cache, or written to it, during a direct write may stay there, older than the disk, and even be
written back over it. So whoever uses an extent's tensor waits first for every transfer of that extent. And while any
extent of a file is being written by a transfer, no tensor of that file is written to: the cache may keep the end of one
extent and the beginning of the next in one piece, which is dirty or clean as a whole.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from zeropp.offload import calls
from zeropp.offload.errors import SwapError
from zeropp.offload.memory import aligned, mapped, view_of, zero_range
from zeropp.offload.stretches import Stretches

__all__ = ["ALIGNED", "REFUSED", "Descriptors", "Extent", "SwapFile"]

_log = logging.getLogger("zeropp")
# Mappings begin on pages, which are larger than 4096 bytes on some processors.
ALIGNED = max(4096, mmap.PAGESIZE)
"""Bytes of which stretches are multiples, at least: O_DIRECT asks for at most 4096 on the disks there are."""
REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Error numbers of a file system without O_DIRECT, for a file that is opened, or first read or written."""
_ZEROS = 1 << 20  # bytes that are written at once where zeros have to be written
_REMEDY = "nvme_path must be a directory on a mounted local disk that this user may write to, or a new name in one"


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
            raise SwapError.of(error.errno or errno.EIO, folder, "cannot make a swap file", _REMEDY) from error
        weakref.finalize(self, os.close, self.cached).atexit = False
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
        weakref.finalize(self, os.close, direct).atexit = False
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
        self._stretches = Stretches()
        self._spaced = 0  # bytes from the beginning that have space on the disk
        # Rows end on any thread, even on one that holds the lock above, when Python collects garbage in between; a
        # deque takes what is freed without a lock.
        self._freed = deque[tuple[int, int]]()

    @property
    def nbytes(self) -> int:
        """Bytes of all extents there are, and free ones between them; the file may have more, see :meth:`reserve`."""
        return self._stretches.end

    def reserve(self, nbytes: int) -> None:
        """Take space for extents of so many bytes, beyond what they have now.

        Raises:
            SwapError: the disk has no room for them; it is as it was.
        """
        descriptors = self._descriptors()
        with self._guard:
            try:
                self._take_space(descriptors, self._stretches.end + nbytes)
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
                self._stretches.free(*self._freed.popleft())
            before = self._stretches.end
            offset = self._stretches.take(nbytes)
            try:
                self._prepare(descriptors, offset, nbytes, before)
                # No cycle and no way back to this object: what is freed after it is dropped does no harm.
                freed = partial(self._freed.append, (offset, nbytes))
                tensor = mapped(descriptors.cached, offset, nbytes, numel, dtype, freed)
            except OSError as error:
                self._stretches.give_back(offset, nbytes, before)
                raise self._refused(error, nbytes, descriptors) from error
        return Extent(tensor, offset, self.alignment, descriptors)

    def close(self) -> None:
        """Close it: nothing can be allocated any more. Rows, and transfers under way, keep what they need."""
        self._open = None

    def _descriptors(self) -> Descriptors:
        if self._open is None:
            raise SwapError.of(errno.EBADF, self._folder, "the swap file is closed", "allocate extents before close()")
        return self._open

    def _prepare(self, descriptors: Descriptors, offset: int, nbytes: int, end: int) -> None:
        """Make a stretch zeros that have space; the file ended at ``end`` so far."""
        used = max(min(offset + nbytes, end) - offset, 0)
        if used and not zero_range(descriptors.cached, offset, used):
            _write_zeros(descriptors.cached, offset, used)
        self._take_space(descriptors, offset + nbytes)

    def _take_space(self, descriptors: Descriptors, end: int) -> None:
        """Let the file have space, and be zeros, from where it has none up to ``end``."""
        begin, file = self._spaced, descriptors.cached
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
        return SwapError.of(number, self._folder, what, remedy)


def _write_zeros(descriptor: int, offset: int, nbytes: int) -> None:
    zeros = aligned(min(nbytes, _ZEROS), torch.uint8)
    memory = view_of(zeros.data_ptr(), zeros.numel())
    end = offset + nbytes
    while offset < end:
        offset += calls.write_at(descriptor, memory[: end - offset], offset)
