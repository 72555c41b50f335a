"""Copies of gradients to pinned host memory and of weights back: kernels that access host memory, or the copy engine.

    python -m bench.kernels.pinned [--mebibytes 256]

"direct" is one launch that reads or writes host memory itself. "staged" is a launch on the device and a copy by the
copy engine, with an additional device buffer of the same size. "pageable" is a copy of memory that is not pinned, which
makes the host wait. Each way is checked for correct values first.

"matrix product" is the time of a chain of matrix products, first without copies and then with each way running on
another stream. The increase is the slowdown that a copy causes to computation. Without a CUDA device all buffers are in
host memory and run one after another, so the numbers have no meaning.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import zeropp_kernels as kernels
from bench.common.machine import describe, machine
from bench.kernels.operations import parts_of, values

ROUNDS = 9


@dataclass(frozen=True)
class Way:
    """One way to copy over the bus.

    Attributes:
        run: function that copies.
        made: tensors that ``run`` fills.
        expected: values of ``made`` after ``run``.
    """

    run: Callable[[], object]
    made: list[Tensor]
    expected: list[Tensor]

    def is_right(self) -> bool:
        """Return True if ``run`` writes the expected values; the targets are filled with NaN first."""
        for each in self.made:
            each.fill_(float("nan"))
        self.run()
        synchronize()
        return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(self.made, self.expected, strict=True))


def synchronize() -> None:
    """Wait for the CUDA device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(way: Way) -> float:
    """Return the median time of a call in milliseconds, with a synchronization before and after the call."""
    taken = []
    for _ in range(ROUNDS + 2):
        synchronize()
        begin = time.perf_counter()
        way.run()
        synchronize()
        taken.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(taken[2:])


def milliseconds_of_products(device: str, beside: Way | None) -> float:
    """Return the median time in milliseconds of a chain of matrix products, with ``beside`` on another stream."""
    # A chain should take about 2 ms on an H100, where 256 MiB should take 5 ms over the bus. On a CPU, which has no
    # second stream, the chain is as short as possible.
    size, chain = (4096, 8) if device == "cuda" else (64, 1)
    left, right = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(left)
    side = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()
    taken = []
    for _ in range(ROUNDS + 2):
        synchronize()
        with side:
            if beside is not None:
                beside.run()
        begin = time.perf_counter()
        for _ in range(chain):
            torch.mm(left, right, out=out)
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
        taken.append(1e3 * (time.perf_counter() - begin))
    synchronize()
    return statistics.median(taken[2:])


def ways(numel: int, device: str) -> dict[str, Way]:
    """Return the timed ways by name; each copies about ``numel`` bfloat16 values."""
    # The tensors have equal sizes in multiples of 256 elements, so their total is a little smaller than ``numel``.
    tensors, table = parts_of(values(numel, device))
    numel = sum(each.numel() for each in tensors)
    flat, spare = values(numel, device), torch.empty(numel, dtype=torch.bfloat16, device=device)
    host, pageable = (torch.empty(numel, dtype=torch.bfloat16, pin_memory=pin) for pin in (device == "cuda", False))
    table = kernels.block_table([each.numel() for each in tensors], device=device)
    source = values(numel, "cpu", seed=1)
    source = source.pin_memory() if device == "cuda" else source
    sent, back = [torch.cat(tensors)], [torch.empty_like(each) for each in tensors]
    parts = list(source.split([each.numel() for each in tensors]))

    def gather_staged() -> None:
        kernels.gather_(tensors, table, spare)
        host.copy_(spare, non_blocking=True)

    def scatter_staged() -> None:
        spare.copy_(source, non_blocking=True)
        kernels.scatter_(spare, back, table)

    return {
        "copy engine alone, to host": Way(lambda: host.copy_(flat, non_blocking=True), [host], [flat]),
        "pageable, to host": Way(lambda: pageable.copy_(flat), [pageable], [flat]),
        "gather, direct": Way(lambda: kernels.gather_(tensors, table, host), [host], sent),
        "gather, staged": Way(gather_staged, [host], sent),
        "copy engine alone, to device": Way(lambda: spare.copy_(source, non_blocking=True), [spare], [source]),
        "pageable, to device": Way(lambda: spare.copy_(pageable), [spare], [pageable]),
        "scatter, direct": Way(lambda: kernels.scatter_(source, back, table), back, parts),
        "scatter, staged": Way(scatter_staged, back, parts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="MiB of bfloat16 values")
    parser.add_argument("--json", type=Path, help="write seconds and bytes of each way to this file")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{describe(machine(device))} {given.mebibytes} MiB of bfloat16, median of {ROUNDS}")
    found, every = {}, ways(given.mebibytes << 19, device)
    for name, way in every.items():
        if not way.is_right():
            raise SystemExit(f"{name}: other values arrived than were sent")
        nbytes, taken = sum(each.nbytes for each in way.made), milliseconds(way)
        found[name] = {"seconds": taken / 1e3, "bytes": nbytes}
        print(f"{name:<30} {taken:8.2f} ms {nbytes / 2**30 / taken * 1e3:7.1f} GiB/s")
    alone = milliseconds_of_products(device, None)
    found["matrix product"] = {"seconds": alone / 1e3, "bytes": 0}
    print(f"{'matrix product':<30} {alone:8.2f} ms")
    for name in ("gather, direct", "gather, staged", "scatter, direct", "scatter, staged"):
        taken = milliseconds_of_products(device, every[name])
        found[f"matrix product beside {name}"] = {"seconds": taken / 1e3, "bytes": 0}
        print(f"{'... beside ' + name:<30} {taken:8.2f} ms {taken / alone:7.2f} times as long")
    if given.json is not None:
        given.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
