"""Whether all ranks that cache the same weights have the same bits; checked with the boundary, now and then.

Weights that are renewed by differences are right only as long as what they are added to is the same everywhere: a bit
that flips on one rank would stay. A 64-bit checksum travels as sums over ranks of numbers and of their squares, which
tell whether all are equal: ``n * sum(x * x) == sum(x) ** 2``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp.engine.engine import Engine
from zeropp.params.flat_buffer import FlatBuffer

__all__ = ["CacheChecksum"]

_EVERY = 100  # steps
# Bits of a checksum in one number: sums of squares over two million ranks are exact in float64 then.
_PIECE = 16
_PIECES = 64 // _PIECE
# Words at a time, which bounds the temporary memory.
_TILE = 2**18
# Any odd number; less 2**64, since it multiplies int64. Overflow wraps, as a hash wants it.
_ODD = 0x9E3779B97F4A7C15 - 2**64


class CacheChecksum:
    """Checksums of what one engine caches.

    Attributes:
        every: steps from one comparison to the next.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps = 0
        self.every = _EVERY

    @property
    def due(self) -> bool:
        """Whether this step compares; the same on every rank."""
        return self._steps % self.every == self.every - 1 and any(buffer.base is not None for buffer in self._buffers)

    def count_step(self) -> None:
        """A step is over."""
        self._steps += 1

    @property
    def _buffers(self) -> list[FlatBuffer]:
        return [buffer for buffer in self._engine.buffers if buffer.base is not None]

    @property
    def _levels(self) -> list[int]:
        return sorted({_level(buffer) for buffer in self._buffers})

    def sums(self) -> Tensor:
        """This rank's part, float64; to be summed over all ranks. No refresh may be running."""
        rows = []
        for level in self._levels:
            buffers = [buffer for buffer in self._buffers if _level(buffer) == level]
            total = torch.zeros((), dtype=torch.int64, device=self._engine.device)
            for buffer in buffers:
                assert buffer.base is not None
                # Multiplied in between, so that the same bits in another buffer make another checksum.
                total = total * _ODD + _checksum(buffer.base)
            numbers = torch.stack([(total >> _PIECE * i) & (2**_PIECE - 1) for i in range(_PIECES)]).double()
            # A row for each slice of this level, and this rank's filled: the sum over ranks is one over those
            # that cache the slice.
            table = torch.zeros(level, 2, _PIECES, dtype=torch.float64, device=total.device)
            table[buffers[0].placement.chain.slice_index(self._engine.comm.rank, level)] = torch.stack(
                [numbers, numbers.square()]
            )
            rows.append(table.view(-1))
        return torch.cat(rows)

    def differ(self, summed: list[float]) -> bool:
        """Whether :meth:`sums`, summed over all ranks, come from different checksums of the same slice."""
        values = iter(summed)
        for level in self._levels:
            copies = self._engine.comm.world // level
            for _ in range(level):
                numbers, squares = ([int(next(values)) for _ in range(_PIECES)] for _ in range(2))
                # Numbers are equal exactly when their squares' sum is as small as it can be.
                if any(copies * square != number**2 for number, square in zip(numbers, squares, strict=True)):
                    return True
        return False


def _level(buffer: FlatBuffer) -> int:
    level = buffer.placement.mode.cached
    assert level is not None  # what has a base is cached
    return level


def _checksum(values: Tensor) -> Tensor:
    """int64 of 16-bit values [n blocks of 256]: 64-bit words times odd numbers, whose sum any one word changes."""
    words = values.view(torch.int64)
    # An odd factor has an inverse modulo 2**64: no change of one word can vanish. Different ones tell words apart that
    # have changed places.
    odd = torch.arange(1, 2 * min(_TILE, words.numel()), 2, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _TILE):
        part = words[start : start + _TILE]
        total += (part * (odd[: part.numel()] + 2 * start)).sum()
    return total
