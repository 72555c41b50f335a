"""Host time of a call: what an operation costs before its kernel runs, on buffers too small to matter.

    python -m bench.kernels.launch

On a GPU the calls are queued, not waited for; on CPU the figure holds the work on 256 elements too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import zeropp_kernels
from bench.common.machine import describe, machine
from bench.kernels.operations import OPERATIONS, Run
from zeropp_kernels import block_table

NUMEL = 3072
TENSORS = (12, 100, 1000)


def gather_many(device: str, tensors: int) -> Run:
    """One launch over many tensors of one block each."""
    table = block_table([256] * tensors, device=device)
    given = [torch.ones(256, device=device) for _ in range(tensors)]
    flat = torch.empty(table.numel, device=device)

    def run() -> list[torch.Tensor]:
        zeropp_kernels.gather_(given, table, flat)
        return [flat]

    return run


def microseconds(device: str, run: Run, calls: int, rounds: int) -> float:
    """Median over rounds of a call's share of one."""
    run()  # compiles
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        taken.append((time.perf_counter() - begin) / calls)
        if device == "cuda":
            torch.cuda.synchronize()
    return 1e6 * statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100, help="of a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write microseconds by operation to this file")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    print(describe(machine(device)))
    print(f"host time of a call, {NUMEL} elements on {device}, median of {given.rounds} x {given.calls}")
    runs = {operation.name: operation.make(NUMEL, device).ours for operation in OPERATIONS}
    runs |= {f"gather of {tensors} tensors": gather_many(device, tensors) for tensors in TENSORS}
    found = {name: microseconds(device, run, given.calls, given.rounds) for name, run in runs.items()}
    for name, taken in found.items():
        print(f"{name:<34} {taken:8.1f} us")
    if given.json is not None:
        given.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
