"""Host time to gather and reshard one unit, and to wrap a model, without a network and with little data.

The model has small blocks of 12 parameters (15 with ``--wrap``). It runs on torch's fake process group, whose
collectives return at once. The benchmark counts aten calls and collectives, and measures the main thread's CPU time:

    unit      gather, wait, unshard and reshard of one unit, all in the caller's thread
    thread    the same with the gather on another thread, as on a CPU with overlap
    forward   time per block of a forward under no_grad, with hooks, minus the time without zeropp
    group     only the collectives of one gather. The fake group copies the pieces one by one (1 MB in 136 pieces at
              1024 ranks), which a real group does not do on the host

The bound is on ``unit - group``; if it is exceeded, the exit code is 1. With ``--wrap`` the benchmark measures wrapping
instead: CPU time of the main thread, memory that stays and peak memory, with a new process for each world size. The
bounds are on the time, and on the peak memory beyond that of the smallest world. With ``--import`` it measures the wall
time of ``import zeropp`` after ``import torch``, with a bound.

Run: ``python -m bench.host_cost --world 8 64 1024 --json host_cost.json``, or with ``--wrap``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import zeropp
from bench.common.machine import describe, machine
from zeropp._compat import all_gather_single
from zeropp.comm.streams import CommStreams, InlineStream, ThreadStream

PARAMETERS = 12
TARGET_US = 60
WRAPPED_UNITS, WRAPPED_PARAMETERS = 2000, 15  # 30,000 parameters
WRAP_S, WRAP_MIB = 3.0, 50.0
IMPORT_S = 0.3
CONFIG = {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
    },
    "zeropp": {"unit_min_blocks": 0},
}
# bf16, so that main weights and gathered weights have different sizes, which is the hardest case for the heap.
WRAPPED_CONFIG = {**CONFIG, "bf16": {"enabled": True}}


class Block(nn.Module):
    """A module with as many parameters as a transformer block with biases; its forward does nothing."""

    def __init__(self, numel: int = 64, parameters: int = PARAMETERS) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(parameters)])

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        return x


class Calls(TorchDispatchMode):
    """Dispatch mode that counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Count a call, and run it."""
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def of(self, namespace: str) -> int:
        """Return the number of calls into one namespace, such as aten."""
        return sum(count for name, count in self.names.items() if name.startswith(f"{namespace}."))


def join(world: int, local: int) -> None:
    """Create a fake process group in which this process is rank 0 of ``world``, with ``local`` ranks per node."""
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())


def gather(unit: Any, comm_streams: CommStreams) -> None:
    """Gather one unit, and wait for its values."""
    work, after = unit.prepare_gather(comm_streams)
    unit.note_gather(comm_streams.run_work(work, after=after))
    unit.wait_for_unshard(10.0)


def cycle(unit: Any, comm_streams: CommStreams) -> None:
    """Gather, unshard and reshard one unit."""
    gather(unit, comm_streams)
    unit.unshard()
    unit.reshard(comm_streams)


def microseconds(work: Callable[[], object], repeats: int, rounds: int = 15) -> float:
    """Return the calling thread's CPU time of one call in microseconds: median over rounds of the mean.

    CPU time excludes other programs on the machine and waiting for other threads.
    """
    for _ in range(20):
        work()
    means = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(repeats):
            work()
        means.append((time.thread_time() - start) / repeats * 1e6)
    return statistics.median(means)


def collectives(unit: Any) -> None:
    """Run only the collectives of one gather; the unit must be unsharded."""
    for buffer in unit.buffers:
        views = buffer._fetch_places
        for hop, piece, out in zip(buffer.paths.fetch.hops, views, views[1:], strict=False):
            all_gather_single(out, piece, group=hop.group)


def count(unit: Any) -> dict[str, Any]:
    """Return the number of calls of each operator in one gather, unshard and reshard, and the number of hops."""
    with Calls() as calls:
        cycle(unit, CommStreams(lambda link: InlineStream()))
    hops = len(unit.buffers[0].paths.fetch.hops)
    return {"aten": calls.of("aten"), "collectives": calls.of("c10d"), "hops": hops, "operators": dict(calls.names)}


def measure(world: int, local: int, blocks: int = 16, repeats: int = 200) -> dict[str, Any]:
    """Return counts and times for one world size, measured on a fake process group.

    Args:
        world: number of ranks.
        local: ranks per node.
        blocks: number of units of the model.
        repeats: number of calls per round.
    """
    plain = nn.Sequential(*(Block() for _ in range(blocks)))
    join(world, local)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, CONFIG)
    try:
        unit = optimizer.engine.units[blocks // 2]
        result: dict[str, Any] = {"world": world, "local": local, "parameters": len(unit.parameters), **count(unit)}
        inline = CommStreams(lambda link: InlineStream())
        thread = CommStreams(lambda link: ThreadStream(f"host cost {link}"))
        result["unit_us"] = microseconds(lambda: cycle(unit, inline), repeats)
        result["thread_us"] = microseconds(lambda: cycle(unit, thread), repeats)
        thread.close()
        gather(unit, inline)
        unit.unshard()
        result["group_us"] = microseconds(lambda: collectives(unit), repeats)
        unit.reshard(inline)
        x = torch.zeros(1)
        with torch.no_grad():
            model(x)  # the first forward learns the order
            with Calls() as calls:
                model(x)
            result["forward_aten"] = calls.of("aten") / blocks
            result["forward_collectives"] = calls.of("c10d") / blocks
            whole = microseconds(lambda: model(x), max(repeats // blocks, 1))
            bare = microseconds(lambda: plain(x), repeats)
        result["forward_us"] = (whole - bare) / blocks
        return result
    finally:
        optimizer.engine.close()
        dist.destroy_process_group()


def measure_wrap(world: int, local: int, blocks: int = WRAPPED_UNITS) -> dict[str, Any]:
    """Wrap a model, and return the time and the memory that wrapping takes.

    Each call needs a new process, because the memory is measured for the whole process.

    Args:
        world: number of ranks.
        local: ranks per node.
        blocks: number of units of the model.
    """
    torch.set_num_threads(1)
    join(world, local)
    model = nn.Sequential(*(Block(parameters=WRAPPED_PARAMETERS) for _ in range(blocks)))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    before = _status("VmRSS")
    start = time.thread_time()
    optimizer = zeropp.ZeroOptimizer(plain, model, WRAPPED_CONFIG)
    seconds = time.thread_time() - start
    mib = {"stays_mib": _status("VmRSS") - before, "most_mib": _status("VmHWM") - before}
    return {"world": world, "local": local, "units": len(optimizer.engine.units), "seconds": seconds, **mib}


def _status(key: str) -> float:
    """Return a memory value of this process in MiB, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024


