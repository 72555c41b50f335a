"""Optimizer steps with states in files: speed relative to the disk's limit, and the gain from the pipeline.

    python -m bench.offload.disk --folder /somewhere/on/the/disk --numel 64000000 --rounds 4

Each round moves the same number of bytes in each way, because disk speed changes within minutes. A step reads main
weights, gradients and two states, and writes all of them but gradients. The way "disk" reads and writes without the
page cache, in requests of the same size, from as many threads as a step has requests in flight, and computes nothing.

The pipeline hides little if the disk is much slower or much faster than the kernels. ``--compute N`` runs the kernels N
times on each tile, which simulates cores that are N times slower. ``auto`` chooses N so that kernels take about as long
as the transfers, measured as the rest of a step that handles one tile at a time.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from torch import Tensor, nn

import zeropp
from bench.common import results
from bench.common.machine import machine
from zeropp.optimizer.cpu_pool import CpuStepPool, step_slices
from zeropp.optimizer.fused import Rule, SliceStep

COLUMNS = ("way", "s", "kernels s", "GB/s", "/ disk")
READ, WRITTEN = 16, 12  # bytes per element with float32 AdamW
PLAIN, PIPED, RAW = "one tile at a time", "pipelined", "disk"
MOST = 64  # largest number of kernel runs per tile; a higher one would mean that the disk is too slow to compare


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure optimizer steps with states in files.")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure; default: a temporary folder")
    parser.add_argument("--numel", type=int, default=64_000_000, help="elements; 16 bytes each on the disk")
    parser.add_argument("--tile", type=int, default=4 << 20, help="elements of a tile (sub_group_size)")
    parser.add_argument("--block", type=int, default=1 << 20, help="bytes per request")
    parser.add_argument("--depth", type=int, default=8, help="number of requests in flight")
    parser.add_argument("--rounds", type=int, default=4, help="measured rounds, after one more that warms up")
    parser.add_argument("--compute", default="1", metavar="N", help='number of kernel runs per tile, or "auto"')
    parser.add_argument("--save", metavar="NAME", help="write bench/results/<date>_<NAME>.md and .json")
    args = parser.parse_args(argv)
    if args.compute != "auto" and not (args.compute.isdecimal() and int(args.compute)):
        parser.error(f'--compute {args.compute}: expected a number of at least 1, or "auto"')
    if min(args.numel, args.tile, args.depth, args.rounds) < 1 or args.block % 4096 or args.block < 4096:
        parser.error("everything must be at least 1, and --block a multiple of 4096")
    return args


class Kernels:
    """Replacement for ``step_slices`` that runs it several times per tile, and measures the seconds.

    Attributes:
        times: number of runs per tile.
        seconds: seconds since the last call of :meth:`taken`.
    """

    def __init__(self) -> None:
        self.times, self.seconds = 1, 0.0

    def __call__(
        self, cores: CpuStepPool, rule: Rule, steps: Sequence[SliceStep], copies: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        begin = time.perf_counter()
        for _ in range(self.times):
            step_slices(cores, rule, steps, copies)
        self.seconds += time.perf_counter() - begin

    def taken(self) -> float:
        found, self.seconds = self.seconds, 0.0
        return found

    def choose(self, whole: float, kernels: float) -> None:
        """Set ``times`` so that kernels take as long as the rest of a step that handled one tile at a time."""
        self.times = min(max(round(self.times * (whole - kernels) / kernels), 1), MOST)


class Weights(nn.Module):
    """A model with one parameter, whose gradient takes little time."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((numel,), 1e-3))

    def forward(self) -> Tensor:
        return self.weight.sum()


def stepper(args: argparse.Namespace, folder: Path, *, piped: bool) -> tuple[Callable[[], float], Callable[[], None]]:
    """Return a function that steps once and returns its seconds, and a function that closes the optimizer."""
    block = {
        "device": "nvme", "nvme_path": str(folder), "buffer_count": 12, "pipeline_read": piped, "pipeline_write": piped,
    }  # fmt: skip
    zero = {"stage": 3, "sub_group_size": args.tile, "offload_optimizer": block}
    aio = {"block_size": args.block, "queue_depth": args.depth}
    config = {"zero_optimization": zero, "aio": aio, "zeropp": {"lazy_step": False}}
    model = Weights(args.numel)
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), model, config)

    def step() -> float:
        optimizer.zero_grad()
        optimizer.backward(model())
        begin = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - begin

    return step, optimizer.close


