"""Sizes of programs and bounds of registers, by kernel, in one table.

Comments give what the first run on a GPU measured, ``bench/results/2026-11-27_gpu-first-run.md``: an H200 with Triton
3.6.0, and shares of a copy's bandwidth at 256 MiB of bfloat16. That run had the earlier code, and other tiles where the
comments say so. The present entries have not been measured. All architectures have the same ones, because no other GPU
has been measured. docs/kernels-machine-code.md has the instructions and registers of each kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import triton

__all__ = ["INTERPRETED", "Tile", "tile_of"]

# True if kernels run in Triton's interpreter. Read once at import, because Triton decides it when a kernel is
# decorated.
INTERPRETED = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Tile:
    """Work of one program and the registers of its threads.

    Attributes:
        rows: rows of 128 elements.
        warps: warps of 32 threads; on AMD half as many, of 64 threads. A thread has ``4 * rows / warps`` elements.
        registers: most registers per thread, on NVIDIA only; Triton has no such option for AMD. A multiprocessor has
            65536, so 80 allow 24 warps, 96 allow 20 and 128 allow 16. Without a bound, ptxas chooses one itself; it has
            chosen 96 for a kernel that needs 114, and spilled.
    """

    rows: int
    warps: int
    registers: int

    def holds(self, numel: int) -> int:
        """Return the number of groups, blocks or sections of ``numel`` elements in a tile."""
        return self.rows * 128 // numel


# Constants of kernels that keep more values in registers: rotated values, errors, old values that a sum is added
# to, and masks of single elements.
_MORE_VALUES = {"ROTATE": True, "FEEDBACK": True, "ACCUMULATE": True, "EVEN": False}
_TILES = {
    # First run: 101 % (int8) and 100 % (int4) with 32 rows, 4 warps and at most 128 registers.
    "quantize": Tile(32, 4, 128),
    "quantize_tensors": Tile(32, 4, 128),
    # First run: 64 % with feedback and 80 % with rotation, with 32 rows and 128 registers. Instructions limited them.
    # With programs of two warps, more programs are in different phases at any time, and 80 registers allow 24 warps.
    "quantize, more values": Tile(16, 2, 80),
    "quantize_tensors, more values": Tile(16, 2, 80),
    # First run: 73 % (4 x int8 to int4) with 32 rows and 92 registers.
    "reduce_quantize": Tile(16, 2, 64),
    "reduce_quantize, more values": Tile(16, 2, 96),
    # First run: 94 % (int8, 48 registers) and 74 % (int4, 83 registers). On NVIDIA GPUs neither takes more than 48 now.
    "dequantize": Tile(32, 4, 128),
    # First run: 95 % (4 x int8) and 84 % (4 x int4) with 32 rows and 72 to 76 registers.
    "reduce": Tile(16, 2, 96),
    "reduce, more values": Tile(16, 2, 128),
    # First run: 102 %.
    "sum": Tile(16, 4, 72),
    # First run: 102 % and 96 %.
    "delta_encode": Tile(32, 4, 128),
    "delta_apply": Tile(32, 4, 64),
    # First run: 92 % and 101 %. Programs for pinned memory wait for the bus, so one per multiprocessor is enough.
    "gather": Tile(32, 4, 104),
    "scatter": Tile(32, 4, 88),
    "gather_pinned": Tile(32, 4, 168),
    "scatter_pinned": Tile(32, 4, 168),
    # First run: 53 % (count and encode, 34 and 96 registers) and 44 % (80 registers). A section has 16 rows.
    "lossless_count": Tile(16, 4, 96),
    "lossless_encode": Tile(16, 4, 64),
    "lossless_encode, more values": Tile(16, 4, 96),
    "lossless_decode": Tile(16, 4, 96),
}
# The interpreter's time is per program, so it gets the tiles of 32 warps. Results are the same.
_INTERPRETED_WARPS = 32


@functools.cache
def _tile(name: str) -> Tile:
    tile = _TILES[name]
    if not INTERPRETED:
        return tile
    return replace(tile, rows=tile.rows * _INTERPRETED_WARPS // tile.warps, warps=_INTERPRETED_WARPS)


def tile_of(kernel: Any, constants: Mapping[str, object] | None = None) -> Tile:
    """Return the tile of a kernel with these constants; a kernel's name ends with "_kernel"."""
    name = str(kernel.__name__).removesuffix("_kernel")
    more = f"{name}, more values"
    if constants and more in _TILES and any(constants.get(each) is value for each, value in _MORE_VALUES.items()):
        name = more
    return _tile(name)
