"""Host time of one call of an operation.

    python -m bench.kernels.launch

Column "call" is the time of a whole call on buffers so small that the kernel's own time does not matter. On a GPU the
call only queues the kernel. On a CPU it also computes, in plain torch, on a few elements.

The other columns have operations of 1 MiB and a Triton driver that launches nothing (``idle_driver.py``), so they are
the same on a machine without a GPU. The launch itself, in CUDA and in Triton's C code, is not in them.

- "torch": torch's dispatcher alone, with an implementation that does nothing.
- "general": all checks, and Triton's own launch.
- "prepared": the checks that each call needs, and the launch of a compiled kernel with addresses, without torch's
  dispatcher.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

import zeropp_kernels
from bench.common.machine import describe, machine
from bench.kernels.idle_driver import WAYS, idle_card
from bench.kernels.operations import OPERATIONS, Run
from zeropp_kernels import block_table, message_layout

NUMEL, NUMEL_OF_1_MIB = 3072, 1 << 19
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


def microseconds(device: str, run: Run, calls: int) -> float:
    """Return the mean time of a call in microseconds."""
    run()  # the first call compiles the kernels, the second one is the first with a prepared launch
    run()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    taken = (time.perf_counter() - begin) / calls
    if device == "cuda":
        torch.cuda.synchronize()
    return MICROSECONDS * taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=100, help="calls per round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    print(describe(machine(device)))
    print(f"host time of a call on {device}, least of {given.rounds} means of {given.calls}")
    small, large = (
        {operation.name: operation.make(numel, device).ours for operation in OPERATIONS}
        for numel in (NUMEL, NUMEL_OF_1_MIB)
    )
    for tensors in TENSORS:
        small |= many(device, tensors)
        large |= many(device, tensors)
    found = {name: dict.fromkeys(("call", *WAYS), float("inf")) for name in small}

    def measure(column: str, runs: dict[str, Run]) -> None:
        for name, run in runs.items():
            found[name][column] = min(found[name][column], microseconds(device, run, given.calls))

    # The columns take turns, because the speed of a machine changes within seconds.
    for _ in range(given.rounds):
        measure("call", small)
        for column, way in WAYS.items():
            with idle_card(way):
                measure(column, large)
    print(f"{'':<34}" + "".join(f" {column:>8}" for column in ("call", *WAYS)) + " us")
    for name, taken in found.items():
        print(f"{name:<34}" + "".join(f" {each:8.1f}" for each in taken.values()))
    if given.json is not None:
        given.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
