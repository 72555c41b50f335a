"""Host time of a call: what an operation costs before its kernel runs, on buffers too small to matter.

    python -m bench.kernels.launch

On a GPU the calls are queued, not waited for; on CPU the figure holds the work on 256 elements too.
"""

from __future__ import annotations

import statistics
import time

import torch

from bench.kernels.operations import OPERATIONS

CALLS, ROUNDS, NUMEL = 300, 9, 3072


def microseconds(device: str, name: str) -> float:
    run = next(operation for operation in OPERATIONS if operation.name == name).make(NUMEL, device).ours
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
    print(f"host time of a call, {NUMEL} elements on {device}, median of {ROUNDS} x {CALLS}")
    for operation in OPERATIONS:
        print(f"{operation.name:<34} {microseconds(device, operation.name):8.1f} us")


if __name__ == "__main__":
    main()
