"""What a sum of gradients says of itself: the squares of its blocks, and whether all of it is finite."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from zeropp_kernels import BlockTable, block_table, gather_
from zeropp_kernels.wire import BLOCK

__all__ = ["Report", "report_nbytes", "summed_by_kernels"]

_AT_ONCE = 2**16 * BLOCK  # elements of a shard that are measured together where they are brought for that


def summed_by_kernels(out: Tensor) -> bool:
    """Whether sums into ``out`` are made, and measured, by one kernel; a CPU is faster with torch's own operations."""
    return out.is_cuda and out.dtype == torch.float32


def _leaves_by_kernel(values: Tensor, staged: Tensor) -> bool:
    # A kernel writes to page-locked memory itself: it adds, measures and copies in one pass.
    return summed_by_kernels(values) and staged.is_pinned()


@lru_cache(maxsize=32)
def _one_tensor(numel: int, device: torch.device, stream: int, thread: int) -> BlockTable:
    # Few sizes: a ring's buffers, and what is left of shards.
    return block_table([numel], [0], numel, device=device)


def _table(values: Tensor) -> BlockTable:
    """The table for a tensor; each stream and thread has its own."""
    # A call writes the tensor's address to the table and then launches a kernel that reads it. Lanes of two engines may
    # do so at once, and torch may give two lanes one stream: with a common table, one would overwrite the other's.
    stream = torch.cuda.current_stream(values.device).cuda_stream if values.is_cuda else 0
    return _one_tensor(values.numel(), values.device, stream, threading.get_ident())


class Report:
    """Statistics of one gradient shard, left by the last sum into it, or taken in a pass of their own.

    Attributes:
        norms: [numel / 256] of the blocks, float32 or float64: sums of squares by a kernel, else their roots.
        flag: int32 [1], 1 if a value is Inf or NaN.
    """

    def __init__(self, shard: Tensor, device: torch.device | None = None) -> None:
        # On the device that sums, which need not be where the shard is.
        device = shard.device if device is None else device
        self.norms = torch.zeros(shard.numel() // BLOCK, dtype=_measured_in(shard.dtype), device=device)
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self._squares: Tensor | None = None  # float64, where no kernel has measured
        self._rooted = False  # whether ``norms`` are roots

    @property
    def nbytes(self) -> int:
        """Bytes of its storages."""
        return self.norms.nbytes + self.flag.nbytes

    def outputs(self) -> dict[str, Tensor]:
        """Keyword arguments for the one call of a kernel that sums and measures."""
        self._squares = None
        # Kernels only ever set it.
        self.flag.zero_()
        return {"norms": self.norms, "flag": self.flag}

    def measure(self, values: Tensor) -> None:
        """Read all of a shard, twice; one that is elsewhere comes by and by, and leaves again."""
        self.flag.zero_()
        for start in range(0, values.numel(), _AT_ONCE):
            self.measure_part(values[start : start + _AT_ONCE].to(self.norms.device), start)
        self.add_up()

    def measure_part(self, values: Tensor, start: int) -> None:
        """Read whole blocks of a shard from an element on; the first part comes after ``flag.zero_()``."""
        # In blocks: faster than float64 throughout, within 1e-8 of it, and the same however units are cut.
        norms = self.norms[start // BLOCK : (start + values.numel()) // BLOCK]
        torch.linalg.vector_norm(values.view(-1, BLOCK), dim=1, dtype=norms.dtype, out=norms)
        self._rooted = True
        # By the extremes, which show any Inf or NaN: the squares of large finite values overflow float32, too. The
        # answer stays on the device, so that the host need not wait for it.
        self.flag |= torch.stack(torch.aminmax(values)).isfinite().all().logical_not()

    def add_up(self) -> None:
        """All parts have been measured, in one way."""
        self._squares = self.norms.to(torch.float64).square().sum() if self._rooted else None
        self._rooted = False

    def send_part(self, values: Tensor, staged: Tensor, start: int, *, accumulate: bool) -> None:
        """Bring whole blocks of a shard, from an element on, to staging memory, and measure what is there then.

        Args:
            values: [numel] on the device; may be changed.
            staged: of their size and dtype, on the host, which may have to wait for what the device was given here.
            start: of the part; the first one comes after ``flag.zero_()``.
            accumulate: add to what is staged.
        """
        if _leaves_by_kernel(values, staged):
            norms = self.norms[start // BLOCK : (start + values.numel()) // BLOCK]
            gather_([values], _table(values), staged, norms=norms, flag=self.flag, accumulate=accumulate)
            return
        # Measured after the sum: the norm is that of what is stepped with.
        if accumulate:
            values.add_(staged.to(values.device))
        self.measure_part(values, start)
        staged.copy_(values)

    @staticmethod
    def total(reports: Sequence[Report], device: torch.device) -> Tensor:
        """float64 [2]: sum of all squares, and how many of the shards are not finite."""
        zero = torch.zeros(1, dtype=torch.float64, device=device)
        squares = [report._squares[None] for report in reports if report._squares is not None]
        blocks = [report.norms for report in reports if report._squares is None]
        # Few launches, whatever the number of units.
        measured = torch.cat(blocks).sum(dtype=torch.float64)[None] if blocks else zero
        flags = torch.cat([report.flag for report in reports]).sum().to(torch.float64)[None] if reports else zero
        return torch.cat([torch.cat([*squares, measured]).sum()[None], flags])


def report_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of the report on a shard of [numel]."""
    return numel // BLOCK * _measured_in(dtype).itemsize + torch.int32.itemsize


def _measured_in(dtype: torch.dtype) -> torch.dtype:
    # Norms of gradients in 16 bits would have three digits, and clipping by them no more.
    return torch.promote_types(dtype, torch.float32)
