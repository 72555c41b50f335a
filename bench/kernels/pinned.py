"""Gradients to pinned host memory, and weights back: kernels that reach over the bus against the copy engine.

    python -m bench.kernels.pinned [--mebibytes 256]

"direct" is one launch that reads or writes the host's memory itself; "staged" a launch on the device and a copy by the
copy engine, which needs a buffer of the same size on the device. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

import zeropp_kernels as kernels
from bench.kernels.operations import parts_of, values

ROUNDS = 9


def milliseconds(run: Callable[[], object]) -> float:
    """Median of a call on the device's own clock."""
    taken = []
    for _ in range(ROUNDS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken[2:])


def contenders(numel: int) -> dict[str, Callable[[], object]]:
    """What is timed; all move ``numel`` bfloat16 values over the bus."""
    tensors, table = parts_of(values(numel, "cuda"))
    host = torch.empty(numel, dtype=torch.bfloat16, pin_memory=True)
    staging = torch.empty(numel, dtype=torch.bfloat16, device="cuda")

    def gather_staged() -> None:
        kernels.gather_(tensors, table, staging)
        host.copy_(staging, non_blocking=True)

    def scatter_staged() -> None:
        staging.copy_(host, non_blocking=True)
        kernels.scatter_(staging, tensors, table)

    return {
        "copy engine alone, to host": lambda: host.copy_(staging, non_blocking=True),
        "gather, direct": lambda: kernels.gather_(tensors, table, host),
        "gather, staged": gather_staged,
        "copy engine alone, to device": lambda: staging.copy_(host, non_blocking=True),
        "scatter, direct": lambda: kernels.scatter_(host, tensors, table),
        "scatter, staged": scatter_staged,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="of bfloat16 values")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; there is no bus to measure")
    print(f"{torch.cuda.get_device_name()}, {given.mebibytes} MiB of bfloat16, median of {ROUNDS}")
    for name, run in contenders(given.mebibytes << 19).items():
        taken = milliseconds(run)
        print(f"{name:<30} {taken:8.2f} ms {given.mebibytes / 1024 / taken * 1e3:7.1f} GiB/s")


if __name__ == "__main__":
    main()
