"""Which stretches of a file are free: arithmetic alone."""

from __future__ import annotations

import bisect

__all__ = ["Stretches"]


class Stretches:
    """Free stretches before an end that moves up when none of them fits.

    Attributes:
        end: bytes that were ever in use.
    """

    def __init__(self) -> None:
        self.end = 0
        # (begin, nbytes) in order of their begins; neighbours are one.
        self._free: list[tuple[int, int]] = []

    def take(self, nbytes: int) -> int:
        """The begin of a stretch of ``nbytes``: of the smallest free one that holds it, or at the end."""
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

    def free(self, begin: int, nbytes: int) -> None:
        """Take a stretch back."""
        place = bisect.bisect(self._free, (begin, nbytes))
        if place < len(self._free) and self._free[place][0] == begin + nbytes:
            nbytes += self._free.pop(place)[1]
        if place > 0 and sum(self._free[place - 1]) == begin:
            begin, before = self._free.pop(place - 1)
            nbytes += before
        bisect.insort(self._free, (begin, nbytes))

    def give_back(self, begin: int, nbytes: int, end: int) -> None:
        """Undo the last :meth:`take`, before which the end was at ``end``."""
        if self.end > end:
            self.end, nbytes = end, end - begin
        if nbytes:
            self.free(begin, nbytes)
