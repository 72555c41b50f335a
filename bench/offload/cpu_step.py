"""Speed of zeropp's AdamW on the CPU, compared with torch's AdamW with as many threads.

    python -m bench.offload.cpu_step --numel 64000000 --rounds 8

Each round runs each way once, and ratios are computed per round, because machine speed changes within minutes. torch
steps one tensor with its intra-op threads. zeropp splits the tensor into chunks for `CpuStepPool`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from torch import Tensor
from torch.optim import AdamW

from bench.common import results
from bench.common.machine import machine
from zeropp.optimizer.cpu_pool import CHUNK_NUMEL, CpuStepPool, spare_cores, step_slices
from zeropp.optimizer.fused import SliceStep, rule_of

THREADS = (1, 2)
COLUMNS = ("way", "threads", "ms", "M parameters/s", "/ torch fused")
_FUSED, _CHUNKS, _PLAIN = "torch fused", "zeropp chunks", "torch"
Times = dict[tuple[str, int], list[float]]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the speed of AdamW on the CPU.")
    parser.add_argument("--numel", type=int, default=64_000_000, help="elements, with 16 bytes each, for every way")
    parser.add_argument("--rounds", type=int, default=8, help="measured rounds, after one more that warms up")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/<date>_<NAME>.md and .json")
    args = parser.parse_args(argv)
    if args.numel < 1 or args.rounds < 1:
        parser.error("--numel and --rounds must be at least 1")
    return args


def fill(numel: int) -> tuple[Tensor, Tensor]:
    """Return a parameter and its gradient, both float32 [numel]."""
    generator = torch.Generator().manual_seed(0)
    param, grad = torch.empty(numel), torch.empty(numel)
    return param.normal_(generator=generator), grad.normal_(std=1e-3, generator=generator)


def torch_step(numel: int, fused: bool) -> Callable[[int], None]:
    """Return a function that steps torch's AdamW with a given number of threads."""
    param, grad = fill(numel)
    param.grad = grad
    optimizer = AdamW([param], fused=fused)

    def step(threads: int) -> None:
        torch.set_num_threads(threads)
        optimizer.step()

    return step


def zeropp_step(numel: int) -> Callable[[int], None]:
    """Return a function that steps AdamW with zeropp's `step_slices` and a given number of threads."""
    param, grad = fill(numel)
    optimizer = AdamW([param])
    rule, state = rule_of(optimizer), dict[str, Tensor]()
    assert rule is not None
    cores = {threads: CpuStepPool(threads) for threads in THREADS}

    def step(threads: int) -> None:
        settings = rule.snapshot(optimizer.param_groups[0])
        count = rule.begin_step(settings, param, state)
        step_slices(cores[threads], rule, [SliceStep(param, grad, state, settings, count)])

    return step


def measure(numel: int, rounds: int) -> Times:
    """Return the seconds of every way and number of threads, one value per round."""
    ways = {_FUSED: torch_step(numel, True), _CHUNKS: zeropp_step(numel), _PLAIN: torch_step(numel, False)}
    before, times = torch.get_num_threads(), Times()
    for number in range(rounds + 1):
        for name, threads in turns(list(ways), number):
            begin = time.perf_counter()
            ways[name](threads)
            if number:
                times.setdefault((name, threads), []).append(time.perf_counter() - begin)
    torch.set_num_threads(before)
    return times


def turns(names: Sequence[str], number: int) -> Iterator[tuple[str, int]]:
    """Return ways and threads of one round. Every other round is reversed, so that no way is always first."""
    order = [(name, threads) for threads in THREADS for name in names]
    return iter(order[::-1] if number % 2 else order)


def report(times: Times, numel: int) -> str:
    """Return the table with medians over rounds, and the range of ratios."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for (name, threads), seconds in sorted(times.items(), key=lambda item: item[0][1]):
        ratios = [base / own for base, own in zip(times[_FUSED, threads], seconds, strict=True)]
        shown = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        took = median(seconds)
        lines.append(f"| {name} | {threads} | {took * 1e3:.1f} | {numel / took / 1e6:.0f} | {shown} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    about = machine("cpu")
    times = measure(args.numel, args.rounds)
    note = (
        f"{args.numel} float32 elements, {args.rounds} rounds, chunks of {CHUNK_NUMEL}; wall time, medians, and ratios "
        f"of speeds by round with their range. spare_cores(1) says {spare_cores(1)} here."
    )
    body = "\n".join([report(times, args.numel), "", note])
    text = results.page("AdamW on the CPU", "bench.offload.cpu_step", argv, about, body)
    print(text)
    if args.save:
        rows = [{"way": name, "threads": threads, "s": seconds} for (name, threads), seconds in times.items()]
        results.save({"machine": about, "settings": vars(args), "rows": rows}, text, args.save)


if __name__ == "__main__":
    main()
