"""Pieces of a transfer: what one thread moves between an extent and memory, and by which way."""

from __future__ import annotations

import errno
import itertools

import torch
from torch import Tensor

from zeropp.offload import calls
from zeropp.offload.errors import SwapError
from zeropp.offload.memory import aligned, copy_bytes, view_of
from zeropp.offload.swap import REFUSED, Descriptors, Extent

__all__ = ["Bounce", "cut", "move"]


class Bounce:
    """Aligned memory of a thread, for what direct I/O cannot move in place; made when first used, and kept."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def address(self, nbytes: int) -> int:
        """Where there is room for ``nbytes``."""
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = aligned(nbytes, torch.uint8)
        return self._memory.data_ptr()


def cut(begin: int, end: int, block: int, extent: Extent) -> list[tuple[int, int]]:
    """Bytes [begin, end) of an extent as pieces (begin, end), in order.

    Parts of blocks of the file are apart from whole ones, which need no copy. The end of the extent counts as whole:
    what is between it and the next extent belongs to nobody.

    Args:
        begin: first byte.
        end: behind the last one.
        block: bytes of a piece at most; rounded up to whole blocks of the file.
        extent: with its length and alignment.
    """
    unit = extent.alignment
    first = min(-(-begin // unit) * unit, end)
    last = end if end == extent.nbytes else max(end // unit * unit, first)
    borders = sorted({begin, *range(first, last, -(-block // unit) * unit), last, end})
    return list(itertools.pairwise(borders))


def move(extent: Extent, begin: int, end: int, address: int, bounce: Bounce, *, reads: bool) -> None:
    """Move a piece, whole.

    Args:
        extent: where the piece lies.
        begin: of the piece in the extent, in bytes.
        end: behind its last byte.
        address: of the first byte in memory; whoever calls keeps what owns it.
        bounce: of this thread.
        reads: from the extent into memory; otherwise the other way.

    Raises:
        SwapError: the system refused, or the file has ended.
    """
    unit = extent.alignment
    low, high = begin // unit * unit, -(-end // unit) * unit
    # The padding behind an extent may be read and written, other bytes of a block only read: whoever writes those at
    # the same moment would have them undone.
    whole = begin == low and (end == high or end == extent.nbytes)
    if extent.descriptors.direct is None or not (reads or whole):
        memory = view_of(address, end - begin)
        _call(extent.descriptors, memory, extent.offset + begin, unit, reads=reads, direct=False)
    elif whole and end == high and address % unit == 0:
        memory = view_of(address, end - begin)
        _call(extent.descriptors, memory, extent.offset + begin, unit, reads=reads, direct=True)
    else:
        room = bounce.address(high - low)
        if not reads:
            copy_bytes(room, address, end - begin)
        _call(extent.descriptors, view_of(room, high - low), extent.offset + low, unit, reads=reads, direct=True)
        if reads:
            copy_bytes(address, room + begin - low, end - begin)


def _call(descriptors: Descriptors, memory: memoryview, offset: int, unit: int, *, reads: bool, direct: bool) -> None:
    done, count = 0, len(memory)
    while done < count:
        # A call that stopped within a block leaves a rest that O_DIRECT would refuse; the cache takes it.
        past = descriptors.direct if direct and done % unit == 0 else None
        descriptor = descriptors.cached if past is None else past
        call = calls.read_at if reads else calls.write_at
        # Read 0 bytes, the file has ended; written 0, nothing would go on for ever.
        number = errno.EIO
        try:
            moved = call(descriptor, memory[done:], offset + done)
        except OSError as error:
            moved, number = 0, error.errno or errno.EIO
        if moved > 0:
            done += moved
        elif past is not None and number in REFUSED:
            descriptors.stop_direct(number)
        else:
            # Outside of the ``except``: with that error would come its frames, and with those the tensor.
            word = "read" if reads else "write"
            what = f"cannot {word} {count - done} bytes at byte {offset + done} of a swap file"
            raise SwapError.of(number, descriptors.folder, what)
