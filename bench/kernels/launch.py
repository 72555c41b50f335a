"""Host time of one call of an operation, on buffers so small that the kernel's own time does not matter.

    python -m bench.kernels.launch

Column "call" is the time of a whole call. On a GPU the call only queues the kernel. On a CPU the call also computes, in
plain torch, on a few elements. Column "ours" is the time with Triton's launcher replaced by a function that does
nothing. It contains torch's dispatcher, the argument checks and the computation of launch parameters. On a CPU, "ours"
runs the same code as on a GPU except for the selection of the device. On a GPU, "call" minus "ours" is the launcher.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import zeropp_kernels
from bench.common.machine import describe, machine
from bench.kernels.operations import OPERATIONS, Run
from zeropp_kernels import block_table, message_layout, reference

NUMEL = 3072
TENSORS = (1, 12, 100, 1000)
MICROSECONDS = 1e6


def many(device: str, tensors: int) -> dict[str, Run]:
    """Return operations on many tensors of one block each, in one launch: gather, scatter, and encode a message."""
    table = block_table([256] * tensors, device=device)
    given = [torch.ones(256, device=device) for _ in range(tensors)]
    flat = torch.empty(table.numel, device=device)
    message = torch.empty(message_layout(table.numel, 8).nbytes, dtype=torch.uint8, device=device)

    def quantize() -> list[Tensor]:
        zeropp_kernels.quantize_tensors_(given, table, message)
        return [message]

    def gather() -> list[Tensor]:
        zeropp_kernels.gather_(given, table, flat)
        return [flat]

    def scatter() -> list[Tensor]:
        zeropp_kernels.scatter_(flat, given, table)
        return given

    return {f"{run.__name__} of {tensors} tensors": run for run in (quantize, gather, scatter)}


@contextmanager
def no_launcher(device: str) -> Iterator[None]:
    """Context that disables kernel launches; on a CPU, operations take the code path of a GPU up to the launch."""
    from zeropp_kernels import device as triton_side

    def nothing(self: object, grid: object) -> Any:
        return lambda *arguments, **options: None

    kernel = type(triton_side.copy.gather_kernel)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(kernel, "__getitem__", nothing))
        if device == "cpu":
            for name in triton_side.__all__:
                patches.enter_context(mock.patch.object(reference, name, getattr(triton_side, name)))
        yield


def microseconds(device: str, run: Run, calls: int, rounds: int) -> float:
    """Return the median over rounds of the mean time of a call, in microseconds."""
    run()  # the first call compiles the kernels
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        taken.append((time.perf_counter() - begin) / calls)
        if device == "cuda":
            torch.cuda.synchronize()
    return MICROSECONDS * statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100, help="calls per round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write microseconds by operation to this file")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    print(describe(machine(device)))
    print(f"host time of a call, {NUMEL} elements on {device}, median of {given.rounds} x {given.calls}")
    runs = {operation.name: operation.make(NUMEL, device).ours for operation in OPERATIONS}
    for tensors in TENSORS:
        runs |= many(device, tensors)
    found = {name: {"call": microseconds(device, run, given.calls, given.rounds)} for name, run in runs.items()}
    with no_launcher(device):
        for name, run in runs.items():
            found[name]["ours"] = microseconds(device, run, given.calls, given.rounds)
    print(f"{'':<34} {'call':>8} {'ours':>8} us")
    for name, taken in found.items():
        print(f"{name:<34} {taken['call']:8.1f} {taken['ours']:8.1f}")
    if given.json is not None:
        given.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