def raw(args: argparse.Namespace, folder: Path) -> tuple[Callable[[], float], Callable[[], None]]:
    """Return a function that moves the bytes of a step by system calls and returns seconds, and one that closes."""
    blocks = -(-args.numel // args.block)  # number of blocks for one byte per element
    reads, writes = READ * blocks, WRITTEN * blocks
    path = folder / "raw"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.unlink(path)
    os.posix_fallocate(descriptor, 0, reads * args.block)
    memory = [mmap.mmap(-1, args.block) for _ in range(args.depth)]
    # In the order of a step: each group of 16 blocks is read, and 12 of them are written back.
    calls = [(at % READ < WRITTEN, at * args.block) for at in range(reads)]

    def work(index: int) -> None:
        for writes_back, offset in calls[index :: args.depth]:
            if os.preadv(descriptor, [memory[index]], offset) != args.block:
                raise OSError("a short read")
            if writes_back and os.pwritev(descriptor, [memory[index]], offset) != args.block:
                raise OSError("a short write")

    def move() -> float:
        begin = time.perf_counter()
        with ThreadPoolExecutor(args.depth) as pool:
            list(pool.map(work, range(args.depth)))
        return (time.perf_counter() - begin) * (READ + WRITTEN) * args.numel / ((reads + writes) * args.block)

    # Write all blocks first: reading blocks that were never written would not access the disk.
    for _, offset in calls:
        os.pwritev(descriptor, [memory[0]], offset)
    return move, lambda: os.close(descriptor)


def report(args: argparse.Namespace, rounds: dict[str, list[tuple[float, float]]], times: int) -> str:
    """Return the table; ``rounds`` has (seconds, seconds in kernels) by way and round."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    seconds = {way: [whole for whole, _ in pairs] for way, pairs in rounds.items()}
    kernels = {way: median(own for _, own in pairs) for way, pairs in rounds.items()}
    for way, own in seconds.items():
        rate = (READ + WRITTEN) * args.numel / median(own) / 1e9
        share = median(disk / each for disk, each in zip(seconds[RAW], own, strict=True))
        lines.append(f"| {way} | {median(own):.2f} | {kernels[way]:.2f} | {rate:.2f} | {share:.2f} |")
    gains = [one / other for one, other in zip(seconds[PLAIN], seconds[PIPED], strict=True)]
    transfers = median(whole - own for whole, own in rounds[PLAIN])
    # Serial time divided by the longer of the two: the pipeline can hide at most the shorter one.
    most = (transfers + kernels[PLAIN]) / max(transfers, kernels[PLAIN])
    often = "once" if times == 1 else f"{times} times, which stands for cores that are {times} times slower,"
    return "\n".join([
        *lines,
        "",
        f"{args.numel} elements in tiles of {args.tile}; medians of {args.rounds} rounds. Kernels run {often} on each "
        f"tile. One tile at a time they take {kernels[PLAIN]:.2f} s, transfers {transfers:.2f} s. One tile at a time / "
        f"pipelined: {median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f}); {most:.2f} would be all of the "
        "shorter one hidden, and more than that transfers that are faster for reading and writing at once.",
    ])  # fmt: skip


def measure(args: argparse.Namespace, folder: Path, kernels: Kernels) -> dict[str, list[tuple[float, float]]]:
    """Return (seconds, seconds in kernels) of every way and round."""
    ways = {
        RAW: raw(args, folder),
        PIPED: stepper(args, folder, piped=True),
        PLAIN: stepper(args, folder, piped=False),
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    kernels.times = 1 if args.compute == "auto" else int(args.compute)
    for number in range(args.rounds + 1):
        for way, (run, _) in ways.items():
            seconds = run()
            if number:
                found[way].append((seconds, kernels.taken()))
            elif way == PLAIN and args.compute == "auto":
                # Ignore the first step, in which memory is touched for the first time and states are created.
                kernels.taken()
                # Repeat the choice, because repeated runs on cached data take less time than the first run.
                for _ in range(3):
                    kernels.choose(run(), kernels.taken())
            kernels.taken()
    for _, end in ways.values():
        end()
    return found


def main(argv: list[str] | None = None) -> None:
    args, kernels, about = parse_arguments(argv), Kernels(), machine("cpu")
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as name,
        mock.patch("zeropp.optimizer.sub_groups.step_slices", kernels),
    ):
        rounds = measure(args, Path(name), kernels)
    body = report(args, rounds, kernels.times)
    text = results.page("A step from files beside the disk", "bench.offload.disk", argv, about, body)
    print(text)
    if args.save:
        settings = {key: value for key, value in vars(args).items() if key != "folder"}
        measured = {"machine": about, "settings": settings, "times": kernels.times, "rounds": rounds}
        results.save(measured, text, args.save)


if __name__ == "__main__":
    main()