def wrap_table(rows: list[dict[str, Any]]) -> str:
    """Return the costs of wrapping as a text table."""
    lines = [f"{'world':>6}{'units':>7}{'seconds':>9}{'stays MiB':>11}{'most MiB':>10}"]
    for r in rows:
        lines.append(f"{r['world']:>6}{r['units']:>7}{r['seconds']:>9.2f}{r['stays_mib']:>11.0f}{r['most_mib']:>10.0f}")
    return "\n".join([*lines, f"bounds: {WRAP_S:g} s, and {WRAP_MIB:g} MiB beyond the smallest world"])


def wrap_misses(rows: list[dict[str, Any]]) -> list[int]:
    """Return the world sizes at which wrapping exceeds its bounds."""
    least = min(rows, key=lambda row: int(row["world"]))["most_mib"]
    return [row["world"] for row in rows if row["seconds"] > WRAP_S or row["most_mib"] - least > WRAP_MIB]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a text table."""
    lines = [
        f"{'world':>6}{'local':>7}{'hops':>6}{'collectives':>13}{'aten':>6}{'unit us':>10}{'thread us':>11}"
        f"{'forward us':>12}{'group us':>10}"
    ]
    for r in rows:
        lines.append(
            f"{r['world']:>6}{r['local']:>7}{r['hops']:>6}{r['collectives']:>13}{r['aten']:>6}{r['unit_us']:>10.1f}"
            f"{r['thread_us']:>11.1f}{r['forward_us']:>12.1f}{r['group_us']:>10.1f}"
        )
    bound = f"bound: {TARGET_US} us to fetch and release a unit of {PARAMETERS} parameters, unit less group"
    return "\n".join([*lines, bound])


def import_seconds(rounds: int = 7) -> float:
    """Return the median seconds of ``import zeropp`` after ``import torch``, in new processes with cached bytecode."""
    program = "import time, torch; begin = time.perf_counter(); import zeropp; print(time.perf_counter() - begin)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", program]
    times = [float(subprocess.run(command, env=env, capture_output=True, check=True).stdout) for _ in range(rounds + 1)]
    return statistics.median(times[1:])  # the first process may compile bytecode


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[8, 64, 1024], help="numbers of ranks")
    parser.add_argument("--local", type=int, default=8, help="ranks per node")
    parser.add_argument("--repeats", type=int, default=200, help="calls per round")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--wrap", action="store_true", help="measure wrapping")
    parser.add_argument("--import", action="store_true", dest="imports", help="measure importing zeropp")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.imports:
        seconds = import_seconds()
        print(f"{describe(machine('cpu'))}\nimport zeropp, after import torch: {seconds:.2f} s")
        raise SystemExit(seconds > IMPORT_S)
    pairs = [(world, min(args.local, world)) for world in args.world]
    if args.wrap:
        # A new process for each world size, without inherited memory, because memory is measured per process.
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(1, maxtasksperchild=1) as pool:
            rows = pool.starmap(measure_wrap, pairs, chunksize=1)
    else:
        rows = [measure(*pair, repeats=args.repeats) for pair in pairs]
    print(describe(machine("cpu")))
    print(wrap_table(rows) if args.wrap else table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2) + "\n")
    if args.wrap:
        missed = wrap_misses(rows)
    else:
        missed = [row["world"] for row in rows if row["unit_us"] - row["group_us"] > TARGET_US]
    if missed:
        raise SystemExit(f"beyond the bounds at {missed} ranks")


if __name__ == "__main__":
    main()
