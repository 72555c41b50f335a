"""Compilation and launch options of the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton

from .tiles import Tile, tile_of

__all__ = ["Launch", "launch", "launch_options", "launched"]

_BACKEND = "hip" if torch.version.hip else "cuda"


def launch_options(backend: str, tile: Tile) -> dict[str, Any]:
    """Return the options for compiling and launching a kernel.

    Args:
        backend: Triton's name of the backend, "cuda" or "hip".
        tile: the kernel's entry in the table of tiles.
    """
    if backend == "hip":
        return {"num_warps": max(tile.warps // 2, 1), "enable_fp_fusion": False}
    return {"num_warps": tile.warps, "enable_fp_fusion": False, "maxnreg": tile.registers}


def launched(*untold: str) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator for kernels that the host launches, compiled once per set of constants and aligned pointers.

    By default Triton also compiles again for integers that are 1 or multiples of 16, and for each integer width. Here
    the annotation of a parameter gives its width, integers are not specialised, and kernels use ``whole`` where a size
    is a multiple of something.

    Args:
        untold: names of pointers whose alignment is not given to the compiler: they are accessed one element at a time,
            or the kernel checks the address itself.

    Returns:
        A decorator that returns the kernel with the attribute ``untold``.
    """

    def decorate(function: Callable[..., None]) -> Any:
        # Annotations are strings in these files because of "from __future__ import annotations".
        integers = [name for name, kind in function.__annotations__.items() if kind in ("tl.int32", "tl.int64")]
        kernel = triton.jit(function, do_not_specialize=integers, do_not_specialize_on_alignment=list(untold))
        kernel.untold = untold
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
    options = launch_options(_BACKEND, tile_of(kernel, constants))
    compiled = kernel[grid](*arguments, **constants, **options)
    return Launch(kernel, compiled, grid, arguments, constants)
