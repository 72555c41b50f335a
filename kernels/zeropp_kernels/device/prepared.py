"""Prepared launches: later calls of the same sizes pass addresses to a compiled kernel, without Triton's own launch.

At every launch, Triton binds the arguments, looks for the compiled kernel of their types and alignments, and calls its
launcher. A prepared launch keeps the compiled kernel and all arguments that follow from the sizes, and calls the
launcher with new addresses and numbers.

In these cases a prepared launch does nothing and returns False, and the call goes through Triton:

- Triton has another driver, or another device is current, than when it was prepared;
- a knob of ``triton.knobs.runtime`` or ``triton.knobs.compilation`` was set in this process since then, or a hook is
  registered for launches or for this kernel;
- a pointer whose alignment the compiler used is not a multiple of 16;
- a scale is not finite, memory is pageable, or the table has other sizes or offsets than that of the launch.

It does not see changes of environment variables, or of constants that kernels read as globals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from ..checks import ALIGNMENT, LARGEST, Memory
from ..table import locate
from .launch import Launch
from .tiles import INTERPRETED

__all__ = ["Prepared", "preparable", "prepare"]

# Function of an operation's arguments that launches and returns True, or does nothing and returns False.
Prepared = Callable[[Sequence[Any]], bool]

# In these versions, compiled kernels have `run(grid x, y, z, stream, function, packed metadata, launch metadata, enter
# hook, exit hook, *arguments)`, which takes all arguments of the kernel, constants included, and pointers as integers.
_VERSIONS = ("3.6", "3.7", "3.8", "3.9")


class _Table(NamedTuple):
    """The table of a launch.

    Attributes:
        tensors: place of the operation's argument ``tensors``.
        host: place of the argument ``host``.
        entries: place of the argument ``entries``.
        numels: numbers of elements of the tensors.
        offsets: offsets of the tensors in the flat buffer.
    """

    tensors: int
    host: int
    entries: int
    numels: list[int]
    offsets: list[int]


def preparable() -> bool:
    """Return True if launches can be prepared with this version of Triton, outside of its interpreter."""
    return not INTERPRETED and ".".join(triton.__version__.split(".")[:2]) in _VERSIONS


def _sources(done: Launch, given: Sequence[object]) -> dict[int, int]:
    """Return {place in the kernel's arguments: place in ``given``} of the arguments that were passed on unchanged."""
    places = {id(each): place for place, each in enumerate(given) if isinstance(each, (Tensor, float))}
    return {slot: places[id(each)] for slot, each in enumerate(done.arguments) if id(each) in places}


def _repeatable(done: Launch, scale: object, sources: dict[int, int]) -> bool:
    """Return True if a launch differs from later ones only in its ``sources``, and nothing observes it."""
    runtime = knobs.runtime
    return (
        isinstance(done.compiled, CompiledKernel)
        # AMD's launcher has not been compared.
        and done.compiled.metadata.target.backend == "cuda"
        # This hook may choose another kernel at every launch.
        and runtime.add_stages_inspection_hook is None
        and all(hasattr(hook, "calls") for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))
        # Arguments computed from a tensor or from the scale would stay as they were at this launch.
        and all(slot in sources for slot, each in enumerate(done.arguments) if isinstance(each, Tensor))
        and (scale is None or any(each is scale for each in done.arguments))
    )


def prepare(
    done: Launch | None, given: Sequence[Any], names: Sequence[str], memory: Memory, device: torch.device
) -> Prepared | None:
    """Return a prepared launch for calls with the same sizes; None if there can be none.

    Args:
        done: the launch of a call that Triton has made.
        given: arguments of that call. All floats must be different objects.
        names: names of these arguments.
        memory: requirements on their memory.
        device: device of the call.
    """
    scale = names.index("scale") if "scale" in names else None
    sources = {} if done is None else _sources(done, given)
    if done is None or not _repeatable(done, None if scale is None else given[scale], sources):
        return None
    kernel = done.kernel
    values = [*done.arguments, *(done.constants[name] for name in kernel.arg_names[len(done.arguments) :])]
    pointers, numbers, host_memory = [], [], []
    for slot, place in sources.items():
        values[slot] = None  # keeps no tensor alive
        if isinstance(given[place], float):
            numbers.append((slot, place))
        elif names[place] == memory.pinned and given[place].device != device:
            # Triton asks CUDA for the device's address of host memory.
            host_memory.append((slot, place))
        else:
            # The compiler assumes no alignment of the pointers in ``untold``, and no kernel needs any.
            told = kernel.arg_names[slot] not in kernel.untold
            pointers.append((slot, place, ALIGNMENT - 1 if told else 0))
    if any(given[place].data_ptr() & mask for _, place, mask in pointers):
        return None
    table = None
    if memory.host is not None:
        tensors, host, entries = (names.index(name) for name in ("tensors", "host", "entries"))
        _, numels, offsets = memory.host.tolist()
        table = _Table(tensors, host, entries, numels, offsets)
    grid = (*done.grid, 1, 1)[:3]
    return _prepared(done, grid, values, pointers, numbers, host_memory, scale, table)


def _prepared(
    done: Launch, grid: tuple[int, ...], values: list[object], pointers: list[tuple[int, int, int]],
    numbers: list[tuple[int, int]], host_memory: list[tuple[int, int]], scale: int | None, table: _Table | None,
) -> Prepared:  # fmt: skip
    active = driver.active
    # The knobs that were set in this process. Triton's choice of a compiled kernel depends on some of them.
    runtime, compilation = vars(knobs.runtime), vars(knobs.compilation)
    runtime_before, compilation_before = runtime.copy(), compilation.copy()
    current_device, current_stream = active.get_current_device, active.get_current_stream
    device = current_device()
    enter, leave, hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, done.kernel.pre_run_hooks
    # compiled is kept, because it unloads its function when it is deleted.
    compiled, after = done.compiled, done.after
    run = compiled.run

    def launch_again(arguments: Sequence[Any]) -> bool:
        if (
            driver.active is not active
            or current_device() != device
            or runtime != runtime_before
            or compilation != compilation_before
            or enter.calls
            or leave.calls
            or hooks
        ):
            return False
        # Written as ``not ... <=`` and not as ``>``, so that NaN is refused, too.
        if scale is not None and not abs(arguments[scale]) <= LARGEST:
            return False
        passed, bits = values.copy(), 0
        for slot, place, mask in pointers:
            passed[slot] = address = arguments[place].data_ptr()
            bits |= address & mask
        if bits:
            return False
        for slot, place in numbers:
            passed[slot] = arguments[place]
        for slot, place in host_memory:
            passed[slot] = tensor = arguments[place]
            if not tensor.is_pinned():
                return False
        if table is not None:
            tensors, host = arguments[table.tensors], arguments[table.host]
            rows = host.tolist()
            if rows != [list(map(Tensor.data_ptr, tensors)), table.numels, table.offsets]:
                if rows[1:] != [table.numels, table.offsets]:
                    return False
                locate(tensors, host, arguments[table.entries])
        run(*grid, current_stream(device), compiled.function, compiled.packed_metadata, None, None, None, *passed)
        if after is not None:
            after(*arguments)
        return True

    return launch_again
