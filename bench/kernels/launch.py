"""Host time of a call: what an operation costs before its kernel runs, on buffers too small to matter.

    python -m bench.kernels.launch

On a GPU the calls are queued, not waited for; on CPU the figure holds the work on 256 elements too.
"""

from __future__ import annotations

import statistics
import time

import torch

import zeropp_kernels
from bench.common.machine import describe, machine
from bench.kernels.operations import OPERATIONS, Run
from zeropp_kernels import block_table

CALLS, ROUNDS, NUMEL = 100, 9, 3072


def gather_many(device: str, tensors: int) -> Run:
    """One launch over many tensors of one block each."""
    table = block_table([256] * tensors, device=device)
    given = [torch.ones(256, device=device) for _ in range(tensors)]
    flat = torch.empty(table.numel, device=device)

    def run() -> list[torch.Tensor]:
        zeropp_kernels.gather_(given, table, flat)
        return [flat]

    return run


def microseconds(device: str, run: Run) -> float:
    taken = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            run()
        taken.append((time.perf_counter() - begin) / CALLS)
        if device == "cuda":
            torch.cuda.synchronize()
    return 1e6 * statistics.median(taken)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    print(describe(machine(device)))
    print(f"host time of a call, {NUMEL} elements on {device}, median of {ROUNDS} x {CALLS}")
    for operation in OPERATIONS:
        print(f"{operation.name:<34} {microseconds(device, operation.make(NUMEL, device).ours):8.1f} us")
    for tensors in (12, 100, 1000):
        print(f"{f'gather of {tensors} tensors':<34} {microseconds(device, gather_many(device, tensors)):8.1f} us")


if __name__ == "__main__":
    main()
