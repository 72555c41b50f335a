"""How kernels are compiled and launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

__all__ = ["INTERPRETED", "ROWS", "launch_options", "launched"]

# Read once: Triton decides when a kernel is decorated whether it is compiled or interpreted.
INTERPRETED = bool(triton.knobs.runtime.interpret)
# Rows of 128 elements in a tile. The interpreter's time is that of programs, whatever they hold; bits are the same.
ROWS = 256 if INTERPRETED else 32


_BACKEND = "hip" if torch.version.hip else "cuda"


def launch_options(backend: str, registers: int) -> dict[str, Any]:
    """How a kernel is compiled for Triton's ``backend``, "cuda" or "hip".

    Args:
        backend: also decides what a warp is.
        registers: that a thread may have; only "cuda" can be told.
    """
    # 32 rows are 128 threads of 16 + 16 elements: four warps of 32 threads, or two of AMD's 64.
    if backend == "hip":
        return {"num_warps": 2, "enable_fp_fusion": False}
    return {"num_warps": 4, "enable_fp_fusion": False, "maxnreg": registers}


def launched(*untold: str, registers: int = 168) -> Callable[[Callable[..., None]], Any]:
    """A kernel that the host launches, compiled once for each set of its constants and of aligned pointers.

    Triton would compile anew for integers that are 1 or multiples of 16, and for each width that a value needs; here a
    parameter's annotation says how wide it is, and the kernels say themselves what is a multiple of what.

    Args:
        untold: pointers whose alignment the compiler is not told: those that are read or written one value at a time,
            and those of which the kernel itself looks at the address.
        registers: that a thread may have. With 168 a multiprocessor holds three programs, with 128 four. Without a
            bound ptxas chooses one, and has spilled at 96 what fits into 114.

    Returns:
        The kernel. ``options`` are how the host launches it; ``untold`` and ``registers`` are as given.
    """

    def decorate(function: Callable[..., None]) -> Any:
        # Annotations are postponed in these files, so they are text.
        integers = [name for name, kind in function.__annotations__.items() if kind in ("tl.int32", "tl.int64")]
        kernel = triton.jit(function, do_not_specialize=integers, do_not_specialize_on_alignment=list(untold))
        kernel.untold, kernel.registers, kernel.options = untold, registers, launch_options(_BACKEND, registers)
        return kernel

    return decorate
