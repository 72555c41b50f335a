"""How near a step from files comes to the disk's limit, and what reading ahead and writing behind are worth.

    python -m bench.offload.disk --folder /somewhere/on/the/disk --numel 64000000 --rounds 4

Every round moves the same bytes by each way, one after the other, since disks differ from minute to minute: main
weights, gradients and two states are read, all but gradients written. The raw way reads and writes them past the page
cache in requests of as many bytes, from as many threads as a step has requests under way, and computes nothing.

Where the disk takes much longer than the kernels, or much less, there is little that could hide. ``--compute N`` runs
the kernels N times on each tile, which stands for cores that are N times slower; ``auto`` chooses N so that kernels
take about as long as transfers, which are what kernels leave of a step that goes one tile at a time.
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
from zeropp.optimizer.fused import Rule, SliceStep
from zeropp.optimizer.host_step import CpuStepPool, step_slices

COLUMNS = ("way", "s", "kernels s", "GB/s", "/ disk")
READ, WRITTEN = 16, 12  # bytes an element of float32 AdamW
PLAIN, PIPED, RAW = "one tile at a time", "pipelined", "disk"
MOST = 64  # times that kernels may have to run: more says that the disk is no match


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How near a step from files comes to the disk's limit.")
    parser.add_argument("--folder", type=Path, help="on the disk; default: a temporary one")
    parser.add_argument("--numel", type=int, default=64_000_000, help="elements; 16 bytes each on the disk")
    parser.add_argument("--tile", type=int, default=4 << 20, help="elements: sub_group_size")
    parser.add_argument("--block", type=int, default=1 << 20, help="bytes of a request")
    parser.add_argument("--depth", type=int, default=8, help="requests that are under way")
    parser.add_argument("--rounds", type=int, default=4, help="measured ones; one more warms up")
    parser.add_argument("--compute", default="1", metavar="N", help='times that kernels run on a tile, or "auto"')
    parser.add_argument("--save", metavar="NAME", help="write bench/results/<date>_<NAME>.md and .json")
    args = parser.parse_args(argv)
    if args.compute != "auto" and not (args.compute.isdecimal() and int(args.compute)):
        parser.error(f'--compute {args.compute}: expected a number of at least 1, or "auto"')
    if min(args.numel, args.tile, args.depth, args.rounds) < 1 or args.block % 4096 or args.block < 4096:
        parser.error("everything must be at least 1, and --block a multiple of 4096")
    return args


class Kernels:
    """In the place of ``step_slices`` of tiles: runs it some times over, and counts the seconds.

    Attributes:
        times: how often on each tile.
        seconds: since :meth:`taken` was last asked.
    """

    def __init__(self) -> None:
        self.times, self.seconds = 1, 0.0

    def __call__(self, cores: CpuStepPool, rule: Rule, steps: Sequence[SliceStep]) -> None:
        begin = time.perf_counter()
        for _ in range(self.times):
            step_slices(cores, rule, steps)
        self.seconds += time.perf_counter() - begin

    def taken(self) -> float:
        found, self.seconds = self.seconds, 0.0
        return found

    def choose(self, whole: float, kernels: float) -> None:
        """Run so much more often that kernels take what is left of a step, which went one tile at a time."""
        self.times = min(max(round(self.times * (whole - kernels) / kernels), 1), MOST)


class Weights(nn.Module):
    """One parameter, whose gradient costs little."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((numel,), 1e-3))

    def forward(self) -> Tensor:
        return self.weight.sum()


def stepper(args: argparse.Namespace, folder: Path, *, piped: bool) -> tuple[Callable[[], float], Callable[[], None]]:
    """What takes a step and says how many seconds it took; and what ends it."""
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
    """The same bytes by bare system calls."""
    blocks = -(-args.numel // args.block)  # of one byte an element
    reads, writes = READ * blocks, WRITTEN * blocks
    path = folder / "raw"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.unlink(path)
    os.posix_fallocate(descriptor, 0, reads * args.block)
    memory = [mmap.mmap(-1, args.block) for _ in range(args.depth)]
    # In the order of a step: what has been read of each sixteenth is followed by what is written there.
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

    # Space that was never written is not read from the disk.
    for _, offset in calls:
        os.pwritev(descriptor, [memory[0]], offset)
    return move, lambda: os.close(descriptor)


def report(args: argparse.Namespace, rounds: dict[str, list[tuple[float, float]]], times: int) -> str:
    """The table, of seconds and of them in kernels, by way and round."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    seconds = {way: [whole for whole, _ in pairs] for way, pairs in rounds.items()}
    kernels = {way: median(own for _, own in pairs) for way, pairs in rounds.items()}
    for way, own in seconds.items():
        rate = (READ + WRITTEN) * args.numel / median(own) / 1e9
        share = median(disk / each for disk, each in zip(seconds[RAW], own, strict=True))
        lines.append(f"| {way} | {median(own):.2f} | {kernels[way]:.2f} | {rate:.2f} | {share:.2f} |")
    gains = [one / other for one, other in zip(seconds[PLAIN], seconds[PIPED], strict=True)]
    transfers = median(whole - own for whole, own in rounds[PLAIN])
    # Both one after the other, and the longer of them alone: no more can be hidden than the shorter one.
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
    """Seconds of every way's rounds, and of them in kernels."""
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
                # Memory that is touched for the first time, and states that are made, would count as kernels.
                kernels.taken()
                # More than once: of what is in the caches already, a kernel takes less.
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
        mock.patch("zeropp.optimizer.host_step.step_slices", kernels),
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
