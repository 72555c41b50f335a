"""Find all configurations that the operations launch, without a GPU, by recording the arguments of Triton's launcher.

Run as a program, with Triton's interpreter off. It prints the launched configurations that `zeropp_kernels.aot` does
not compile, their number, and the number of GPU calls that decode lossless messages. It exits with 1 if any is missing.
"""

from __future__ import annotations

import itertools
import sys
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

from tests.kernels import agreement
from tests.kernels.cases import BITS, DTYPES
from tests.kernels.fast import device
from zeropp_kernels import lossless_layout, reference
from zeropp_kernels.aot.cases import Case, cases
from zeropp_kernels.device import copy
from zeropp_kernels.device.launch import launch_options
from zeropp_kernels.device.tiles import tile_of

TARGET = GPUTarget("cuda", 90, 32)
Configuration = tuple[object, ...]


def seen(kernel: jit.JITFunction, arguments: tuple[object, ...], options: dict[str, object]) -> Configuration:
    """Return the kernel's name and, for each parameter, its type and its constant value or True if it is aligned."""
    bind = jit.create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))
    _, found, _ = bind(*arguments, **options)
    parts = []
    for kind, detail in found:
        parts.append((kind, str(detail) if kind == "constexpr" else "D" in (detail or "")))
    return kernel.__name__, *parts


def known(case: Case) -> Configuration:
    """Return the configuration of a case of `zeropp_kernels.aot` in the form of :func:`seen`."""
    source = case.source(TARGET)
    parts = []
    for parameter in case.kernel.params:
        place = (parameter.num,)
        kind = source.signature[parameter.name]
        detail = str(source.constants[place]) if kind == "constexpr" else bool(source.attrs.get(place))
        parts.append((kind, detail))
    return case.kernel.__name__, *parts


def launch_everything() -> set[Configuration]:
    """Run the calls of the agreement tests with a launcher that only records; return the configurations."""
    found = set()

    def run(self: jit.JITFunction, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        found.add(seen(self, arguments, options))
        assert options.items() >= launch_options(TARGET.backend, tile_of(self, options)).items(), options

    def check(name: str, arguments: tuple[object, ...], outputs: object) -> None:
        getattr(device, name)(*arguments)
        getattr(reference, name)(*arguments)  # computes the input of the next operation

    jit.JITFunction.run = run
    agreement.check = check
    lengths = (1, 128, 257, 512, 1536)
    for numel, dtype, bits in itertools.product(lengths, DTYPES, BITS):
        agreement.quantize(numel, dtype, bits)
        agreement.dequantize(numel, dtype, bits)
        agreement.reduce(numel, dtype, bits)
        agreement.plain_sum(numel, dtype)
        for source_bits in BITS:
            agreement.reduce_quantize(numel, source_bits, bits)
    for shapes, dtype, other in itertools.product(agreement.SHAPES, DTYPES, DTYPES):
        for pinned in (False, True):
            with mock.patch.object(copy, "is_pinned", lambda *_, pinned=pinned: pinned):
                agreement.copies(shapes, dtype, other)
        for bits in BITS:
            agreement.quantize_tensors(shapes, dtype, bits)
    for numel in lengths:
        for dtype in DTYPES[1:]:
            agreement.delta(numel, dtype)
        for dtype in DTYPES[:2]:
            agreement.lossless(numel, dtype)
    return found


class Calls(TorchDispatchMode):
    """A dispatch mode that counts torch operations."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += 1
        return function(*args, **(kwargs or {}))


def calls_of_lossless_decoding(count: int) -> int:
    """Return the number of kernels and torch operations that decoding ``count`` messages launches on a GPU."""
    numel, room = 5000, 100
    messages = torch.empty(count * lossless_layout(numel, room, room).nbytes, dtype=torch.uint8)
    held = torch.empty(count * numel, dtype=torch.bfloat16)
    with Calls() as calls, mock.patch.object(jit.JITFunction, "run") as run:
        device.lossless_decode_(messages, held, held, count, room, room)
    return calls.number + run.call_count


def main() -> int:
    launched, every = launch_everything(), {known(case) for case in cases("all")}
    for configuration in sorted(launched - every, key=str):
        print("not compiled ahead of time:", *configuration)
    print("calls that decode 1, 2 and 64 lossless messages:", *map(calls_of_lossless_decoding, (1, 2, 64)))
    print(f"{len(launched)} configurations launched, {len(launched - every)} unknown, {len(every)} known")
    return 1 if launched - every or not launched else 0


if __name__ == "__main__":
    sys.exit(main())
