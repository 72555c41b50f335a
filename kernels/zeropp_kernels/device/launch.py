"""Compilation and launch options of the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton

__all__ = ["INTERPRETED", "ROWS", "Launch", "launch", "launch_options", "launched"]

# True if kernels run in Triton's interpreter. Read once at import, because Triton decides it when a kernel is
# decorated.
INTERPRETED = bool(triton.knobs.runtime.interpret)
# Rows of 128 elements in a tile. The interpreter's time is per program, so it gets larger tiles; results are the same.
ROWS = 256 if INTERPRETED else 32


_BACKEND = "hip" if torch.version.hip else "cuda"


def launch_options(backend: str, registers: int) -> dict[str, Any]:
    """Return the options for compiling and launching a kernel.

    Args:
        backend: Triton's name of the backend, "cuda" or "hip".
        registers: most registers per thread. Used for "cuda" only; Triton has no such option for "hip".
    """
    # A tile of 32 rows is 128 threads with 16 + 16 elements each: four warps of 32 threads, or two AMD warps of 64.
    if backend == "hip":
        return {"num_warps": 2, "enable_fp_fusion": False}
    return {"num_warps": 4, "enable_fp_fusion": False, "maxnreg": registers}


def launched(*untold: str, registers: int = 168) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator for kernels that the host launches, compiled once per set of constants and aligned pointers.

    By default Triton also compiles again for integers that are 1 or multiples of 16, and for each integer width. Here
    the annotation of a parameter gives its width, integers are not specialised, and kernels use ``whole`` where a size
    is a multiple of something.

    Args:
        untold: names of pointers whose alignment is not given to the compiler: they are accessed one element at a time,
            or the kernel checks the address itself.
        registers: most registers per thread. With 168 a multiprocessor can run three programs at a time, with 128 four.
            Without a bound, ptxas chooses one itself; it has chosen 96 for a kernel that needs 114, and spilled.

    Returns:
        A decorator that returns the kernel with three attributes: ``options`` (keyword arguments of a launch),
            ``untold`` and ``registers``.
    """

    def decorate(function: Callable[..., None]) -> Any:
        # Annotations are strings in these files because of "from __future__ import annotations".
        integers = [name for name, kind in function.__annotations__.items() if kind in ("tl.int32", "tl.int64")]
        kernel = triton.jit(function, do_not_specialize=integers, do_not_specialize_on_alignment=list(untold))
        kernel.untold, kernel.registers, kernel.options = untold, registers, launch_options(_BACKEND, registers)
        return kernel

    return decorate


class Launch(NamedTuple):
    """One launch of a kernel, from which :mod:`.prepared` derives later ones.

    Attributes:
        kernel: kernel from :func:`launched`.
        compiled: what Triton returned for the launch: the compiled kernel, or None under the interpreter.
        grid: numbers of programs by axis.
        arguments: arguments of the kernel that are no constants, in the order of its parameters.
        constants: the other arguments, by name.
        after: function of the operation's arguments that does the work which follows the kernel; None for none. It may
            be called in grad mode, so it must not compute with tensors that can require grad.
    """

    kernel: Any
    compiled: Any
    grid: tuple[int, ...]
    arguments: Sequence[object]
    constants: dict[str, object]
    after: Callable[..., None] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> Launch:
    """Launch a kernel through Triton, and return the launch."""
    compiled = kernel[grid](*arguments, **constants, **kernel.options)
    return Launch(kernel, compiled, grid, arguments, constants)
